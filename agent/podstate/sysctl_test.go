package podstate

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

func TestForbiddenSysctl(t *testing.T) {
	pod := func(name string, change ...func(*v1.PodSpec)) *v1.Pod {
		p := &v1.Pod{Spec: v1.PodSpec{SecurityContext: &v1.PodSecurityContext{Sysctls: []v1.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}, {Name: name, Value: "1"}}}}}
		for _, c := range change {
			c(&p.Spec)
		}
		return p
	}
	plain := func(*v1.PodSpec) {}
	hostNet := func(s *v1.PodSpec) { s.HostNetwork = true }
	hostIPC := func(s *v1.PodSpec) { s.HostIPC = true }
	for _, tt := range []struct {
		name   string
		change func(*v1.PodSpec)
		want   string
	}{
		{"net.ipv4.tcp_syncookies", plain, ""},
		{"net/ipv4/tcp_syncookies", plain, ""},
		{"net.core.somaxconn", plain, ""}, // allowed by name
		{"kernel.msgmax", plain, ""},      // allowed by prefix
		{"kernel.sem", plain, `"kernel.sem" not allowlisted`},
		{"net.core.somaxconn2", plain, "not allowlisted"},
		{"vm.swappiness", plain, "not allowlisted"},
		{"net.ipv4.tcp_syncookies", hostNet, "host net"},
		{"kernel.msgmax", hostIPC, "host ipc"},
	} {
		v := ForbiddenSysctl(pod(tt.name, tt.change), []string{"net.core.somaxconn", "kernel.msg*"})
		switch {
		case v == nil && tt.want != "":
			t.Errorf("%s: allowed", tt.name)
		case v != nil && (tt.want == "" || v.Reason != "SysctlForbidden" || !strings.Contains(v.Message, tt.want)):
			t.Errorf("%s: %+v", tt.name, v)
		}
	}
	if v := ForbiddenSysctl(&v1.Pod{}, nil); v != nil {
		t.Errorf("none: %+v", v)
	}
}
