package podspec

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

func TestExpand(t *testing.T) {
	vars := map[string]string{"A": "1", "B": "two", "EMPTY": ""}
	for in, want := range map[string]string{
		"":               "",
		"plain":          "plain",
		"$(A)":           "1",
		"x$(A)y$(B)z":    "x1ytwoz",
		"$(EMPTY)":       "",
		"$(MISSING)":     "$(MISSING)",
		"$$(A)":          "$(A)",
		"$$$(A)":         "$1",
		"$(A":            "$(A",
		"$A ${A}":        "$A ${A}",
		"ends in $":      "ends in $",
		"$()":            "$()",
		"$(A)$(A)":       "11",
		"$$":             "$",
		"$(MISSING)$(A)": "$(MISSING)1",
	} {
		if got := Expand(in, vars); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func FuzzExpand(f *testing.F) {
	f.Add("$(A)$$(B)$(", "A", "v")
	f.Fuzz(func(t *testing.T, s, k, v string) {
		got := Expand(s, map[string]string{k: v})
		if !strings.Contains(s, "$") && got != s {
			t.Errorf("%q became %q", s, got)
		}
	})
}

// objects are ConfigMaps and Secrets by name.
type objects struct {
	maps    map[string]*v1.ConfigMap
	secrets map[string]*v1.Secret
}

func (o objects) ConfigMap(_ context.Context, _, name string) (*v1.ConfigMap, error) {
	if c := o.maps[name]; c != nil {
		return c, nil
	}
	return nil, apierrors.NewNotFound(v1.Resource("configmaps"), name)
}

func (o objects) Secret(_ context.Context, _, name string) (*v1.Secret, error) {
	if c := o.secrets[name]; c != nil {
		return c, nil
	}
	return nil, apierrors.NewNotFound(v1.Resource("secrets"), name)
}

func TestBuildEnv(t *testing.T) {
	objs := objects{
		maps:    map[string]*v1.ConfigMap{"cm": {Data: map[string]string{"k": "cmv", "other": "o"}}},
		secrets: map[string]*v1.Secret{"sec": {Data: map[string][]byte{"pw": []byte("s3")}}},
	}
	ref := func(name string) v1.LocalObjectReference { return v1.LocalObjectReference{Name: name} }
	cmKey := func(name, key string, opt *bool) *v1.EnvVarSource {
		return &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: ref(name), Key: key, Optional: opt}}
	}
	field := func(p string) *v1.EnvVarSource {
		return &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: p}}
	}
	tests := []struct {
		name string
		from []v1.EnvFromSource
		env  []v1.EnvVar
		want []string // beside PATH and HOSTNAME
		err  string
	}{
		{"plain and expanded", nil, []v1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "$(A)2$(NO)"}, {Name: "A", Value: "3"}}, []string{"A=3", "B=12$(NO)"}, ""},
		{"replaces the image's", nil, []v1.EnvVar{{Name: "IMG", Value: "mine"}}, []string{"IMG=mine"}, ""},
		{"the image's is not expanded", nil, []v1.EnvVar{{Name: "B", Value: "$(IMG)"}}, []string{"IMG=image", "B=$(IMG)"}, ""},
		{"from", []v1.EnvFromSource{{Prefix: "P_", ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: ref("cm")}}, {SecretRef: &v1.SecretEnvSource{LocalObjectReference: ref("sec")}}},
			[]v1.EnvVar{{Name: "X", Value: "$(P_k)"}}, []string{"P_k=cmv", "P_other=o", "pw=s3", "X=cmv"}, ""},
		{"keys", nil, []v1.EnvVar{{Name: "A", ValueFrom: cmKey("cm", "k", nil)}, {Name: "B", ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: ref("sec"), Key: "pw"}}}}, []string{"A=cmv", "B=s3"}, ""},
		{"optional", nil, []v1.EnvVar{{Name: "A", ValueFrom: cmKey("cm", "no", ptr.To(true))}, {Name: "B", ValueFrom: cmKey("no", "no", ptr.To(true))}}, nil, ""},
		{"missing object", nil, []v1.EnvVar{{Name: "A", ValueFrom: cmKey("no", "k", nil)}}, nil, `configmaps "no" not found`},
		{"missing key", nil, []v1.EnvVar{{Name: "A", ValueFrom: cmKey("cm", "no", nil)}}, nil, "couldn't find key no in ConfigMap ns/cm"},
		{"missing from", []v1.EnvFromSource{{SecretRef: &v1.SecretEnvSource{LocalObjectReference: ref("no")}}}, nil, nil, `secrets "no" not found`},
		{"fields", nil, []v1.EnvVar{
			{Name: "NS", ValueFrom: field("metadata.namespace")}, {Name: "IP", ValueFrom: field("status.podIP")}, {Name: "NODE", ValueFrom: field("spec.nodeName")},
			{Name: "HOST", ValueFrom: field("status.hostIP")}, {Name: "HOSTS", ValueFrom: field("status.hostIPs")}, {Name: "IPS", ValueFrom: field("status.podIPs")},
			{Name: "NAME", ValueFrom: field("metadata.name")}, {Name: "UID", ValueFrom: field("metadata.uid")}, {Name: "SA", ValueFrom: field("spec.serviceAccountName")},
			{Name: "NONE", ValueFrom: field("metadata.annotations['none']")}, {Name: "L", ValueFrom: field("metadata.labels['l']")},
		}, []string{"NS=ns", "IP=10.0.0.9", "NODE=n1", "HOST=192.0.2.1", "HOSTS=192.0.2.1", "IPS=10.0.0.9", "NAME=p", "UID=u", "SA=web", "NONE=", "L=v"}, ""},
		{"unknown field", nil, []v1.EnvVar{{Name: "A", ValueFrom: field("spec.nope")}}, nil, "unsupported fieldPath: spec.nope"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u", Labels: map[string]string{"l": "v"}}, Spec: v1.PodSpec{NodeName: "n1", ServiceAccountName: "web"}}
			lines, _, err := buildEnv(t.Context(), envInput{
				pod: p, container: &v1.Container{Name: "c", EnvFrom: tt.from, Env: tt.env}, image: []string{"PATH=/bin", "IMG=image"}, objects: objs,
				podIPs: []netip.Addr{netip.MustParseAddr("10.0.0.9")}, nodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nodeName: "n1", hostname: "p",
			})
			if tt.err != "" {
				if err == nil || err.Error() != tt.err {
					t.Errorf("error %v, want %s", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range append(tt.want, "PATH=/bin", "HOSTNAME=p") {
				if !slices.Contains(lines, w) {
					t.Errorf("no %s in %v", w, lines)
				}
			}
		})
	}
}

