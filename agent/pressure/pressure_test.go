package pressure

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestParse(t *testing.T) {
	got, err := Parse(" memory.available<100Mi, nodefs.available<10% ,")
	want := []Threshold{{Signal: MemoryAvailable, Quantity: 100 << 20}, {Signal: NodefsAvailable, Percent: 10}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v %v", got, err)
	}
	for in, want := range map[string]string{
		"memory.available":                          "signal<quantity",
		"memory.available<":                         "signal<quantity",
		"memory.free<1Gi":                           `unknown signal "memory.free": there are memory.available`,
		"memory.available<lots":                     `"lots" is no quantity`,
		"memory.available<-5":                       "no quantity",
		"memory.available<101%":                     "no percentage",
		"memory.available<1Gi,memory.available<2Gi": "given twice",
		"memory.available>1Gi":                      "signal<quantity",
	} {
		if _, err := Parse(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", in, err)
		}
	}
	soft, err := ParseSoft("memory.available<1Gi", "memory.available=90s")
	if err != nil || len(soft) != 1 || soft[0].Grace != 90*time.Second {
		t.Errorf("soft: %+v %v", soft, err)
	}
	for _, tt := range [][3]string{
		{"memory.available<1Gi", "", "no grace period"},
		{"", "memory.available=90s", "no soft threshold"},
		{"memory.available<1Gi", "memory.available=soon", "signal=duration"},
	} {
		if _, err := ParseSoft(tt[0], tt[1]); err == nil || !strings.Contains(err.Error(), tt[2]) {
			t.Errorf("%q: %v", tt, err)
		}
	}
}

func candidate(name string, priority int32, memory, request string) Candidate {
	c := Candidate{Pod: &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Spec: v1.PodSpec{Priority: &priority}}}
	q := resource.MustParse(memory)
	c.Memory = q.Value()
	if request != "" {
		c.Requests = v1.ResourceList{v1.ResourceMemory: resource.MustParse(request)}
	}
	return c
}

