package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	ournames "github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// leaseSeconds of the nodes in this test. A quarter of it is what a busy machine
// may take to end the pods.
const leaseSeconds = 20

// TestE2EFencing: a node is lost in every way there is, one after the other. The
// pod of a StatefulSet comes back on another with its volume, without anybody's
// help, and the old one never writes after the new one has begun.
func TestE2EFencing(t *testing.T) {
	e := startBare(t, 3, func(c *cluster.Config) {
		c.Args = []string{fmt.Sprintf("--node-lease-duration=%ds", leaseSeconds)}
	})
	e.ready(3)
	f := &fencing{env: e, ns: e.namespace("fencing"), dir: t.TempDir()}
	f.volume()
	f.statefulSet()
	f.stateless()
	for _, fault := range []struct {
		how        string
		lose, back func(node string) error
	}{
		{"its cable is pulled", e.Partition, e.Heal},
		{"clusterd is stopped", e.Pause, e.Resume},
		{"clusterd is killed", e.Kill, func(node string) error { return e.Start(t.Context(), node) }},
		{"it is switched off", func(node string) error {
			if err := e.PowerOff(node); err != nil {
				return err
			}
			return e.Partition(node) // its kernel is this one, and would answer on
		}, func(node string) error { return errors.Join(e.Heal(node), e.Start(t.Context(), node)) }},
	} {
		node := f.lose(fault.how, fault.lose)
		// The lost node comes back, and finds that its pod runs on another node.
		f.back(node, fault.back)
	}
	t.Logf("pods that may be doubled run elsewhere after %s at best", slices.Min(f.took).Round(10*time.Millisecond))
}

type fencing struct {
	*env
	ns   string
	dir  string
	took []time.Duration // until the stateless pods of a lost node ran elsewhere
}

// volume makes a directory that all nodes reach, as a file server's is.
func (f *fencing) volume() {
	f.t.Helper()
	f.must(os.Chmod(f.dir, 0o777))
	_, err := f.api.CoreV1().PersistentVolumes().Create(f.t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "keeper"}, Spec: corev1.PersistentVolumeSpec{
		Capacity: someSpace, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: f.dir}}, StorageClassName: "shared",
		ClaimRef: &corev1.ObjectReference{Namespace: f.ns, Name: "data-keeper-0"},
	}}, metav1.CreateOptions{})
	f.must(err)
}

var someSpace = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}

// statefulSet runs a pod that signs what it writes, on n2 or n3: n1 is asked.
func (f *fencing) statefulSet() {
	f.t.Helper()
	p := pod("keeper", "sign", "/data/log", "$(UID)")
	p.Annotations = map[string]string{ournames.SelfFencing: "true"}
	p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "UID", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.uid"}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	p.Spec.Tolerations = gone(0)
	p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"n1"}}},
	}}}}}
	_, err := f.api.AppsV1().StatefulSets(f.ns).Create(f.t.Context(), &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "keeper"}, Spec: appsv1.StatefulSetSpec{
		Replicas: ptr.To[int32](1), Selector: &metav1.LabelSelector{MatchLabels: p.Labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: p.Labels, Annotations: p.Annotations}, Spec: p.Spec},
		VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To("shared"),
			Resources: corev1.VolumeResourceRequirements{Requests: someSpace},
		}}},
	}}, metav1.CreateOptions{})
	f.must(err)
	f.podReady(f.ns, "keeper-0")
	f.podIs(f.ns, "keeper-0", "said to end with its node's lease", func(p *corev1.Pod) error {
		if c := podCondition(p, ournames.SelfFencingCondition); c == nil || c.Status != corev1.ConditionTrue {
			return errors.New("it is not")
		}
		return nil
	})
}

// stateless runs pods that may be doubled: their controller does not wait for the lost ones.
func (f *fencing) stateless() {
	f.t.Helper()
	d := deployment("web", 4)
	d.Spec.Template.Spec.Tolerations = gone(0)
	f.createDeployment(f.ns, d)
	f.podsReady(f.ns, "app=web", 4)
}

