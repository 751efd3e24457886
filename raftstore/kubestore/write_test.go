package kubestore

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/raftstore"
)

// An update that says nothing of the TTL must not make the object immortal,
// also where the caller passes in the object it has cached.
func TestUpdateKeepsTTL(t *testing.T) {
	f := newFixture(t, setup{})
	for _, withCached := range []bool{false, true} {
		key := fmt.Sprint("/pods/ns/foo-", withCached)
		var cached runtime.Object
		created := &example.Pod{}
		if err := f.raw.Create(f.ctx, key, &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: "foo", Namespace: "ns"}}, created, 3600); err != nil {
			t.Fatal(err)
		}
		if withCached {
			cached = created
		}
		var seen int64
		err := f.raw.GuaranteedUpdate(f.ctx, key, &example.Pod{}, false, nil, func(in runtime.Object, m storage.ResponseMeta) (runtime.Object, *uint64, error) {
			seen = m.TTL
			in.(*example.Pod).Labels = map[string]string{"a": "b"}
			return in, nil, nil
		}, cached)
		if err != nil {
			t.Fatal(err)
		}
		if seen < 3000 || seen > 3601 {
			t.Errorf("%s: update received a TTL of %d s", key, seen)
		}
		kv, _, err := f.store.Get(f.ctx, "/registry"+key, raftstore.ReadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if left := secondsLeft(kv.ExpiresAt, f.store.Time()); kv.ExpiresAt == 0 || left < 3000 || left > 3601 {
			t.Errorf("%s: %d s left after the update", key, left)
		}
	}
}

func TestSecondsLeft(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		at       int64
		min, max int64
	}{
		{0, 0, 0},
		{now.Add(-time.Hour).UnixMilli(), 1, 1},
		{now.Add(90 * time.Second).UnixMilli(), 90, 90},
	} {
		if got := secondsLeft(tt.at, now); got < tt.min || got > tt.max {
			t.Errorf("secondsLeft(%d) = %d, want %d to %d", tt.at, got, tt.min, tt.max)
		}
	}
}