// TestEnvironmentIsBounded: what no program could be started with is refused before
// it is put together, wherever it comes from.
func TestEnvironmentIsBounded(t *testing.T) {
	big := strings.Repeat("x", 100<<10)
	objs := objects{maps: map[string]*v1.ConfigMap{"big": {Data: map[string]string{"k": big}}, "bigger": {Data: map[string]string{"k": big + big}}}}
	from := func(name string, times int) (out []v1.EnvFromSource) {
		for i := range times {
			out = append(out, v1.EnvFromSource{Prefix: fmt.Sprintf("P%d_", i), ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: name}}})
		}
		return out
	}
	doubled := []v1.EnvVar{{Name: "V0", Value: "xxxxxxxx"}}
	for i := range 40 {
		doubled = append(doubled, v1.EnvVar{Name: fmt.Sprintf("V%d", i+1), Value: fmt.Sprintf("$(V%d)$(V%d)", i, i)})
	}
	var many []string
	for i := range 30 {
		many = append(many, fmt.Sprintf("I%d=%s", i, big))
	}
	for _, tt := range []struct {
		name, err, reason string
		c                 v1.Container
		image             []string
	}{
		{name: "as much as goes", c: v1.Container{EnvFrom: from("big", 20)}},
		{name: "a set that replaces itself", c: v1.Container{EnvFrom: append(from("big", 20), from("big", 20)...)}},
		{name: "one ConfigMap many times", c: v1.Container{EnvFrom: from("big", 100)}, err: `envFrom: environment: with the variable "P20_k"`, reason: "CreateContainerConfigError"},
		{name: "one long variable", c: v1.Container{EnvFrom: from("bigger", 1)}, err: `envFrom: environment variable "P0_k" has`, reason: "CreateContainerConfigError"},
		{name: "doubled and doubled", c: v1.Container{Env: doubled}, err: `environment variable "V14" has`, reason: "CreateContainerConfigError"},
		{name: "the image's", c: v1.Container{Image: "i"}, image: many, err: `image "i": environment: with the variable "I20"`, reason: podstate.ReasonCreateContainer},
	} {
		lines, _, err := buildEnv(t.Context(), envInput{pod: &v1.Pod{}, container: &tt.c, image: tt.image, objects: objs, hostname: "p"})
		if tt.err == "" {
			if err == nil {
				err = Startable(&api.Container{Args: []string{"a"}, Env: lines})
			}
			if err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tt.err) || Reason(err) != tt.reason {
			t.Errorf("%s: error %.200v, want one with %q that is a %s", tt.name, err, tt.err, tt.reason)
		}
	}
	if _, err := argv(&v1.Container{Command: slices.Repeat([]string{"$(B)"}, 100)}, nil, nil, map[string]string{"B": big}); err == nil || !strings.Contains(err.Error(), "command and args have more than 2097152 bytes") {
		t.Errorf("arguments: error %.200v", err)
	}
	if err := Startable(&api.Container{Args: []string{"a", big + big}}); err == nil || !strings.Contains(err.Error(), "command and args: string 2") {
		t.Errorf("a long argument: error %.200v", err)
	}
	if err := Startable(&api.Container{Args: slices.Repeat([]string{big}, 10), Env: slices.Repeat([]string{big}, 11)}); err == nil || !strings.Contains(err.Error(), "have 2150421 bytes") {
		t.Errorf("both together: error %.200v", err)
	}
}

