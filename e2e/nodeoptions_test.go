package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
	"github.com/clusterd/clusterd/features"
)

// TestE2ENodeOptions is a server and an agent with options that nodes seldom
// have together: what they do at the start, whom they tell what, and what
// becomes of them while events pour in.
func TestE2ENodeOptions(t *testing.T) {
	need(t)
	spans := collectSpans(t)
	t.Setenv("CLUSTERD_DEBUG_CERT_LIFETIME", "40s")
	fakeJournal(t)
	podLogs := filepath.Join(t.TempDir(), "var", "log", "pods")
	e := startBare(t, 1, func(c *cluster.Config) {
		c.Agents = 1
		c.Args = []string{
			"--pod-log-links", podLogs,
			"--log-level", "debug", "--read-only-port", "10255", "--cpu-manager-policy", "static", "--reserved-cpus", "0",
			"--node-addresses", "ExternalIP=203.0.113.7,ExternalDNS=n.example.org", "--tracing-config", spans.config,
		}
	})
	e.ready(2)
	n1, a1 := e.Nodes()[0], e.Nodes()[1]
	ns := e.namespace("options")
	certs := e.watchCerts(n1)

	pinned := pod("pinned", "serve")
	pinned.Spec.NodeName = "n1"
	pinned.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1"), corev1.ResourceMemory: resource.MustParse("64Mi")}
	e.create(ns, pinned)
	e.podReady(ns, "pinned")

	t.Run("folders", func(t *testing.T) {
		features.Shows(t, 162)
		for _, n := range []cluster.Node{n1, a1} {
			for path, want := range map[string]fs.FileMode{
				".": 0o700, "pods": 0o750, "kubelet/plugins": 0o750, "kubelet/plugins_registry": 0o750, "pod-resources": 0o750,
			} {
				st, err := os.Stat(filepath.Join(n.Data, path))
				if err != nil || !st.IsDir() || st.Mode().Perm() != want {
					t.Errorf("%s of %s: %v (%v), want %v", path, n.Name, st, err, want)
				}
			}
		}
	})
	t.Run("log folders of pods", func(t *testing.T) {
		features.Shows(t, 254)
		// Before the sandbox: there is none of this pod's, and will be none.
		e.ctlIn("apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: nowhere}\nhandler: nowhere\n", "apply", "-f", "-")
		waits := pod("waits", "sleep")
		waits.Spec.NodeName, waits.Spec.RuntimeClassName = "n1", ptr.To("nowhere")
		waits = e.create(ns, waits)
		e.eventually("the pod has no sandbox", func(context.Context) error {
			if text := e.ctl("-n", ns, "describe", "pod", "waits"); !strings.Contains(text, "FailedCreatePodSandBox") {
				return errors.New(text)
			}
			return nil
		})
		folder := func(p *corev1.Pod) string { return filepath.Join(podLogs, ns+"_"+p.Name+"_"+string(p.UID)) }
		if st, err := os.Stat(folder(waits)); err != nil || !st.IsDir() {
			t.Errorf("%s: %v (%v)", folder(waits), st, err)
		}
		// Of one that runs, what log shippers read is found by its name.
		e.eventually("its first line", func(context.Context) error {
			if b, err := os.ReadFile(filepath.Join(folder(e.get(ns, "pinned")), "main", "0.log")); err != nil || !strings.Contains(string(b), "stdout F hello from pinned") {
				return fmt.Errorf("%q, %v", b, err)
			}
			return nil
		})
		e.ctl("-n", ns, "delete", "pod", "waits")
		e.eventually("the folder goes with the pod", func(context.Context) error {
			if _, err := os.Lstat(folder(waits)); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%s: %v", folder(waits), err)
			}
			return nil
		})
		e.ctl("delete", "runtimeclass", "nowhere")
	})
	t.Run("the machine's cgroups", func(t *testing.T) {
		_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
		v2 := err == nil
		if warned := strings.Contains(e.log("n1"), "memory QoS is not to be had"); warned == v2 {
			t.Errorf("cgroup v2: %v; the log warns: %v", v2, warned)
		}
		if v2 {
			return // nothing to warn of; the row is shown where there is
		}
		features.Shows(t, 145)
		e.nodeEvent("n1", "CgroupV1", "memory QoS", "cgroup v2")
		e.nodeEvent("a1", "CgroupV1", "memory QoS", "cgroup v2")
	})
	t.Run("swap", func(t *testing.T) {
		features.Shows(t, 146)
		data := filepath.Join(t.TempDir(), "data")
		prepare := []string{"init", "--prepare", "--name", "x", "--data", data, "--port", "7443"}
		text, code := e.withSwap("/swap.img", "n1", append(prepare, "--fail-swap-on")...)
		mustContain(t, "refusal", text, "--fail-swap-on", "/swap.img", "swapoff")
		if _, err := os.Stat(data); code != 1 || !errors.Is(err, os.ErrNotExist) {
			t.Errorf("exit code %d; the folder: %v", code, err)
		}
		// A node that was made without is not run with it either.
		if text, code := e.withSwap("/swap.img", "n1", prepare...); code != 0 {
			t.Fatalf("without the flag: %d %s", code, text)
		}
		text, code = e.withSwap("/swap.img", "n1", "run", "--data", data, "--fail-swap-on")
		if mustContain(t, "refusal", text, "/swap.img"); code != 1 {
			t.Errorf("exit code %d", code)
		}
		// What runs is accounted for, all pods together, too.
		e.eventuallyHas([]string{"get", "--raw", "/api/v1/nodes/n1/proxy/stats/summary"}, `"systemContainers":[{"name":"pods"`, `"usageCoreNanoSeconds":`, `"workingSetBytes":`)
	})
	t.Run("read-only port", func(t *testing.T) {
		at := net.JoinHostPort(n1.Addr.String(), "10255")
		code, text := plain(t, "GET", "http://"+at+"/pods")
		if code != 200 || !strings.Contains(text, `"name":"pinned"`) {
			t.Errorf("/pods: %d %s", code, text)
		}
		for path, want := range map[string]int{"/healthz": 200, "/metrics": 200, "/configz": 404, "/logs/": 404, "/containerLogs/" + ns + "/pinned/main": 404, "/exec/" + ns + "/pinned/main?command=/hello&output=1": 404} {
			if code, text := plain(t, "GET", "http://"+at+path); code != want {
				t.Errorf("%s: %d %s", path, code, text)
			}
		}
		if code, _ := plain(t, "POST", "http://"+at+"/pods"); code != 405 {
			t.Errorf("POST /pods: %d", code)
		}
		mustContain(t, "the log", e.log("n1"), "the read-only port is open")
	})
	t.Run("pod resources", func(t *testing.T) {
		features.Shows(t, 157) // processors; devices are TestE2EDevices'
		e.showPodResources(n1, ns)
	})
	t.Run("logs of the node", func(t *testing.T) {
		features.Shows(t, 158)
		e.showNodeLogs(n1)
	})
	t.Run("spans", func(t *testing.T) {
		features.Shows(t, 159)
		spans.show(e, string(e.get(ns, "pinned").UID))
	})
	// From here on: before, the storm would hold back the node's own events, as
	// it is written in its name.
	storm := e.eventStorm(ns)
	t.Run("addresses", func(t *testing.T) {
		features.Shows(t, 149, 156, 168)
		for flag, word := range map[string]string{
			"127.0.0.1": "loopback", "0.0.0.0": "unspecified", "224.0.0.1": "multicast", "fe80::1": "link-local", "n1": "no address",
			"192.0.2.77": "no interface", a1.Addr.String() + ",192.0.2.1": "one family",
		} {
			text, code := finish(t, e.Exec(t.Context(), "a1", e.Bin("clusterd"), "run", "--data", t.TempDir(), "--node-ip", flag))
			if mustContain(t, "--node-ip "+flag, text, "--node-ip", word); code != 1 {
				t.Errorf("--node-ip %s: exit code %d", flag, code)
			}
		}
		const six = "fd00:90::3"
		if err := e.Do("a1", func() error { return giveAddress(a1.Addr.String(), six) }); err != nil {
			t.Fatal(err)
		}
		e.reconfigure(a1, func(config string) string {
			return strings.Replace(config, "readOnlyPort: 10255\n", "", 1) + "nodeIP: " + a1.Addr.String() + "," + six + "\n"
		})
		want := fmt.Sprintf("InternalIP=%s InternalIP=%s ExternalIP=203.0.113.7 ExternalDNS=n.example.org Hostname=a1 ", a1.Addr, six)
		e.eventually("both addresses are reported", func(ctx context.Context) error {
			n, err := e.api.CoreV1().Nodes().Get(ctx, "a1", metav1.GetOptions{})
			if err != nil {
				return err
			}
			got := ""
			for _, a := range n.Status.Addresses {
				got += string(a.Type) + "=" + a.Address + " "
			}
			if got != want || !nodeReady(n) {
				return fmt.Errorf("%s, want %s", got, want)
			}
			return nil
		})
		// Without the option the port is closed.
		if c, err := net.Dial("tcp", net.JoinHostPort(a1.Addr.String(), "10255")); err == nil {
			c.Close()
			t.Error("the read-only port is open by default")
		}
	})
	t.Run("a part that cannot start", func(t *testing.T) {
		features.Shows(t, 152)
		if err := e.Stop(t.Context(), "a1"); err != nil {
			t.Fatal(err)
		}
		checkpoint := filepath.Join(a1.Data, "cpus.json")
		if err := os.WriteFile(checkpoint, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		text, code := finish(t, e.Exec(t.Context(), "a1", e.Bin("clusterd"), "run", "--data", a1.Data))
		if mustContain(t, "the program's last words", text, "could not be started", checkpoint); code != 1 {
			t.Errorf("exit code %d", code)
		}
		e.nodeEvent("a1", "KubeletSetupFailed", checkpoint)
		if err := os.Remove(checkpoint); err != nil {
			t.Fatal(err)
		}
		if err := e.Start(t.Context(), "a1"); err != nil {
			t.Fatal(err)
		}
		e.eventually("the node is Ready again", func(ctx context.Context) error {
			n, err := e.api.CoreV1().Nodes().Get(ctx, "a1", metav1.GetOptions{})
			if err == nil && !nodeReady(n) {
				err = fmt.Errorf("%+v", n.Status.Conditions)
			}
			return err
		})
	})
	t.Run("certificates are renewed", func(t *testing.T) {
		features.Shows(t, 165)
		certs.show(t)
	})
	t.Run("events do not delay leases", func(t *testing.T) {
		features.Shows(t, 142)
		storm.show(t)
	})
	t.Run("status writes are spread", func(t *testing.T) {
		features.Shows(t, 170)
		e.showSpread()
	})
}

