package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXAgent looks at how the agent does its work.
func TestE2EXAgent(t *testing.T) {
	t.Parallel()
	k := start(t, "agent")
	k.sub("containers start without their status being written", func(k *kit) {
		features.Shows(k, 219)
		k.apply(simple("told", "sleep"))
		k.ready("told")
		k.policy("Validating", "no-status", "{apiGroups: [''], apiVersions: [v1], operations: [UPDATE], resources: [pods/status]}", `  validations: [{expression: "false", message: no status is written}]`)
		k.refusal("", []string{"patch", "pod", "told", "--subresource=status", "--dry-run=server", "-p", `{"status":{"message":"m"}}`}, "no status is written")
		k.apply(simple("untold", "sleep"))
		uid := string(k.pod("untold").UID)
		k.process(uid, "sleep")
		if p := k.pod("untold"); p.Status.Phase != corev1.PodPending || len(p.Status.ContainerStatuses) > 0 {
			k.Errorf("status %+v", p.Status)
		}
		k.noPolicy("Validating", "no-status")
		k.ready("untold") // what was refused is tried again
		k.ok("delete", "pod", "told", "untold", "--wait=false")
	})
	k.sub("each write of a status changes it", func(k *kit) {
		features.Shows(k, 175)
		pods := k.api.CoreV1().Pods(k.ns)
		w, err := pods.Watch(k.Context(), metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", "written").String()})
		if err != nil {
			k.Fatal(err)
		}
		defer w.Stop()
		k.apply(simple("written", "sleep"))
		k.ready("written")
		k.ok("delete", "pod", "written")
		var last *corev1.Pod
		writes := 0
		for e := range w.ResultChan() {
			if e.Type == watch.Deleted {
				break
			}
			p := e.Object.(*corev1.Pod)
			p.ResourceVersion, p.ManagedFields = "", nil
			if last != nil && equality.Semantic.DeepEqual(last, p) {
				k.Errorf("written again as it was: %+v", p.Status)
			}
			last = p
			writes++
		}
		if writes < 4 { // made, bound, started, deleted
			k.Errorf("%d writes were seen", writes)
		}
	})
	k.sub("a container runs when its postStart has ended", func(k *kit) {
		features.Shows(k, 293)
		hook := k.hangingServer()
		k.apply(strings.Replace(simple("hooked", "sleep"), "args:", fmt.Sprintf("lifecycle: {postStart: {httpGet: {host: %s, port: %d, path: /}}}, args:", k.c.Nodes()[0].Addr, hook.port), 1))
		<-hook.asked
		p := k.pod("hooked")
		k.process(string(p.UID), "sleep")
		k.eventuallyHas([]string{"get", "pod", "hooked"}, "0/1", "ContainerCreating")
		if s := k.pod("hooked").Status; len(s.ContainerStatuses) != 1 || s.ContainerStatuses[0].State.Running != nil || s.Phase != corev1.PodPending {
			k.Errorf("while the hook runs: %+v", s)
		}
		hook.release()
		k.ready("hooked")
		k.ok("delete", "pod", "hooked", "--wait=false")
	})
	k.sub("a bound pod starts soon", func(k *kit) {
		features.Shows(k, 181)
		const soon = 5 * time.Second // a quarter of the period at which an agent without a watch would look
		k.best("a bound pod starts", soon, func(i int) time.Duration {
			name := fmt.Sprintf("soon-%d", i)
			k.apply(simple(name, "sleep"))
			p := k.ready(name)
			k.ok("delete", "pod", name, "--wait=false")
			return p.Status.ContainerStatuses[0].State.Running.StartedAt.Sub(transition(p, corev1.PodScheduled))
		})
	})
	k.sub("the packet filter holds the node's tables", func(k *kit) {
		features.Shows(k, 174)
		var names []string
		if err := k.c.Do(node, func() error {
			conn, err := nftables.New()
			if err != nil {
				return err
			}
			tables, err := conn.ListTables()
			for _, t := range tables {
				names = append(names, t.Name)
			}
			return err
		}); err != nil {
			k.Fatal(err)
		}
		if !slices.Contains(names, "clusterd") {
			k.Errorf("tables %q", names)
		}
	})
	k.sub("another container of the machine", func(k *kit) {
		// It is one for the kernel: a cgroup and namespaces of its own.
		group := "/sys/fs/cgroup/pids/docker/0123456789abcdef"
		if err := os.MkdirAll(group, 0o755); err != nil {
			k.Fatal(err)
		}
		cmd := k.c.Exec(k.Context(), node, "/bin/sleep", "3600")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC}
		if err := cmd.Start(); err != nil {
			k.Fatal(err)
		}
		defer func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = os.Remove(group)
			_ = os.Remove(filepath.Dir(group))
		}()
		if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), fmt.Append(nil, cmd.Process.Pid), 0o644); err != nil {
			k.Fatal(err)
		}
		k.apply(simple("beside", "sleep"))
		k.ready("beside")
		for _, h := range k.holdings() {
			if h.Pid == cmd.Process.Pid {
				k.Errorf("it is listed: %+v", h)
			}
		}
		k.lacks(k.ok("get", "--raw", "/api/v1/nodes/"+node+"/proxy/stats/summary"), "0123456789abcdef")
		k.ok("delete", "pod", "beside")
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			k.Errorf("it was ended: %v", err)
		}
	})
}