func TestArgv(t *testing.T) {
	entry, cmd := []string{"/e"}, []string{"c"}
	for _, tt := range []struct {
		command, args, want []string
	}{
		{nil, nil, []string{"/e", "c"}},
		{nil, []string{"a"}, []string{"/e", "a"}},
		{[]string{"/x"}, nil, []string{"/x"}},
		{[]string{"/x", "$(V)"}, []string{"$(V)"}, []string{"/x", "v", "v"}},
	} {
		got, err := argv(&v1.Container{Command: tt.command, Args: tt.args}, entry, cmd, map[string]string{"V": "v"})
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%v %v: %v %v", tt.command, tt.args, got, err)
		}
	}
	if _, err := argv(&v1.Container{Image: "i"}, nil, nil, nil); err == nil || !strings.Contains(err.Error(), "no command specified") {
		t.Errorf("error %v", err)
	}
}

func TestIdentity(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"passwd": "root:x:0:0::/:\nnope\nweb:x:33:44::/:\nwide:x:8589934592:1::/:\n", "group": "root:x:0:\nextra:x:55:web,other\nlog:x:66:\n",
	} {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tooLarge := func(n, user string) string {
		return fmt.Sprintf("user or group %s of the image's USER %q or of its /etc/passwd or /etc/group: must be between 0 and 2147483647; set securityContext.runAsUser and runAsGroup", n, user)
	}
	tests := []struct {
		name     string
		pod      *v1.PodSecurityContext
		ctr      *v1.SecurityContext
		image    string
		uid, gid uint32
		extra    []uint32
		err      string
	}{
		{name: "nothing said: root"},
		{name: "image's name", image: "web", uid: 33, gid: 44, extra: []uint32{55}},
		{name: "image's name and group", image: "web:log", uid: 33, gid: 66},
		{name: "image's numbers", image: "7:8", uid: 7, gid: 8},
		{name: "unknown number", image: "4242", uid: 4242},
		{name: "number that is 0 in 32 bits", image: "4294967296", ctr: &v1.SecurityContext{RunAsNonRoot: ptr.To(true)}, err: tooLarge("4294967296", "4294967296")},
		{name: "negative number", image: "-1", err: tooLarge("-1", "-1")},
		{name: "group that is 0 in 32 bits", image: "7:4294967296", err: tooLarge("4294967296", "7:4294967296")},
		{name: "such a number in passwd", image: "wide", ctr: &v1.SecurityContext{RunAsNonRoot: ptr.To(true)}, err: "container has runAsNonRoot and image has non-numeric user (wide), cannot verify user is non-root (pod: \"p_ns(u)\", container: c)"},
		{name: "such a number in passwd, without runAsNonRoot", image: "wide", err: tooLarge("8589934592", "wide")},
		{name: "unknown name", image: "who", err: "unable to find user who: no matching entries in passwd file"},
		{name: "unknown group", image: "web:who", err: "unable to find group who: no matching entries in group file"},
		{name: "runAsUser", image: "web", ctr: &v1.SecurityContext{RunAsUser: ptr.To(int64(9))}, uid: 9},
		{name: "container before pod", pod: &v1.PodSecurityContext{RunAsUser: ptr.To(int64(1)), RunAsGroup: ptr.To(int64(2))}, ctr: &v1.SecurityContext{RunAsUser: ptr.To(int64(3))}, uid: 3, gid: 2},
		{name: "fsGroup and supplemental", pod: &v1.PodSecurityContext{FSGroup: ptr.To(int64(5)), SupplementalGroups: []int64{9, 5, 7}}, extra: []uint32{5, 7, 9}},
		{name: "strict groups", image: "web", pod: &v1.PodSecurityContext{SupplementalGroupsPolicy: ptr.To(v1.SupplementalGroupsPolicyStrict)}, uid: 33, gid: 44},
		{name: "non-root image", image: "7", ctr: &v1.SecurityContext{RunAsNonRoot: ptr.To(true)}, uid: 7},
		{name: "root image", pod: &v1.PodSecurityContext{RunAsNonRoot: ptr.To(true)}, err: `container has runAsNonRoot and image will run as root (pod: "p_ns(u)", container: c)`},
		{name: "named image", image: "web", pod: &v1.PodSecurityContext{RunAsNonRoot: ptr.To(true)}, err: "container has runAsNonRoot and image has non-numeric user (web), cannot verify user is non-root (pod: \"p_ns(u)\", container: c)"},
		{name: "root asked for", pod: &v1.PodSecurityContext{RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To(int64(0))}, err: `container's runAsUser breaks non-root policy (pod: "p_ns(u)", container: c)`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u"}, Spec: v1.PodSpec{SecurityContext: tt.pod}}
			var out api.Container
			err := identity(&out, p, &v1.Container{Name: "c", SecurityContext: tt.ctr}, tt.image, root)
			if tt.err != "" {
				if err == nil || err.Error() != tt.err {
					t.Errorf("error %v", err)
				}
				return
			}
			if err != nil || out.UID != tt.uid || out.GID != tt.gid || !slices.Equal(out.ExtraGIDs, tt.extra) {
				t.Errorf("%d:%d %v, %v", out.UID, out.GID, out.ExtraGIDs, err)
			}
		})
	}
}

