package podctl

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSlowStart(t *testing.T) {
	quota := errors.New("quota")
	tests := []struct {
		name       string
		n, room    int
		wantBegins []int
		wantSizes  []int
		wantDone   int
		wantErr    bool
	}{
		{"all", 10, 100, []int{0, 1, 3, 7}, []int{1, 2, 4, 3}, 10, false},
		{"none", 20, 0, []int{0}, []int{1}, 0, true},
		{"quota of two", 20, 2, []int{0, 1}, []int{1, 2}, 2, true},
		{"nothing to do", 0, 0, nil, nil, 0, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			room := test.room
			var begins, sizes []int
			done, err := SlowStart(test.n, func(begin, size int) (int, error) {
				begins, sizes = append(begins, begin), append(sizes, size)
				ok := min(size, room)
				room -= ok
				if ok < size {
					return ok, quota
				}
				return ok, nil
			})
			if done != test.wantDone || (err != nil) != test.wantErr || !cmp.Equal(sizes, test.wantSizes) || !cmp.Equal(begins, test.wantBegins) {
				t.Errorf("done %d, err %v, sizes %v from %v", done, err, sizes, begins)
			}
			if err != nil && !errors.Is(err, quota) {
				t.Errorf("error %v does not wrap the cause", err)
			}
		})
	}
}
