package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// killContainer ends the first process of a container behind everybody's back.
func (e *env) killContainer(n cluster.Node, containerID string) {
	e.t.Helper()
	_, id, _ := strings.Cut(containerID, "://")
	if err := syscall.Kill(e.firstProcess(n, id), syscall.SIGKILL); err != nil {
		e.t.Fatal(err)
	}
}

// firstProcess is the pid of a container by its cgroup.
func (e *env) firstProcess(n cluster.Node, id string) int {
	e.t.Helper()
	var found int
	e.eventually("there is a process of "+id, func(context.Context) error {
		pids, err := e.Processes(n.Name)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			if err == nil && strings.Contains(string(groups), id) {
				found = pid
				return nil
			}
		}
		return fmt.Errorf("%d processes are none", len(pids))
	})
	return found
}

// showDroppedWatch: what an agent knows goes on from where it was, after its
// server went away and came back, though the agent itself did not.
func (e *env) showDroppedWatch(t *testing.T, ns string, server cluster.Node, restart func()) {
	before, err := e.Pid("a1")
	if err != nil {
		t.Fatal(err)
	}
	events, _ := e.audit(server)
	restart()
	// It may be made before the agent has found the server again.
	e.eventually("a pod is taken", func(ctx context.Context) error {
		p := pod("after", "sleep")
		p.Spec.NodeName = "a1"
		_, err := e.api.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{})
		return err
	})
	e.podReady(ns, "after")
	if after, err := e.Pid("a1"); err != nil || after != before {
		t.Errorf("the agent was process %d and is %d (%v)", before, after, err)
	}
	for _, resource := range []string{"pods", "services"} { // each when its own turn comes
		e.eventually("the agent resumes or lists again its "+resource, func(context.Context) error {
			all, _ := e.audit(server)
			if !slices.ContainsFunc(all[len(events):], func(ev auditEvent) bool {
				return ev.User.Username == "system:node:a1" && (ev.Verb == "watch" || ev.Verb == "list") && ev.ObjectRef.Resource == resource
			}) {
				return errors.New("the audit log shows none of it")
			}
			return nil
		})
	}
}