// TestE2EXKubeletPort asks the node where tools ask the kubelet.
func TestE2EXKubeletPort(t *testing.T) {
	t.Parallel()
	k := start(t, "kubeletport")
	features.Shows(k, 155)
	k.apply(simple("serves", "serve"))
	k.ready("serves")
	k.eventuallyHas([]string{"logs", "serves"}, "serving on")
	for _, user := range []string{"scraper", "operator", "stranger"} {
		k.ok("create", "serviceaccount", user)
	}
	k.ok("create", "clusterrole", "kubeletport-scraper", "--verb=get", "--resource=nodes/metrics,nodes/stats")
	k.ok("create", "clusterrole", "kubeletport-operator", "--verb=get,create", "--resource=nodes/proxy")
	for _, user := range []string{"scraper", "operator"} {
		k.ok("create", "clusterrolebinding", "kubeletport-"+user, "--clusterrole=kubeletport-"+user, "--serviceaccount="+k.ns+":"+user)
	}
	as := func(user string) *rest.Config {
		c := &rest.Config{
			Host: "https://" + net.JoinHostPort(k.c.Nodes()[0].Addr.String(), "10250"), Dial: k.dial,
			TLSClientConfig: rest.TLSClientConfig{CAData: k.config.CAData},
		}
		if user != "" {
			c.BearerToken = strings.TrimSpace(k.ok("create", "token", user))
		}
		return c
	}
	get := func(c *rest.Config, path string) (int, string) {
		client, err := rest.HTTPClientFor(c)
		if err != nil {
			k.Fatal(err)
		}
		defer client.CloseIdleConnections()
		req, err := http.NewRequestWithContext(k.Context(), http.MethodGet, c.Host+path, nil)
		if err != nil {
			k.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			k.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			k.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	log := "/containerLogs/" + k.ns + "/serves/main"
	scraper, operator := as("scraper"), as("operator")
	wrong := as("")
	wrong.BearerToken = "guessed"
	for _, tt := range []struct {
		name, path string
		as         *rest.Config
		code       int
		says       string
	}{
		{"nobody", "/metrics", as(""), 401, "Unauthorized"},
		{"nobody", "/healthz", as(""), 401, "Unauthorized"},
		{"wrong", "/pods", wrong, 401, "Unauthorized"},
		{"the administrator's certificate", "/pods", &rest.Config{Host: scraper.Host, Dial: k.dial, TLSClientConfig: k.config.TLSClientConfig}, 401, "Unauthorized"},
		{"stranger", "/metrics", as("stranger"), 403, "nodes/metrics"},
		{"scraper", "/metrics", scraper, 200, "kubelet_running_pods"},
		{"scraper", "/metrics/cadvisor", scraper, 200, "container_memory_usage_bytes"},
		{"scraper", "/metrics/resource", scraper, 200, "node_cpu_usage_seconds_total"},
		{"scraper", "/stats/summary", scraper, 200, `"nodeName"`},
		{"scraper", log, scraper, 403, "nodes/proxy"},
		{"operator", log, operator, 200, "serving on"},
		{"operator", "/pods", operator, 200, `"serves"`},
	} {
		// The node learns of accounts and bindings by watches, and remembers a refusal for
		// moments.
		k.eventually(fmt.Sprintf("%s as %s: %d %q", tt.path, tt.name, tt.code, tt.says), func(context.Context) error {
			code, body := get(tt.as, tt.path)
			if tt.code != http.StatusOK && code == http.StatusOK {
				k.Fatalf("%s as %s is answered: %.300s", tt.path, tt.name, body)
			}
			if code != tt.code || !strings.Contains(body, tt.says) {
				return fmt.Errorf("%d %.300s", code, body)
			}
			return nil
		})
	}
	run := func(c *rest.Config) (string, error) {
		to, err := url.Parse(c.Host + "/exec/" + k.ns + "/serves/main?command=/hello&command=echo&command=by-port&output=1")
		if err != nil {
			k.Fatal(err)
		}
		executor, err := remotecommand.NewSPDYExecutor(c, http.MethodPost, to)
		if err != nil {
			k.Fatal(err)
		}
		var out strings.Builder
		err = executor.StreamWithContext(k.Context(), remotecommand.StreamOptions{Stdout: &out})
		return out.String(), err
	}
	k.eventually("exec by the port", func(context.Context) error {
		if out, err := run(operator); err != nil || strings.TrimSpace(out) != "by-port" {
			return fmt.Errorf("%q %w", out, err)
		}
		return nil
	})
	if out, err := run(scraper); err == nil {
		k.Errorf("exec without the right: %q", out)
	}
}

// holding is what `clusterd containers` prints of a sandbox or container.
type holding struct {
	Pod, Type, Name, ID string
	Attempt             int
	Pid                 int
	Running             bool
}

// holdings asks podmon what it holds.
func (k *kit) holdings() []holding {
	k.Helper()
	out, err := k.c.Exec(k.Context(), node, k.c.Bin("clusterd"), "containers", "--data", k.c.Nodes()[0].Data, "-o", "json").Output()
	if err != nil {
		k.Fatal(err)
	}
	var list []holding
	if err := json.Unmarshal(out, &list); err != nil {
		k.Fatal(err)
	}
	return list
}

// sandbox is the one of a pod that runs.
func (k *kit) sandbox(pod string) holding {
	k.Helper()
	for _, h := range k.holdings() {
		if h.Type == "sandbox" && h.Pod == pod && h.Running {
			return h
		}
	}
	k.Fatalf("%s has no sandbox", pod)
	return holding{}
}

// hanging answers each request when it is released.
type hanging struct {
	port    int
	asked   chan struct{} // closed with the first request
	release func()
}

// hangingServer listens at the node's address until the test ends.
func (k *kit) hangingServer() *hanging {
	k.Helper()
	var l net.Listener
	if err := k.c.Do(node, func() (err error) {
		l, err = net.Listen("tcp", k.c.Nodes()[0].Addr.String()+":0")
		return err
	}); err != nil {
		k.Fatal(err)
	}
	h := &hanging{port: l.Addr().(*net.TCPAddr).Port, asked: make(chan struct{})}
	free := make(chan struct{})
	h.release = sync.OnceFunc(func() { close(free) })
	asked := sync.OnceFunc(func() { close(h.asked) })
	srv := &http.Server{ReadHeaderTimeout: testTimeout, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		asked()
		<-free
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	k.Cleanup(func() { h.release(); _ = srv.Close(); <-done })
	return h
}

// TestE2EXAgentFaults is not parallel: it takes from the only node what its
// agent needs.
func TestE2EXAgentFaults(t *testing.T) {
	k := start(t, "agentfaults")
	k.sub("the runtime hangs", func(k *kit) {
		features.Shows(k, 171, 173)
		podmon := k.podmon()
		defer func() { _ = syscall.Kill(podmon, syscall.SIGCONT) }()
		const soon = 2 * time.Second // row 171
		k.best("the node is Ready after its runtime", soon, func(int) time.Duration {
			if err := syscall.Kill(podmon, syscall.SIGSTOP); err != nil {
				k.Fatal(err)
			}
			k.eventually("the node says so", func(ctx context.Context) error {
				c, err := k.readyCondition(ctx)
				if err == nil && (c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "container runtime is not ready")) {
					err = fmt.Errorf("%+v", c)
				}
				return err
			})
			if err := syscall.Kill(podmon, syscall.SIGCONT); err != nil {
				k.Fatal(err)
			}
			began := time.Now()
			k.eventually("it is Ready again", func(ctx context.Context) error {
				c, err := k.readyCondition(ctx)
				if err == nil && c.Status != corev1.ConditionTrue {
					err = fmt.Errorf("%+v", c)
				}
				return err
			})
			return time.Since(began)
		})
	})
	k.sub("mounts outlive the agent; a feature is switched off", func(k *kit) {
		features.Shows(k, 137, 169)
		k.ok("create", "configmap", "large", "--from-literal=f="+strings.Repeat("x", 100<<10))
		k.ok("create", "configmap", "large-2", "--from-literal=f="+strings.Repeat("y", 100<<10))
		k.is("encoding of a long list", k.encoding("configmaps"), "gzip")
		k.ok("create", "configmap", "c", "--from-literal=f=one")
		k.apply(strings.Replace(simple("mounts", "sleep", "volumes:", "- {name: mem, emptyDir: {medium: Memory}}", "- {name: config, configMap: {name: c}}"),
			"args:", "volumeMounts: [{name: mem, mountPath: /m}, {name: config, mountPath: /c}], args:", 1))
		p := k.ready("mounts")
		k.exec("mounts", "main", "write", "/m/kept", "text") // mounted before the start
		id := p.Status.ContainerStatuses[0].ContainerID
		if err := k.c.Kill(node); err != nil {
			k.Fatal(err)
		}
		k.again("--feature-gates=APIResponseCompression=false", "--cpu-manager-policy=static", "--reserved-cpus=0")
		k.is("encoding of a long list", k.encoding("configmaps"), "")
		k.eventually("the file is there", func(context.Context) error {
			out, errs, code := k.in("", "exec", "mounts", "--", "/hello", "cat", "/m/kept")
			if code != 0 || strings.TrimSpace(out) != "text" {
				return errors.New(out + errs)
			}
			return nil
		})
		k.ok("patch", "configmap", "c", "-p", `{"data":{"f":"two"}}`)
		k.eventually("the mounted file follows", func(context.Context) error {
			if out, errs, code := k.in("", "exec", "mounts", "--", "/hello", "cat", "/c/f"); code != 0 || strings.TrimSpace(out) != "two" {
				return errors.New(out + errs)
			}
			return nil
		})
		k.is("container", k.pod("mounts").Status.ContainerStatuses[0].ContainerID, id)
		k.ok("delete", "pod", "mounts")
		k.eventually("nothing is mounted", func(context.Context) error {
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			if err == nil && strings.Contains(string(mounts), string(p.UID)) {
				err = errors.New("a mount of the pod is left")
			}
			return err
		})
	})
	k.sub("processors of one's own", func(k *kit) { // of the flags above
		if runtime.NumCPU() < 2 {
			k.Skip("needs two processors: one is for all")
		}
		features.Shows(k, 242)
		// What its program reads first is what it began with.
		k.apply(strings.Replace(simple("exclusive", "cat, /proc/self/status", "restartPolicy: Never"), "args:", `resources: {limits: {cpu: "1", memory: 32Mi}}, args:`, 1))
		k.phase("exclusive", corev1.PodSucceeded)
		_, list, _ := strings.Cut(k.ok("logs", "exclusive"), "Cpus_allowed_list:")
		own, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(list, "\n", 2)[0]))
		if err != nil || own == 0 {
			k.Errorf("the program began on the processors %q, want one that is not reserved", strings.SplitN(list, "\n", 2)[0])
		}
		k.ok("delete", "pod", "exclusive")
	})
	k.sub("the bridge cannot be made", func(k *kit) {
		features.Shows(k, 198, 276)
		if err := k.c.Kill(node); err != nil {
			k.Fatal(err)
		}
		const bridge = "clusterd0"
		inWay := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: bridge}, PeerName: "inway"}
		free := func() error {
			return k.c.Do(node, func() error {
				link, err := netlink.LinkByName(bridge)
				if err != nil || link.Type() != inWay.Type() {
					return err
				}
				return netlink.LinkDel(link)
			})
		}
		defer func() { _ = free() }()
		if err := k.c.Do(node, func() error {
			if link, err := netlink.LinkByName(bridge); err == nil {
				if err := netlink.LinkDel(link); err != nil {
					return err
				}
			}
			return netlink.LinkAdd(inWay)
		}); err != nil {
			k.Fatal(err)
		}
		k.again()
		k.eventually("the node says so", func(ctx context.Context) error {
			c, err := k.readyCondition(ctx)
			if err == nil && (c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "an interface of type veth has that name")) {
				err = fmt.Errorf("%+v", c)
			}
			return err
		})
		k.apply(pinned(simple("held", "sleep")))
		k.apply(pinned(simple("host", "sleep", "hostNetwork: true")))
		k.ready("host")
		k.event("held", "NetworkNotReady", "an interface of type veth has that name")
		for _, h := range k.holdings() {
			if h.Pod == "held" {
				k.Errorf("without a sandbox there is %+v", h)
			}
		}
		k.is("phase", string(k.pod("held").Status.Phase), "Pending")
		if err := free(); err != nil {
			k.Fatal(err)
		}
		k.ready("held")
		k.ok("delete", "pod", "held", "host")
	})
}

