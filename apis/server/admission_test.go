package server_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

func TestNamespaceLifecycle(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, spaces := t.Context(), s.Client.CoreV1().Namespaces()
	_, err := s.Client.CoreV1().ConfigMaps("nowhere").Create(ctx, configMap("x", nil), metav1.CreateOptions{})
	if !apierrors.IsNotFound(err) || err.Error() != `namespaces "nowhere" not found` {
		t.Errorf("create in a missing namespace: %v", err)
	}
	// So is a pod, whose account other plugins would miss there.
	_, err = s.Client.CoreV1().Pods("nowhere").Create(ctx, pod("x"), metav1.CreateOptions{})
	if !apierrors.IsNotFound(err) || err.Error() != `namespaces "nowhere" not found` {
		t.Errorf("create a pod in a missing namespace: %v", err)
	}
	for _, name := range []string{"default", "kube-system", "kube-public", "kube-node-lease"} {
		if err := spaces.Delete(ctx, name, metav1.DeleteOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "this namespace may not be deleted") {
			t.Errorf("delete %s: %v", name, err)
		}
	}

	must[*corev1.Namespace](t)(spaces.Create(ctx, &corev1.Namespace{ObjectMeta: meta("brief")}, metav1.CreateOptions{}))
	maps := s.Client.CoreV1().ConfigMaps("brief")
	must[*corev1.ConfigMap](t)(maps.Create(ctx, configMap("before", nil), metav1.CreateOptions{}))
	if err := spaces.Delete(ctx, "brief", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ns := must[*corev1.Namespace](t)(spaces.Get(ctx, "brief", metav1.GetOptions{}))
	if ns.Status.Phase != corev1.NamespaceTerminating || ns.DeletionTimestamp == nil {
		t.Errorf("a deleted namespace is %s (%v), want Terminating", ns.Status.Phase, ns.DeletionTimestamp)
	}
	_, err = maps.Create(ctx, configMap("after", nil), metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) ||
		!strings.Contains(err.Error(), "unable to create new content in namespace brief because it is being terminated") {
		t.Errorf("create in a terminating namespace: %v", err)
	}
	if err := maps.Delete(ctx, "before", metav1.DeleteOptions{}); err != nil {
		t.Errorf("delete in a terminating namespace: %v", err)
	}
	// A second delete changes nothing: the namespace waits for its finalizer.
	if err := spaces.Delete(ctx, "brief", metav1.DeleteOptions{}); err != nil {
		t.Errorf("second delete: %v", err)
	}
	ns.Spec.Finalizers = nil
	must[*corev1.Namespace](t)(spaces.Finalize(ctx, ns, metav1.UpdateOptions{}))
	if _, err := spaces.Get(ctx, "brief", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after finalize: %v, want NotFound", err)
	}
}

func TestPodsAreCompleted(t *testing.T) {
	seconds := int64(7)
	s := servertest.Start(t, func(c *server.Config) { c.TolerationSeconds = &seconds })
	ctx := t.Context()
	must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Create(ctx, &corev1.ServiceAccount{
		ObjectMeta: meta("robot"), ImagePullSecrets: []corev1.LocalObjectReference{{Name: "registry"}},
	}, metav1.CreateOptions{}))

	plain := createPod(t, s.Client, pod("plain"), "")
	if plain.Spec.ServiceAccountName != "default" || plain.Spec.Priority == nil || *plain.Spec.Priority != 0 {
		t.Errorf("service account %q, priority %v", plain.Spec.ServiceAccountName, plain.Spec.Priority)
	}
	tolerated := map[string]int64{}
	for _, toleration := range plain.Spec.Tolerations {
		tolerated[toleration.Key] = *toleration.TolerationSeconds
	}
	if tolerated["node.kubernetes.io/not-ready"] != 7 || tolerated["node.kubernetes.io/unreachable"] != 7 {
		t.Errorf("tolerations: %v", plain.Spec.Tolerations)
	}

	picky := pod("picky")
	picky.Spec.ServiceAccountName = "robot"
	picky.Spec.PriorityClassName = "system-node-critical"
	picky.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	picky = createPod(t, s.Client, picky, "")
	if len(picky.Spec.Tolerations) != 1 || *picky.Spec.Priority != 2000001000 || len(picky.Spec.ImagePullSecrets) != 1 {
		t.Errorf("picky: %+v", picky.Spec)
	}

	for name, spoil := range map[string]func(*corev1.PodSpec){
		`error looking up service account default/ghost: serviceaccounts "ghost" not found`: func(p *corev1.PodSpec) { p.ServiceAccountName = "ghost" },
		`no PriorityClass with name vip was found`:                                          func(p *corev1.PodSpec) { p.PriorityClassName = "vip" },
	} {
		p := pod("bad")
		spoil(&p.Spec)
		if _, err := s.Client.CoreV1().Pods("default").Create(ctx, p, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), name) {
			t.Errorf("%v, want Forbidden: %s", err, name)
		}
	}
}

