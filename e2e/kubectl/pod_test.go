package kubectl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// processes are the pids whose cgroup belongs to a pod, with their command
// lines.
func (k *kit) processes(uid string) map[int]string {
	k.Helper()
	pids, err := k.c.Processes(node)
	if err != nil {
		k.Fatal(err)
	}
	found := map[int]string{}
	for _, pid := range pids {
		group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil || !strings.Contains(string(group), uid) {
			continue
		}
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		found[pid] = strings.TrimSpace(strings.ReplaceAll(string(line), "\x00", " "))
	}
	return found
}

// process waits for a process of a pod whose command line contains the words:
// a container counts as running a moment before its program is executed.
func (k *kit) process(uid, words string) int {
	k.Helper()
	found := 0
	k.eventually("a process "+words, func(context.Context) error {
		all := k.processes(uid)
		for pid, line := range all {
			if strings.Contains(line, words) {
				found = pid
				return nil
			}
		}
		return fmt.Errorf("there are %v", all)
	})
	return found
}

// pause is the process that holds the namespaces of a container's pod. It is in
// a cgroup of all pauses.
func (k *kit) pause(container int) int {
	k.Helper()
	pids, err := k.c.Processes(node)
	if err != nil {
		k.Fatal(err)
	}
	want := k.namespace(container, "ipc")
	var found []int
	for _, pid := range pids {
		group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil || !strings.Contains(string(group), "/pauses") {
			continue
		}
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/ipc", pid)); err == nil && ns == want {
			found = append(found, pid)
		}
	}
	if len(found) != 1 {
		k.Fatalf("pauses of the pod: %v", found)
	}
	return found[0]
}

func (k *kit) kill(pid int) {
	k.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		k.Fatal(err)
	}
}

func restarts(n int32) func(*corev1.Pod) bool {
	return func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount >= n &&
			condition(p, corev1.PodReady) == corev1.ConditionTrue
	}
}