// away counts the pods of an app that are Ready on other nodes.
func (f *fencing) away(ctx context.Context, app, node string) (n int, err error) {
	list, err := f.api.CoreV1().Pods(f.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
	if err == nil {
		for _, p := range list.Items {
			if podReady(&p) && p.DeletionTimestamp == nil && p.Spec.NodeName != node {
				n++
			}
		}
	}
	return n, err
}

// lose loses the node that has the set's pod, and waits until it runs elsewhere.
func (f *fencing) lose(how string, lose func(string) error) (node string) {
	f.t.Helper()
	before := f.podReady(f.ns, "keeper-0")
	node = before.Spec.NodeName
	began := time.Now()
	f.must(lose(node))
	for _, app := range []struct {
		name string
		n    int
	}{{"web", 4}, {"keeper", 1}} {
		f.within(3*time.Minute, app.name+" runs elsewhere", func(ctx context.Context) error {
			n, err := f.away(ctx, app.name, node)
			if err == nil && n < app.n {
				err = fmt.Errorf("%d of %d", n, app.n)
			}
			return err
		})
		took := time.Since(began)
		if app.name == "web" {
			f.took = append(f.took, took)
		}
		f.t.Logf("%s: %s: %s runs elsewhere after %s, with a lease of %d s", node, how, app.name, took.Round(10*time.Millisecond), leaseSeconds)
	}
	if now := f.get(f.ns, "keeper-0"); now.UID == before.UID {
		f.t.Errorf("the same pod is on %s and was on %s", now.Spec.NodeName, node)
	}
	l, err := f.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(f.t.Context(), node, metav1.GetOptions{})
	f.must(err)
	if *l.Spec.HolderIdentity == node || l.Annotations[ournames.Fenced] == "" {
		f.t.Errorf("the lease of %s: %+v, %v", node, l.Spec, l.Annotations)
	}
	f.eventuallyHas([]string{"describe", "node", node}, "NodeFenced")
	f.oneWriter()
	return node
}

func (f *fencing) isReady(node string) func(context.Context) error {
	return func(ctx context.Context) error {
		n, err := f.api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err == nil && !nodeReady(n) {
			err = fmt.Errorf("conditions %+v", n.Status.Conditions)
		}
		return err
	}
}

// back brings a node back; it takes its Lease up and has nothing of what it lost.
func (f *fencing) back(node string, bring func(string) error) {
	f.t.Helper()
	f.must(bring(node))
	f.eventually(node+" is Ready, and holds its lease", func(ctx context.Context) error {
		if err := f.isReady(node)(ctx); err != nil {
			return err
		}
		l, err := f.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, node, metav1.GetOptions{})
		if err == nil && (*l.Spec.HolderIdentity != node || l.Annotations[ournames.Fenced] != "") {
			err = fmt.Errorf("its lease: %+v, %v", l.Spec, l.Annotations)
		}
		return err
	})
	f.podsReady(f.ns, "app=web", 4)
	f.oneWriter()
}

// oneWriter looks at who has written to the volume: once another has begun, the
// one before has not gone on.
func (f *fencing) oneWriter() {
	f.t.Helper()
	b, err := os.ReadFile(filepath.Join(f.dir, "log"))
	f.must(err)
	b = b[:bytes.LastIndexByte(b, '\n')+1] // a line may be half there
	var writers []string
	seen := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		switch {
		case len(writers) > 0 && writers[len(writers)-1] == line:
		case seen[line]:
			f.t.Fatalf("pod %q writes again after %q", line, writers[len(writers)-1])
		default:
			seen[line] = true
			writers = append(writers, line)
		}
	}
	f.t.Logf("%d lines by %d writers, one after the other", bytes.Count(b, []byte("\n")), len(writers))
}
