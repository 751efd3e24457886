package shutdown

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/shutdown/logindtest"
)

// membership is a Member that writes down what it is asked.
type membership struct {
	*pods
	refuses error // MayLeave
	stays   error // Leave
	budget  int   // of evictions of the pod "db" that are refused

	did []string // guarded by pods.mu
}

func (m *membership) do(what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.did = append(m.did, what)
}

func (m *membership) doings() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.did)
}

func (m *membership) MayLeave(context.Context) error { m.do("may"); return m.refuses }

// Cordon implements Member.
func (m *membership) Cordon(_ context.Context, on bool) (bool, error) {
	m.do(map[bool]string{true: "cordon", false: "uncordon"}[on])
	return true, nil
}

func (m *membership) Leave(context.Context) error { m.do("leave"); return m.stays }

// Evict implements Member: the pod leaves at once.
func (m *membership) Evict(_ context.Context, p *v1.Pod) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.Name == "db" && m.budget > 0 {
		m.budget--
		return apierrors.NewTooManyRequests("the disruption budget db needs 1 healthy pods and has 1 currently", 0)
	}
	m.did = append(m.did, "evict "+p.Name)
	m.list = slices.DeleteFunc(slices.Clone(m.list), func(o *v1.Pod) bool { return o.UID == p.UID })
	return nil
}

// runMember runs a Guard with a membership until the test ends.
func runMember(t *testing.T, s *logindtest.Logind, m *membership, periods []Period) {
	close(m.seen)
	g := New(Config{Periods: periods, Pods: m, Member: m, Bus: s.Address(), DropInDir: s.DropIns})
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = g.Run(ctx) })
	t.Cleanup(func() { cancel(); work.Wait() })
	until(t, "the lock is held", holds(s, 1))
}

// TestLeave: a machine that is shut down evicts its pods, ends the others, and leaves;
// logind waits for that as well.
func TestLeave(t *testing.T) {
	s := logindtest.New(t)
	of := podOf("agent", 0)
	of.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: ptr.To(true)}}
	static := podOf("static", 0)
	static.Annotations = map[string]string{"kubernetes.io/config.source": "file"}
	m := &membership{pods: newPods(podOf("web", 0), podOf("db", 0), of, static), budget: 1}
	runMember(t, s, m, Periods(time.Minute, time.Second))
	if d := s.Delay(); d != time.Minute+2*leaveTime {
		t.Errorf("logind waits for %s", d)
	}
	s.PrepareAs(true, "poweroff")
	until(t, "two pods are ended", func() bool { _, ended := m.told(); return len(ended) == 2 })
	did := m.doings()
	slices.Sort(did)
	if !slices.Equal(did, []string{"cordon", "evict db", "evict web", "may"}) {
		t.Errorf("before the others have ended: %q", did)
	}
	if v := testutil.ToFloat64(started); time.Since(time.Unix(int64(v), 0)) > time.Minute || testutil.ToFloat64(ended) != 0 {
		t.Errorf("began at %v, ended at %v", v, testutil.ToFloat64(ended))
	}
	m.leave("agent")
	m.leave("static")
	until(t, "the lock is released", holds(s, 0))
	if did := m.doings(); did[len(did)-1] != "leave" {
		t.Errorf("%q", did)
	}
	if v := testutil.ToFloat64(ended); v < testutil.ToFloat64(started) {
		t.Errorf("ended at %v", v)
	}
}

// TestStays: a reboot, an unknown type, and a cluster that cannot do without the
// machine: the pods end as ever, and nothing is evicted.
func TestStays(t *testing.T) {
	for what, c := range map[string]struct {
		kind    string
		refuses error
		did     []string
	}{
		"reboot":      {kind: "reboot"},
		"soft reboot": {kind: "soft-reboot"},
		"unknown":     {},
		"new type":    {kind: "hibernate-for-a-year"},
		"last voter":  {kind: "poweroff", refuses: errors.New("n1 alone holds the cluster's state"), did: []string{"may"}},
	} {
		t.Run(what, func(t *testing.T) {
			s := logindtest.New(t)
			m := &membership{pods: newPods(podOf("web", 0)), refuses: c.refuses}
			runMember(t, s, m, Periods(time.Minute, 0))
			if c.kind == "" {
				s.Prepare(true)
			} else {
				s.PrepareAs(true, c.kind)
			}
			until(t, "the pod is ended", func() bool { _, ended := m.told(); return len(ended) == 1 })
			m.pods.leave("web")
			until(t, "the lock is released", holds(s, 0))
			if _, ended := m.told(); !slices.Equal(ended, []string{"web in 1m0s"}) || !slices.Equal(m.doings(), c.did) {
				t.Errorf("ended %q, did %q", ended, m.doings())
			}
		})
	}
}