// showInformers lets the scheduler and a controller decide a hundred times each,
// and looks what they asked the API for meanwhile: nothing to read.
func (e *env) showInformers(t *testing.T, ns string, server cluster.Node) {
	const decisions = 100
	loops := func(ev auditEvent) bool {
		return strings.HasPrefix(ev.User.Username, "system:kube-") || strings.HasPrefix(ev.User.Username, "system:serviceaccount:kube-system:")
	}
	reads := func(ev auditEvent) bool { return ev.Verb == "get" || ev.Verb == "list" }
	// The leader's loops were restarted a moment ago: they are at work when a pod
	// and a ReplicaSet of their own were seen to.
	round := func(name string, n int) []auditEvent {
		before, _ := e.audit(server)
		for i := range n {
			p := pod(fmt.Sprintf("%s-%d", name, i))
			p.Labels = map[string]string{"decided": name}
			p.Spec.NodeSelector = map[string]string{"no": "such-node"}
			e.create(ns, p)
			rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: p.Name}}
			rs.Spec.Replicas = ptr.To[int32](0)
			rs.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"of": p.Name}}
			rs.Spec.Template = corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: rs.Spec.Selector.MatchLabels}, Spec: p.Spec}
			rs.Labels = p.Labels
			if _, err := e.api.AppsV1().ReplicaSets(ns).Create(t.Context(), rs, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		selected := metav1.ListOptions{LabelSelector: "decided=" + name}
		e.eventually("all were decided on", func(ctx context.Context) error {
			pods, err := e.api.CoreV1().Pods(ns).List(ctx, selected)
			if err != nil {
				return err
			}
			sets, err := e.api.AppsV1().ReplicaSets(ns).List(ctx, selected)
			if err != nil {
				return err
			}
			refused, seen := 0, 0
			for i := range pods.Items {
				if c := podCondition(&pods.Items[i], corev1.PodScheduled); c != nil && c.Status == corev1.ConditionFalse {
					refused++
				}
			}
			for i := range sets.Items {
				if sets.Items[i].Status.ObservedGeneration == sets.Items[i].Generation {
					seen++
				}
			}
			if refused != n || seen != n {
				return fmt.Errorf("%d pods, %d ReplicaSets", refused, seen)
			}
			return nil
		})
		var own []auditEvent
		e.eventually("the audit log tells of it", func(context.Context) error { // after the answers
			after, _ := e.audit(server)
			own = slices.DeleteFunc(slices.Clone(after[len(before):]), func(ev auditEvent) bool { return !loops(ev) })
			writes := map[string]int{}
			for _, ev := range own {
				if !reads(ev) && ev.Verb != "watch" {
					writes[ev.ObjectRef.Resource+"/"+ev.ObjectRef.Subresource]++
				}
			}
			for _, resource := range []string{"pods/status", "replicasets/status"} {
				if writes[resource] < n {
					return fmt.Errorf("%d writes of %s tell of %d decisions", writes[resource], resource, n)
				}
			}
			return nil
		})
		return own
	}
	// A loop that has just begun reads what it begins with (that of Gateways is
	// making their kinds yet), in one round or another; one that reads for each of
	// its decisions does so in all of them.
	const rounds = 4
	round("first", 1)
	for i := range rounds {
		var read []string
		for _, ev := range round(fmt.Sprintf("round-%d", i), decisions) {
			if reads(ev) && ev.ObjectRef.Resource != "" { // discovery is no object
				read = append(read, ev.User.Username+" read "+ev.RequestURI)
			}
		}
		if len(read) == 0 {
			break
		}
		t.Logf("round %d of %d:\n%s", i+1, rounds, strings.Join(read, "\n"))
		if i == rounds-1 {
			t.Error("in every round something was read")
		}
	}
	e.ctl("-n", ns, "delete", "pods,replicasets", "-l", "decided", "--wait=false")
}