// log is all that a node has logged.
func (e *env) log(node string) string {
	e.t.Helper()
	r, err := e.Logs(node)
	if err != nil {
		e.t.Fatal(err)
	}
	defer r.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(r); err != nil {
		e.t.Fatal(err)
	}
	return b.String()
}

// nodeEvent waits for an event about a node that has all the words.
func (e *env) nodeEvent(node, reason string, words ...string) {
	e.t.Helper()
	e.eventually("event "+reason+" about "+node, func(ctx context.Context) error {
		list, err := e.api.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=" + reason + ",involvedObject.kind=Node,involvedObject.name=" + node})
		if err != nil {
			return err
		}
		for _, ev := range list.Items {
			has := true
			for _, w := range words {
				has = has && strings.Contains(ev.Message, w)
			}
			if has {
				return nil
			}
		}
		return fmt.Errorf("%d of that reason have not %q", len(list.Items), words)
	})
}

// finish runs a command to its end and gives what it said.
func finish(t *testing.T, cmd *exec.Cmd) (text string, code int) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// withSwap runs clusterd on a node where the kernel says that it swaps to a
// file.
func (e *env) withSwap(file, node string, args ...string) (text string, code int) {
	e.t.Helper()
	swaps := filepath.Join(e.t.TempDir(), "swaps")
	if err := os.WriteFile(swaps, []byte("Filename\tType\tSize\tUsed\tPriority\n"+file+"\tfile\t4092\t0\t-2\n"), 0o644); err != nil {
		e.t.Fatal(err)
	}
	script := `mount --bind "$0" /proc/swaps && exec "$@"`
	return finish(e.t, e.Exec(e.t.Context(), node, "unshare", append([]string{"--mount", "sh", "-c", script, swaps, e.Bin("clusterd")}, args...)...))
}