// pinned puts a pod on the node past the scheduler, whatever the node's taints.
func pinned(manifest string) string {
	return manifest + "  nodeName: " + node + "\n  tolerations: [{operator: Exists}]\n"
}

// again starts the killed clusterd, with more flags, and waits for its API.
func (k *kit) again(flags ...string) {
	k.Helper()
	if err := k.c.StartWith(k.Context(), node, flags...); err != nil {
		k.Fatal(err)
	}
	k.eventually("the API answers", func(ctx context.Context) error {
		return k.api.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// encoding is how the list of a resource in the namespace comes to a client that
// takes gzip.
func (k *kit) encoding(resource string) string {
	k.Helper()
	config := rest.CopyConfig(k.config)
	config.DisableCompression = true // by the client on its own
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		k.Fatal(err)
	}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(k.Context(), http.MethodGet, config.Host+"/api/v1/namespaces/"+k.ns+"/"+resource, nil)
	if err != nil {
		k.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := client.Do(req)
	if err != nil {
		k.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		k.Fatalf("%s: %v", resp.Status, err)
	}
	return resp.Header.Get("Content-Encoding")
}

// podmon is the process that holds the node's containers.
func (k *kit) podmon() int {
	k.Helper()
	var pids []int
	k.eventually("podmon is one process", func(context.Context) (err error) { // a child of its own looks like it until it executes
		if pids, err = k.c.Processes(node); err != nil {
			return err
		}
		data := k.c.Nodes()[0].Data
		pids = slices.DeleteFunc(pids, func(pid int) bool {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			words := strings.Split(string(line), "\x00")
			return words[0] != "podmon" || slices.Contains(words, "--keep") || !slices.Contains(words, filepath.Join(data, "podmon"))
		})
		if len(pids) != 1 {
			return fmt.Errorf("processes %v", pids)
		}
		return nil
	})
	return pids[0]
}

func (k *kit) readyCondition(ctx context.Context) (corev1.NodeCondition, error) {
	n, err := k.api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return corev1.NodeCondition{}, err
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c, nil
		}
	}
	return corev1.NodeCondition{}, errors.New("no Ready condition")
}