func TestRank(t *testing.T) {
	pods := []Candidate{
		candidate("within", 0, "1Gi", "2Gi"),
		candidate("important", 100, "3Gi", ""),
		candidate("little", 0, "10Mi", ""),
		candidate("much", 0, "1Gi", "100Mi"),
		candidate("within-less", -1, "1Mi", "1Gi"),
	}
	var got []string
	for _, c := range rank(MemoryAvailable, pods) {
		got = append(got, c.Pod.Name)
	}
	if want := []string{"much", "little", "important", "within-less", "within"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// Files are counted, and cannot be asked for.
	many, large := candidate("many", 0, "0", ""), candidate("large", 0, "0", "")
	many.Inodes, large.Inodes, large.Disk = 1_000_000, 10, 1<<30
	if got := rank(NodefsInodesFree, []Candidate{large, many})[0].Pod.Name; got != "many" {
		t.Errorf("inodes: %s", got)
	}
	// Process numbers cannot be asked for: priority comes first.
	a, b := candidate("a", 5, "0", ""), candidate("b", 0, "0", "")
	a.Pids, b.Pids = 1000, 1
	if got := rank(PidAvailable, []Candidate{a, b})[0].Pod.Name; got != "b" {
		t.Errorf("pids: %s", got)
	}
}

func TestObserve(t *testing.T) {
	hard, _ := Parse("memory.available<10%,nodefs.available<1Gi")
	soft, _ := ParseSoft("memory.available<50%", "memory.available=1m")
	w := watcher{thresholds: append(hard, soft...), transition: 5 * time.Minute}
	now := time.Unix(1_000_000, 0)
	step := func(after time.Duration, memory, disk int64, want string) {
		t.Helper()
		now = now.Add(after)
		levels := map[Signal]Level{MemoryAvailable: {memory, 100}, NodefsAvailable: {disk << 30, 100 << 30}}
		if disk < 0 {
			delete(levels, NodefsAvailable)
		}
		under, crossed := w.observe(now, levels)
		var got []string
		for _, c := range crossed {
			got = append(got, string(c.Signal)+" "+c.Grace.String())
		}
		for _, c := range []v1.NodeConditionType{v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure} {
			if under[c] {
				got = append(got, string(c))
			}
		}
		if s := strings.Join(got, "; "); s != want {
			t.Errorf("%s: %q, want %q", now.UTC().Format(time.TimeOnly), s, want)
		}
	}
	step(0, 60, 2, "")
	step(time.Second, 40, 2, "") // soft, and not for long
	step(time.Minute, 60, 2, "") // it went away
	step(time.Second, 40, 2, "")
	step(time.Minute, 40, 2, "memory.available 1m0s; MemoryPressure")
	step(time.Second, 5, 0, "memory.available 0s; nodefs.available 0s; memory.available 1m0s; MemoryPressure; DiskPressure")
	step(time.Second, 60, -1, "MemoryPressure; DiskPressure") // conditions stay
	step(4*time.Minute, 60, 2, "MemoryPressure; DiskPressure")
	step(2*time.Minute, 60, 2, "")
}

func TestGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hard, _ := Parse("memory.available<100Mi,nodefs.available<10%")
		critical := candidate("critical", systemCritical, "9Gi", "")
		pods := []Candidate{critical, candidate("big", 0, "2Gi", "1Gi"), candidate("small", 0, "1Mi", "1Gi"), candidate("other", 0, "1Gi", "1Gi")}
		levels := map[Signal]Level{MemoryAvailable: {200 << 20, 4 << 30}, NodefsAvailable: {50, 100}}
		var evicted, messages []string
		changes, reclaims := 0, 0
		var mu sync.Mutex // guards levels and reclaims
		set := func(s Signal, l Level) { mu.Lock(); defer mu.Unlock(); levels[s] = l }
		g := New(Config{
			Thresholds: hard, Measure: func() map[Signal]Level { mu.Lock(); defer mu.Unlock(); return maps.Clone(levels) },
			Candidates: func(context.Context, Signal) []Candidate { return pods },
			Evict: func(uid types.UID, message string, hard bool) {
				if !hard {
					t.Error("a hard threshold gives grace")
				}
				evicted, messages = append(evicted, string(uid)), append(messages, message)
			},
			Reclaim: func(context.Context) error {
				mu.Lock()
				defer mu.Unlock()
				reclaims++
				levels[NodefsAvailable] = Level{50, 100}
				return nil
			},
			Changed: func() { changes++ },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- g.Run(ctx) }()
		pass := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
		pass(5500 * time.Millisecond)
		if len(evicted) > 0 || g.Under(v1.NodeMemoryPressure) {
			t.Fatalf("without need: %q", evicted)
		}
		set(MemoryAvailable, Level{50 << 20, 4 << 30})
		pass(5 * time.Second)
		// One at a time: the next only when this one is gone.
		if !slices.Equal(evicted, []string{"big"}) || !g.Under(v1.NodeMemoryPressure) || changes != 1 {
			t.Fatalf("evicted %q, changes %d", evicted, changes)
		}
		if want := "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. The pod was using 2Gi, request is 1Gi. "; messages[0] != want {
			t.Errorf("message %q", messages[0])
		}
		pods = slices.Delete(pods, 1, 2)
		pass(time.Second)
		if !slices.Equal(evicted, []string{"big", "other"}) {
			t.Fatalf("evicted %q", evicted)
		}
		pass(evictionTimeout + 2*time.Second) // it does not go
		if !slices.Equal(evicted, []string{"big", "other", "small"}) {
			t.Fatalf("evicted %q", evicted)
		}
		// Disk: what can be freed without ending anybody is freed first.
		set(MemoryAvailable, Level{1 << 30, 4 << 30})
		set(NodefsAvailable, Level{5, 100})
		pass(2 * time.Second)
		if reclaims != 1 || len(evicted) != 3 || !g.Under(v1.NodeDiskPressure) {
			t.Errorf("reclaimed %d times, evicted %q", reclaims, evicted)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestSlowDiskDoesNotHoldUpMemory: while images are removed, a pod is evicted for
// memory.
func TestSlowDiskDoesNotHoldUpMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hard, _ := Parse("memory.available<100Mi,nodefs.available<10%")
		var low atomic.Bool // memory
		evicted := make(chan types.UID, 8)
		g := New(Config{
			Thresholds: hard,
			Measure: func() map[Signal]Level {
				levels := map[Signal]Level{MemoryAvailable: {1 << 30, 4 << 30}, NodefsAvailable: {5, 100}}
				if low.Load() {
					levels[MemoryAvailable] = Level{1 << 20, 4 << 30}
				}
				return levels
			},
			Candidates: func(context.Context, Signal) []Candidate { return []Candidate{candidate("big", 0, "2Gi", "1Gi")} },
			Evict:      func(uid types.UID, _ string, _ bool) { evicted <- uid },
			Reclaim:    func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- g.Run(ctx) }()
		time.Sleep(5500 * time.Millisecond)
		synctest.Wait()
		if len(evicted) > 0 {
			t.Fatal("evicted before anything was reclaimed")
		}
		low.Store(true)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if len(evicted) != 1 {
			t.Errorf("%d pods were evicted for memory, want 1", len(evicted))
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestRefuses(t *testing.T) {
	pod := &v1.Pod{}
	tolerant := &v1.Pod{Spec: v1.PodSpec{Tolerations: []v1.Toleration{{Key: v1.TaintNodeMemoryPressure, Operator: v1.TolerationOpExists}}}}
	static := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{mirrorAnnotation: "x"}}}
	for _, tt := range []struct {
		pod  *v1.Pod
		qos  v1.PodQOSClass
		at   v1.NodeConditionType
		want bool
	}{
		{pod, v1.PodQOSBestEffort, "", false},
		{pod, v1.PodQOSBestEffort, v1.NodeMemoryPressure, true},
		{tolerant, v1.PodQOSBestEffort, v1.NodeMemoryPressure, false},
		{pod, v1.PodQOSBurstable, v1.NodeMemoryPressure, false},
		{pod, v1.PodQOSGuaranteed, v1.NodeDiskPressure, true},
		{tolerant, v1.PodQOSBestEffort, v1.NodePIDPressure, true},
		{static, v1.PodQOSBestEffort, v1.NodeDiskPressure, false},
	} {
		got := Refuses(tt.pod, tt.qos, func(c v1.NodeConditionType) bool { return c == tt.at })
		if (got != "") != tt.want || tt.want && !strings.Contains(got, "["+string(tt.at)+"]") {
			t.Errorf("%s under %s: %q", tt.qos, tt.at, got)
		}
	}
}

func TestMeasure(t *testing.T) {
	got := Machine{NodeDir: t.TempDir(), ImageDir: "/"}.Measure()
	for _, s := range []Signal{MemoryAvailable, NodefsAvailable, ImagefsAvailable, PidAvailable} {
		if l := got[s]; l.Available <= 0 || l.Capacity < l.Available {
			t.Errorf("%s: %+v", s, l)
		}
	}
}
