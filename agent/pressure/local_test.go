package pressure

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

func TestOverLocalLimit(t *testing.T) {
	q := resource.MustParse
	const mi = 1 << 20
	pod := func(volume, a, b, whole string) LocalPod {
		return LocalPod{
			Volumes:    []LocalVolume{{"cache", "v", q(volume)}, {"free", "w", resource.Quantity{}}},
			Containers: []LocalContainer{{"a", []string{"a-rw", "a-log"}, q(a)}, {"b", []string{"b-rw"}, q(b)}},
			Others:     []string{"etc"}, Limit: q(whole),
		}
	}
	for _, tt := range []struct {
		name string
		pod  LocalPod
		use  map[string]int64
		want string
	}{
		{"all within", pod("10Mi", "10Mi", "10Mi", "20Mi"), map[string]int64{"v": 10 * mi, "a-rw": 5 * mi, "a-log": 4 * mi, "etc": mi}, ""},
		{"a volume", pod("10Mi", "0", "0", "0"), map[string]int64{"v": 10*mi + 1}, `Usage of EmptyDir volume "cache" exceeds the limit "10Mi". `},
		{"a volume without a limit", pod("10Mi", "0", "0", "0"), map[string]int64{"w": 1 << 40}, ""},
		{"layer and logs of a container", pod("0", "10Mi", "0", "0"), map[string]int64{"a-rw": 6 * mi, "a-log": 5 * mi}, `Container a exceeded its local ephemeral storage limit "10Mi". `},
		{"another container's limit", pod("0", "10Mi", "0", "0"), map[string]int64{"b-rw": 100 * mi}, ""},
		{"the second container", pod("0", "10Mi", "1Mi", "0"), map[string]int64{"b-rw": 2 * mi}, `Container b exceeded its local ephemeral storage limit "1Mi". `},
		{"the pod, by its volumes", pod("0", "10Mi", "10Mi", "20Mi"), map[string]int64{"a-rw": 10 * mi, "w": 11 * mi}, "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. "},
		{"the pod, by its own files", pod("0", "0", "0", "20Mi"), map[string]int64{"etc": 21 * mi}, "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. "},
		{"volume before pod before container", pod("1Mi", "1Mi", "0", "1Mi"), map[string]int64{"v": 2 * mi, "a-rw": 2 * mi}, `Usage of EmptyDir volume "cache" exceeds the limit "1Mi". `},
		{"pod before container", pod("0", "1Mi", "0", "1Mi"), map[string]int64{"a-rw": 2 * mi}, "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := tt.pod.over(func(dirs ...string) (n int64, err error) {
				for _, d := range dirs {
					n += tt.use[d]
				}
				return n, nil
			})
			if err != nil || got != tt.want {
				t.Errorf("%q %v, want %q", got, err, tt.want)
			}
		})
	}
	free := pod("0", "0", "0", "0")
	if free.Limited() {
		t.Error("a pod without limits would be measured")
	}
	for _, p := range []LocalPod{pod("1", "0", "0", "0"), pod("0", "1", "0", "0"), pod("0", "0", "0", "1")} {
		if !p.Limited() {
			t.Errorf("%+v would not be measured", p)
		}
	}
	broken := pod("1Mi", "0", "0", "0")
	if _, err := broken.over(func(...string) (int64, error) { return 0, errors.New("disk") }); err == nil {
		t.Error("what cannot be measured is told as fine")
	}
}

// TestLocalGuard: directories that hang hold up nobody but their pod, pods without
// limits are not measured, and a slow walk is not repeated at once.
func TestLocalGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := resource.MustParse("1Mi")
		one := func(name string) LocalPod {
			return LocalPod{UID: types.UID(name), Name: name, Volumes: []LocalVolume{{"v", name, limit}}}
		}
		pods := []LocalPod{one("hangs"), one("hangs-too"), one("big"), one("small"), one("slow"), {UID: "free", Others: []string{"free"}}}
		var mu sync.Mutex
		measured := map[string]int{}
		var evicted []string
		release := make(chan struct{})
		g := NewLocal(LocalConfig{
			Pods: func() []LocalPod { return pods },
			Use: func(_ context.Context, dirs ...string) (int64, error) {
				mu.Lock()
				measured[dirs[0]]++
				mu.Unlock()
				switch dirs[0] {
				case "hangs", "hangs-too":
					<-release
				case "slow":
					time.Sleep(5 * time.Second) // the bubble's
				case "big":
					return 2 << 20, nil
				}
				return 0, nil
			},
			Evict: func(uid types.UID, message string) {
				mu.Lock()
				defer mu.Unlock()
				if message != `Usage of EmptyDir volume "v" exceeds the limit "1Mi". ` {
					t.Errorf("message %q", message)
				}
				if !slices.Contains(evicted, string(uid)) {
					evicted = append(evicted, string(uid))
				}
			},
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- g.Run(ctx) }()
		time.Sleep(5 * time.Minute) // the bubble's
		synctest.Wait()
		mu.Lock()
		if !slices.Equal(evicted, []string{"big"}) {
			t.Errorf("evicted %q", evicted)
		}
		if measured["hangs"] != 1 || measured["hangs-too"] != 1 {
			t.Errorf("a walk that hangs was begun again: %v", measured)
		}
		if measured["free"] != 0 {
			t.Error("a pod without limits was measured")
		}
		// After at most 30 s behind the hanging walks, each 10 s.
		if measured["small"] < 20 {
			t.Errorf("measured too rarely: %v", measured)
		}
		// 5 s of walking, 100 s of rest.
		if n := measured["slow"]; n < 2 || n > 4 {
			t.Errorf("a slow walk was made %d times", n)
		}
		mu.Unlock()
		cancel()
		if err := <-ended; err != nil { // although two walks hang
			t.Error(err)
		}
		close(release)
	})
}
