package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EDeploy sends the demo's manifest down the whole line.
func TestE2EDeploy(t *testing.T) {
	e := start(t)
	const manifest = "../examples/hello.yaml"
	out := e.ctl("apply", "-f", manifest)
	mustContain(t, "first apply", out, "namespace/hello created", "configmap/hello created", "deployment.apps/hello created")
	mustContain(t, "rollout", e.ctl("-n", "hello", "rollout", "status", "deployment/hello", "--timeout=110s"), "successfully rolled out")
	pods := e.podsReady("hello", "app=hello", 3)

	t.Run("one on each node, each with its own address in the node's range", func(t *testing.T) {
		features.Shows(t, 121, 282, 285)
		nodes, ips := map[string]bool{}, map[string]bool{}
		for _, p := range pods {
			nodes[p.Spec.NodeName], ips[p.Status.PodIP] = true, true
		}
		if len(nodes) != 3 || len(ips) != 3 {
			t.Errorf("nodes %v, addresses %v", nodes, ips)
		}
		ranges := map[string]string{}
		list, err := e.api.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range list.Items {
			if n.Spec.PodCIDR == "" || ranges[n.Spec.PodCIDR] != "" {
				t.Errorf("%s has the range %q", n.Name, n.Spec.PodCIDR)
			}
			ranges[n.Spec.PodCIDR] = n.Name
		}
		for _, p := range pods {
			for cidr, node := range ranges {
				if node == p.Spec.NodeName && !contains(t, cidr, p.Status.PodIP) {
					t.Errorf("%s on %s has %s, outside of %s", p.Name, node, p.Status.PodIP, cidr)
				}
			}
		}
	})
	t.Run("images are kept, pinned and removed", func(t *testing.T) { imagesOnNodes(t, e) })
	t.Run("pages across the pod network", func(t *testing.T) {
		for _, p := range pods {
			for _, n := range e.Nodes() {
				var page string
				e.eventually(p.Name+" answers "+n.Name, func(context.Context) (err error) {
					page, err = e.page(n.Name, p.Status.PodIP)
					return err
				})
				mustContain(t, "page", page, "Hello from clusterd!", "I am pod "+p.Name+" on node "+p.Spec.NodeName+" at "+p.Status.PodIP)
			}
		}
		// From pod to pod, with the pod's own address as sender.
		from, to := pods[0], pods[1]
		out := e.ctl("-n", "hello", "exec", from.Name, "--", "/hello", "fetch", "http://"+to.Status.PodIP+":8080/")
		mustContain(t, "page", out, "I am pod "+to.Name, "you come from "+from.Status.PodIP)
	})
	t.Run("the doctor, on a server of a healthy cluster", func(t *testing.T) {
		n := e.Nodes()[0]
		e.eventually("the doctor finds the cluster well", func(context.Context) error {
			// How it ends is about the machine that the tests run on.
			out, _ := e.Exec(t.Context(), n.Name, e.Bin("clusterd"), "doctor", "--data", n.Data).CombinedOutput()
			for _, want := range []string{
				"clusterd runs and has them", n.Addr.String() + ", as node " + n.Name, "3 of 3 voters are alive, led by",
				"3 of 3 are Ready", "of its quota are used", "this node's certificate is good for",
			} {
				if !strings.Contains(string(out), want) {
					return fmt.Errorf("%q is not in:\n%s", want, out)
				}
			}
			return nil
		})
	})
	t.Run("the web page", func(t *testing.T) { e.webPage() })
	t.Run("owners and labels", func(t *testing.T) {
		features.Shows(t, 93, 95, 102)
		sets, err := e.api.AppsV1().ReplicaSets("hello").List(t.Context(), metav1.ListOptions{LabelSelector: "app=hello"})
		if err != nil || len(sets.Items) != 1 {
			t.Fatalf("ReplicaSets: %v %v", sets, err)
		}
		rs := sets.Items[0]
		hash := rs.Labels["pod-template-hash"]
		if hash == "" || rs.Spec.Template.Labels["pod-template-hash"] != hash || rs.Annotations["deployment.kubernetes.io/revision"] != "1" {
			t.Errorf("ReplicaSet: labels %v, annotations %v", rs.Labels, rs.Annotations)
		}
		d, err := e.api.AppsV1().Deployments("hello").Get(t.Context(), "hello", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		e.replicaSetsCome(t)
		tmpl := rs.Spec.Template.DeepCopy()
		delete(tmpl.Labels, "pod-template-hash")
		if !equality.Semantic.DeepEqual(*tmpl, d.Spec.Template) {
			t.Errorf("the ReplicaSet's template differs:\n%v\n%v", *tmpl, d.Spec.Template)
		}
		for _, p := range pods {
			owner := metav1.GetControllerOf(&p)
			if owner == nil || owner.Kind != "ReplicaSet" || owner.Name != rs.Name || owner.UID != rs.UID {
				t.Errorf("%s is owned by %v", p.Name, owner)
			}
		}
	})
	t.Run("apply again", func(t *testing.T) {
		features.Shows(t, 7, 8)
		version := func() string {
			return e.ctl("-n", "hello", "get", "deployment", "hello", "-o", "jsonpath={.metadata.resourceVersion}")
		}
		e.eventually("an apply that writes nothing", func(context.Context) error { // a status may be written meanwhile
			before := version()
			mustContain(t, "second apply", e.ctl("apply", "-f", manifest), "namespace/hello unchanged", "configmap/hello unchanged", "deployment.apps/hello unchanged")
			if after := version(); after != before {
				return fmt.Errorf("resourceVersion moved from %s to %s", before, after)
			}
			return nil
		})
		b, err := os.ReadFile(manifest)
		if err != nil {
			t.Fatal(err)
		}
		changed := strings.Replace(string(b), "Hello from clusterd!", "Changed", 1)
		mustContain(t, "changed", e.ctlIn(changed, "apply", "-f", "-"), "configmap/hello configured", "deployment.apps/hello unchanged")
	})
	t.Run("the changed ConfigMap reaches the running pods", func(t *testing.T) {
		e.eventually("the page to show it", func(context.Context) error {
			page, err := e.page("n1", pods[0].Status.PodIP)
			if err == nil && !strings.HasPrefix(page, "Changed") {
				err = fmt.Errorf("the page is %q", page)
			}
			return err
		})
	})
	t.Run("apply from standard input and a kustomization", func(t *testing.T) {
		features.Shows(t, 1)
		cm := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s}\ndata: {a: b}\n"
		mustContain(t, "stdin", e.ctlIn(fmt.Sprintf(cm, "from-stdin"), "-n", "hello", "apply", "-f", "-"), "configmap/from-stdin created")
		dir := t.TempDir()
		for name, content := range map[string]string{"cm.yaml": fmt.Sprintf(cm, "from-k"), "kustomization.yaml": "resources: [cm.yaml]\n"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		mustContain(t, "-k", e.ctl("-n", "hello", "apply", "-k", dir), "configmap/from-k created")
	})
	t.Run("tables and templates", func(t *testing.T) {
		features.Shows(t, 23, 24)
		for _, prog := range kubectls() {
			out, errs, code := e.run(prog, "", "-n", "hello", "get", "pods")
			if code != 0 {
				t.Fatalf("%s: %s", prog, errs)
			}
			head, _, _ := strings.Cut(out, "\n")
			if got := strings.Join(strings.Fields(head), " "); got != "NAME READY STATUS RESTARTS AGE" {
				t.Errorf("%s: columns %q", prog, got)
			}
			mustContain(t, prog, out, "1/1", "Running")
			out, errs, code = e.run(prog, "", "-n", "hello", "get", "pod", pods[0].Name, "-o",
				`go-template={{range .status.conditions}}{{if or (eq .type "PodScheduled") (eq .type "Ready")}}{{.type}}={{.status}} {{end}}{{end}}`)
			if code != 0 || !strings.Contains(out, "PodScheduled=True") || !strings.Contains(out, "Ready=True") {
				t.Errorf("%s: %q %s", prog, out, errs)
			}
		}
	})
	t.Run("scale", func(t *testing.T) {
		features.Shows(t, 98)
		for _, n := range []int{1, 5, 2} {
			e.ctl("-n", "hello", "scale", "deployment", "hello", fmt.Sprintf("--replicas=%d", n))
			e.podsReady("hello", "app=hello", n)
		}
	})
	t.Run("a deleted pod is replaced", func(t *testing.T) {
		features.Shows(t, 90)
		old := e.podsReady("hello", "app=hello", 2)[0]
		e.ctl("-n", "hello", "delete", "pod", old.Name, "--grace-period=1")
		for _, p := range e.podsReady("hello", "app=hello", 2) {
			if p.UID == old.UID {
				t.Errorf("%s is still there", old.Name)
			}
		}
	})
	t.Run("roll out and back", func(t *testing.T) {
		features.Shows(t, 94, 97)
		e.ctl("-n", "hello", "set", "env", "deployment/hello", "MESSAGE_FILE=", "MESSAGE=second")
		mustContain(t, "rollout", e.ctl("-n", "hello", "rollout", "status", "deployment/hello", "--timeout=110s"), "successfully rolled out")
		page := func(want string) {
			t.Helper()
			for _, p := range e.podsReady("hello", "app=hello", 2) {
				e.eventually(p.Name+" answers "+want, func(context.Context) error {
					got, err := e.page("n1", p.Status.PodIP)
					if err == nil && !strings.HasPrefix(got, want) {
						err = fmt.Errorf("got %q", got)
					}
					return err
				})
			}
		}
		page("second")
		if rev := e.ctl("-n", "hello", "get", "deployment", "hello", "-o", `jsonpath={.metadata.annotations.deployment\.kubernetes\.io/revision}`); rev != "2" {
			t.Errorf("revision %s", rev)
		}
		e.ctl("-n", "hello", "rollout", "undo", "deployment/hello")
		e.ctl("-n", "hello", "rollout", "status", "deployment/hello", "--timeout=110s")
		page("Changed")
	})
	t.Run("delete takes all along", func(t *testing.T) {
		features.Shows(t, 103)
		e.ctl("-n", "hello", "delete", "deployment", "hello", "--cascade=foreground", "--timeout=110s")
		e.eventually("no pod and no ReplicaSet is left", func(ctx context.Context) error {
			pods, err := e.api.CoreV1().Pods("hello").List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			sets, err := e.api.AppsV1().ReplicaSets("hello").List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			if len(pods.Items)+len(sets.Items) > 0 {
				return fmt.Errorf("%d pods, %d ReplicaSets", len(pods.Items), len(sets.Items))
			}
			return nil
		})
	})
	t.Run("a namespace takes all along", func(t *testing.T) {
		e.create("hello", pod("last", "sleep"))
		e.podReady("hello", "last")
		e.ctl("delete", "namespace", "hello", "--timeout=110s")
		mustContain(t, "get", e.refused("", "get", "namespace", "hello"), `namespaces "hello" not found`)
		list, err := e.api.CoreV1().Pods("hello").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 0 {
			t.Errorf("pods %v, %v", list.Items, err)
		}
	})
}

// imagesOnNodes removes images that pods need and others, while pods of hello:1 run on
// all three nodes.
func imagesOnNodes(t *testing.T, e *env) {
	if out := e.refused("", "image", "rm", image); !strings.Contains(out, "failed on 3 of 3 nodes") || !strings.Contains(out, "pod hello/hello-") {
		t.Errorf("an image that pods need: %s", out)
	}
	if out := e.refused("", "image", "rm", "nothing:1", "--node", "n1"); !strings.Contains(out, "this node has no such image") {
		t.Errorf("an image that is not there: %s", out)
	}
	const other = "clusterd.local/operator:1"
	on := func() string {
		for line := range strings.Lines(e.ctl("image", "ls")) {
			if f := strings.Fields(line); f[0] == other {
				return strings.Join(f[len(f)-3:], " ") // the size's unit is in between
			}
		}
		return ""
	}
	e.ctl("image", "load", filepath.Join(e.binDir(), "operator.tar"))
	if got := on(); got != "yes all 3" {
		t.Errorf("loaded: %q", got)
	}
	e.ctl("image", "prune") // what else is there is none of ours to count
	if got := on(); got != "yes all 3" {
		t.Errorf("pruned while it is pinned: %q", got)
	}
	e.ctl("image", "unpin", other, "--node", "n1,n2")
	if got := on(); got != "1 all 3" && got != "on 1 all 3" {
		t.Errorf("unpinned on two: %q", got)
	}
	mustContain(t, "prune", e.ctl("image", "prune", "--node", "n1"), "n1: 1 image removed, ")
	e.ctl("image", "pin", other, "--node", "n2")
	e.ctl("image", "rm", other, "--node", "n3")
	if got := on(); got != "MiB yes n2" {
		t.Errorf("left on one: %q", got)
	}
	e.ctl("image", "rm", other, "--node", "n2")
	if got := on(); got != "" {
		t.Errorf("removed everywhere: %q", got)
	}
	e.eventually("no Node lists it", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range list.Items {
			for _, i := range n.Status.Images {
				if slices.Contains(i.Names, other) {
					return fmt.Errorf("%s does: %v", n.Name, i.Names)
				}
			}
		}
		return nil
	})
}

// replicaSetsCome: a Deployment has its ReplicaSet soon, on a machine that is not too busy
// for one try at least.
func (e *env) replicaSetsCome(t *testing.T) {
	t.Helper()
	ns := e.namespace("soon")
	var waits []time.Duration
	for i := range 5 {
		d := deployment(fmt.Sprintf("soon-%d", i), 0)
		e.createDeployment(ns, d)
		e.eventually("the ReplicaSet of "+d.Name, func(ctx context.Context) error {
			made, err := e.api.AppsV1().Deployments(ns).Get(ctx, d.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			sets, err := e.api.AppsV1().ReplicaSets(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + d.Name})
			if err == nil && len(sets.Items) != 1 {
				err = fmt.Errorf("%d ReplicaSets", len(sets.Items))
			}
			if err == nil {
				waits = append(waits, sets.Items[0].CreationTimestamp.Sub(made.CreationTimestamp.Time))
			}
			return err
		})
		if waits[i] <= stalled {
			return
		}
	}
	t.Errorf("ReplicaSets came after %s", waits)
}
