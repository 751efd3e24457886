package podspec

import (
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

func TestCapabilities(t *testing.T) {
	def := api.DefaultCapabilities()
	one := []string{"CAP_NET_BIND_SERVICE"}
	list := func(names ...v1.Capability) []v1.Capability { return names }
	without := func(set []string, name string) []string {
		return slices.DeleteFunc(slices.Clone(set), func(c string) bool { return c == name })
	}
	for _, tt := range []struct {
		name      string
		add, drop []v1.Capability
		want      []string
	}{
		{"nothing", nil, nil, def},
		{"drop ALL", nil, list("ALL"), nil},
		{"drop all in small letters", nil, list("all"), nil},
		{"drop ALL, add one", list("NET_BIND_SERVICE"), list("ALL"), one},
		{"with its prefix", list("CAP_NET_BIND_SERVICE"), list("ALL"), one},
		{"in small letters", list("net_bind_service"), list("ALL"), one},
		{"added twice", list("NET_ADMIN", "CAP_NET_ADMIN", "CHOWN"), nil, append(slices.Clone(def), "CAP_NET_ADMIN")},
		{"drop one", nil, list("CAP_KILL"), without(def, "CAP_KILL")},
		{"add and drop the same", list("NET_ADMIN"), list("NET_ADMIN"), def},
		{"add ALL", list("ALL"), nil, allCapabilities},
		{"add ALL, drop one", list("ALL"), list("SYS_ADMIN"), without(allCapabilities, "CAP_SYS_ADMIN")},
		{"add and drop ALL", list("ALL"), list("ALL"), allCapabilities},
	} {
		got, err := capabilities(&v1.Capabilities{Add: tt.add, Drop: tt.drop})
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, %v; want %v", tt.name, got, err, tt.want)
		}
	}
	if got, err := capabilities(nil); err != nil || !slices.Equal(got, def) {
		t.Errorf("default: %v, %v", got, err)
	}
	for want, c := range map[string]v1.Capabilities{
		`securityContext.capabilities.add[1]: unknown capability "NET_ADMN"`:   {Add: list("KILL", "NET_ADMN")},
		`securityContext.capabilities.drop[0]: unknown capability "CAP_WRONG"`: {Drop: list("CAP_WRONG")},
		`securityContext.capabilities.add[0]: unknown capability ""`:           {Add: list("")},
	} {
		if _, err := capabilities(&c); err == nil || !strings.HasPrefix(err.Error(), want) || Reason(err) != "CreateContainerError" {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
