package podspec

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

func TestSeccompProfile(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "team", "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "team", "p.json")
	if err := os.WriteFile(file, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	local := func(name string) *v1.SeccompProfile {
		return &v1.SeccompProfile{Type: v1.SeccompProfileTypeLocalhost, LocalhostProfile: &name}
	}
	for _, tt := range []struct {
		name       string
		pod, ctr   *v1.SeccompProfile
		privileged bool
		want, err  string
	}{
		{name: "nothing said", want: "RuntimeDefault"},
		{name: "unconfined", ctr: &v1.SeccompProfile{Type: v1.SeccompProfileTypeUnconfined}, want: "Unconfined"},
		{name: "the pod's", pod: local("team/p.json"), want: file},
		{name: "the container's before the pod's", pod: local("team/p.json"), ctr: &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault}, want: "RuntimeDefault"},
		{name: "the container's alone", pod: &v1.SeccompProfile{Type: v1.SeccompProfileTypeUnconfined}, ctr: local("team/p.json"), want: file},
		{name: "privileged has none", pod: local("team/none.json"), privileged: true, want: "Unconfined"},
		{name: "missing", ctr: local("team/none.json"), err: `seccompProfile.localhostProfile "team/none.json": stat ` + filepath.Join(root, "team", "none.json")},
		{name: "escape", ctr: local("../p.json"), err: `seccompProfile.localhostProfile "../p.json": want a path below ` + root},
		{name: "absolute", ctr: local(file), err: "want a path below"},
		{name: "folder", ctr: local("team/folder"), err: "is not a file"},
		{name: "no name", ctr: &v1.SeccompProfile{Type: v1.SeccompProfileTypeLocalhost}, err: `seccompProfile.type "Localhost"`},
	} {
		p := &v1.Pod{Spec: v1.PodSpec{SecurityContext: &v1.PodSecurityContext{SeccompProfile: tt.pod}}}
		var out api.Container
		err := security(&out, p, &v1.Container{SecurityContext: &v1.SecurityContext{SeccompProfile: tt.ctr, Privileged: &tt.privileged}}, root)
		switch {
		case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err) || Reason(err) != "CreateContainerError"):
			t.Errorf("%s: %v, want %s", tt.name, err, tt.err)
		case tt.err == "" && (err != nil || out.Seccomp != tt.want):
			t.Errorf("%s: %q, %v; want %q", tt.name, out.Seccomp, err, tt.want)
		}
	}
}

// TestConfinement: what the fields make of a container.
func TestConfinement(t *testing.T) {
	for _, tt := range []struct {
		name                             string
		sc                               *v1.SecurityContext
		privileged, noNewPrivs, ro, mask bool
	}{
		{name: "nothing said", mask: true},
		{name: "empty", sc: &v1.SecurityContext{}, mask: true},
		{name: "privileged", sc: &v1.SecurityContext{Privileged: ptr.To(true)}, privileged: true},
		{name: "read-only root", sc: &v1.SecurityContext{ReadOnlyRootFilesystem: ptr.To(true)}, ro: true, mask: true},
		{name: "escalation refused", sc: &v1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false)}, noNewPrivs: true, mask: true},
		{name: "escalation allowed", sc: &v1.SecurityContext{AllowPrivilegeEscalation: ptr.To(true)}, mask: true},
	} {
		var out api.Container
		if err := security(&out, &v1.Pod{}, &v1.Container{SecurityContext: tt.sc}, t.TempDir()); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if out.Privileged != tt.privileged || out.NoNewPrivileges != tt.noNewPrivs || out.ReadonlyRootfs != tt.ro || (len(out.MaskedPaths) > 0) != tt.mask || (len(out.ReadonlyPaths) > 0) != tt.mask {
			t.Errorf("%s: %+v", tt.name, out)
		}
	}
}