// showParts: one program is all there is of a node, and it names its parts, each
// of which works.
func (e *env) showParts(t *testing.T, ns string) {
	for _, n := range e.Nodes() {
		e.eventually(n.Name+" runs one clusterd", func(context.Context) error { // one that starts a program is two for a moment
			pids, err := e.Processes(n.Name)
			if err != nil {
				return err
			}
			count := 0
			for _, pid := range pids {
				exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
				if err != nil {
					continue // it ended
				}
				switch name := filepath.Base(strings.TrimSuffix(exe, " (deleted)")); {
				case name == "clusterd":
					count++
				case strings.HasPrefix(name, "kube"), strings.HasPrefix(name, "etcd"), strings.HasPrefix(name, "containerd"), strings.HasPrefix(name, "crio"), strings.HasPrefix(name, "flannel"), strings.HasPrefix(name, "coredns"):
					t.Errorf("%s runs %s", n.Name, exe)
				}
			}
			if count != 1 {
				return fmt.Errorf("%d times", count)
			}
			return nil
		})
	}
	for _, prog := range kubectls() {
		var text string
		e.eventually(prog+" gets readyz", func(context.Context) error {
			out, errs, code := e.run(prog, "", "get", "--raw", "/readyz?verbose")
			if text = out; code != 0 {
				return fmt.Errorf("exit %d: %s", code, errs)
			}
			return nil
		})
		for _, part := range []string{"apiserver", "controller-manager", "scheduler", "kubelet", "container-runtime", "kube-proxy", "raftstore", "pod-network", "csi"} {
			mustContain(t, "readyz of "+prog, text, "[+]"+part+" ok\n")
		}
		mustContain(t, "readyz of "+prog, text, "readyz check passed")
	}
	// Each does its work: a Deployment's pods are made, placed, run, have an
	// address of the pod network, and are reached by a Service's.
	e.createDeployment(ns, deployment("parts", 2))
	pods := e.podsReady(ns, "app=parts", 2)
	for _, p := range pods {
		if p.Spec.NodeName == "" || !strings.HasPrefix(p.Status.ContainerStatuses[0].ContainerID, "clusterd://") {
			t.Errorf("%s is on %q as %q", p.Name, p.Spec.NodeName, p.Status.ContainerStatuses[0].ContainerID)
		}
		node, err := e.api.CoreV1().Nodes().Get(t.Context(), p.Spec.NodeName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if !contains(t, node.Spec.PodCIDR, p.Status.PodIP) {
			t.Errorf("%s has %s, and its node %s", p.Name, p.Status.PodIP, node.Spec.PodCIDR)
		}
	}
	e.ctl("-n", ns, "expose", "deployment", "parts", "--port=8080")
	ip := e.ctl("-n", ns, "get", "service", "parts", "-o", "jsonpath={.spec.clusterIP}")
	for _, n := range e.Nodes() {
		e.eventually("the Service answers on "+n.Name, func(context.Context) error {
			text, err := e.page(n.Name, ip)
			if err == nil && !strings.Contains(text, "I am pod parts-") {
				err = errors.New(text)
			}
			return err
		})
		// Drivers of storage register there, once one is there: e2e/csi_test.go.
		if st, err := os.Stat(filepath.Join(n.Data, "kubelet", "plugins_registry")); err != nil || !st.IsDir() {
			t.Errorf("where drivers register on %s: %v", n.Name, err)
		}
	}
	e.ctl("-n", ns, "delete", "deployment/parts", "service/parts", "--wait=false")
}

// standInForNFS puts a mount.nfs before the machine's, where its kernel or its
// programs know no NFS. It asks the server, and waits for its answer as the kernel
// would.
func standInForNFS(t *testing.T) {
	t.Helper()
	kinds, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("mount.nfs"); err == nil && bytes.Contains(kinds, []byte("\tnfs4\n")) {
		return
	}
	dir := t.TempDir()
	script := "#!/bin/bash\nexec 3<>\"/dev/tcp/${1%%:*}/2049\" || exit 32\necho mount >&3\nread -r -u 3 || { echo 'mount.nfs: Connection reset by peer' >&2; exit 32; }\n"
	if err := os.WriteFile(filepath.Join(dir, "mount.nfs"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// deadServer listens where NFS servers do, on the machine that the nodes are on,
// and never answers.
type deadServer struct {
	addr  string
	asked atomic.Int32
	ln    net.Listener
	wg    sync.WaitGroup
	mu    sync.Mutex // guards conns
	conns []net.Conn
}

func newDeadServer(t *testing.T) *deadServer {
	t.Helper()
	host := segment().Addr().Next().String()
	ln, err := net.Listen("tcp", host+":2049")
	if err != nil {
		t.Fatal(err)
	}
	d := &deadServer{addr: host, ln: ln}
	d.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			d.mu.Lock()
			d.conns = append(d.conns, c)
			d.mu.Unlock()
			d.asked.Add(1)
		}
	})
	t.Cleanup(d.close)
	return d
}

// close ends it, as a machine does that is switched off permanently.
func (d *deadServer) close() {
	d.ln.Close()
	d.wg.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		c.Close()
	}
}

