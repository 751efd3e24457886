package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/features"
)

// TestE2EServers asks every server of a cluster, then takes the leader away,
// then the majority.
func TestE2EServers(t *testing.T) {
	e := start(t)
	ns := e.namespace("servers")
	ctx := t.Context()

	t.Run("read your write, through any server", func(t *testing.T) {
		features.Shows(t, 78)
		for i := range 20 {
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("written-%d", i)}}
			written, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, cm, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range e.Nodes() {
				api, _, err := e.Client(n.Name)
				if err != nil {
					t.Fatal(err)
				}
				read, err := api.CoreV1().ConfigMaps(ns).Get(ctx, cm.Name, metav1.GetOptions{})
				if err != nil {
					t.Errorf("%s: %v", n.Name, err)
				} else if read.UID != written.UID || read.ResourceVersion != written.ResourceVersion {
					t.Errorf("%s: read %v, wrote %v", n.Name, read.ObjectMeta, written.ObjectMeta)
				}
			}
		}
	})
	t.Run("only the leader's controllers work", func(t *testing.T) {
		features.Shows(t, 89)
		controllers := []string{"deployment", "replicaset", "gc"}
		adds := func(ctx context.Context, node, controller string) (string, error) {
			api, _, err := e.Client(node)
			if err != nil {
				return "", err
			}
			text, err := api.Discovery().RESTClient().Get().AbsPath("/metrics").Do(ctx).Raw()
			return queued(string(text), controller), err
		}
		tries := 0
		e.eventually("the leader's controllers have worked, and no others", func(context.Context) error {
			// Each wait in here has its own timeout.
			leader := e.leader()
			before := map[string]string{}
			for _, n := range e.Nodes() {
				for _, c := range controllers {
					var err error
					if before[n.Name+c], err = adds(ctx, n.Name, c); err != nil {
						return err
					}
				}
			}
			tries++
			name := fmt.Sprintf("worked-%d", tries)
			e.createDeployment(ns, deployment(name, 1))
			e.podsReady(ns, "app="+name, 1)
			if err := e.api.AppsV1().Deployments(ns).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
				return err
			}
			e.podsReady(ns, "app="+name, 0) // collected as garbage
			for _, n := range e.Nodes() {
				for _, c := range controllers {
					after, err := adds(ctx, n.Name, c)
					if err != nil {
						return err
					}
					if works := after != before[n.Name+c]; works != (n.Name == leader) {
						return fmt.Errorf("%s, with %s leading: the %s controller works: %v", n.Name, leader, c, works)
					}
				}
			}
			return nil
		})
	})
	t.Run("made while there is no leader", func(t *testing.T) {
		features.Shows(t, 92)
		leader := e.leader()
		if err := e.Kill(leader); err != nil {
			t.Fatal(err)
		}
		e.use(e.other(leader))
		e.eventually("a Deployment is taken", func(ctx context.Context) error {
			_, err := e.api.AppsV1().Deployments(ns).Create(ctx, deployment("later", 2), metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil // an answer was lost
			}
			return err
		})
		// One may have been given to the lost node before anyone knew that it was
		// lost. It is replaced after the eviction delay, and stays Terminating
		// until its node says that it has ended.
		e.eventually("2 pods app=later are Ready", func(ctx context.Context) error {
			list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=later"})
			if err != nil {
				return err
			}
			ready := 0
			for i := range list.Items {
				if podReady(&list.Items[i]) && list.Items[i].DeletionTimestamp == nil {
					ready++
				}
			}
			if ready != 2 {
				return fmt.Errorf("%d of %d are", ready, len(list.Items))
			}
			return nil
		})
		if err := e.Start(ctx, leader); err != nil {
			t.Fatal(err)
		}
		e.podsReady(ns, "app=later", 2)
		e.eventually("all are Ready", func(ctx context.Context) error {
			list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, n := range list.Items {
				if !nodeReady(&n) {
					return errors.New(n.Name + " is not")
				}
			}
			return nil
		})
	})
	t.Run("a write without a majority", func(t *testing.T) {
		features.Shows(t, 79)
		e.use("n1")
		e.eventually("n1 serves", func(ctx context.Context) error { // it may have been the leader that was killed
			return e.api.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		})
		for _, n := range []string{"n2", "n3"} {
			if err := e.Kill(n); err != nil {
				t.Fatal(err)
			}
		}
		// A plain request: client-go would try again, as the answer asks it to.
		client, err := rest.HTTPClientFor(e.config)
		if err != nil {
			t.Fatal(err)
		}
		client.Timeout = testTimeout
		began := time.Now()
		resp, err := client.Post(e.config.Host+"/api/v1/namespaces/"+ns+"/configmaps", "application/json",
			strings.NewReader(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"lost"}}`))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode < 500 || resp.StatusCode > 504 || !strings.Contains(string(body), `"kind":"Status"`) {
			t.Errorf("%s: %s", resp.Status, body)
		}
		t.Logf("refused after %s: %s (Retry-After %q)", time.Since(began).Round(time.Millisecond), body, resp.Header.Get("Retry-After"))
		for _, n := range []string{"n2", "n3"} {
			if err := e.Start(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}
		e.eventually("writes pass again", func(ctx context.Context) error {
			_, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "again-"}}, metav1.CreateOptions{})
			return err
		})
	})
}

// queued reads from a server's metrics how many things a controller's queue has
// ever been given; "" if the controller never ran there.
func queued(metrics, controller string) string {
	for line := range strings.Lines(metrics) {
		if n, ok := strings.CutPrefix(line, `workqueue_adds_total{name="`+controller+`"} `); ok {
			return strings.TrimSpace(n)
		}
	}
	return ""
}

// TestE2EPlacement lets the scheduler choose among nodes that would all do.
func TestE2EPlacement(t *testing.T) {
	e := start(t)
	ns := e.namespace("placement")
	on := func(name string) string {
		t.Helper()
		return e.podIs(ns, name, "bound", func(p *corev1.Pod) error {
			if p.Spec.NodeName == "" {
				return errors.New("not yet")
			}
			return nil
		}).Spec.NodeName
	}
	e.ctl("label", "node", "n2", "disk=ssd")
	disk := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{"ssd"}}}}

	t.Run("ties are broken at random", func(t *testing.T) {
		features.Shows(t, 123)
		// Nothing is started for these: their image is nowhere.
		const pods = 100
		for i := range pods {
			p := pod(fmt.Sprintf("tie-%d", i))
			p.Labels = map[string]string{"tie": "yes"}
			p.Spec.Containers[0].Image = "clusterd.local/none:1"
			p.Spec.Containers[0].ImagePullPolicy = corev1.PullNever
			e.create(ns, p)
		}
		count := map[string]int{}
		for i := range pods {
			count[on(fmt.Sprintf("tie-%d", i))]++
		}
		t.Logf("%v", count)
		if len(count) != 3 {
			t.Errorf("%d pods went to %v", pods, count)
		}
		e.ctl("-n", ns, "delete", "pods", "-l", "tie=yes", "--grace-period=0", "--force", "--timeout=110s")
	})
	t.Run("node affinity", func(t *testing.T) {
		features.Shows(t, 117)
		must := pod("must", "sleep")
		must.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{disk}}}}
		e.create(ns, must)
		likes := pod("likes", "sleep")
		likes.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 100, Preference: disk}}}}
		e.create(ns, likes)
		never := pod("never", "sleep")
		never.Spec.Affinity = must.Spec.Affinity.DeepCopy()
		never.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{"tape"}
		e.create(ns, never)
		for _, name := range []string{"must", "likes"} {
			if got := on(name); got != "n2" {
				t.Errorf("%s is on %s", name, got)
			}
		}
		e.podIs(ns, "never", "unschedulable", func(p *corev1.Pod) error {
			if c := podCondition(p, corev1.PodScheduled); c == nil || c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "affinity") {
				return fmt.Errorf("%+v", c)
			}
			return nil
		})
		e.ctl("-n", ns, "delete", "pod", "must", "likes", "never")
	})
	t.Run("one a node", func(t *testing.T) {
		features.Shows(t, 118)
		d := deployment("apart", 4)
		d.Spec.Template.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "kubernetes.io/hostname", LabelSelector: d.Spec.Selector}}}}
		e.createDeployment(ns, d)
		e.eventually("three are bound and one is not", func(ctx context.Context) error {
			list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=apart"})
			if err != nil {
				return err
			}
			nodes, refused := map[string]int{}, 0
			for i := range list.Items {
				p := &list.Items[i]
				if p.Spec.NodeName != "" {
					nodes[p.Spec.NodeName]++
				} else if c := podCondition(p, corev1.PodScheduled); c != nil && c.Status == corev1.ConditionFalse {
					refused++
				}
			}
			if len(nodes) != 3 || refused != 1 {
				return fmt.Errorf("%v, %d refused", nodes, refused)
			}
			return nil
		})
		near := pod("near", "sleep")
		near.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "kubernetes.io/hostname", LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"is": "there"}}}}}}
		e.create(ns, near)
		e.podIs(ns, "near", "unschedulable", func(p *corev1.Pod) error {
			if c := podCondition(p, corev1.PodScheduled); c == nil || c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "affinity") {
				return fmt.Errorf("%+v", c)
			}
			return nil
		})
		there := pod("there", "sleep")
		there.Labels = map[string]string{"is": "there"}
		e.create(ns, there)
		if a, b := on("near"), on("there"); a != b {
			t.Errorf("near is on %s, what it wants to be near to on %s", a, b)
		}
		e.ctl("-n", ns, "delete", "pod", "near", "there")
		e.ctl("-n", ns, "delete", "deployment", "apart", "--cascade=foreground", "--timeout=110s")
	})
	t.Run("the emptier one", func(t *testing.T) {
		features.Shows(t, 120, 122, 244)
		n, err := e.api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		asking := func(name string, percent int64, node string) {
			p := pod(name, "sleep")
			if node != "" {
				p.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": node}
			}
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{
				corev1.ResourceCPU:    *resource.NewMilliQuantity(n.Status.Allocatable.Cpu().MilliValue()*percent/100, resource.DecimalSI),
				corev1.ResourceMemory: *resource.NewQuantity(n.Status.Allocatable.Memory().Value()*percent/100, resource.BinarySI),
			}
			e.create(ns, p)
		}
		asking("fills-1", 50, "n1")
		asking("fills-2", 30, "n2")
		asking("fills-3", 40, "n3")
		for _, name := range []string{"fills-1", "fills-2", "fills-3"} {
			on(name)
		}
		asking("chooses", 10, "")
		if got := on("chooses"); got != "n2" {
			t.Errorf("it is on %s, and n2 is the emptiest", got)
		}
	})
}