// reconfigure restarts a node with another configuration.
func (e *env) reconfigure(n cluster.Node, change func(string) string) {
	e.t.Helper()
	if err := e.Stop(e.t.Context(), n.Name); err != nil {
		e.t.Fatal(err)
	}
	path := filepath.Join(n.Data, "config.yaml")
	b, err := os.ReadFile(path)
	if err != nil {
		e.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(change(string(b))), 0o600); err != nil {
		e.t.Fatal(err)
	}
	if err := e.Start(e.t.Context(), n.Name); err != nil {
		e.t.Fatal(err)
	}
}

// giveAddress gives the interface that has an address another one.
func giveAddress(has, another string) error {
	links, err := clustertest.Dump(netlink.LinkList)
	if err != nil {
		return err
	}
	for _, l := range links {
		addrs, err := clustertest.Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_V4) })
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if a.IP.String() == has {
				_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+l.Attrs().Name+"/disable_ipv6", []byte("0"), 0o644)
				return netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(another), Mask: net.CIDRMask(64, 128)}, Flags: 0x02}) // IFA_F_NODAD
			}
		}
	}
	return fmt.Errorf("no interface has %s", has)
}

// bearer is a client of a node's port 10250 with a token of a service account.
func (e *env) bearer(n cluster.Node, ns, account string) *rest.Config {
	return &rest.Config{
		Host:            "https://" + net.JoinHostPort(n.Addr.String(), "10250"),
		TLSClientConfig: rest.TLSClientConfig{CAData: e.config.CAData},
		BearerToken:     strings.TrimSpace(e.ctl("create", "token", account, "-n", ns)),
	}
}
