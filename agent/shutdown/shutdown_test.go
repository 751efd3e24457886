package shutdown

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/shutdown/logindtest"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// until waits for a level.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// run runs a Guard until the test ends; told is what its owner heard.
func run(t *testing.T, s *logindtest.Logind, p *pods, periods []Period) (g *Guard, told func() []string) {
	var mu sync.Mutex
	var heard []string
	g = New(Config{Periods: periods, Pods: p, Bus: s.Address(), DropInDir: s.DropIns, Changed: func(m string) {
		mu.Lock()
		defer mu.Unlock()
		heard = append(heard, m)
	}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		until(t, "all locks are released", func() bool { _, held := s.Locks(); return held == 0 })
	})
	return g, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(heard)
	}
}

func holds(s *logindtest.Logind, want int) func() bool {
	return func() bool { _, held := s.Locks(); return held == want }
}

// TestShutdown: the lock is held, logind waits long enough, pods end in the order of
// their priorities, and the lock is released when the last has ended.
func TestShutdown(t *testing.T) {
	s := logindtest.New(t)
	p := newPods(podOf("web", 0), podOf("db", 1000), podOf("dns", 2_000_000_000), podOf("net", 2_000_001_000))
	g, told := run(t, s, p, Periods(30*time.Minute, 10*time.Minute))
	until(t, "the lock is held", holds(s, 1))
	if d := s.Delay(); d != 30*time.Minute {
		t.Errorf("logind waits for %s", d)
	}
	s.Prepare(true)
	until(t, "the machine is down", func() bool { down, _ := p.told(); return g.Down() && slices.Equal(down, []bool{true}) })
	if _, ended := p.told(); len(ended) > 0 {
		t.Fatalf("before the pods are known: %v", ended)
	}
	close(p.seen)
	until(t, "the first ones end", func() bool { _, ended := p.told(); return len(ended) == 2 })
	p.leave("web")
	p.leave("db")
	until(t, "the others end", func() bool { _, ended := p.told(); return len(ended) == 4 })
	want := []string{"web in 20m0s", "db in 20m0s", "dns in 10m0s", "net in 10m0s"}
	if _, ended := p.told(); !slices.Equal(ended, want) {
		t.Errorf("ended %v, want %v", ended, want)
	}
	p.leave("net")
	if _, held := s.Locks(); held != 1 {
		t.Error("the lock is released before the last pod has ended")
	}
	p.leave("dns")
	until(t, "the lock is released", holds(s, 0))
	if got := told(); !slices.Equal(got, []string{"Shutdown manager detected shutdown event"}) {
		t.Errorf("told %q", got)
	}
}

// TestCancelledShutdown: it is taken back, and the next one is held up again.
func TestCancelledShutdown(t *testing.T) {
	s := logindtest.New(t)
	p := newPods(podOf("web", 0), podOf("dns", critical))
	close(p.seen)
	g, told := run(t, s, p, Periods(time.Hour, time.Minute))
	until(t, "the lock is held", holds(s, 1))
	s.Prepare(true)
	until(t, "a pod ends", func() bool { _, ended := p.told(); return len(ended) == 1 })
	s.Prepare(false)
	until(t, "a new lock is held", func() bool { locks, held := s.Locks(); return locks == 2 && held == 1 })
	if down, ended := p.told(); g.Down() || !slices.Equal(down, []bool{true, false}) || len(ended) != 1 {
		t.Errorf("down %v, set %v, ended %v", g.Down(), down, ended)
	}
	s.Prepare(true)
	until(t, "it ends again", func() bool { _, ended := p.told(); return len(ended) == 2 })
	p.leave("web")
	p.leave("dns")
	until(t, "the lock is released", holds(s, 0))
	want := []string{"Shutdown manager detected shutdown event", "Shutdown manager detected shutdown cancellation", "Shutdown manager detected shutdown event"}
	if got := told(); !slices.Equal(got, want) {
		t.Errorf("told %q", got)
	}
}