// TestForgedSignals: any program may send signals of logind's words. Those of another
// sender, and those that logind does not confirm, end no pod, and say nothing of the type
// of a shutdown that follows.
func TestForgedSignals(t *testing.T) {
	for what, sender := range map[string]string{"another sender": ":1.66", "logind does not confirm it": logindtest.Owner} {
		t.Run(what, func(t *testing.T) {
			s := logindtest.New(t)
			m := &membership{pods: newPods(podOf("web", 0))}
			runMember(t, s, m, Periods(time.Minute, 0))
			asked := len(s.Asked())
			s.Forge(sender, "poweroff")
			if sender == logindtest.Owner {
				until(t, "logind is asked", func() bool { return len(s.Asked()) > asked })
			}
			s.Prepare(true)
			until(t, "the pod is ended", func() bool { _, ended := m.told(); return len(ended) == 1 })
			m.pods.leave("web")
			until(t, "the lock is released", holds(s, 0))
			if _, ended := m.told(); !slices.Equal(ended, []string{"web in 1m0s"}) || len(m.doings()) > 0 {
				t.Errorf("ended %q, did %q", ended, m.doings())
			}
		})
	}
}

// TestKindIsForgotten: a shutdown that was cancelled says nothing of the next, whose
// type is unknown.
func TestKindIsForgotten(t *testing.T) {
	s := logindtest.New(t)
	m := &membership{pods: newPods(podOf("web", 0)), budget: 0}
	static := podOf("static", 0)
	static.Annotations = map[string]string{"kubernetes.io/config.source": "file"}
	m.pods = newPods(static)
	runMember(t, s, m, Periods(time.Minute, 0))
	s.PrepareAs(true, "poweroff")
	until(t, "the pod is ended", func() bool { _, ended := m.told(); return len(ended) == 1 })
	s.PrepareAs(false, "poweroff")
	until(t, "a new lock is held", func() bool { locks, held := s.Locks(); return locks == 2 && held == 1 })
	s.Prepare(true)
	until(t, "the pod is ended again", func() bool { _, ended := m.told(); return len(ended) == 2 })
	m.pods.leave("static")
	until(t, "the lock is released", holds(s, 0))
	if did := m.doings(); !slices.Equal(did, []string{"may", "cordon", "uncordon"}) {
		t.Errorf("%q", did)
	}
}

// TestLeaveThatFails: the node takes pods again when it comes back.
func TestLeaveThatFails(t *testing.T) {
	s := logindtest.New(t)
	m := &membership{pods: newPods(podOf("web", 0)), stays: errors.New("no leader")}
	runMember(t, s, m, Periods(time.Minute, 0))
	s.PrepareAs(true, "poweroff")
	until(t, "the lock is released", holds(s, 0))
	if did := m.doings(); !slices.Equal(did, []string{"may", "cordon", "evict web", "leave", "uncordon"}) {
		t.Errorf("%q", did)
	}
}

// TestBudgetsThatHold: pods that may not be evicted are ended when the time for that is
// over, and the machine leaves.
func TestBudgetsThatHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &membership{pods: newPods(podOf("db", 0)), budget: 1 << 30}
		close(m.seen)
		g := New(Config{Periods: Periods(4*time.Second, 3*time.Second), Pods: m, Member: m})
		var work sync.WaitGroup
		work.Go(func() { g.shutDown(t.Context(), "halt", g.total()) })
		until(t, "the pod is ended", func() bool { _, ended := m.told(); return len(ended) == 1 })
		m.pods.leave("db")
		work.Wait()
		if did := m.doings(); !slices.Equal(did, []string{"may", "cordon", "leave"}) {
			t.Errorf("%q", did)
		}
		if _, ended := m.told(); len(ended) != 1 || !strings.HasPrefix(ended[0], "db in ") {
			t.Errorf("ended %q", ended)
		}
	})
}

// TestPodsThatStay: a machine on which pods still run does not leave.
func TestPodsThatStay(t *testing.T) {
	m := &membership{pods: newPods(podOf("db", 0)), budget: 1 << 30}
	close(m.seen)
	g := New(Config{Periods: Periods(200*time.Millisecond, 100*time.Millisecond), Pods: m, Member: m})
	g.shutDown(t.Context(), "poweroff", g.total())
	if did := m.doings(); !slices.Equal(did, []string{"may", "cordon", "uncordon"}) {
		t.Errorf("%q", did)
	}
}

// TestLogindThatWaitsForLess: a machine that would be down before it has left does not try.
func TestLogindThatWaitsForLess(t *testing.T) {
	m := &membership{pods: newPods()}
	close(m.seen)
	g := New(Config{Periods: Periods(2*time.Second, time.Second), Pods: m, Member: m})
	g.shutDown(t.Context(), "poweroff", g.total()-time.Second)
	if did := m.doings(); len(did) > 0 {
		t.Errorf("%q", did)
	}
}