// TestE2EXPod looks at what becomes of pods.
func TestE2EXPod(t *testing.T) {
	t.Parallel()
	k := start(t, "pods")
	k.sub("phases and conditions", func(k *kit) {
		features.Shows(k, 206, 207, 208, 209, 212, 213, 214, 259)
		features.Conforms(k, 288)
		k.apply(simple("nowhere", "sleep", "nodeSelector: {no: such}"))
		k.apply(simple("good", "exit, '0'", "restartPolicy: Never"))
		k.apply(simple("bad", "exit, '3'", "restartPolicy: Never"))
		k.apply(simple("init", "sleep", "initContainers:",
			`- {name: i1, image: "`+image+`", args: [fetch, "http://127.0.0.1:1/"]}`,
			`- {name: i2, image: "`+image+`", args: [exit, "0"]}`))
		k.apply(simple("initializing", "sleep", "initContainers:",
			`- {name: i1, image: "`+image+`", args: [sleep]}`, `- {name: i2, image: "`+image+`", args: [sleep]}`))
		k.apply(simple("runs", "sleep"))
		k.podIs("nowhere", "is unschedulable", func(p *corev1.Pod) bool { return condition(p, corev1.PodScheduled) == corev1.ConditionFalse })
		k.is("phase", string(k.pod("nowhere").Status.Phase), "Pending")
		k.phase("good", corev1.PodSucceeded)
		k.is("exit code", fmt.Sprint(k.phase("bad", corev1.PodFailed).Status.ContainerStatuses[0].State.Terminated.ExitCode), "3")
		p := k.ready("runs")
		k.is("phase", string(p.Status.Phase), "Running")
		for _, kind := range []corev1.PodConditionType{corev1.PodScheduled, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
			k.is(string(kind), string(condition(p, kind)), "True")
		}
		// An init container that fails holds the pod back.
		k.podIs("init", "has tried twice", func(p *corev1.Pod) bool {
			return len(p.Status.InitContainerStatuses) == 2 && p.Status.InitContainerStatuses[0].RestartCount > 0
		})
		k.eventuallyHas([]string{"get", "pod", "initializing"}, "0/1", "Init:0/2")
		k.is("phase", string(k.pod("initializing").Status.Phase), "Pending")
		held := k.pod("init")
		k.is("phase", string(held.Status.Phase), "Pending")
		k.is("Initialized", string(condition(held, corev1.PodInitialized)), "False")
		k.conditionFields("runs", "init")
		k.event("init", "BackOff")
		k.event("runs", "Created")
		k.event("runs", "Started")
		var order []string
		for _, e := range k.events("runs") {
			order = append(order, e.Reason)
		}
		if c, s := slices.Index(order, "Created"), slices.Index(order, "Started"); c > s {
			k.Errorf("events %q", order)
		}
		k.ok("delete", "pod", "nowhere", "init", "initializing", "runs", "good", "bad")
	})
	k.sub("a killed process is noticed and replaced", func(k *kit) {
		features.Shows(k, 199, 262)
		k.apply(simple("killed", "sleep", `- {name: side, image: "`+image+`", args: [serve]}`))
		p := k.ready("killed")
		side := k.process(string(p.UID), "serve")
		var again *corev1.Pod
		k.best("a new one after the end", stalled, func(i int) time.Duration {
			k.kill(k.process(string(p.UID), "sleep"))
			again = k.podIs("killed", "was started again", restarts(int32(i+1)))
			s := again.Status.ContainerStatuses[0]
			l := s.LastTerminationState.Terminated
			if l == nil || l.ExitCode != 137 {
				k.Fatalf("last state %+v", s.LastTerminationState)
			}
			return s.State.Running.StartedAt.Sub(l.FinishedAt.Time)
		})
		k.is("address", again.Status.PodIP, p.Status.PodIP) // the pause holds it
		k.is("the other's restarts", fmt.Sprint(again.Status.ContainerStatuses[1].RestartCount), "0")
		if got := k.process(string(p.UID), "serve"); got != side {
			k.Errorf("the other container is process %d, was %d", got, side)
		}
		k.ok("delete", "pod", "killed")
	})
	k.sub("a killed sandbox is built anew", func(k *kit) {
		features.Shows(k, 199, 201, 257)
		k.apply(simple("sandbox", "sleep", `- {name: side, image: "`+image+`", args: [serve]}`))
		p := k.ready("sandbox")
		main := k.process(string(p.UID), "sleep")
		k.process(string(p.UID), "serve")
		old := k.processes(string(p.UID))
		if len(old) != 2 {
			k.Fatalf("processes %v", old)
		}
		first := k.sandbox("sandbox")
		k.eventuallyHas([]string{"logs", "sandbox", "-c", "side"}, "serving on") // before it is killed
		k.kill(k.pause(main))
		again := k.podIs("sandbox", "has a new sandbox", func(p2 *corev1.Pod) bool {
			return restarts(1)(p2) && p2.Status.PodIP != p.Status.PodIP
		})
		for pid := range k.processes(string(again.UID)) {
			if _, ok := old[pid]; ok {
				k.Errorf("process %d is from before", pid)
			}
		}
		k.is("the other's restarts", fmt.Sprint(again.Status.ContainerStatuses[1].RestartCount), "1")
		if second := k.sandbox("sandbox"); second.ID == first.ID || second.Attempt != first.Attempt+1 {
			k.Errorf("sandbox %+v, before %+v", second, first)
		}
		k.has(k.ok("logs", "sandbox", "-c", "side", "--previous"), "serving on")
		k.ok("delete", "pod", "sandbox")
	})
	k.sub("deletion leaves nothing", func(k *kit) {
		features.Shows(k, 191, 205, 245, 246)
		k.apply(simple("leaves", "sleep", "volumes:", "- {name: scratch, emptyDir: {}}"))
		p := k.ready("leaves")
		data := k.c.Nodes()[0].Data
		uid := string(p.UID)
		if _, err := os.Stat(filepath.Join(data, "pods", uid, "volumes", "kubernetes.io~empty-dir", "scratch")); err != nil {
			k.Error(err)
		}
		logs := filepath.Join(data, "log", "pods", k.ns+"_leaves_"+uid)
		if _, err := os.Stat(logs); err != nil {
			k.Error(err)
		}
		group := k.cgroup(k.process(uid, "sleep"), "memory")
		k.ok("delete", "pod", "leaves", "--force", "--grace-period=0")
		k.eventually("no trace is left", func(context.Context) error {
			for _, path := range []string{filepath.Join(data, "pods", uid), logs, filepath.Dir(group)} {
				if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("%s is left (%v)", path, err)
				}
			}
			if left := k.processes(uid); len(left) > 0 {
				return fmt.Errorf("processes %v", left)
			}
			return nil
		})
	})
	k.sub("rapid changes end right", func(k *kit) {
		features.Shows(k, 187, 190)
		for i := range 5 {
			k.apply(simple("rapid", "sleep"))
			k.ok("label", "pod", "rapid", fmt.Sprintf("round=%d", i))
			k.ok("delete", "pod", "rapid", "--wait=false", "--grace-period=1")
			k.gone("rapid")
		}
		k.apply(simple("rapid", "sleep"))
		p := k.ready("rapid")
		k.is("restarts", fmt.Sprint(p.Status.ContainerStatuses[0].RestartCount), "0")
		// A status that somebody else wrote is put right.
		k.ok("patch", "pod", "rapid", "--subresource=status", "-p", `{"status":{"phase":"Pending"}}`)
		k.podIs("rapid", "has its own status again", func(now *corev1.Pod) bool {
			return now.Status.Phase == corev1.PodRunning && now.Status.PodIP == p.Status.PodIP
		})
		k.ok("delete", "pod", "rapid")
	})
	k.sub("hard admission", func(k *kit) {
		features.Shows(k, 195)
		k.apply(strings.Replace(simple("huge", "sleep", "nodeName: "+node), "args:", "resources: {requests: {cpu: 9000}}, args:", 1))
		p := k.phase("huge", corev1.PodFailed)
		k.is("reason", p.Status.Reason, "OutOfcpu")
		k.apply(simple("selective", "sleep", "nodeName: "+node, "nodeSelector: {no: such}"))
		k.is("reason", k.phase("selective", corev1.PodFailed).Status.Reason, "NodeAffinity")
		k.has(k.ok("get", "pods"), "OutOfcpu", "NodeAffinity")
	})
	k.sub("active deadline", func(k *kit) {
		features.Shows(k, 197)
		k.apply(simple("late", "sleep", "activeDeadlineSeconds: 2"))
		k.is("reason", k.phase("late", corev1.PodFailed).Status.Reason, "DeadlineExceeded")
	})
	k.sub("only this node's pods", func(k *kit) {
		features.Shows(k, 112, 180)
		k.apply(simple("elsewhere", "sleep", "nodeName: another"))
		elsewhere := string(k.pod("elsewhere").UID) // it is collected after a while, as there is no such node
		k.best("it begins", stalled, func(i int) time.Duration {
			if i > 0 {
				k.ok("delete", "pod", "here")
			}
			k.apply(simple("here", "sleep", "nodeName: "+node))
			p := k.ready("here")
			return p.Status.StartTime.Sub(p.CreationTimestamp.Time)
		})
		if left := k.processes(elsewhere); len(left) > 0 {
			k.Errorf("another node's pod runs: %v", left)
		}
		if e := k.events("here"); slices.ContainsFunc(e, func(e corev1.Event) bool { return e.Reason == "Scheduled" }) {
			k.Errorf("it was scheduled: %v", e)
		}
		k.apply(simple("placed", "sleep"))
		k.event("placed", "Scheduled")
		k.is("node", k.pod("placed").Spec.NodeName, node)
		k.ok("delete", "pod", "elsewhere", "--force", "--ignore-not-found")
		k.ok("delete", "pod", "here", "placed")
	})
	k.sub("binding", func(k *kit) {
		features.Shows(k, 125, 126, 127, 128)
		k.apply(simple("foreign", "sleep", "schedulerName: somebody-else"))
		bind := func(uid, to string) int {
			code, _ := k.ask("POST", "/api/v1/namespaces/"+k.ns+"/pods/foreign/binding",
				`{"apiVersion":"v1","kind":"Binding","metadata":{"name":"foreign","uid":"`+uid+`","annotations":{"by":"me"}},"target":{"kind":"Node","name":"`+to+`"}}`)
			return code
		}
		if code := bind("00000000-0000-0000-0000-000000000000", node); code != 409 {
			k.Errorf("a wrong uid: %d", code)
		}
		k.is("node", k.pod("foreign").Spec.NodeName, "")
		if code := bind(string(k.pod("foreign").UID), node); code != 201 {
			k.Errorf("binding: %d", code)
		}
		if code := bind("", node); code != 409 {
			k.Errorf("a second binding: %d", code)
		}
		p := k.ready("foreign")
		k.is("annotation", p.Annotations["by"], "me")
		k.is("PodScheduled", string(condition(p, corev1.PodScheduled)), "True")
		k.ok("delete", "pod", "foreign")
	})
	k.sub("hooks", func(k *kit) {
		features.Shows(k, 291, 292)
		features.Conforms(k, 263, 264)
		k.apply(simple("server", "serve"))
		ip := k.ready("server").Status.PodIP
		hook := func(name, hook string) {
			k.apply(strings.Replace(simple(name, "sleep"), "args:", "lifecycle: {postStart: {"+hook+"}}, args:", 1))
		}
		hook("runs-it", `exec: {command: [/hello, sleep, "2"]}`)
		hook("fails-it", `exec: {command: [/hello, exit, "1"]}`)
		hook("asks", `httpGet: {host: `+ip+`, port: 8080, path: /from-the-hook}`)
		p := k.ready("runs-it")
		if ready := transition(p, corev1.PodReady); ready.Sub(p.Status.ContainerStatuses[0].State.Running.StartedAt.Time) < time.Second {
			k.Errorf("it was Ready before its hook had ended: %+v", p.Status)
		}
		k.ready("asks")
		k.eventuallyHas([]string{"logs", "server"}, "GET /from-the-hook")
		k.event("fails-it", "FailedPostStartHook")
		k.podIs("fails-it", "was killed for it", func(p *corev1.Pod) bool {
			return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
		})
		k.ok("delete", "pod", "server", "runs-it", "fails-it", "asks", "--wait=false")
	})
}

