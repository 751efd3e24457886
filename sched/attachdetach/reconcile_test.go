package attachdetach

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var now = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

func pv(mode corev1.PersistentVolumeAccessMode) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv1"}, Spec: corev1.PersistentVolumeSpec{
		AccessModes:            []corev1.PersistentVolumeAccessMode{mode},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "d.example.com", VolumeHandle: "h"}},
	}}
}

func at(name string, change ...func(*place)) place {
	p := place{name: name, node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now.Add(-time.Hour))}},
	}}}
	for _, f := range change {
		f(&p)
	}
	return p
}

func wanted(p *place) {
	p.pods = append(p.pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "p-" + p.name}})
}
func made(p *place)     { p.attachment = &storagev1.VolumeAttachment{} }
func attached(p *place) { made(p); p.attachment.Status.Attached = true }
func going(p *place)    { attached(p); t := metav1.NewTime(now); p.attachment.DeletionTimestamp = &t }
func inUse(p *place) {
	p.node.Status.VolumesInUse = []corev1.UniqueVolumeName{"kubernetes.io/csi/d.example.com^h"}
}
func knows(p *place) {
	p.node.Status.VolumesAttached = []corev1.AttachedVolume{{Name: "kubernetes.io/csi/d.example.com^h"}}
}
func gone(p *place)   { p.node = nil }
func fenced(p *place) { p.fenced = true }
func off(p *place)    { p.node.Spec.Taints = []corev1.Taint{{Key: outOfService}} }
func silent(since time.Duration) func(*place) {
	return func(p *place) {
		p.node.Status.Conditions[0].Status = corev1.ConditionUnknown
		p.node.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-since))
	}
}
func idle(since time.Duration) func(*place) {
	return func(p *place) { p.unwanted = now.Add(-since) }
}

func TestDecide(t *testing.T) {
	once, many := pv(corev1.ReadWriteOnce), pv(corev1.ReadWriteMany)
	for name, test := range map[string]struct {
		volume   *corev1.PersistentVolume
		noAttach bool
		places   []place
		want     string // attach, tell, take, blocked, again
	}{
		"a pod wants it":                       {volume: once, places: []place{at("a", wanted)}, want: "attach a"},
		"its driver does not attach":           {volume: once, noAttach: true, places: []place{at("a", wanted)}},
		"its node has gone":                    {volume: once, places: []place{at("a", wanted, gone)}},
		"it is being attached":                 {volume: once, places: []place{at("a", wanted, made)}},
		"it is attached":                       {volume: once, places: []place{at("a", wanted, attached)}, want: "tell a"},
		"the node knows":                       {volume: once, places: []place{at("a", wanted, attached, knows)}},
		"no pod wants it":                      {volume: once, places: []place{at("a", attached, knows)}, want: "take a"},
		"no pod wants it, the node uses it":    {volume: once, places: []place{at("a", attached, knows, inUse)}},
		"the driver does not attach any more":  {volume: once, noAttach: true, places: []place{at("a", wanted, attached, knows)}, want: "take a"},
		"wanted again while it is detached":    {volume: once, places: []place{at("a", wanted, going)}},
		"being detached":                       {volume: once, places: []place{at("a", going)}},
		"the volume has gone":                  {places: []place{at("a", attached, inUse)}, want: "take a"},
		"two nodes may have it":                {volume: many, places: []place{at("a", wanted, attached, knows), at("b", wanted)}, want: "attach b"},
		"one node may have it":                 {volume: once, places: []place{at("a", wanted, attached, knows), at("b", wanted)}, want: "blocked p-b: attached to node a, where pod d/p-a uses it"},
		"it moves":                             {volume: once, places: []place{at("a", attached, knows, inUse), at("b", wanted)}, want: "blocked p-b: still attached to node a"},
		"it moves, and is free":                {volume: once, places: []place{at("a", attached, knows), at("b", wanted)}, want: "blocked p-b: still attached to node a; take a"},
		"it moves, and is being detached":      {volume: once, places: []place{at("a", going), at("b", wanted)}, want: "blocked p-b: still attached to node a"},
		"two want it at once":                  {volume: once, places: []place{at("a", wanted), at("b", wanted)}, want: "attach a; blocked p-b: pod d/p-a uses it on node a"},
		"its node object was deleted":          {volume: once, places: []place{at("a", attached, gone), at("b", wanted)}, want: "blocked p-b: still attached; take a"},
		"its node is out of service":           {volume: once, places: []place{at("a", attached, knows, inUse, silent(time.Minute), off)}, want: "take a"},
		"its node has lost its lease":          {volume: once, places: []place{at("a", attached, knows, inUse, silent(time.Second), idle(time.Second), fenced)}, want: "take a"},
		"its node had lost its lease":          {volume: once, places: []place{at("a", attached, knows, inUse, fenced)}},
		"wanted where the lease was lost":      {volume: once, places: []place{at("a", wanted, attached, knows, inUse, silent(time.Hour), fenced), at("b", wanted)}, want: "blocked p-b: attached to node a, where pod d/p-a uses it"},
		"its node is silent for a while":       {volume: once, places: []place{at("a", attached, inUse, silent(5*time.Minute), idle(time.Hour))}, want: "again 1m0s"},
		"its node is silent, pods left lately": {volume: once, places: []place{at("a", attached, inUse, silent(time.Hour), idle(4*time.Minute))}, want: "again 2m0s"},
		"its node is silent for long":          {volume: once, places: []place{at("a", attached, inUse, silent(time.Hour), idle(7*time.Minute))}, want: "take a"},
	} {
		t.Run(name, func(t *testing.T) {
			got := decide(input{volume: test.volume, attaches: !test.noAttach, places: test.places, now: now})
			var said []string
			for what, nodes := range map[string][]string{"attach": got.attach, "tell": got.tell, "take": got.take} {
				for _, n := range nodes {
					said = append(said, what+" "+n)
				}
			}
			for _, b := range got.blocked {
				said = append(said, "blocked "+b.pod.Name+": "+b.message)
			}
			if got.again > 0 {
				said = append(said, "again "+got.again.String())
			}
			slices.Sort(said)
			var want []string
			if test.want != "" {
				want = strings.Split(test.want, "; ")
			}
			if len(said) != len(want) {
				t.Fatalf("%q, want %q", said, want)
			}
			slices.Sort(want)
			for i := range want {
				what, part, _ := strings.Cut(want[i], ": ")
				if !strings.HasPrefix(said[i], what) || !strings.Contains(said[i], part) {
					t.Errorf("%q, want %q", said[i], want[i])
				}
			}
		})
	}
}
