package pod

import (
	"errors"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/users"
)

func TestUnsupported(t *testing.T) {
	probe := func(err error) *users.Ranges {
		return users.New(users.Config{Area: users.DefaultIDRange, Probe: func() error { return err }})
	}
	asks := &v1.Pod{Spec: v1.PodSpec{HostUsers: ptr.To(false)}}
	for _, tt := range []struct {
		name  string
		users *users.Ranges
		want  string // in the message; "": the pod is taken
	}{
		{"a node without ids for them", nil, "no ids"},
		{"an old kernel", probe(errors.New("tmpfs cannot be mounted with mapped ids")), "tmpfs cannot be mounted with mapped ids"},
		{"a node that can", probe(nil), ""},
	} {
		m := &Manager{cfg: Config{Users: tt.users}}
		v := m.unsupported(asks)
		if (v != nil) != (tt.want != "") || v != nil && (v.Reason != "UserNamespacesNotSupported" || !strings.Contains(v.Message, "spec.hostUsers") || !strings.Contains(v.Message, tt.want)) {
			t.Errorf("%s: %+v", tt.name, v)
		}
		for _, u := range []*bool{nil, ptr.To(true)} {
			if v := m.unsupported(&v1.Pod{Spec: v1.PodSpec{HostUsers: u}}); v != nil {
				t.Errorf("%s: a pod in the host's user namespace: %+v", tt.name, v)
			}
		}
	}
}