func transition(p *corev1.Pod, kind corev1.PodConditionType) time.Time {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// cgroup is the directory of a process' cgroup in a hierarchy of version 1, or in
// the one of version 2.
func (k *kit) cgroup(pid int, controller string) string {
	k.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		k.Fatal(err)
	}
	unified := ""
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if slices.Contains(strings.Split(f[1], ","), controller) {
			return filepath.Join("/sys/fs/cgroup", controller, f[2])
		}
		if f[1] == "" {
			unified = filepath.Join("/sys/fs/cgroup", f[2])
		}
	}
	return unified
}

// hungImage is an image of a registry on the node's loopback that takes
// connections and never answers.
func (k *kit) hungImage() string {
	k.Helper()
	var l net.Listener
	if err := k.c.Do(node, func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		k.Fatal(err)
	}
	k.Cleanup(func() { _ = l.Close() })
	k.allowPlainHTTP(l.Addr().String())
	return l.Addr().String() + "/a/b:1"
}

// allowPlainHTTP makes the node speak to a registry without TLS.
func (k *kit) allowPlainHTTP(host string) {
	k.Helper()
	for _, n := range k.c.Nodes() {
		if n.Name != node {
			continue
		}
		if err := n.AllowPlainHTTP(host); err != nil {
			k.Fatal(err)
		}
	}
}

