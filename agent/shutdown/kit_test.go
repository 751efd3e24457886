package shutdown

import (
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// pods are those of a node that ends them when the test says so.
type pods struct {
	mu    sync.Mutex // guards all below
	list  []*v1.Pod
	down  []bool // as set
	ended []string
	left  map[types.UID]chan struct{}
	seen  chan struct{}
}

func newPods(list ...*v1.Pod) *pods {
	p := &pods{list: list, left: map[types.UID]chan struct{}{}, seen: make(chan struct{})}
	for _, o := range list {
		p.left[o.UID] = make(chan struct{})
	}
	return p
}

func podOf(name string, priority int32) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	p.Spec.Priority = &priority
	return p
}

func (p *pods) SetShutdown(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = append(p.down, on)
}

func (p *pods) Active() []*v1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.list
}

func (p *pods) Seen() <-chan struct{} { return p.seen }

func (p *pods) Terminate(uid types.UID, most time.Duration) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = append(p.ended, fmt.Sprintf("%s in %s", uid, most))
	return p.left[uid]
}

// leave has a pod end.
func (p *pods) leave(uid types.UID) { close(p.left[uid]) }

func (p *pods) told() (down []bool, ended []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]bool{}, p.down...), append([]string{}, p.ended...)
}