// showDeadNFS: pods that mount from a server that does not answer wait, by a
// volume of their own and by a claim, and no other pod of their node does.
func (e *env) showDeadNFS(t *testing.T, ns string) {
	server := newDeadServer(t)
	e.ctlIn(fmt.Sprintf(`apiVersion: v1
kind: PersistentVolume
metadata: {name: dead}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  claimRef: {namespace: %[1]s, name: dead}
  nfs: {server: %[2]s, path: /data}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: dead, namespace: %[1]s}
spec: {accessModes: [ReadWriteMany], storageClassName: "", volumeName: dead, resources: {requests: {storage: 1Gi}}}
`, ns, server.addr), "apply", "-f", "-")
	waits := func(name string, source corev1.VolumeSource) {
		p := pod(name, "sleep")
		p.Spec.NodeName = "a1"
		p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: source}}
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
		e.create(ns, p)
	}
	e.eventually("the claim is bound", func(context.Context) error {
		if got := e.ctl("-n", ns, "get", "pvc", "dead", "-o", "jsonpath={.status.phase}"); got != "Bound" {
			return errors.New(got)
		}
		return nil
	})
	waits("nfs-claim", corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "dead"}})
	waits("nfs-own", corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: server.addr, Path: "/data"}})
	e.eventually("the server was asked by both", func(context.Context) error {
		if n := server.asked.Load(); n < 2 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	const others = 10
	for i := range others {
		p := pod(fmt.Sprintf("beside-%d", i), "sleep")
		p.Labels = map[string]string{"app": "beside"}
		p.Spec.NodeName = "a1"
		p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
		e.create(ns, p)
	}
	// None waits for one of them: the mounts are under way all the time.
	e.eventually("the others are Ready", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=beside"})
		if err != nil {
			return err
		}
		ready := 0
		for i := range list.Items {
			if podReady(&list.Items[i]) {
				ready++
			}
		}
		if ready != others {
			return fmt.Errorf("%d are", ready)
		}
		return nil
	})
	for _, name := range []string{"nfs-claim", "nfs-own"} {
		e.podIs(ns, name, "said to wait", func(p *corev1.Pod) error {
			if p.Status.Phase != corev1.PodPending || waiting(p) == nil || waiting(p).Reason != "ContainerCreating" {
				return errors.New("it is not")
			}
			return nil
		})
	}
	e.nodeIs("a1", corev1.NodeReady, corev1.ConditionTrue)
	// Others end while they wait, too.
	e.ctl("-n", ns, "delete", "pods", "-l", "app=beside", "--timeout=110s")
	e.ctl("-n", ns, "delete", "pod", "nfs-claim", "nfs-own", "--wait=false")
	server.close()
	e.eventually("the pods are gone once the server is given up", func(ctx context.Context) error {
		for _, name := range []string{"nfs-claim", "nfs-own"} {
			if p, err := e.api.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{}); err == nil {
				return fmt.Errorf("%s: %s", name, brief(p))
			}
		}
		return nil
	})
	e.ctl("-n", ns, "delete", "pvc/dead", "pv/dead", "--wait=false")
}

// closed refuses every write but those of one user.
const closed = `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: closed}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules: [{apiGroups: ["*"], apiVersions: ["*"], operations: ["*"], resources: ["*/*"]}]
  validations: [{expression: "request.userInfo.username == '%s'", message: the door is closed}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: closed}
spec: {policyName: closed, validationActions: [Deny]}
`

