package nodelifecycle

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestPaces(t *testing.T) {
	held := pace{held: true}
	for _, tt := range []struct {
		name  string
		zones map[string]Zone
		want  map[string]pace // those that are not evicted at once
	}{
		{"none", nil, nil},
		{"one of three", map[string]Zone{"": {Lost: 1, All: 3}}, nil},
		{"two of three", map[string]Zone{"": {Lost: 2, All: 3}}, map[string]pace{"": held}},
		{"half", map[string]Zone{"": {Lost: 1, All: 2}}, nil},
		{"all", map[string]Zone{"": {Lost: 2, All: 2}}, map[string]pace{"": held}},
		{"all there is", map[string]Zone{"": {Lost: 1, All: 1}}, map[string]pace{"": held}},
		{"most of many", map[string]Zone{"": {Lost: 30, All: 51}}, map[string]pace{"": {every: largeZonePace}}},
		{"most of not so many", map[string]Zone{"": {Lost: 30, All: 50}}, map[string]pace{"": held}},
		{"two zones of three", map[string]Zone{"a": {Lost: 2, All: 2}, "b": {Lost: 2, All: 2}, "c": {All: 2}}, map[string]pace{"a": {every: lostZonePace}, "b": {every: lostZonePace}}},
		{"all zones", map[string]Zone{"a": {Lost: 2, All: 2}, "b": {Lost: 2, All: 2}}, map[string]pace{"a": held, "b": held}},
		{"most of a small zone", map[string]Zone{"a": {Lost: 2, All: 3}, "b": {Lost: 1, All: 3}}, nil},
		{"most of one of three zones", map[string]Zone{"a": {Lost: 2, All: 3}, "b": {All: 3}, "c": {All: 3}}, nil},
		{"most of each zone", map[string]Zone{"a": {Lost: 2, All: 3}, "b": {Lost: 2, All: 3}}, map[string]pace{"a": held, "b": held}},
		{"three of four, and of five", map[string]Zone{"a": {Lost: 3, All: 4}, "b": {Lost: 3, All: 5}, "c": {All: 9}}, map[string]pace{"a": held, "b": held}},
		{"more than half of one zone", map[string]Zone{"a": {Lost: 11, All: 20}, "b": {All: 20}}, map[string]pace{"a": held}},
		{"one zone, and most of the other", map[string]Zone{"a": {Lost: 3, All: 3}, "b": {Lost: 2, All: 3}}, map[string]pace{"a": {every: lostZonePace}, "b": held}},
	} {
		if got := paces(tt.zones); fmt.Sprint(got) != fmt.Sprint(tt.want) && len(got)+len(tt.want) > 0 {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// A zone's nodes have their turn one after the other, each once.
func TestGrant(t *testing.T) {
	c := &controller{census: newCensus(), turns: map[string]*turns{}, granted: map[string]bool{}}
	c.census.add(member{zone: "a", counts: true, lost: true}, 5)
	c.census.add(member{zone: "b", counts: true}, 2)
	node := func(name, zone string) *corev1.Node {
		return schedtest.Node(name).Label(corev1.LabelTopologyZone, zone).Obj()
	}
	at := time.Unix(1000, 0)
	for _, tt := range []struct {
		after      time.Duration
		node, zone string
		wait       time.Duration // 0: granted
	}{
		{0, "1", "a", 0},
		{0, "1", "a", 0}, // it failed and is tried again
		{0, "2", "a", lostZonePace},
		{0, "3", "b", 0},
		{0, "4", "b", 0},
		{4 * time.Second, "2", "a", lostZonePace - 4*time.Second},
		{lostZonePace, "2", "a", 0},
		{lostZonePace, "5", "a", lostZonePace},
		{lostZonePace, "1", "a", 0},
	} {
		if ok, wait := c.grant(node(tt.node, tt.zone), at.Add(tt.after)); ok != (tt.wait == 0) || wait != tt.wait {
			t.Errorf("after %s node %s: %t, wait %s, want %s", tt.after, tt.node, ok, wait, tt.wait)
		}
	}
}

// Nodes that wait for their turn have one each: they asked for the next one all
// together, each time that one of them had it.
func TestTurns(t *testing.T) {
	c := &controller{census: newCensus(), turns: map[string]*turns{}, granted: map[string]bool{}}
	c.census.add(member{zone: "", counts: true, lost: true}, 50)
	c.census.add(member{zone: "other", counts: true}, 1)
	node := func(i int) *corev1.Node { return schedtest.Node(fmt.Sprint(i)).Obj() }
	at := time.Unix(1000, 0)
	due := make([]time.Duration, 50)
	for i := range due {
		_, due[i] = c.grant(node(i), at)
		if want := time.Duration(i) * lostZonePace; due[i] != want {
			t.Fatalf("node %d has to wait %s, want %s", i, due[i], want)
		}
		if _, again := c.grant(node(i), at.Add(time.Second)); i > 0 && again != due[i]-time.Second {
			t.Fatalf("node %d has to wait %s a second later", i, again)
		}
	}
	for i := 1; i < 20; i++ { // each asks when it was said to
		if ok, wait := c.grant(node(i), at.Add(due[i])); !ok {
			t.Errorf("node %d has to wait %s though its turn has come", i, wait)
		}
	}
	// A loop that was late: no two in one moment.
	late := at.Add(due[25])
	if ok, _ := c.grant(node(21), late); !ok {
		t.Error("a turn that is over is lost")
	}
	if ok, wait := c.grant(node(22), late); ok || wait != lostZonePace {
		t.Errorf("another turn at once: %t, %s", ok, wait)
	}
	// One that is heard of gives its turn up, and has the first that is free when it is
	// lost again.
	c.found(node(30))
	if _, wait := c.grant(node(50), late); wait != due[30]-due[25] {
		t.Errorf("a node has to wait %s though a turn is free after %s", wait, due[30]-due[25])
	}
	if _, wait := c.grant(node(30), late); wait != at.Add(50*lostZonePace).Sub(late) {
		t.Errorf("lost again, it has to wait %s", wait)
	}
	// At another pace the turns are others; the last one counts.
	c.census.add(member{zone: "", counts: true}, 10)
	for i := range 3 {
		if ok, wait := c.grant(node(40+i), late); ok || wait != time.Duration(i+1)*largeZonePace {
			t.Errorf("at the slower pace the node has to wait %s", wait)
		}
	}
	c.census.add(member{zone: "", counts: true}, 50) // half are lost: all at once
	if ok, _ := c.grant(node(49), late); !ok {
		t.Error("a node has to wait though evictions are not paced any more")
	}
}

// Turns of nodes that were found are nobody's: the next failure of the zone waited for
// the end of all that had been promised in the one before.
func TestTurnsEndWithTheFailure(t *testing.T) {
	c := &controller{census: newCensus(), turns: map[string]*turns{}, granted: map[string]bool{}}
	c.census.add(member{zone: "", counts: true, lost: true}, 60)
	c.census.add(member{zone: "", counts: true}, 40)
	c.census.add(member{zone: "other", counts: true}, 100)
	node := func(i int) *corev1.Node { return schedtest.Node(fmt.Sprint(i)).Obj() }
	at := time.Unix(1000, 0)
	fail := func(at time.Time, first time.Duration) {
		t.Helper()
		for i := range 60 {
			want := first + time.Duration(i)*largeZonePace
			if ok, wait := c.grant(node(i), at); ok != (want == 0) || wait != want {
				t.Fatalf("node %d: %t, wait %s, want %s", i, ok, wait, want)
			}
		}
	}
	heal := func() {
		for i := range 60 {
			c.found(node(i))
		}
	}
	fail(at, 0)
	heal()
	fail(at.Add(10*time.Minute), 0)
	heal()
	// The pace of turns that were taken holds over failures.
	fail(at.Add(10*time.Minute+time.Second), largeZonePace-time.Second)
	// What was evicted at once, as fewer were lost meanwhile, waits for no turn.
	c.census.add(member{zone: "", counts: true}, 100)
	for i := range 60 {
		if ok, _ := c.grant(node(i), at.Add(20*time.Minute)); !ok {
			t.Fatalf("node %d waits though its zone's evictions are not paced", i)
		}
	}
	c.census.add(member{zone: "", counts: true}, -100)
	if ok, wait := c.grant(node(60), at.Add(20*time.Minute)); !ok {
		t.Errorf("the only node that waits has to wait %s", wait)
	}
}

// tells waits for an event of the node with that reason, and returns its message.
func tells(t *testing.T, c *schedtest.Cluster, node, reason string) (message string) {
	t.Helper()
	schedtest.Eventually(t, func() string {
		list, err := c.Client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		var reasons []string
		for _, e := range list.Items {
			if e.InvolvedObject.Name != node {
				continue
			}
			if e.Reason == reason {
				message = e.Message
				return ""
			}
			reasons = append(reasons, e.Reason)
		}
		return fmt.Sprintf("events of %s are %v, want %s", node, reasons, reason)
	})
	return message
}

// That pods of lost nodes are not evicted was said in the log alone; and Nodes that
// will not come back counted until somebody knew to delete them.
func TestSuspendedEvictionsAreTold(t *testing.T) {
	c := schedtest.New(t, append(nodes(3), schedtest.Pod("p").On("n2").Ready(time.Now()).Obj())...)
	w := &wire{suspects: make(chan string), silent: map[string]bool{"n1": true, "n2": true}}
	start(t, c, w)
	if got := tells(t, c, "n2", "EvictionsSuspended"); !strings.Contains(got, "2 of 3 nodes are lost") || !strings.Contains(got, "delete Nodes") {
		t.Errorf("it says %q", got)
	}
	if err := c.Client.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := tells(t, c, "n2", "EvictionsResumed"); !strings.Contains(got, "1 of 2 nodes are lost") {
		t.Errorf("it says %q", got)
	}
	schedtest.Eventually(t, func() string {
		pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), "p", metav1.GetOptions{})
		if err != nil || pod.DeletionTimestamp == nil {
			return fmt.Sprintf("the pod is not evicted: %v, %v", pod.DeletionTimestamp, err)
		}
		return ""
	})
}

// Of a zone of which nothing is left, the pods are evicted though most nodes are
// lost: another zone lives.
func TestALostZoneIsEvicted(t *testing.T) {
	all := nodes(3)
	for i, zone := range []string{"a", "a", "b"} {
		all[i].(*corev1.Node).Labels = map[string]string{corev1.LabelTopologyZone: zone}
	}
	c := schedtest.New(t, append(all, schedtest.Pod("p").On("n1").Ready(time.Now()).Obj(), schedtest.Pod("q").On("n2").Ready(time.Now()).Obj())...)
	w := &wire{suspects: make(chan string), silent: map[string]bool{"n1": true}}
	start(t, c, w) // asks all, and finds n1
	evicted := func(name string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil || pod.DeletionTimestamp == nil {
				return fmt.Sprintf("pod %s is not evicted: %v", name, err)
			}
			return ""
		})
	}
	evicted("p")
	w.silence("n2")
	w.suspects <- "n2"
	evicted("q")
}
