package kubectl

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
	"github.com/clusterd/clusterd/features"
	"github.com/clusterd/clusterd/netsetup/netns"
)

// TestE2EXVolumes looks at what is mounted into containers, and when.
func TestE2EXVolumes(t *testing.T) {
	t.Parallel()
	k := start(t, "volumes")
	k.sub("every kind", func(k *kit) {
		features.Shows(k, 253, 269)
		features.Conforms(k, 398)
		k.ok("create", "configmap", "cm", "--from-literal=key=of the map")
		k.ok("create", "secret", "generic", "s", "--from-literal=password=hush")
		host := k.file("on-the-host", "of the host")
		if err := os.Chmod(host, 0o644); err != nil { // the image's user is not root
			k.Fatal(err)
		}
		k.apply(fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: all, annotations: {note: read me}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: %[1]q
    command: [/hello]
    args: [sleep, "1234"]
    env: [{name: ONE, value: "1"}, {name: TWO, value: "$(ONE)+1"}]
    volumeMounts:
    - {name: e, mountPath: /e}
    - {name: m, mountPath: /m}
    - {name: h, mountPath: /h}
    - {name: cm, mountPath: /cm}
    - {name: s, mountPath: /s}
    - {name: d, mountPath: /d}
    - {name: p, mountPath: /p}
  - {name: side, image: %[1]q, args: [sleep], volumeMounts: [{name: e, mountPath: /elsewhere}]}
  volumes:
  - {name: e, emptyDir: {}}
  - {name: m, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
  - {name: h, hostPath: {path: %[2]q, type: Directory}}
  - {name: cm, configMap: {name: cm}}
  - {name: s, secret: {secretName: s}}
  - {name: d, downwardAPI: {items: [{path: note, fieldRef: {fieldPath: "metadata.annotations['note']"}}]}}
  - name: p
    projected: {sources: [{configMap: {name: cm}}, {secret: {name: s}}, {downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}]}
`, image, filepath.Dir(host)))
		p := k.ready("all")
		for path, want := range map[string]string{
			"/h/on-the-host": "of the host", "/cm/key": "of the map", "/s/password": "hush", "/d/note": "read me",
			"/p/key": "of the map", "/p/password": "hush", "/p/name": "all",
		} {
			k.is(path, k.exec("all", "main", "cat", path), want)
		}
		mounts := k.exec("all", "main", "cat", "/proc/mounts")
		k.has(mounts, " /e ", "tmpfs /m tmpfs rw", "size=4096k", " /dev ", " /proc ")
		k.has(k.exec("all", "main", "env"), "ONE=1\n", "TWO=1+1\n")
		k.is("/dev/null", k.exec("all", "main", "cat", "/dev/null"), "")
		// What one container leaves in the shared directory, the other finds: the
		// node's root writes through the first container's view of it.
		main := k.process(string(p.UID), "sleep 1234")
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/root/e/word", main), []byte("shared"), 0o644); err != nil {
			k.Fatal(err)
		}
		k.is("the other's view", k.exec("all", "side", "cat", "/elsewhere/word")+k.exec("all", "main", "cat", "/e/word"), "sharedshared")
		k.ok("delete", "pod", "all", "--wait=false")
	})
	k.sub("a Secret that comes late", func(k *kit) {
		features.Shows(k, 247, 251)
		k.apply(strings.Replace(simple("waits", "sleep", "volumes:", "- {name: s, secret: {secretName: late}}"), "args:", "volumeMounts: [{name: s, mountPath: /s}], args:", 1))
		k.event("waits", "FailedMount", `MountVolume.SetUp failed for volume "s"`, `"late" not found`)
		p := k.pod("waits")
		k.is("phase", string(p.Status.Phase), "Pending")
		for _, line := range k.processes(string(p.UID)) {
			k.lacks(line, "hello")
		}
		k.ok("create", "secret", "generic", "late", "--from-literal=a=b")
		k.ready("waits")
		k.is("the file", k.exec("waits", "main", "cat", "/s/a"), "b")
		k.ok("delete", "pod", "waits", "--wait=false")
	})
	k.sub("an image", func(k *kit) {
		features.Conforms(k, 284)
		host, asked := k.registry("bob", "hush")
		from := func(name, volume, mount string) string {
			return strings.Replace(simple(name, "sleep", `- {name: other, image: "`+image+`", args: [sleep]}`, "imagePullSecrets: [{name: creds}]", "volumes:", "- {name: i, image: {"+volume+"}}"),
				"args:", "volumeMounts: [{name: i, mountPath: /i"+mount+"}], args:", 1)
		}
		ref := host + "/team/app:1"
		k.apply(from("image", `reference: "`+ref+`", pullPolicy: Always`, ""))
		k.eventuallyHas([]string{"describe", "pod", "image"}, "UNAUTHORIZED")
		k.eventuallyHas([]string{"get", "pod", "image"}, "1/2", "ImagePullBackOff")
		before := asked.Load() // by those it lets in
		k.ok("create", "secret", "docker-registry", "creds", "--docker-server="+host, "--docker-username=bob", "--docker-password=hush")
		p := k.ready("image")
		if asked.Load() == before {
			k.Error("the registry was not asked")
		}
		k.has(k.exec("image", "main", "cat", "/proc/mounts"), "overlay /i overlay ro,nosuid,nodev,noexec")
		st := p.Status.ContainerStatuses[0].VolumeMounts
		if len(st) == 0 || st[0].VolumeStatus == nil || !strings.HasPrefix(st[0].VolumeStatus.Image.ImageRef, host+"/team/app@sha256:") {
			k.Errorf("status of the mounts: %+v", st)
		}
		k.apply(from("part", `reference: "`+ref+`", pullPolicy: IfNotPresent`, ", subPath: no/such"))
		k.eventuallyHas([]string{"describe", "pod", "part"}, "CreateContainerError", `volume "i" has no subPath "no/such"`)
		k.ok("delete", "pod", "image", "part", "--wait=false")
	})
	k.sub("bundles of trust", trustBundles)
	k.sub("certificates of pods", podCertificates)
	k.sub("more than it may hold", func(k *kit) {
		k.apply(strings.Replace(simple("over", "sleep", "volumes:", "- {name: e, emptyDir: {sizeLimit: 1Mi}}"), "args:", "volumeMounts: [{name: e, mountPath: /e}], args:", 1))
		p := k.ready("over")
		main := k.process(string(p.UID), "sleep")
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/root/e/big", main), make([]byte, 2<<20), 0o644); err != nil {
			k.Fatal(err)
		}
		k.event("over", "Evicted", `Usage of EmptyDir volume "e" exceeds the limit "1Mi". `)
		k.podIs("over", "has failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed && p.Status.Reason == "Evicted" })
		k.ok("delete", "pod", "over", "--wait=false")
	})
	k.sub("an optional one that never comes", func(k *kit) {
		k.apply(simple("without", "sleep", "volumes:", "- {name: s, secret: {secretName: never, optional: true}}"))
		k.ready("without")
		k.ok("delete", "pod", "without", "--wait=false")
	})
}

// TestE2EXResources looks at cgroups from the outside.
func TestE2EXResources(t *testing.T) {
	t.Parallel()
	k := start(t, "resources")
	features.Shows(k, 144, 237, 238, 239)
	with := func(name, resources string) string {
		return strings.Replace(simple(name, "sleep", `- {name: side, image: "`+image+`", args: [sleep], resources: {`+resources+`}}`), "args:", "resources: {"+resources+"}, args:", 1)
	}
	root := k.c.Nodes()[0].CgroupRoot
	for name, tt := range map[string]struct{ resources, class, below string }{
		"guaranteed": {"limits: {cpu: 100m, memory: 32Mi}", "Guaranteed", root + "/pod"},
		"burstable":  {"requests: {cpu: 10m}, limits: {memory: 32Mi, cpu: 100m}", "Burstable", root + "/burstable/pod"},
		"besteffort": {"", "BestEffort", root + "/besteffort/pod"},
	} {
		k.sub(name, func(k *kit) {
			k.apply(with(name, tt.resources))
			p := k.ready(name)
			k.is("class", string(p.Status.QOSClass), tt.class)
			pid := k.process(string(p.UID), "sleep")
			groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			if err != nil {
				k.Fatal(err)
			}
			want := tt.below + string(p.UID) + "/"
			for _, c := range []string{"memory", "cpu", "pids"} {
				k.has(k.cgroup(pid, c), want)
			}
			k.lacks(string(groups), "docker", "kubepods")
			if tt.class == "BestEffort" {
				return
			}
			k.is("memory", k.limit(filepath.Dir(k.cgroup(pid, "memory")), "memory.limit_in_bytes", "memory.max"), strconv.Itoa(2*32<<20))
			k.is("cpu", k.limit(filepath.Dir(k.cgroup(pid, "cpu")), "cpu.cfs_quota_us", "cpu.max"), "20000")
			k.is("the container's memory", k.limit(k.cgroup(pid, "memory"), "memory.limit_in_bytes", "memory.max"), strconv.Itoa(32<<20))
		})
	}
}

// limit reads a limit of cgroups of version 1 or 2.
func (k *kit) limit(dir, v1, v2 string) string {
	k.Helper()
	b, err := os.ReadFile(filepath.Join(dir, v1))
	if err != nil {
		b, err = os.ReadFile(filepath.Join(dir, v2))
	}
	if err != nil {
		k.Fatal(err)
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	return first
}

// TestE2EXSandbox looks at what the containers of a pod share.
func TestE2EXSandbox(t *testing.T) {
	t.Parallel()
	k := start(t, "sandbox")
	side := `- {name: side, image: "` + image + `", args: [serve]}`
	k.apply(simple("pair", "sleep", side))
	k.apply(simple("together", "sleep", side, "shareProcessNamespace: true"))
	pair, together := k.ready("pair"), k.ready("together")
	main, other := k.process(string(pair.UID), "sleep"), k.process(string(pair.UID), "serve")

	k.sub("network, IPC and name", func(k *kit) {
		features.Shows(k, 256, 263, 264, 265, 287)
		for kind, shared := range map[string]bool{"net": true, "ipc": true, "uts": true, "pid": false, "mnt": false} {
			if same := k.namespace(main, kind) == k.namespace(other, kind); same != shared {
				k.Errorf("the containers share %s: %v", kind, same)
			}
		}
		// One pause holds them, older than both, and nothing else is there.
		all := k.processes(string(pair.UID))
		delete(all, main)
		delete(all, other)
		if len(all) > 0 {
			k.Errorf("other processes: %v", all)
		}
		if k.started(k.pause(main)) > min(k.started(main), k.started(other)) {
			k.Error("the pause is younger than a container")
		}
		// Without a probe it may be Ready before it listens.
		k.eventuallyHas([]string{"exec", "pair", "-c", "main", "--", "/hello", "fetch", "http://127.0.0.1:8080/healthz"}, "ok\n")
		const addrs = "/proc/net/fib_trie"
		k.has(k.exec("pair", "main", "cat", addrs), pair.Status.PodIP)
		k.has(k.exec("pair", "side", "cat", addrs), pair.Status.PodIP)
		for _, c := range []string{"main", "side"} {
			k.is("hostname", k.exec("pair", c, "cat", "/proc/sys/kernel/hostname"), "pair\n")
		}
		// A segment that one makes is in the other's list.
		out, err := exec.CommandContext(k.Context(), "nsenter", "--ipc=/proc/"+strconv.Itoa(main)+"/ns/ipc", "ipcmk", "-M", "12345").CombinedOutput()
		if err != nil {
			k.Fatalf("ipcmk: %v: %s", err, out)
		}
		k.has(k.exec("pair", "side", "cat", "/proc/sysvipc/shm"), " 12345 ")
	})
	k.sub("processes, when asked for", func(k *kit) {
		features.Shows(k, 266)
		a, b := k.process(string(together.UID), "sleep"), k.process(string(together.UID), "serve")
		if k.namespace(a, "pid") != k.namespace(b, "pid") {
			k.Error("the containers do not share it")
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b))
		if err != nil {
			k.Fatal(err)
		}
		var inside string
		for line := range strings.Lines(string(status)) {
			if f := strings.Fields(line); f[0] == "NSpid:" {
				inside = f[len(f)-1]
			}
		}
		k.has(k.exec("together", "main", "cat", "/proc/"+inside+"/cmdline"), "serve")
	})
	k.sub("without any other runtime", func(k *kit) {
		features.Shows(k, 135, 136, 260)
		pids, err := k.c.Processes(node)
		if err != nil {
			k.Fatal(err)
		}
		for _, pid := range pids {
			comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			if err != nil {
				continue // it ended
			}
			if strings.HasPrefix(string(comm), "runc:[") {
				continue // libcontainer's init, for the moment before it is another test's program
			}
			k.lacks(string(comm), "containerd", "dockerd", "runc", "crio", "shim")
		}
		k.lacks(k.field("node/"+node, "{.status.images[*].names}"), "pause")
	})
	k.sub("bounded leftovers of a crashing container", func(k *kit) {
		features.Shows(k, 202, 275)
		k.apply(simple("crash", "echo, again"))
		backoffs := []string{"back-off 10s", "back-off 20s", "back-off 40s"} // row 202
		var runs [3]*corev1.ContainerStateTerminated                         // those after whose end it waits so
		p := k.podIs("crash", "waits twice as long after each end", func(p *corev1.Pod) bool {
			if w := waiting(p); w != nil {
				for i, text := range backoffs {
					if strings.HasPrefix(w.Message, text+" ") {
						runs[i] = p.Status.ContainerStatuses[0].LastTerminationState.Terminated
					}
				}
			}
			return runs[2] != nil
		})
		for i, least := range []time.Duration{10 * time.Second, 20 * time.Second} {
			if runs[i] == nil {
				k.Fatalf("it was never told %q", backoffs[i])
			}
			// The API tells whole seconds.
			if took := runs[i+1].StartedAt.Sub(runs[i].FinishedAt.Time); took < least-time.Second {
				k.Errorf("it ran again %s after an end with %q", took, backoffs[i])
			}
		}
		for _, reason := range []string{"Pulled", "Created", "Started", "BackOff"} {
			k.event("crash", reason)
		}
		k.eventuallyHas([]string{"get", "pod", "crash"}, "CrashLoopBackOff")
		kept, err := filepath.Glob(filepath.Join(k.c.Nodes()[0].Data, "log", "pods", "*_"+string(p.UID), "main", "*.log"))
		if err != nil || len(kept) > 2 {
			k.Errorf("kept: %q (%v)", kept, err)
		}
		k.is("logs -p", k.ok("logs", "-p", "crash"), "again\n")
		k.ok("delete", "pod", "crash", "--wait=false")
	})
	k.sub("containers start in order, after init", func(k *kit) {
		features.Shows(k, 273, 274)
		k.apply(simple("ordered", "sleep", `- {name: second, image: "`+image+`", args: [count]}`, `- {name: third, image: "`+image+`", args: [follow, /none, /none]}`,
			"initContainers:", `- {name: i1, image: "`+image+`", args: [exit, "0", "1"]}`, `- {name: i2, image: "`+image+`", args: [exit, "0"]}`))
		s := k.ready("ordered").Status
		i1, i2 := s.InitContainerStatuses[0].State.Terminated, s.InitContainerStatuses[1].State.Terminated
		if i1 == nil || i2 == nil || i2.StartedAt.Before(&i1.FinishedAt) {
			k.Fatalf("init containers: %+v, %+v", i1, i2)
		}
		if first := s.ContainerStatuses[0].State.Running.StartedAt; first.Before(&i2.FinishedAt) {
			k.Errorf("the first started at %s, before the init containers had ended at %s", first, i2.FinishedAt)
		}
		// The status has whole seconds; the kernel's clock has ticks of 10 ms.
		ticks := make([]int, 0, 3)
		for _, program := range []string{"sleep", "count", "follow"} {
			ticks = append(ticks, k.started(k.process(string(k.pod("ordered").UID), program)))
		}
		if !slices.IsSorted(ticks) || ticks[0] == ticks[2] {
			k.Errorf("they started at the ticks %v", ticks)
		}
		k.ok("delete", "pod", "ordered", "--wait=false")
	})
	k.sub("no new privileges", func(k *kit) {
		k.apply(strings.Replace(simple("humble", "sleep"), "args:", "securityContext: {allowPrivilegeEscalation: false}, args:", 1))
		k.ready("humble")
		k.has(k.exec("humble", "main", "cat", "/proc/1/status"), "NoNewPrivs:\t1")
		k.has(k.exec("pair", "main", "cat", "/proc/1/status"), "NoNewPrivs:\t0")
		// A profile that is not there keeps the pod waiting, and it says why. Row 196 is
		// not claimed: no profile would be applied.
		k.apply(strings.Replace(simple("armoured", "sleep"), "args:", "securityContext: {appArmorProfile: {type: Localhost, localhostProfile: nosuch}}, args:", 1))
		p := k.podIs("armoured", "refused", func(p *corev1.Pod) bool {
			w := waiting(p)
			return w != nil && strings.Contains(w.Message, "Cannot enforce AppArmor")
		})
		k.is("phase", string(p.Status.Phase), "Pending")
		k.ok("delete", "pod", "humble", "armoured", "--wait=false")
	})
	k.ok("delete", "pod", "pair", "together", "--wait=false")
}

// started is when a process started, in ticks since the machine did.
func (k *kit) started(pid int) int {
	k.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		k.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), ") ") // the name may hold anything
	ticks, err := strconv.Atoi(strings.Fields(rest)[19])
	if err != nil {
		k.Fatal(err)
	}
	return ticks
}

func (k *kit) namespace(pid int, kind string) string {
	k.Helper()
	ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	if err != nil {
		k.Fatal(err)
	}
	return ns
}

// TestE2EXNetwork looks at a pod's network from both ends.
func TestE2EXNetwork(t *testing.T) {
	t.Parallel()
	k := start(t, "network")
	k.apply(simple("net", "serve"))
	p := k.ready("net")
	cidr, err := netip.ParsePrefix(k.field("node/"+node, "{.spec.podCIDR}"))
	if err != nil {
		k.Fatal(err)
	}
	ip, err := netip.ParseAddr(p.Status.PodIP)
	if err != nil {
		k.Fatal(err)
	}
	gateway := cidr.Masked().Addr().Next()

	k.sub("bridge and pair", func(k *kit) {
		features.Shows(k, 277, 278, 281, 282, 285)
		if !cidr.Contains(ip) || ip == gateway {
			k.Errorf("%s has %s", cidr, ip)
		}
		k.has(k.exec("net", "main", "cat", "/proc/net/dev"), "eth0:", "lo:")
		peer := k.link(k.process(string(p.UID), "/hello"))
		if err := k.c.Do(node, func() error {
			links, err := clustertest.Dump(netlink.LinkList)
			if err != nil {
				return err
			}
			for _, l := range links {
				if l.Attrs().Index != peer {
					continue
				}
				bridge, err := netlink.LinkByIndex(l.Attrs().MasterIndex)
				if err != nil {
					return err
				}
				addrs, err := netlink.AddrList(bridge, netlink.FAMILY_V4)
				if err != nil {
					return err
				}
				if l.Type() != "veth" || bridge.Type() != "bridge" || len(addrs) != 1 || addrs[0].IP.String() != gateway.String() {
					return fmt.Errorf("%s is a %s on %s, a %s with %v", l.Attrs().Name, l.Type(), bridge.Attrs().Name, bridge.Type(), addrs)
				}
				return nil
			}
			return fmt.Errorf("no interface %d", peer)
		}); err != nil {
			k.Error(err)
		}
	})
	k.sub("routes", func(k *kit) {
		features.Shows(k, 279, 284, 286)
		routes := map[string]string{} // destination → gateway
		for line := range strings.Lines(k.exec("net", "main", "cat", "/proc/net/route")) {
			if f := strings.Fields(line); f[0] == "eth0" {
				routes[k.hexAddr(f[1])+"/"+k.hexAddr(f[7])] = k.hexAddr(f[2])
			}
		}
		k.is("default route", routes["0.0.0.0/0.0.0.0"], gateway.String())
		// The pod's address is a single one of the node's range: all it sends
		// passes the node, where Services and policies are.
		if len(routes) != 1 || !cidr.Contains(gateway) {
			k.Errorf("routes %v, the range is %s", routes, cidr)
		}
	})
	k.sub("outside hosts see the node", func(k *kit) {
		features.Shows(k, 280)
		l, err := net.Listen("tcp", net.JoinHostPort(shared.Subnet.Masked().Addr().Next().String(), "0")) // the host's address
		if err != nil {
			k.Fatal(err)
		}
		srv := &http.Server{ReadHeaderTimeout: testTimeout, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "you come from %s", r.RemoteAddr)
		})}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = srv.Serve(l)
		}()
		defer func() { _ = srv.Close(); <-done }()
		k.has(k.exec("net", "main", "fetch", "http://"+l.Addr().String()+"/"), "you come from "+k.c.Nodes()[0].Addr.String()+":")
	})
	k.sub("the node reaches the pod", func(k *kit) {
		k.eventually("a connection", func(ctx context.Context) error {
			conn, err := k.dial(ctx, "tcp", p.Status.PodIP+":8080")
			if err == nil {
				_ = conn.Close()
			}
			return err
		})
	})
	k.sub("the node's own network", func(k *kit) {
		k.apply(simple("host", "sleep", "hostNetwork: true"))
		k.is("address", k.ready("host").Status.PodIP, k.c.Nodes()[0].Addr.String())
		k.ok("delete", "pod", "host", "--wait=false")
	})
	k.ok("delete", "pod", "net", "--wait=false")
}

// link is the index of the other end of a process' eth0.
func (k *kit) link(pid int) int {
	k.Helper()
	var index int
	if err := netns.Do(fmt.Sprintf("/proc/%d/ns/net", pid), func() error {
		l, err := netlink.LinkByName("eth0")
		if err == nil {
			index = l.Attrs().ParentIndex
		}
		return err
	}); err != nil {
		k.Fatal(err)
	}
	return index
}

// hexAddr reads an address as /proc/net/route writes it.
func (k *kit) hexAddr(s string) string {
	k.Helper()
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 4 {
		k.Fatalf("%q: %v", s, err)
	}
	out := make(net.IP, 4)
	binary.LittleEndian.PutUint32(out, binary.BigEndian.Uint32(b))
	return out.String()
}
