package kubectl

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// with is simple with further fields of its container.
func with(name, args, fields string, more ...string) string {
	return strings.Replace(simple(name, args, more...), "args:", fields+", args:", 1)
}

// applyAll applies many manifests at once.
func (k *kit) applyAll(manifests ...string) {
	k.Helper()
	k.apply(strings.Join(manifests, "\n---\n"))
}

// status is what the kernel tells of the first process of a container.
func (k *kit) status(pod string) map[string]string {
	k.Helper()
	fields := map[string]string{}
	for line := range strings.Lines(k.exec(pod, "main", "cat", "/proc/1/status")) {
		key, value, _ := strings.Cut(line, ":")
		fields[key] = strings.Join(strings.Fields(value), " ")
	}
	return fields
}

// userImages puts images into a registry whose USER, CMD and STOPSIGNAL are
// set. The user "web" of their passwd file is in two groups.
func (k *kit) userImages(users ...string) []string {
	k.Helper()
	host, _ := k.registry("", "")
	img, err := tarball.ImageFromPath(filepath.Join(filepath.Dir(k.c.Bin("clusterd")), "hello.tar"), nil)
	if err != nil {
		k.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for file, text := range map[string]string{"etc/passwd": "root:x:0:0::/:\nweb:x:33:44::/:\n", "etc/group": "root:x:0:\nweb:x:44:\nextra:x:55:web\n"} {
		if err := w.WriteHeader(&tar.Header{Name: file, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg}); err != nil {
			k.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			k.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		k.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err == nil {
		img, err = mutate.AppendLayers(img, layer)
	}
	var cfg *v1.ConfigFile
	if err == nil {
		cfg, err = img.ConfigFile()
	}
	if err != nil {
		k.Fatal(err)
	}
	var refs []string
	for _, user := range users {
		cfg = cfg.DeepCopy()
		cfg.Config.User, cfg.Config.Cmd, cfg.Config.StopSignal = user, []string{"sleep", "9876"}, "SIGINT"
		as, err := mutate.ConfigFile(img, cfg)
		if err != nil {
			k.Fatal(err)
		}
		ref, err := name.ParseReference(host + "/team/user-" + user + ":1")
		if err != nil {
			k.Fatal(err)
		}
		if err := remote.Write(ref, as, remote.WithTransport(pusher{&http.Transport{DisableKeepAlives: true, DialContext: k.dial}})); err != nil {
			k.Fatal(err)
		}
		refs = append(refs, ref.String())
	}
	return refs
}

// held waits until a pod's container waits with a reason, and returns why.
func (k *kit) held(name, reason string) string {
	k.Helper()
	var message string
	k.podIs(name, "waits with "+reason, func(p *corev1.Pod) bool {
		w := waiting(p)
		if w == nil || w.Reason != reason {
			return false
		}
		message = w.Message
		return true
	})
	return message
}

// TestE2EXSecurity goes through the security contexts, as the kernel sees what
// comes of them.
func TestE2EXSecurity(t *testing.T) {
	t.Parallel()
	k := start(t, "security")
	images := k.userImages("web", "0")
	folder := filepath.Join(k.c.Nodes()[0].Data, "seccomp")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		k.Fatal(err)
	}
	for file, text := range map[string]string{
		"deny.json": `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["sethostname", "no_such_call"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95}]}`,
		"bad.json":  `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALOW"}]}`,
	} {
		if err := os.WriteFile(filepath.Join(folder, file), []byte(text), 0o600); err != nil {
			k.Fatal(err)
		}
	}
	of := func(manifest string) string { return strings.Replace(manifest, image, images[0], 1) }
	root := "runAsUser: 0, "
	const sc = "securityContext: "
	k.applyAll(
		simple("plain", "sleep"),
		with("nobody", "sleep", sc+"{runAsUser: 65534}"),
		with("container", "sleep", sc+"{runAsUser: 1001, runAsGroup: 2002}", sc+"{runAsUser: 7, runAsGroup: 8}"),
		simple("pod", "sleep", sc+"{runAsUser: 1001, runAsGroup: 2002, fsGroup: 3003, supplementalGroups: [4004, 2002]}"),
		of(simple("merge", "sleep", sc+"{supplementalGroups: [4004]}")),
		of(simple("strict", "sleep", sc+"{supplementalGroups: [4004], supplementalGroupsPolicy: Strict}")),
		of(simple("named", "sleep", sc+"{runAsNonRoot: true}")),
		of(with("numbered", "sleep", sc+"{runAsUser: 33}", sc+"{runAsNonRoot: true}")),
		strings.Replace(with("root", "sleep", sc+"{runAsNonRoot: true}"), image, images[1], 1),
		with("zero", "sleep", sc+"{runAsNonRoot: true, runAsUser: 0}"),
		with("tight", "sleep", sc+"{allowPrivilegeEscalation: false, runAsUser: 1000}"),
		with("loose", "sleep", sc+"{allowPrivilegeEscalation: true, runAsUser: 1000}"),
		with("dropped", "sleep", sc+"{"+root+"capabilities: {drop: [ALL], add: [NET_BIND_SERVICE, CAP_CHOWN]}}"),
		with("added", "sleep", sc+"{"+root+"capabilities: {add: [ALL]}}"),
		with("unknown", "sleep", sc+"{capabilities: {add: [NET_ADMN]}}"),
		with("privileged", "sleep", sc+"{"+root+"privileged: true, seccompProfile: {type: Localhost, localhostProfile: none.json}}"),
		with("readonly", "sleep", sc+"{"+root+"readOnlyRootFilesystem: true}"),
		with("writable", "sleep", sc+"{"+root+"readOnlyRootFilesystem: false, privileged: false}"),
		with("filtered", "sleep", sc+"{"+root+"seccompProfile: {type: Localhost, localhostProfile: deny.json}, capabilities: {add: [SYS_ADMIN]}}", sc+"{seccompProfile: {type: Unconfined}}"),
		simple("podfiltered", "sleep", sc+"{seccompProfile: {type: Localhost, localhostProfile: deny.json}}"),
		with("unconfined", "sleep", sc+"{"+root+"seccompProfile: {type: Unconfined}, capabilities: {add: [SYS_ADMIN]}}"),
		with("nofile", "sleep", sc+"{seccompProfile: {type: Localhost, localhostProfile: none.json}}"),
		with("badfile", "sleep", sc+"{seccompProfile: {type: Localhost, localhostProfile: bad.json}}"),
		with("labelled", "sleep", sc+"{seLinuxOptions: {level: 's0:c1,c2'}}"),
		with("noarmour", "sleep", sc+"{appArmorProfile: {type: Unconfined}}"),
		strings.Replace(simple("annotated", "sleep"), "labels:", "annotations: {container.apparmor.security.beta.kubernetes.io/main: localhost/x}, labels:", 1),
		simple("sysctl", "sleep", sc+"{sysctls: [{name: kernel.shm_rmid_forced, value: '1'}, {name: net/ipv4/ip_unprivileged_port_start, value: '0'}]}"),
		simple("unsafe", "sleep", sc+"{sysctls: [{name: kernel.msgmax, value: '1'}]}"),
	)

	k.sub("users and groups", func(k *kit) {
		features.Conforms(k, 340, 344, 345)
		for name, want := range map[string]struct {
			uid, gid int64
			groups   []int64 // further ones
		}{
			"plain": {uid: 65532, gid: 65532}, "nobody": {uid: 65534}, "container": {uid: 1001, gid: 2002}, "pod": {1001, 2002, []int64{3003, 4004}},
			"merge": {33, 44, []int64{55, 4004}}, "strict": {33, 44, []int64{4004}}, "numbered": {33, 44, []int64{55}},
		} {
			p := k.ready(name)
			s := k.status(name)
			k.is(name+"'s users", s["Uid"], strings.Repeat(fmt.Sprint(want.uid)+" ", 3)+fmt.Sprint(want.uid))
			k.is(name+"'s group", s["Gid"], strings.Repeat(fmt.Sprint(want.gid)+" ", 3)+fmt.Sprint(want.gid))
			for _, g := range want.groups {
				if !slices.Contains(strings.Fields(s["Groups"]), fmt.Sprint(g)) {
					k.Errorf("%s: group %d is not among %s", name, g, s["Groups"])
				}
			}
			told := p.Status.ContainerStatuses[0].User
			all := append(want.groups, want.gid)
			slices.Sort(all)
			if told == nil || told.Linux == nil || told.Linux.UID != want.uid || told.Linux.GID != want.gid || !slices.Equal(told.Linux.SupplementalGroups, all) {
				k.Errorf("%s: the status tells of %+v", name, told)
			}
		}
		k.is("groups of Strict", k.status("strict")["Groups"], "4004")
		k.is("node's feature", k.field("node/"+node, "{.status.features.supplementalGroupsPolicy}"), "true")
		k.is("effective capabilities of nobody", k.status("nobody")["CapEff"], "0000000000000000")
		if got := k.pod("merge").Status.ContainerStatuses[0].StopSignal; got == nil || *got != corev1.SIGINT {
			k.Errorf("stop signal of the image: %v", got)
		}
	})
	k.sub("not as root", func(k *kit) {
		const reason = "CreateContainerConfigError"
		k.has(k.held("named", reason), "container has runAsNonRoot and image has non-numeric user (web), cannot verify user is non-root (pod: \"named_"+k.ns)
		k.has(k.held("root", reason), "container has runAsNonRoot and image will run as root")
		k.has(k.held("zero", reason), "container's runAsUser breaks non-root policy")
	})
	k.sub("capabilities", func(k *kit) {
		for _, name := range []string{"dropped", "added"} {
			k.ready(name)
		}
		s := k.status("dropped")
		for _, set := range []string{"CapPrm", "CapEff", "CapBnd"} {
			k.is(set, s[set], fmt.Sprintf("%016x", 1<<10|1)) // NET_BIND_SERVICE, CHOWN
		}
		k.is("CapAmb", s["CapAmb"], "0000000000000000")
		ours, err := os.ReadFile("/proc/self/status")
		if err != nil {
			k.Fatal(err)
		}
		k.has(string(ours), "CapBnd:\t"+k.status("added")["CapEff"]) // no more than the node has itself
		k.has(k.held("unknown", "CreateContainerError"), `securityContext.capabilities.add[0]: unknown capability "NET_ADMN"`)
	})
	k.sub("privileges", func(k *kit) {
		features.Conforms(k, 341, 343)
		for _, name := range []string{"tight", "loose", "privileged", "writable"} {
			k.ready(name)
		}
		// A copy of the program that belongs to root and gives its rights to
		// whoever runs it.
		for name, euid := range map[string]string{"tight": "1000", "loose": "0"} {
			files := fmt.Sprintf("/proc/%d/root", k.process(string(k.pod(name).UID), "/hello"))
			b, err := os.ReadFile(files + "/hello")
			if err == nil {
				err = os.WriteFile(files+"/suid", b, 0o755)
			}
			if err == nil {
				err = os.Chmod(files+"/suid", 0o755|os.ModeSetuid)
			}
			if err != nil {
				k.Fatal(err)
			}
			uids := ""
			for line := range strings.Lines(k.ok("exec", name, "--", "/suid", "cat", "/proc/self/status")) {
				if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
					uids = strings.Join(strings.Fields(rest), " ")
				}
			}
			k.is(name+"'s real and effective user", strings.Join(strings.Fields(uids)[:2], " "), "1000 "+euid)
		}
		k.has(k.fails("exec", "writable", "--", "/hello", "hostname", "x"), "operation not permitted")
		k.ok("exec", "privileged", "--", "/hello", "hostname", "renamed")
		k.is("name", k.exec("privileged", "main", "cat", "/proc/sys/kernel/hostname"), "renamed\n")
		s := k.status("privileged")
		k.is("seccomp of a privileged one", s["Seccomp"], "0")
		mounts := k.exec("privileged", "main", "cat", "/proc/mounts")
		k.has(mounts, "sysfs /sys sysfs rw")
		k.lacks(mounts, " /proc/sys ", " /sys/firmware ")
		k.has(k.exec("plain", "main", "cat", "/proc/mounts"), "sysfs /sys sysfs ro", " /proc/sys ", " /sys/firmware ")
		uid := string(k.pod("privileged").UID)
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/dev/kmsg", k.process(uid, "/hello"))); err != nil {
			k.Errorf("a device of the node: %v", err)
		}
	})
	k.sub("root file system", func(k *kit) {
		features.Conforms(k, 292, 342)
		k.ready("readonly")
		k.has(k.fails("exec", "readonly", "--", "/hello", "write", "/file", "x"), "read-only file system")
		k.ok("exec", "readonly", "--", "/hello", "write", "/dev/termination-log", "x")
		k.ok("exec", "writable", "--", "/hello", "write", "/file", "x")
		k.is("the file", k.exec("writable", "main", "cat", "/file"), "x")
	})
	k.sub("seccomp", func(k *kit) {
		for _, name := range []string{"filtered", "podfiltered", "unconfined"} {
			k.ready(name)
		}
		k.is("the default", k.status("plain")["Seccomp"], "2")
		k.has(k.fails("exec", "filtered", "--", "/hello", "hostname", "x"), "operation not supported") // errno 95
		k.has(k.fails("exec", "podfiltered", "--", "/hello", "hostname", "x"), "operation not supported")
		k.is("unconfined", k.status("unconfined")["Seccomp"], "0")
		k.ok("exec", "unconfined", "--", "/hello", "hostname", "x")
		k.has(k.held("nofile", "CreateContainerError"), filepath.Join(folder, "none.json"), "no such file")
		k.has(k.held("badfile", "CreateContainerError"), filepath.Join(folder, "bad.json"), `syscalls[0].action: unknown action "SCMP_ACT_ALOW"`)
		k.has(k.failsIn(with("escapes", "sleep", sc+"{seccompProfile: {type: Localhost, localhostProfile: ../x.json}}"), "apply", "-f", "-"),
			"localhostProfile: Invalid value", "must not contain '..'")
		// Put there, it is found without anything else being done.
		if err := os.WriteFile(filepath.Join(folder, "none.json"), []byte(`{"defaultAction": "SCMP_ACT_ALLOW"}`), 0o600); err != nil {
			k.Fatal(err)
		}
		k.ready("nofile")
	})
	k.sub("labels and profiles of others", func(k *kit) {
		if _, err := os.Stat("/sys/fs/selinux/enforce"); err == nil {
			k.has(k.held("labelled", "CreateContainerError"), "Cannot apply securityContext.seLinuxOptions of container main")
		} else {
			k.ready("labelled")
		}
		k.has(k.held("annotated", "CreateContainerError"), "Cannot enforce AppArmor: annotation container.apparmor.security.beta.kubernetes.io/main")
		k.ready("noarmour")
	})
	k.sub("sysctls", func(k *kit) {
		features.Conforms(k, 346, 347)
		k.ready("sysctl")
		k.is("kernel.shm_rmid_forced", k.exec("sysctl", "main", "cat", "/proc/sys/kernel/shm_rmid_forced"), "1\n")
		k.is("of the node's other pods", k.exec("plain", "main", "cat", "/proc/sys/kernel/shm_rmid_forced"), "0\n")
		k.is("with slashes", k.exec("sysctl", "main", "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start"), "0\n")
		p := k.phase("unsafe", corev1.PodFailed)
		k.is("reason", p.Status.Reason, "SysctlForbidden")
		k.has(k.failsIn(simple("wrong", "sleep", sc+"{sysctls: [{name: foo-, value: bar}, {name: kernel.shmmax, value: '1'}, {name: safe-and-unsafe, value: '1'}, {name: 'bar..', value: '1'}]}"), "apply", "-f", "-"),
			`Invalid value: "foo-"`, `Invalid value: "bar.."`)
	})
	k.ok("delete", "pod", "--all", "--wait=false", "--grace-period=1")
	k.eventually("no pod is left", func(context.Context) error {
		if out := k.ok("get", "pods", "-o", "name"); out != "" {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
}
