package apps

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

// newStatefulSet is a sound, defaulted set with a claim that its container
// mounts, after edit.
func newStatefulSet(edit func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
	s := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "hello", ResourceVersion: "7", Generation: 3},
		Spec: appsv1.StatefulSetSpec{
			ServiceName: "db",
			Selector:    &metav1.LabelSelector{MatchLabels: webLabels},
			Template:    newTemplate(),
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{
				ObjectMeta: metav1.ObjectMeta{Name: "data"},
				Spec: corev1.PersistentVolumeClaimSpec{
					AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
				},
			}},
		},
	}
	s.Spec.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	edit(s)
	defaultStatefulSet(s)
	return s
}

func TestValidateStatefulSet(t *testing.T) {
	rolling := func(r appsv1.RollingUpdateStatefulSetStrategy) func(*appsv1.StatefulSet) {
		return func(s *appsv1.StatefulSet) { s.Spec.UpdateStrategy.RollingUpdate = &r }
	}
	tests := []struct {
		name string
		edit func(*appsv1.StatefulSet)
		want []string
	}{
		{"sound", func(*appsv1.StatefulSet) {}, nil},
		{"no service", func(s *appsv1.StatefulSet) { s.Spec.ServiceName = "" }, nil},
		{"numbers", func(s *appsv1.StatefulSet) {
			s.Spec.Replicas, s.Spec.MinReadySeconds, s.Spec.Ordinals = ptr.To[int32](-1), -1, &appsv1.StatefulSetOrdinals{Start: -1}
		}, []string{
			"spec.replicas: Invalid value: -1: must be greater than or equal to 0",
			"spec.minReadySeconds: Invalid value: -1: must be greater than or equal to 0",
			"spec.ordinals.start: Invalid value: -1: must be greater than or equal to 0",
		}},
		{"policies", func(s *appsv1.StatefulSet) {
			s.Spec.PodManagementPolicy = "Backwards"
			s.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenScaled: "Burn"}
		}, []string{
			`spec.podManagementPolicy: Unsupported value: "Backwards"`,
			`spec.persistentVolumeClaimRetentionPolicy.whenScaled: Unsupported value: "Burn"`,
		}},
		{"partition", rolling(appsv1.RollingUpdateStatefulSetStrategy{Partition: ptr.To[int32](-1)}),
			[]string{"spec.updateStrategy.rollingUpdate.partition: Invalid value: -1: must be greater than or equal to 0"}},
		{"none unavailable", rolling(appsv1.RollingUpdateStatefulSetStrategy{MaxUnavailable: ptr.To(intstr.FromString("0%"))}),
			[]string{"spec.updateStrategy.rollingUpdate.maxUnavailable: Invalid value: \"0%\": cannot be 0"}},
		{"more than all", rolling(appsv1.RollingUpdateStatefulSetStrategy{MaxUnavailable: ptr.To(intstr.FromString("101%"))}),
			[]string{"spec.updateStrategy.rollingUpdate.maxUnavailable: Invalid value: \"101%\": must not be greater than 100%"}},
		{"on delete with a roll", func(s *appsv1.StatefulSet) {
			s.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: "OnDelete", RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{}}
		}, []string{"spec.updateStrategy.rollingUpdate: Invalid value: {}: only allowed for updateStrategy 'RollingUpdate'"}},
		{"mount without claim", func(s *appsv1.StatefulSet) { s.Spec.VolumeClaimTemplates = nil },
			[]string{`spec.template.spec.containers[0].volumeMounts[0].name: Not found: "data"`}},
		{"claims", func(s *appsv1.StatefulSet) {
			bad := s.Spec.VolumeClaimTemplates[0].DeepCopy()
			bad.Spec.AccessModes, bad.Spec.Resources.Requests = nil, nil
			s.Spec.VolumeClaimTemplates = append(s.Spec.VolumeClaimTemplates, *bad)
		}, []string{
			`spec.volumeClaimTemplates[1].metadata.name: Duplicate value: "data"`,
			"spec.volumeClaimTemplates[1].spec.accessModes: Required value: at least 1 access mode is required",
			"spec.volumeClaimTemplates[1].spec.resources[storage]: Required value",
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, StatefulSet().Validate(newStatefulSet(test.edit)), test.want...)
		})
	}
}

