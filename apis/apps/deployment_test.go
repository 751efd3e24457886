package apps

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

var webLabels = map[string]string{"app": "web"}

func newTemplate() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "web:1"}}},
	}
}

// newDeployment is a sound, defaulted deployment, after edit.
func newDeployment(edit func(*appsv1.Deployment)) *appsv1.Deployment {
	d := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "hello", ResourceVersion: "7", Generation: 3},
		Spec:       appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: webLabels}, Template: newTemplate()},
	}
	edit(d)
	defaultDeployment(d)
	return d
}

func TestValidateDeployment(t *testing.T) {
	const mismatch = "`selector` does not match template `labels`"
	rolling := func(unavailable, surge intstr.IntOrString) func(*appsv1.Deployment) {
		return func(d *appsv1.Deployment) {
			d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxUnavailable: &unavailable, MaxSurge: &surge}
		}
	}
	tests := []struct {
		name string
		edit func(*appsv1.Deployment)
		want []string
	}{
		{"sound", func(*appsv1.Deployment) {}, nil},
		{"no selector", func(d *appsv1.Deployment) { d.Spec.Selector = nil }, []string{
			"spec.selector: Required value",
			`spec.template.metadata.labels: Invalid value: {"app":"web"}: ` + mismatch,
		}},
		{"empty selector", func(d *appsv1.Deployment) { d.Spec.Selector = &metav1.LabelSelector{} }, []string{"spec.selector: Invalid value: {}: empty selector is invalid for deployment"}},
		{"selector of other labels", func(d *appsv1.Deployment) { d.Spec.Template.Labels = map[string]string{"app": "db"} },
			[]string{`spec.template.metadata.labels: Invalid value: {"app":"db"}: ` + mismatch}},
		{"selector with a bad operator", func(d *appsv1.Deployment) {
			d.Spec.Selector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: "Like"}}}
		}, []string{
			`spec.selector.matchExpressions[0].operator: Invalid value: "Like": not a valid selector operator`,
			"spec.selector: Invalid value: ",
		}},
		{"template runs once", func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.RestartPolicy, d.Spec.Template.Spec.ActiveDeadlineSeconds = corev1.RestartPolicyNever, ptr.To[int64](5)
		}, []string{
			`spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`,
			"spec.template.spec.activeDeadlineSeconds: Forbidden: activeDeadlineSeconds in deployment is not Supported",
		}},
		{"template without containers", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers = nil }, []string{"spec.template.spec.containers: Required value"}},
		{"numbers", func(d *appsv1.Deployment) {
			d.Spec.Replicas, d.Spec.RevisionHistoryLimit, d.Spec.MinReadySeconds = ptr.To[int32](-1), ptr.To[int32](-1), -1
		}, []string{
			"spec.replicas: Invalid value: -1: must be greater than or equal to 0",
			"spec.revisionHistoryLimit: Invalid value: -1: must be greater than or equal to 0",
			"spec.minReadySeconds: Invalid value: -1: must be greater than or equal to 0",
		}},
		{"deadline before ready", func(d *appsv1.Deployment) {
			d.Spec.MinReadySeconds, d.Spec.ProgressDeadlineSeconds = 10, ptr.To[int32](10)
		},
			[]string{"spec.progressDeadlineSeconds: Invalid value: 10: must be greater than minReadySeconds"}},
		{"strategy", func(d *appsv1.Deployment) { d.Spec.Strategy.Type = "Canary" }, []string{`spec.strategy.type: Unsupported value: "Canary": supported values: "Recreate", "RollingUpdate"`}},
		{"recreate and roll", func(d *appsv1.Deployment) {
			d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType, RollingUpdate: &appsv1.RollingUpdateDeployment{}}
		}, []string{"spec.strategy.rollingUpdate: Forbidden: may not be specified when strategy `type` is 'Recreate'"}},
		{"stands still", rolling(intstr.FromInt32(0), intstr.FromString("0%")), []string{"spec.strategy.rollingUpdate.maxUnavailable: Invalid value: 0: may not be 0 when `maxSurge` is 0"}},
		{"all of them", rolling(intstr.FromString("100%"), intstr.FromInt32(0)), nil},
		{"more than all", rolling(intstr.FromString("101%"), intstr.FromInt32(0)), []string{`spec.strategy.rollingUpdate.maxUnavailable: Invalid value: "101%": must not be greater than 100%`}},
		{"no percentage", rolling(intstr.FromString("many"), intstr.FromInt32(-1)), []string{
			`spec.strategy.rollingUpdate.maxUnavailable: Invalid value: "many": a valid percent string must be`,
			"spec.strategy.rollingUpdate.maxSurge: Invalid value: -1: must be greater than or equal to 0",
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { checktest.Faults(t, validateDeployment(newDeployment(test.edit)), test.want...) })
	}
}