// registry serves images on the node's loopback without TLS, to those that know user and
// password if they are set. It counts the requests for manifests.
func (k *kit) registry(user, password string) (host string, manifests *atomic.Int32) {
	k.Helper()
	var l net.Listener
	if err := k.c.Do(node, func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		k.Fatal(err)
	}
	host = l.Addr().String()
	k.allowPlainHTTP(host)
	manifests = new(atomic.Int32)
	open := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := &http.Server{ReadHeaderTimeout: testTimeout, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); user != "" && r.Header.Get("X-Push") == "" && (u != user || p != password) {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, `{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}`)
			return
		}
		if strings.Contains(r.URL.Path, "/manifests/") {
			manifests.Add(1)
		}
		open.ServeHTTP(w, r)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	k.Cleanup(func() { _ = srv.Close(); <-done })
	img, err := tarball.ImageFromPath(filepath.Join(filepath.Dir(k.c.Bin("clusterd")), "hello.tar"), nil)
	if err != nil {
		k.Fatal(err)
	}
	if user != "" { // an image of its own, which was not loaded from a file too
		cf, err := img.ConfigFile()
		if err != nil {
			k.Fatal(err)
		}
		cf = cf.DeepCopy()
		cf.Config.Labels = map[string]string{"private": host}
		if img, err = mutate.ConfigFile(img, cf); err != nil {
			k.Fatal(err)
		}
	}
	ref, err := name.ParseReference(host + "/team/app:1")
	if err != nil {
		k.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithTransport(pusher{&http.Transport{DisableKeepAlives: true, DialContext: k.dial}})); err != nil {
		k.Fatal(err)
	}
	manifests.Store(0)
	return host, manifests
}