func TestStatefulSetUpdate(t *testing.T) {
	const forbidden = "spec: Forbidden: updates to statefulset spec for fields other than"
	tests := []struct {
		name       string
		edit       func(*appsv1.StatefulSet)
		generation int64
		want       []string
	}{
		{"nothing", func(*appsv1.StatefulSet) {}, 3, nil},
		{"annotations are no wish", func(s *appsv1.StatefulSet) { s.Annotations = webLabels }, 3, nil},
		{"what may change", func(s *appsv1.StatefulSet) {
			s.Spec.Replicas, s.Spec.MinReadySeconds = ptr.To[int32](5), 3
			s.Spec.Template.Spec.Containers[0].Image = "db:16"
			s.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: 2}
		}, 4, nil},
		{"service name", func(s *appsv1.StatefulSet) { s.Spec.ServiceName = "other" }, 4, []string{forbidden}},
		{"claims", func(s *appsv1.StatefulSet) {
			s.Spec.VolumeClaimTemplates[0].Spec.StorageClassName = ptr.To("fast")
		}, 4, []string{forbidden}},
	}
	k := StatefulSet()
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s, old := newStatefulSet(test.edit), newStatefulSet(func(*appsv1.StatefulSet) {})
			k.PrepareUpdate(s, old)
			if s.Generation != test.generation {
				t.Errorf("generation %d, want %d", s.Generation, test.generation)
			}
			checktest.Faults(t, k.ValidateUpdate(s, old), test.want...)
		})
	}
	s := newStatefulSet(func(*appsv1.StatefulSet) {})
	s.Status = appsv1.StatefulSetStatus{Replicas: 1, ReadyReplicas: 2, AvailableReplicas: 3}
	checktest.Faults(t, k.Status.ValidateUpdate(s, newStatefulSet(func(s *appsv1.StatefulSet) { s.Status.CollisionCount = ptr.To[int32](1) })),
		"status.readyReplicas: Invalid value: 2: cannot be greater than status.replicas",
		"status.availableReplicas: Invalid value: 3: cannot be greater than status.replicas",
		"status.availableReplicas: Invalid value: 3: cannot be greater than status.readyReplicas",
		"status.collisionCount: Invalid value: null: cannot be unset")
}

func TestValidateDaemonSet(t *testing.T) {
	daemon := func(edit func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
		d := &appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Name: "logs", Namespace: "hello", ResourceVersion: "7"},
			Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: webLabels}, Template: newTemplate()},
		}
		edit(d)
		defaultDaemonSet(d)
		return d
	}
	rolling := func(unavailable, surge intstr.IntOrString) func(*appsv1.DaemonSet) {
		return func(d *appsv1.DaemonSet) {
			d.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &unavailable, MaxSurge: &surge}
		}
	}
	tests := []struct {
		name string
		edit func(*appsv1.DaemonSet)
		want []string
	}{
		{"sound", func(*appsv1.DaemonSet) {}, nil},
		{"surge", rolling(intstr.FromInt32(0), intstr.FromString("50%")), nil},
		{"neither", rolling(intstr.FromInt32(0), intstr.FromInt32(0)), []string{"spec.updateStrategy.rollingUpdate.maxUnavailable: Required value: cannot be 0 when maxSurge is 0"}},
		{"both", rolling(intstr.FromInt32(1), intstr.FromInt32(1)), []string{"spec.updateStrategy.rollingUpdate.maxSurge: Invalid value: 1: may not be set when maxUnavailable is non-zero"}},
		{"more than all", rolling(intstr.FromString("200%"), intstr.FromInt32(0)), []string{`spec.updateStrategy.rollingUpdate.maxUnavailable: Invalid value: "200%": must not be greater than 100%`}},
		{"strategy", func(d *appsv1.DaemonSet) { d.Spec.UpdateStrategy.Type = "Later" }, []string{`spec.updateStrategy.type: Unsupported value: "Later": supported values: "OnDelete", "RollingUpdate"`}},
		{"runs once", func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever }, []string{`spec.template.spec.restartPolicy: Unsupported value: "Never"`}},
		{"history", func(d *appsv1.DaemonSet) { d.Spec.RevisionHistoryLimit = ptr.To[int32](-1) }, []string{"spec.revisionHistoryLimit: Invalid value: -1: must be greater than or equal to 0"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, DaemonSet().Validate(daemon(test.edit)), test.want...)
		})
	}
	moved := daemon(func(d *appsv1.DaemonSet) {
		d.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
		d.Spec.Template.Labels = map[string]string{"a": "b"}
	})
	checktest.Faults(t, DaemonSet().ValidateUpdate(moved, daemon(func(*appsv1.DaemonSet) {})), "spec.selector: Invalid value: ")
}

func TestControllerRevisionData(t *testing.T) {
	revision := func(data string) *appsv1.ControllerRevision {
		return &appsv1.ControllerRevision{
			ObjectMeta: metav1.ObjectMeta{Name: "db-1", Namespace: "hello", ResourceVersion: "7"},
			Data:       runtime.RawExtension{Raw: []byte(data)}, Revision: 1,
		}
	}
	k := ControllerRevision()
	checktest.Faults(t, k.Validate(revision(`{"spec":{}}`)))
	checktest.Faults(t, k.Validate(revision(`[1]`)), "data: Invalid value: \"\": must be a JSON object")
	checktest.Faults(t, k.ValidateUpdate(revision(`{"a":1}`), revision(`{"a":2}`)), "data: Invalid value: ")
	renumbered := revision(`{"a":1}`)
	renumbered.Revision = 4
	checktest.Faults(t, k.ValidateUpdate(renumbered, revision(`{"a":1}`)))
}