func TestDeploymentUpdate(t *testing.T) {
	nop := func(*appsv1.Deployment) {}
	tests := []struct {
		name       string
		edit       func(*appsv1.Deployment)
		generation int64
		want       []string
	}{
		{"nothing", nop, 3, nil},
		{"labels", func(d *appsv1.Deployment) { d.Labels = webLabels }, 3, nil},
		{"annotations", func(d *appsv1.Deployment) { d.Annotations = webLabels }, 4, nil},
		{"replicas", func(d *appsv1.Deployment) { d.Spec.Replicas = ptr.To[int32](3) }, 4, nil},
		{"status is kept", func(d *appsv1.Deployment) { d.Status.Replicas = 9 }, 3, nil},
		{"selector", func(d *appsv1.Deployment) {
			d.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "web"}}
			d.Spec.Template.Labels["tier"] = "web"
		}, 4, []string{"spec.selector: Invalid value: {\"matchLabels\":{\"tier\":\"web\"}}: field is immutable"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			d, old := newDeployment(test.edit), newDeployment(nop)
			prepareDeploymentUpdate(d, old)
			if d.Generation != test.generation {
				t.Errorf("generation %d, want %d", d.Generation, test.generation)
			}
			if d.Status.Replicas != 0 {
				t.Error("an update changed the status")
			}
			checktest.Faults(t, validateDeploymentUpdate(d, old), test.want...)
		})
	}
}

func TestDeploymentStatusUpdate(t *testing.T) {
	kind := Deployment()
	old := newDeployment(func(d *appsv1.Deployment) { d.Status.CollisionCount = ptr.To[int32](2) })
	d := old.DeepCopy()
	d.Spec.Replicas = ptr.To[int32](50)
	d.Status = appsv1.DeploymentStatus{Replicas: 1, ReadyReplicas: 2, AvailableReplicas: 3, UpdatedReplicas: -1, CollisionCount: ptr.To[int32](1)}
	kind.Status.PrepareUpdate(d, old)
	if *d.Spec.Replicas != 1 {
		t.Error("a status update changed the spec")
	}
	checktest.Faults(t, kind.Status.ValidateUpdate(d, old),
		"status.updatedReplicas: Invalid value: -1: must be greater than or equal to 0",
		"status.readyReplicas: Invalid value: 2: cannot be greater than status.replicas",
		"status.availableReplicas: Invalid value: 3: cannot be greater than status.replicas",
		"status.availableReplicas: Invalid value: 3: cannot be greater than readyReplicas",
		"status.collisionCount: Invalid value: 1: cannot be decremented",
	)
	d.Status = appsv1.DeploymentStatus{}
	checktest.Faults(t, kind.Status.ValidateUpdate(d, old), "status.collisionCount: Invalid value: null: cannot be unset")
}

func TestDeploymentScale(t *testing.T) {
	scale := Deployment().Scale
	d := newDeployment(func(d *appsv1.Deployment) { d.Status.Replicas = 2 })
	scale.SetSpecReplicas(d, 5)
	selector, err := scale.Selector(d)
	if scale.SpecReplicas(d) != 5 || scale.StatusReplicas(d) != 2 || selector != "app=web" || err != nil {
		t.Errorf("spec %d, status %d, selector %q, %v", scale.SpecReplicas(d), scale.StatusReplicas(d), selector, err)
	}
	d.Spec.Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}
	if _, err := scale.Selector(d); err == nil {
		t.Error("a bad selector has a text")
	}
}
