package nodelifecycle

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

// answers is a node that answers questions so, one after the other; the last for ever.
type answers struct {
	list  []error
	asked int
}

func (a *answers) Suspects() <-chan string { return nil }

func (a *answers) Confirm(context.Context, string) error {
	err := a.list[min(a.asked, len(a.list)-1)]
	a.asked++
	return err
}

// TestQuestions: a node that is silent is dead after two questions; one that refuses
// connections may be starting, and is given more time.
func TestQuestions(t *testing.T) {
	refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	silent := errors.New("no answer in time")
	for name, test := range map[string]struct {
		answers []error
		dead    bool
		asked   int
	}{
		"answers":                   {[]error{nil}, false, 1},
		"answers late":              {[]error{silent, nil}, false, 2},
		"silent":                    {[]error{silent}, true, 2},
		"starts again":              {[]error{refused, refused, refused, refused, nil}, false, 5},
		"stays away":                {[]error{refused}, true, refusedTries},
		"refuses, then is silent": {[]error{refused, silent}, true, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
				if err := nodes.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}); err != nil {
					t.Fatal(err)
				}
				wire := &answers{list: test.answers}
				c := &controller{cfg: Config{Liveness: wire}, clock: clock.RealClock{}, nodes: corelisters.NewNodeLister(nodes), seen: map[string]*seen{}}
				c.Controller = loop.New("test", loop.Env{Clock: clock.RealClock{}}, 1, nil)
				c.entry("n1")
				time.Sleep(time.Second) // what was heard before is no answer
				c.confirm(t.Context(), "n1")
				if c.seen["n1"].dead != test.dead || wire.asked != test.asked {
					t.Errorf("dead %v after %d questions, want %v after %d", c.seen["n1"].dead, wire.asked, test.dead, test.asked)
				}
			})
		})
	}
}