// showOneDoor closes the API to all writers but one, and then stops it: in both
// cases controllers and agents have their work, and nothing of it reaches the store.
func (e *env) showOneDoor(t *testing.T, ns string) {
	admin := e.ctl("auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
	robot := strings.TrimSpace(e.ctl("-n", ns, "create", "token", "default"))
	e.ctl("-n", ns, "create", "rolebinding", "robot", "--clusterrole=edit", "--serviceaccount="+ns+":default")
	leases := func() (times []time.Time) {
		for _, n := range e.Nodes() {
			l, err := e.api.CoordinationV1().Leases("kube-node-lease").Get(t.Context(), n.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			times = append(times, l.Spec.RenewTime.Time)
		}
		return times
	}
	e.ctlIn(fmt.Sprintf(closed, admin), "apply", "-f", "-")
	open := func() {
		e.ctl("delete", "validatingadmissionpolicybinding/closed", "validatingadmissionpolicy/closed")
	}
	defer func() {
		if t.Failed() {
			open()
		}
	}()
	e.eventually("the door is closed", func(ctx context.Context) error {
		_, err := e.holder(robot).CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "robot-"}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || !strings.Contains(err.Error(), "the door is closed") {
			return fmt.Errorf("a dry run: %w", err)
		}
		return nil
	})
	// What was let in before has been written by the time that this is.
	e.createDeployment(ns, deployment("stalls", 1))
	bound := pod("stalls", "sleep")
	bound.Spec.NodeName = "a1"
	revision := e.create(ns, bound).ResourceVersion
	renewed := leases()
	// Leases are renewed each ten seconds: both nodes have tried.
	const had = 12 * time.Second
	began := time.Now()
	end, late := began.Add(had), false
	e.eventually("the loops and agents had their time", func(ctx context.Context) error {
		list, err := e.api.CoreV1().ConfigMaps(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if list.ResourceVersion != revision {
			// A busy machine may write one late that was let in before, and soon.
			if late || time.Since(began) > 3*time.Second {
				t.Fatalf("the store is at revision %s, and was at %s when the last one wrote who may", list.ResourceVersion, revision)
			}
			t.Logf("a write came late: revision %s after %s", list.ResourceVersion, revision)
			revision, renewed, end, late = list.ResourceVersion, leases(), time.Now().Add(had), true
		}
		if time.Now().Before(end) {
			return errors.New("they had not")
		}
		return nil
	})
	if now := leases(); !slices.Equal(now, renewed) {
		t.Errorf("leases were renewed: %v, %v", renewed, now)
	}
	if p := e.get(ns, "stalls"); p.Status.Phase != corev1.PodPending || len(p.Status.ContainerStatuses) > 0 {
		t.Errorf("the agent reported its pod: %s", brief(p))
	}
	if sets := e.ctl("-n", ns, "get", "replicasets", "-l", "app=stalls", "-o", "name"); sets != "" {
		t.Errorf("the controllers made %s", sets)
	}
	open()
	e.podReady(ns, "stalls")
	e.eventually("the controllers go on", func(ctx context.Context) error {
		d, err := e.api.AppsV1().Deployments(ns).Get(ctx, "stalls", metav1.GetOptions{})
		if err == nil && d.Status.ReadyReplicas != 1 {
			err = fmt.Errorf("%+v", d.Status)
		}
		return err
	})

	// The agent has nothing but the API: with that stopped it works and cannot report.
	n1, a1 := e.Nodes()[0], e.Nodes()[1]
	if _, err := os.Stat(filepath.Join(a1.Data, "store")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the agent has a store (%v)", err)
	}
	id := e.get(ns, "stalls").Status.ContainerStatuses[0].ContainerID
	if err := e.Pause("n1"); err != nil {
		t.Fatal(err)
	}
	before := hashOf(t, filepath.Join(n1.Data, "store"))
	e.killContainer(a1, id)
	e.eventually("the container runs again on its node", func(context.Context) error {
		out, err := exec.CommandContext(t.Context(), e.Bin("clusterd"), "containers", "--data", a1.Data, "--pod", ns+"/stalls").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if strings.Count(string(out), "Running") != 1+1 || !strings.Contains(string(out), "Exited(137)") { // the sandbox and the container
			return errors.New(string(out))
		}
		return nil
	})
	after := hashOf(t, filepath.Join(n1.Data, "store"))
	if err := e.Resume("n1"); err != nil {
		t.Fatal(err)
	}
	if before != after {
		t.Error("the store has changed while the API was stopped")
	}
	e.podIs(ns, "stalls", "reported when the API is back", func(p *corev1.Pod) error {
		if p.Status.ContainerStatuses[0].RestartCount != 1 || !podReady(p) {
			return errors.New("not yet")
		}
		return nil
	})
	e.ctl("-n", ns, "delete", "deployment/stalls", "pod/stalls", "--wait=false")
}

// hashOf is a hash of all files below a directory.
func hashOf(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		fmt.Fprintln(h, path)
		_, err = io.Copy(h, f)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}