func TestPriorityClasses(t *testing.T) {
	s := servertest.Start(t, nil)
	classes := s.Client.SchedulingV1().PriorityClasses()
	never := corev1.PreemptNever
	for _, class := range []*schedulingv1.PriorityClass{
		{ObjectMeta: meta("high"), Value: 1000, PreemptionPolicy: &never},
		{ObjectMeta: meta("usual"), Value: 10, GlobalDefault: true},
	} {
		must[*schedulingv1.PriorityClass](t)(classes.Create(t.Context(), class, metav1.CreateOptions{}))
	}
	for name, want := range map[string]struct {
		class, gets string
		value       int32
		policy      corev1.PreemptionPolicy
	}{
		"named":   {"high", "high", 1000, corev1.PreemptNever},
		"unnamed": {"", "usual", 10, corev1.PreemptLowerPriority},
		"system":  {"system-cluster-critical", "system-cluster-critical", 2000000000, corev1.PreemptLowerPriority},
	} {
		p := pod(name)
		p.Spec.PriorityClassName = want.class
		spec := createPod(t, s.Client, p, "").Spec
		if spec.PriorityClassName != want.gets || *spec.Priority != want.value || *spec.PreemptionPolicy != want.policy {
			t.Errorf("%s: %s %d %s", name, spec.PriorityClassName, *spec.Priority, *spec.PreemptionPolicy)
		}
	}
	lying := pod("lying")
	more := int32(2000)
	lying.Spec.PriorityClassName, lying.Spec.Priority = "high", &more
	if _, err := s.Client.CoreV1().Pods("default").Create(t.Context(), lying, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("%v, want Forbidden", err)
	}
	// Nor may the policy contradict the class; to repeat it is fine.
	eager := pod("eager")
	eager.Spec.PriorityClassName, eager.Spec.PreemptionPolicy = "high", ptr.To(corev1.PreemptLowerPriority)
	if _, err := s.Client.CoreV1().Pods("default").Create(t.Context(), eager, metav1.CreateOptions{}); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), "the string value of PreemptionPolicy (PreemptLowerPriority) must not be provided in pod spec") {
		t.Errorf("a policy against the class: %v, want Forbidden", err)
	}
	eager.Spec.PreemptionPolicy = &never
	made := createPod(t, s.Client, eager, "")
	group := &schedulingv1beta1.PodGroup{ObjectMeta: meta("eager"), Spec: schedulingv1beta1.PodGroupSpec{
		PriorityClassName: "high", PreemptionPolicy: ptr.To(schedulingv1beta1.PreemptLowerPriority),
		SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{Basic: &schedulingv1beta1.BasicSchedulingPolicy{}},
	}}
	if _, err := s.Client.SchedulingV1beta1().PodGroups("default").Create(t.Context(), group, metav1.CreateOptions{}); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), "must not be provided in pod group spec") {
		t.Errorf("a group's policy against the class: %v, want Forbidden", err)
	}

	// Who writes a pod again need not know what admission gave it.
	made.Spec.Priority, made.Spec.PreemptionPolicy, made.Labels = nil, nil, map[string]string{"written": "anew"}
	made = must[*corev1.Pod](t)(s.Client.CoreV1().Pods("default").Update(t.Context(), made, metav1.UpdateOptions{}))
	if made.Spec.Priority == nil || *made.Spec.Priority != 1000 || made.Spec.PreemptionPolicy == nil || *made.Spec.PreemptionPolicy != never {
		t.Errorf("after a write without priority: %v, %v", made.Spec.Priority, made.Spec.PreemptionPolicy)
	}

	// There is one default.
	second := func(err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "PriorityClass usual is already marked as default. Only one default can exist") {
			t.Errorf("a second default: %v, want Forbidden", err)
		}
	}
	_, err := classes.Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: meta("other"), Value: 5, GlobalDefault: true}, metav1.CreateOptions{})
	second(err)
	other := must[*schedulingv1.PriorityClass](t)(classes.Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: meta("other"), Value: 5}, metav1.CreateOptions{}))
	other.GlobalDefault = true
	_, err = classes.Update(t.Context(), other, metav1.UpdateOptions{})
	second(err)
	usual := must[*schedulingv1.PriorityClass](t)(classes.Get(t.Context(), "usual", metav1.GetOptions{}))
	usual.Description = "still the one"
	must[*schedulingv1.PriorityClass](t)(classes.Update(t.Context(), usual, metav1.UpdateOptions{}))
}