func TestThermalThrottle(t *testing.T) {
	sys := t.TempDir()
	for _, dir := range []string{"cpu0/thermal_throttle", "cpu12/thermal_throttle", "cpu1/topology", "cpufreq/thermal_throttle"} {
		if err := os.MkdirAll(filepath.Join(sys, "devices/system/cpu", dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got := thermalThrottle(sys)
	want := []string{filepath.Join(sys, "devices/system/cpu/cpu0/thermal_throttle"), filepath.Join(sys, "devices/system/cpu/cpu12/thermal_throttle")}
	if !slices.Equal(got, want) {
		t.Errorf("masked: %q, want %q", got, want)
	}
}

func TestForbiddenMAC(t *testing.T) {
	local := &v1.AppArmorProfile{Type: v1.AppArmorProfileTypeLocalhost, LocalhostProfile: ptr.To("p")}
	def := &v1.AppArmorProfile{Type: v1.AppArmorProfileTypeRuntimeDefault}
	open := &v1.AppArmorProfile{Type: v1.AppArmorProfileTypeUnconfined}
	label := &v1.SELinuxOptions{Level: "s0:c1,c2"}
	defer func(was string) { seLinuxEnforce = was }(seLinuxEnforce)
	without, with := filepath.Join(t.TempDir(), "enforce"), filepath.Join(t.TempDir(), "enforce")
	if err := os.WriteFile(with, []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name       string
		pod        v1.PodSecurityContext
		ctr        v1.SecurityContext
		annotation string
		message    string
		without    bool // SELinux
	}{
		{name: "nothing"},
		{name: "unconfined", pod: v1.PodSecurityContext{AppArmorProfile: open}, ctr: v1.SecurityContext{AppArmorProfile: open}},
		{name: "empty label", pod: v1.PodSecurityContext{SELinuxOptions: &v1.SELinuxOptions{}}},
		{name: "annotation unconfined", annotation: "unconfined"},
		{name: "the field before the annotation", ctr: v1.SecurityContext{AppArmorProfile: open}, annotation: "localhost/p"},
		{name: "the annotation before the pod", pod: v1.PodSecurityContext{AppArmorProfile: local}, annotation: "unconfined"},
		{name: "pod", pod: v1.PodSecurityContext{AppArmorProfile: local}, message: "Cannot enforce AppArmor: spec.securityContext.appArmorProfile.type is Localhost"},
		{name: "pod's default", pod: v1.PodSecurityContext{AppArmorProfile: def}, message: "RuntimeDefault"},
		{name: "container", ctr: v1.SecurityContext{AppArmorProfile: def}, message: "securityContext.appArmorProfile.type of container c is RuntimeDefault"},
		{name: "annotation", annotation: "localhost/p", message: `annotation container.apparmor.security.beta.kubernetes.io/c is "localhost/p"`},
		{name: "annotation's default", annotation: "runtime/default", message: "runtime/default"},
		{name: "pod's label", pod: v1.PodSecurityContext{SELinuxOptions: label}, message: "spec.securityContext.seLinuxOptions"},
		{name: "container's label", ctr: v1.SecurityContext{SELinuxOptions: label}, message: "securityContext.seLinuxOptions of container c"},
		{name: "labels without SELinux", pod: v1.PodSecurityContext{SELinuxOptions: label}, ctr: v1.SecurityContext{SELinuxOptions: label}, without: true},
	} {
		seLinuxEnforce = with
		if tt.without {
			seLinuxEnforce = without
		}
		p := &v1.Pod{Spec: v1.PodSpec{SecurityContext: &tt.pod}}
		if tt.annotation != "" {
			p.ObjectMeta = metav1.ObjectMeta{Annotations: map[string]string{appArmorAnnotation + "c": tt.annotation, appArmorAnnotation + "other": "localhost/p"}}
		}
		err := forbiddenMAC(p, &v1.Container{Name: "c", SecurityContext: &tt.ctr})
		switch {
		case err == nil && tt.message != "":
			t.Errorf("%s: let through", tt.name)
		case err != nil && (tt.message == "" || !strings.Contains(err.Error(), tt.message) || Reason(err) != "CreateContainerError"):
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestBuildReason(t *testing.T) {
	if got := Reason(errors.New("x")); got != "CreateContainerConfigError" {
		t.Errorf("an error of the configuration: %s", got)
	}
	if got := Reason(createError{errors.New("x")}); got != "CreateContainerError" {
		t.Errorf("an error of the node: %s", got)
	}
}