// TestPodsThatDoNotEnd: a group is waited for no longer than its time.
func TestPodsThatDoNotEnd(t *testing.T) {
	s := logindtest.New(t)
	p := newPods(podOf("web", -5), podOf("dns", critical))
	close(p.seen)
	run(t, s, p, Periods(30*time.Millisecond, 20*time.Millisecond))
	until(t, "the lock is held", holds(s, 1))
	s.Prepare(true)
	until(t, "the lock is released", holds(s, 0))
	if _, ended := p.told(); !slices.Equal(ended, []string{"web in 10ms", "dns in 20ms"}) {
		t.Errorf("ended %v", ended)
	}
	if slices.Contains(s.Asked(), "KillUnit") {
		t.Error("logind, which waits long enough, was told to wait longer")
	}
}

// TestBusIsLost: a lock is taken again, and a shutdown that began meanwhile is
// noticed.
func TestBusIsLost(t *testing.T) {
	s := logindtest.New(t)
	p := newPods(podOf("web", 0))
	close(p.seen)
	g, _ := run(t, s, p, Periods(time.Second, 0))
	until(t, "the lock is held", holds(s, 1))
	s.Restarted()
	until(t, "a new logind has a lock, the old one's is released", func() bool { locks, held := s.Locks(); return locks == 2 && held == 1 })
	s.SetPreparing(true)
	s.Break()
	until(t, "the machine is down", g.Down)
	p.leave("web")
	until(t, "the lock is released", holds(s, 0))
	if locks, _ := s.Locks(); locks != 2 {
		t.Errorf("%d locks were taken", locks)
	}
}

// TestLogindThatKeepsItsDelay: what it gives is shared out.
func TestLogindThatKeepsItsDelay(t *testing.T) {
	s := logindtest.New(t)
	s.Deaf = true
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := dial(ctx, s.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	var again sync.WaitGroup
	again.Go(func() {
		defer cancel()
		until(t, "logind is asked again", func() bool {
			asked := s.Asked()
			i := slices.Index(asked, "KillUnit")
			return i >= 0 && len(asked) > i+2
		})
	})
	defer again.Wait()
	if have, err := l.raise(short, s.DropIns, 30*time.Second); have != 5*time.Second || err == nil || !strings.Contains(err.Error(), "InhibitDelayMaxSec at 5s") {
		t.Errorf("%s, %v", have, err)
	}
	if got, want := fit(Periods(30*time.Second, 10*time.Second), 6*time.Second), Periods(6*time.Second, 2*time.Second); !cmp.Equal(got, want) {
		t.Errorf("periods %v, want %v", got, want)
	}
}

// TestNoBus: nothing happens, and nothing is held.
func TestNoBus(t *testing.T) {
	p := newPods(podOf("web", 0))
	g := New(Config{Periods: Periods(time.Second, 0), Pods: p, Bus: "unix:path=" + t.TempDir() + "/none"})
	ctx, cancel := context.WithCancel(t.Context())
	if err := g.follow(ctx); err == nil || !strings.Contains(err.Error(), "connect to D-Bus") {
		t.Errorf("%v", err)
	}
	cancel()
	if err := g.Run(ctx); err != nil {
		t.Error(err)
	}
	if down, ended := p.told(); g.Down() || len(down)+len(ended) > 0 {
		t.Errorf("down %v, ended %v", down, ended)
	}
}

func TestParse(t *testing.T) {
	got, err := Parse("2000000000=10s, 0=20s,-10=1m")
	if want := []Period{{-10, time.Minute}, {0, 20 * time.Second}, {2_000_000_000, 10 * time.Second}}; err != nil || !cmp.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"", "0", "0=", "x=1s", "0=-1s", "3000000000=1s", "0=1s,0=2s"} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), `"`) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if got := Periods(0, 0); got != nil {
		t.Errorf("no total: %v", got)
	}
}

func TestGroups(t *testing.T) {
	plain := podOf("plain", 0)
	plain.Spec.Priority = nil
	all := []*v1.Pod{podOf("top", 2_000_001_000), podOf("low", -100), plain, podOf("edge", 100), podOf("mid", 99)}
	var got []string
	for _, g := range groups([]Period{{0, 0}, {100, 0}, {1000, 0}}, all) {
		var names []string
		for _, p := range g.pods {
			names = append(names, p.Name)
		}
		got = append(got, strings.Join(names, " "))
	}
	if want := []string{"low plain mid", "edge", "top"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