// pusher marks requests as the test's own.
type pusher struct{ http.RoundTripper }

func (p pusher) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-Push", "yes")
	return p.RoundTripper.RoundTrip(r)
}

// dial connects from the node's network.
func (k *kit) dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = k.c.Do(node, func() (err error) {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}

// TestE2EXImage looks at where containers' programs come from.
func TestE2EXImage(t *testing.T) {
	t.Parallel()
	k := start(t, "images")
	from := func(name, ref string, more ...string) string {
		return strings.Replace(simple(name, "sleep", more...), image, ref, 1)
	}
	k.sub("a pull that hangs", func(k *kit) {
		features.Shows(k, 193, 194, 211)
		ref := k.hungImage()
		// The pull is given up after a minute; the pods do not wait for that.
		k.best("their deletion", stalled, func(i int) time.Duration {
			hung, mountless, unhindered := fmt.Sprint("hung-", i), fmt.Sprint("mountless-", i), fmt.Sprint("unhindered-", i)
			k.apply(from(hung, ref))
			k.podIs(hung, "is being made", func(p *corev1.Pod) bool {
				w := waiting(p)
				return w != nil && w.Reason == "ContainerCreating" && p.Status.Phase == corev1.PodPending
			})
			k.event(hung, "Pulling")
			k.apply(simple(mountless, "sleep", "volumes:", "- {name: v, configMap: {name: none}}"))
			k.event(mountless, "FailedMount")
			k.apply(simple(unhindered, "sleep"))
			k.ready(unhindered)
			began := time.Now()
			k.ok("delete", "pod", hung, mountless, timeoutFlag)
			return time.Since(began)
		})
	})
	k.sub("not there", func(k *kit) {
		host, _ := k.registry("", "")
		k.apply(from("absent", host+"/nobody/nothing:1"))
		k.podIs("absent", "says ErrImagePull", func(p *corev1.Pod) bool { // for two seconds after each try
			w := waiting(p)
			return w != nil && w.Reason == "ErrImagePull"
		})
		k.eventuallyHas([]string{"get", "pod", "absent"}, "ImagePullBackOff")
		k.eventuallyHas([]string{"describe", "pod", "absent"}, "NAME_UNKNOWN", "Failed to pull image", "Back-off pulling image", host)
		k.ok("delete", "pod", "absent")
	})
	k.sub("only when absent, or always", func(k *kit) {
		features.Shows(k, 271)
		host, asked := k.registry("", "")
		ref := host + "/team/app:1"
		k.apply(from("first", ref))
		k.ready("first")
		k.event("first", "Pulled", "Successfully pulled image")
		if asked.Load() == 0 {
			k.Error("the registry was not asked")
		}
		asked.Store(0)
		k.apply(from("second", ref))
		k.ready("second")
		k.event("second", "Pulled", "already present on machine")
		if n := asked.Load(); n != 0 {
			k.Errorf("the registry was asked %d times", n)
		}
		k.apply(strings.Replace(from("always", ref), "args:", "imagePullPolicy: Always, args:", 1))
		k.ready("always")
		if asked.Load() == 0 {
			k.Error("the registry was not asked")
		}
		k.apply(strings.Replace(from("never", host+"/team/other:1"), "args:", "imagePullPolicy: Never, args:", 1))
		k.eventuallyHas([]string{"get", "pod", "never"}, "ErrImageNeverPull")
		k.ok("delete", "pod", "first", "second", "always", "never", "--wait=false")
	})
	k.sub("private", func(k *kit) {
		features.Shows(k, 252, 272)
		host, asked := k.registry("bob", "hush")
		ref := host + "/team/app:1"
		k.apply(from("stranger", ref))
		k.eventuallyHas([]string{"describe", "pod", "stranger"}, "UNAUTHORIZED")
		k.ok("create", "secret", "docker-registry", "creds", "--docker-server="+host, "--docker-username=bob", "--docker-password=hush")
		k.apply(from("friend", ref, "imagePullSecrets: [{name: creds}]"))
		k.ready("friend")
		// That it is on the node opens it to none who could not have pulled it (KEP-2535).
		k.apply(from("late", ref))
		k.eventuallyHas([]string{"describe", "pod", "late"}, "was pulled with other credentials than this pod's", "UNAUTHORIZED")
		never := func(pod string) string { return strings.Replace(pod, "args:", "imagePullPolicy: Never, args:", 1) }
		k.apply(never(from("idle", ref)))
		k.eventuallyHas([]string{"describe", "pod", "idle"}, "ErrImageNeverPull", "does not have the proper credentials")
		before := asked.Load()
		k.apply(never(from("second-friend", ref, "imagePullSecrets: [{name: creds}]")))
		k.ready("second-friend")
		k.is("requests for the second friend", strconv.FormatInt(int64(asked.Load()-before), 10), "0")
		for _, name := range []string{"stranger", "late", "idle"} {
			if phase := k.ok("get", "pod", name, "-o", "jsonpath={.status.phase}"); phase != "Pending" {
				k.Errorf("%s is %s", name, phase)
			}
		}
		k.ok("delete", "pod", "stranger", "friend", "late", "idle", "second-friend", "--wait=false")
	})
	k.sub("another image in place", func(k *kit) {
		features.Shows(k, 200)
		host, _ := k.registry("", "")
		k.apply(simple("changes", "sleep", `- {name: side, image: "`+image+`", args: [sleep]}`))
		p := k.ready("changes")
		k.ok("set", "image", "pod/changes", "main="+host+"/team/app:1")
		again := k.podIs("changes", "runs another image", restarts(1))
		k.is("image", again.Status.ContainerStatuses[0].Image, host+"/team/app:1")
		k.is("address", again.Status.PodIP, p.Status.PodIP)
		k.is("the other's restarts", strconv.Itoa(int(again.Status.ContainerStatuses[1].RestartCount)), "0")
		k.ok("delete", "pod", "changes", "--wait=false")
	})
}
