package kubectl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXNode looks at what a node says of itself.
func TestE2EXNode(t *testing.T) {
	t.Parallel()
	k := start(t, "node")
	lease := func() time.Time {
		var l *coordinationv1.Lease
		k.eventually("the node's Lease", func(ctx context.Context) (err error) { // it comes beside the first status
			l, err = k.api.CoordinationV1().Leases("kube-node-lease").Get(ctx, node, metav1.GetOptions{})
			return err
		})
		k.is("holder", *l.Spec.HolderIdentity, node)
		return l.Spec.RenewTime.Time
	}
	renewed := lease()
	var n *corev1.Node
	k.eventually("the node is Ready", func(ctx context.Context) (err error) { // on a busy machine it is not, for moments
		if n, err = k.api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				return fmt.Errorf("%+v", c)
			}
		}
		return nil
	})
	k.sub("status", func(k *kit) {
		features.Shows(k, 148, 179)
		host, err := os.Hostname()
		if err != nil || strings.EqualFold(host, node) {
			k.Errorf("the host is called %q (%v): the test is blind", host, err)
		}
		for _, list := range []corev1.ResourceList{n.Status.Capacity, n.Status.Allocatable} {
			for _, r := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourcePods} {
				if q := list[r]; q.Sign() <= 0 {
					k.Errorf("%s is %s", r, q.String())
				}
			}
		}
		conditions := map[corev1.NodeConditionType]corev1.ConditionStatus{}
		for _, c := range n.Status.Conditions {
			conditions[c.Type] = c.Status
		}
		for kind, want := range map[corev1.NodeConditionType]corev1.ConditionStatus{
			corev1.NodeReady: "True", corev1.NodeMemoryPressure: "False", corev1.NodeDiskPressure: "False", corev1.NodePIDPressure: "False",
		} {
			k.is(string(kind), string(conditions[kind]), string(want))
		}
		k.is("InternalIP", k.field("node/"+node, `{.status.addresses[?(@.type=="InternalIP")].address}`), k.c.Nodes()[0].Addr.String())
		k.eventuallyHas([]string{"get", "node", node, "-o", "jsonpath={.status.images[*].names}"}, image)
		if n.Status.NodeInfo.KernelVersion == "" || n.Status.NodeInfo.KubeletVersion == "" || n.Status.NodeInfo.Architecture == "" {
			k.Errorf("node info %+v", n.Status.NodeInfo)
		}
	})
	k.sub("ready soon", func(k *kit) {
		first := shared.First // other tests make the node not Ready for a while
		// It happens once, while other packages' clusters may begin as well: how long the
		// API took tells how slow the machine is then.
		most := stalled + 2*shared.Served.Sub(shared.Began)
		if took := first.CreationTimestamp.Sub(shared.Began); took > most {
			k.Errorf("there was a Node %s after the start, want %s at most", took, most)
		}
		for _, c := range first.Status.Conditions {
			if took := c.LastTransitionTime.Sub(first.CreationTimestamp.Time); c.Type == corev1.NodeReady && took > most {
				k.Errorf("the node was Ready after %s, want %s at most", took, most)
			}
		}
	})
	k.sub("running configuration", func(k *kit) {
		features.Shows(k, 140)
		k.has(k.ok("get", "--raw", "/api/v1/nodes/"+node+"/proxy/configz"), `"nodeName":"`+node+`"`, `"maxPods":`+maxPods+`,`, `"cgroupRoot":"`+k.c.Nodes()[0].CgroupRoot+`"`)
	})
	k.sub("what the node and its pods use", func(k *kit) {
		features.Shows(k, 167)
		k.eventuallyHas([]string{"get", "--raw", "/api/v1/nodes/" + node + "/proxy/stats/summary"}, `"nodeName":"`+node+`"`, `"availableBytes":`, `"pods":[`, `"usageCoreNanoSeconds":`)
	})
	k.sub("one agent a folder", func(k *kit) {
		features.Shows(k, 139)
		k.has(k.clusterd("run", "--data", k.c.Nodes()[0].Data), "another clusterd is running", k.c.Nodes()[0].Data)
	})
	k.sub("flags and the configuration file", func(k *kit) {
		features.Shows(k, 52, 132, 137, 138, 151, 183)
		dir := filepath.Join(k.dir, "data")
		if err := os.Mkdir(dir, 0o700); err != nil {
			k.Fatal(err)
		}
		config := func(text string) {
			if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(text), 0o600); err != nil {
				k.Fatal(err)
			}
		}
		config("nonsense: 1\n")
		k.has(k.clusterd("run", "--data", dir), `unknown field "nonsense"`, filepath.Join(dir, "config.yaml"))
		config("maxPods: many\n")
		k.has(k.clusterd("run", "--data", dir), "maxPods")
		config("logFormat: prose\n")
		k.has(k.clusterd("run", "--data", dir), `"prose"`, "text or json")
		named := filepath.Join(k.dir, "named.yaml")
		if err := os.WriteFile(named, []byte("logFormat: verse\n"), 0o600); err != nil {
			k.Fatal(err)
		}
		k.has(k.clusterd("run", "--data", dir, "--config", named), `"verse"`, "text or json")
		k.has(k.clusterd("run", "--data", dir, "--config", named+"2"), "--config "+named+"2", "no such file")
		// A flag wins over the file; then all that is amiss is that nobody began.
		k.lacks(k.clusterd("run", "--data", dir, "--log-format=json"), "prose")
		k.has(k.clusterd("run", "--data", dir, "--log-format=json", "--feature-gates=NoSuchThing=true"), "--feature-gates", "NoSuchThing", "NAME=true")
		k.has(k.clusterdWith([]string{"CLUSTERD_MAX_PODS=several"}, "run", "--data", dir), `CLUSTERD_MAX_PODS="several", for --max-pods`)
		k.has(k.clusterd("init", "--prepare", "--data", dir+"2", "--cluster-cidr=10.96.0.0/12"), "overlap")
		if _, err := os.Stat(dir + "2"); !errors.Is(err, os.ErrNotExist) {
			k.Errorf("the refused init left %s (%v)", dir+"2", err)
		}
		for _, flag := range []string{"--windows-service", "--basic-auth-file=x"} {
			name, _, _ := strings.Cut(flag, "=")
			k.has(k.clusterd("run", flag), "unknown flag: "+name)
		}
	})
	k.sub("the lease moves", func(k *kit) {
		features.Shows(k, 172)
		next := func(before time.Time) time.Time {
			var now time.Time
			k.eventually("it was renewed", func(context.Context) error {
				if now = lease(); !now.After(before) {
					return fmt.Errorf("renewed at %s", now)
				}
				return nil
			})
			return now
		}
		from := next(renewed) // other tests may have kept it back before
		k.best("a renewal follows on another", 12*time.Second, func(int) time.Duration {
			to := next(from)
			gap := to.Sub(from)
			from = to
			if gap < 8*time.Second { // the one before was late, or it is renewed too often
				return time.Hour
			}
			return gap
		})
	})
}

