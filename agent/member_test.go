package agent

import (
	"context"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/apis/names"
)

// asked is a Membership that writes down what it is asked.
type asked struct{ did []string }

func (a *asked) MayLeave(context.Context) error { a.did = append(a.did, "may"); return nil }
func (a *asked) Leave(context.Context) error    { a.did = append(a.did, "leave"); return nil }

// TestMemberWithVolumes: a node with the only data of a claim does not leave; volumes of
// other nodes, and those whose data go anyway, do not hinder it.
func TestMemberWithVolumes(t *testing.T) {
	volume := func(name, node string, phase v1.PersistentVolumePhase, reclaim v1.PersistentVolumeReclaimPolicy) *v1.PersistentVolume {
		v := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{names.LocalPathNode: node}}}
		v.Spec.ClaimRef = &v1.ObjectReference{Namespace: "shop", Name: "of-" + name}
		v.Spec.PersistentVolumeReclaimPolicy, v.Status.Phase = reclaim, phase
		return v
	}
	other := volume("other", "n2", v1.VolumeBound, v1.PersistentVolumeReclaimDelete)
	gone := volume("gone", "n1", v1.VolumeReleased, v1.PersistentVolumeReclaimDelete)
	for what, c := range map[string]struct {
		volume *v1.PersistentVolume
		held   bool
	}{
		"bound":    {volume("db", "n1", v1.VolumeBound, v1.PersistentVolumeReclaimDelete), true},
		"new":      {volume("db", "n1", "", v1.PersistentVolumeReclaimDelete), true},
		"retained": {volume("db", "n1", v1.VolumeReleased, v1.PersistentVolumeReclaimRetain), true},
		"none":     {other, false},
	} {
		t.Run(what, func(t *testing.T) {
			client := fake.NewClientset(c.volume, gone)
			if c.volume != other {
				if err := client.Tracker().Add(other); err != nil {
					t.Fatal(err)
				}
			}
			a := &asked{}
			m := member{a, client, "n1"}
			for _, err := range []error{m.MayLeave(t.Context()), m.Leave(t.Context())} {
				if held := err != nil; held != c.held {
					t.Errorf("%v", err)
				}
				if err != nil && (!strings.Contains(err.Error(), "claims shop/of-db are on this node alone") || !strings.Contains(err.Error(), "clusterctl members rm n1")) {
					t.Errorf("%v", err)
				}
			}
			if did := slices.Equal(a.did, []string{"may", "leave"}); did == c.held {
				t.Errorf("asked for %q", a.did)
			}
		})
	}
}
