package podspec

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

func TestInsideUsers(t *testing.T) {
	in, host := &v1.Pod{Spec: v1.PodSpec{HostUsers: ptr.To(false)}}, &v1.Pod{}
	for _, tt := range []struct {
		c  api.Container
		ok bool
	}{
		{api.Container{UID: 65535, GID: 65535, ExtraGIDs: []uint32{65535}}, true},
		{api.Container{UID: 65536}, false},
		{api.Container{GID: 65536}, false},
		{api.Container{ExtraGIDs: []uint32{1, 65536}}, false},
	} {
		if err := insideUsers(&tt.c, in); (err == nil) != tt.ok {
			t.Errorf("%+v: %v", tt.c, err)
		}
		if err := insideUsers(&tt.c, host); err != nil {
			t.Errorf("%+v on the host's ids: %v", tt.c, err)
		}
	}
}