// clusterd runs the program in the node's network; it must not succeed.
func (k *kit) clusterd(args ...string) string {
	k.Helper()
	return k.clusterdWith(nil, args...)
}

// clusterdWith is clusterd with further environment variables.
func (k *kit) clusterdWith(env []string, args ...string) string {
	k.Helper()
	ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
	defer cancel()
	cmd := k.c.Exec(ctx, node, k.c.Bin("clusterd"), args...)
	cmd.Env = append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err == nil || ctx.Err() != nil {
		k.Fatalf("clusterd %q passed (%v): %s", args, ctx.Err(), out.String())
	}
	return out.String()
}

// TestE2EXReboot is not parallel: it takes the power from the only node.
func TestE2EXReboot(t *testing.T) {
	k := start(t, "reboot")
	features.Shows(k, 80, 81, 283)
	k.ok("create", "configmap", "kept", "--from-literal=a=b")
	k.apply(web("web", 3))
	k.ok("rollout", "status", "deploy/web", timeoutFlag)
	before := map[string]bool{}
	for _, p := range k.webs(3) {
		before[p.Name] = true
	}
	if err := k.c.PowerOff(node); err != nil {
		k.Fatal(err)
	}
	if err := k.c.Start(k.Context(), node); err != nil {
		k.Fatal(err)
	}
	k.eventually("the API answers", func(ctx context.Context) error {
		return k.api.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	k.is("the ConfigMap", k.field("cm/kept", "{.data.a}"), "b")
	k.podsRestarted(3)
	k.ok("scale", "deploy/web", "--replicas=6")
	ips := map[string]string{}
	for _, p := range k.webs(6) {
		if p.Spec.NodeName != node {
			k.Errorf("%s is on %q", p.Name, p.Spec.NodeName)
		}
		if other := ips[p.Status.PodIP]; other != "" {
			k.Errorf("%s and %s both have %s", p.Name, other, p.Status.PodIP)
		}
		ips[p.Status.PodIP] = p.Name
		delete(before, p.Name)
	}
	if len(before) > 0 {
		k.Errorf("gone: %v", before)
	}
	k.ok("delete", "deploy", "web", "--cascade=foreground", timeoutFlag)
	k.eventually("no address is held", func(context.Context) error {
		b, err := os.ReadFile(filepath.Join(k.c.Nodes()[0].Data, "network", "ipam.json"))
		if err != nil {
			return err
		}
		var ipam struct{ Allocated map[string]string }
		k.decode(string(b), &ipam)
		if len(ipam.Allocated) > 0 {
			return fmt.Errorf("%s", b)
		}
		return nil
	})
}

// podsRestarted waits until so many pods were started again.
func (k *kit) podsRestarted(n int) {
	k.Helper()
	k.eventually("the pods were started again", func(ctx context.Context) error {
		list, err := k.api.CoreV1().Pods(k.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		again := 0
		for i := range list.Items {
			if restarts(1)(&list.Items[i]) {
				again++
			}
		}
		if again != n {
			return fmt.Errorf("%d of %d", again, len(list.Items))
		}
		return nil
	})
}

// webs waits for exactly so many Ready pods of the Deployment "web".
func (k *kit) webs(n int) []corev1.Pod {
	k.Helper()
	var pods []corev1.Pod
	k.eventually(fmt.Sprintf("%d pods are Ready", n), func(ctx context.Context) error {
		list, err := k.api.CoreV1().Pods(k.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil {
			return err
		}
		pods = list.Items
		ready := 0
		for i := range pods {
			if condition(&pods[i], corev1.PodReady) == corev1.ConditionTrue {
				ready++
			}
		}
		if ready != n || len(pods) != n {
			return fmt.Errorf("%d of %d", ready, len(pods))
		}
		return nil
	})
	return pods
}