func TestRuntimeClasses(t *testing.T) {
	features.Shows(t, 176)
	features.Conforms(t, 331)
	s := servertest.Start(t, nil)
	ctx, pods := t.Context(), s.Client.CoreV1().Pods("default")
	taint := corev1.Toleration{Key: "sandbox", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	cost := corev1.ResourceList{"cpu": apiresource.MustParse("250m"), "memory": apiresource.MustParse("120Mi")}
	for _, class := range []*nodev1.RuntimeClass{
		{ObjectMeta: meta("plain"), Handler: "runc"},
		{
			ObjectMeta: meta("costly"), Handler: "runc",
			Overhead:   &nodev1.Overhead{PodFixed: cost},
			Scheduling: &nodev1.Scheduling{NodeSelector: map[string]string{"disk": "fast"}, Tolerations: []corev1.Toleration{taint}},
		},
	} {
		must[*nodev1.RuntimeClass](t)(s.Client.NodeV1().RuntimeClasses().Create(ctx, class, metav1.CreateOptions{}))
	}
	of := func(name, class string, edits ...func(*corev1.PodSpec)) *corev1.Pod {
		p := pod(name)
		if class != "" {
			p.Spec.RuntimeClassName = &class
		}
		for _, edit := range edits {
			edit(&p.Spec)
		}
		return p
	}

	if spec := createPod(t, s.Client, of("a", "plain"), "").Spec; spec.Overhead != nil || len(spec.NodeSelector) > 0 {
		t.Errorf("a class that says nothing changed the pod: %v, %v", spec.Overhead, spec.NodeSelector)
	}
	full := createPod(t, s.Client, of("b", "costly", func(p *corev1.PodSpec) {
		p.NodeSelector = map[string]string{"zone": "one", "disk": "fast"}
		p.Tolerations = []corev1.Toleration{taint}
		p.Overhead = cost // what the class says may be repeated
	}), "").Spec
	times := 0
	for _, toleration := range full.Tolerations {
		if toleration == taint {
			times++
		}
	}
	if !equality.Semantic.DeepEqual(full.Overhead, cost) || full.NodeSelector["zone"] != "one" || full.NodeSelector["disk"] != "fast" || times != 1 {
		t.Errorf("overhead %v, nodeSelector %v, tolerations %v", full.Overhead, full.NodeSelector, full.Tolerations)
	}
	bare := createPod(t, s.Client, of("c", "costly"), "").Spec
	if !equality.Semantic.DeepEqual(bare.Overhead, cost) || bare.NodeSelector["disk"] != "fast" || !slices.Contains(bare.Tolerations, taint) {
		t.Errorf("overhead %v, nodeSelector %v, tolerations %v", bare.Overhead, bare.NodeSelector, bare.Tolerations)
	}

	for want, p := range map[string]*corev1.Pod{
		`pod rejected: RuntimeClass "ghost" not found`: of("bad", "ghost"),
		"pod rejected: conflict: runtimeClass.scheduling.nodeSelector[disk] = fast; pod.spec.nodeSelector[disk] = slow": of("bad", "costly",
			func(p *corev1.PodSpec) { p.NodeSelector = map[string]string{"disk": "slow"} }),
		`pod rejected: spec.overhead does not match the one that RuntimeClass "costly" defines`: of("bad", "costly",
			func(p *corev1.PodSpec) { p.Overhead = corev1.ResourceList{"cpu": apiresource.MustParse("1")} }),
		"pod rejected: spec.overhead is set and the pod's RuntimeClass defines none": of("bad", "",
			func(p *corev1.PodSpec) { p.Overhead = cost }),
	} {
		if _, err := pods.Create(ctx, p, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want Forbidden: %s", err, want)
		}
	}
}

// TestMirrorPods: a node shows its static pods, and gains no right by it.
func TestMirrorPods(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx := t.Context()
	n1 := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(s.ClientConfigFor("system:node:n1", "system:nodes")))
	node := must[*corev1.Node](t)(s.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: meta("n1")}, metav1.CreateOptions{}))
	mirror := func(name string, edits ...func(*corev1.Pod)) *corev1.Pod {
		p := pod(name)
		p.Spec.NodeName = "n1"
		p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "hash"}
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n1", UID: node.UID, Controller: ptr.To(true)}}
		for _, edit := range edits {
			edit(p)
		}
		return p
	}
	made := must[*corev1.Pod](t)(n1.CoreV1().Pods("default").Create(ctx, mirror("good"), metav1.CreateOptions{}))
	if made.Spec.ServiceAccountName != "" {
		t.Errorf("a mirror pod runs as %q", made.Spec.ServiceAccountName)
	}
	for name, test := range map[string]struct {
		edit func(*corev1.Pod)
		want string
	}{
		"plain":          {func(p *corev1.Pod) { p.Annotations = nil }, `pod does not have "kubernetes.io/config.mirror" annotation`},
		"foreign":        {func(p *corev1.Pod) { p.Spec.NodeName = "n2" }, "with spec.nodeName set to itself"},
		"orphan":         {func(p *corev1.Pod) { p.OwnerReferences = nil }, "a single owner reference set to itself"},
		"of n2":          {func(p *corev1.Pod) { p.OwnerReferences[0].Name = "n2" }, "a single owner reference set to itself"},
		"of a former n1": {func(p *corev1.Pod) { p.OwnerReferences[0].UID = "former" }, "node n1 UID mismatch: expected " + string(node.UID) + " got former"},
		"not controlled": {func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil }, "with a controller owner reference set to itself"},
		"in n1's way":    {func(p *corev1.Pod) { p.OwnerReferences[0].BlockOwnerDeletion = ptr.To(true) }, "must not set blockOwnerDeletion"},
		"curious":        {func(p *corev1.Pod) { p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}} }, "a mirror pod may not reference secrets"},
		"other account":  {func(p *corev1.Pod) { p.Spec.ServiceAccountName = "robot" }, "reference"},
		"in env": {func(p *corev1.Pod) {
			p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}}}}
		}, "can not create pods that reference configmaps/c"},
	} {
		_, err := n1.CoreV1().Pods("default").Create(ctx, mirror(strings.NewReplacer(" ", "-", "'", "").Replace(name), test.edit), metav1.CreateOptions{})
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want Forbidden: %s", name, err, test.want)
		}
	}
	// Its status and its end are the node's; another node's are not.
	made.Status.Phase = corev1.PodRunning
	must[*corev1.Pod](t)(n1.CoreV1().Pods("default").UpdateStatus(ctx, made, metav1.UpdateOptions{}))
	n2 := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(s.ClientConfigFor("system:node:n2", "system:nodes")))
	if err := n2.CoreV1().Pods("default").Delete(ctx, "good", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("another node deletes it: %v", err)
	}
	if err := n1.CoreV1().Pods("default").Delete(ctx, "good", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Error(err)
	}
}