// TestHostileAccounts: a passwd or group file that is not a regular one is an
// error at once; a FIFO without a writer once held up every start on the node.
func TestHostileAccounts(t *testing.T) {
	hostile := map[string]func(path string) error{
		"is not a regular file": func(p string) error { return unix.Mkfifo(p, 0o644) },
		"too many levels":       func(p string) error { return os.Symlink(filepath.Base(p), p) },
		"is larger than":        func(p string) error { return os.WriteFile(p, bytes.Repeat([]byte("x"), maxAccounts+1), 0o644) },
	}
	for want, mk := range hostile {
		for _, name := range []string{"passwd", "group"} {
			root := t.TempDir()
			if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := mk(filepath.Join(root, "etc", name)); err != nil {
				t.Fatal(err)
			}
			if _, err := lookup(root, "7:8"); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}
	}
}

func TestOwnName(t *testing.T) {
	full := func(hostname string, asFQDN bool) *v1.Pod {
		return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns"},
			Spec: v1.PodSpec{Hostname: hostname, Subdomain: "sub", SetHostnameAsFQDN: &asFQDN}}
	}
	long := strings.Repeat("x", 40)
	for _, test := range []struct {
		pod        *v1.Pod
		want, fail string
	}{
		{&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}}, "p", ""},
		{&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.PodSpec{HostNetwork: true}}, "n1", ""},
		{full("h", false), "h", ""},
		{full("h", true), "h.sub.ns.svc.cluster.local", ""},
		{full(long, false), long, ""},
		{full(long, true), "", "has 65 characters, the kernel takes 64"},
	} {
		got, err := Hostname(test.pod, "n1", "cluster.local")
		if got != test.want || (err == nil) != (test.fail == "") || err != nil && !strings.Contains(err.Error(), test.fail) {
			t.Errorf("%+v: %q, %v", test.pod.Spec, got, err)
		}
	}
}

func TestStopSignal(t *testing.T) {
	for in, want := range map[string]int{
		"": 15, "SIGQUIT": 3, "int": 2, "9": 9, "SIGRTMIN": 34, "SIGRTMIN+3": 37, "RTMAX-1": 63, "SIGRTMAX": 64, "SIGCLD": 17, "SIGPOLL": 29, "SIGIOT": 6,
		"nonsense": 15, "SIGRTMIN+31": 15, "SIGRTMIN+": 15, "SIGRTMAX--1": 15, "65": 15, "0": 15,
	} {
		if got := StopSignal(nil, in); got != want {
			t.Errorf("%q: %d", in, got)
		}
	}
	for n, want := range map[int]string{15: "SIGTERM", 6: "SIGABRT", 17: "SIGCHLD", 29: "SIGIO", 34: "SIGRTMIN", 49: "SIGRTMIN+15", 50: "SIGRTMAX-14", 64: "SIGRTMAX", 33: ""} {
		if got := signalName(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
	own := v1.SIGUSR1
	if got := StopSignal(&v1.Container{Lifecycle: &v1.Lifecycle{StopSignal: &own}}, "SIGQUIT"); got != 10 {
		t.Errorf("the spec's: %d", got)
	}
}
