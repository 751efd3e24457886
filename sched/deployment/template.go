package deployment

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
)

// hashLabel sets the pods of one ReplicaSet apart from those of its siblings.
const hashLabel = appsv1.DefaultDeploymentUniqueLabelKey

// Annotations that kubectl rollout and this controller share.
const (
	revisionAnnotation        = "deployment.kubernetes.io/revision"
	revisionHistoryAnnotation = "deployment.kubernetes.io/revision-history"
	desiredAnnotation         = "deployment.kubernetes.io/desired-replicas"
	maxAnnotation             = "deployment.kubernetes.io/max-replicas"
	rollbackAnnotation        = "deprecated.deployment.rollback.to"
)

// ownAnnotations are not copied from a Deployment to its ReplicaSets.
var ownAnnotations = map[string]bool{
	corev1.LastAppliedConfigAnnotation: true,
	revisionAnnotation:                 true,
	revisionHistoryAnnotation:          true,
	desiredAnnotation:                  true,
	maxAnnotation:                      true,
	rollbackAnnotation:                 true,
}

// templateHash names a pod template: the FNV-1a hash of its JSON form and the
// collision count, in characters that are safe in names. It is only a name.
// Whether a ReplicaSet runs a template is decided by comparing templates, so a
// later version of clusterd may hash differently without starting a rollout.
func templateHash(template *corev1.PodTemplateSpec, collisions *int32) (string, error) {
	encoded, err := json.Marshal(withoutHash(template))
	if err != nil {
		return "", fmt.Errorf("hash pod template: %w", err)
	}
	h := fnv.New32a()
	h.Write(encoded)
	if collisions != nil {
		h.Write(strconv.AppendInt(nil, int64(*collisions), 10))
	}
	return rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10)), nil
}

func withoutHash(template *corev1.PodTemplateSpec) *corev1.PodTemplateSpec {
	t := template.DeepCopy()
	delete(t.Labels, hashLabel)
	return t
}

func sameTemplate(a, b *corev1.PodTemplateSpec) bool {
	return apiequality.Semantic.DeepEqual(withoutHash(a), withoutHash(b))
}

// newReplicaSet returns the ReplicaSet for the Deployment's present template,
// with no replicas yet.
func newReplicaSet(d *appsv1.Deployment) (*appsv1.ReplicaSet, error) {
	hash, err := templateHash(&d.Spec.Template, d.Status.CollisionCount)
	if err != nil {
		return nil, err
	}
	template := d.Spec.Template.DeepCopy()
	template.Labels = withLabel(template.Labels, hash)
	selector := d.Spec.Selector.DeepCopy()
	selector.MatchLabels = withLabel(selector.MatchLabels, hash)
	return &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{
			// The name is a function of the template: creating it twice is
			// refused by the server, however old a cache is.
			Name:            d.Name + "-" + hash,
			Namespace:       d.Namespace,
			Labels:          maps.Clone(template.Labels),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, Kind)},
		},
		Spec: appsv1.ReplicaSetSpec{
			Replicas:        new(int32),
			MinReadySeconds: d.Spec.MinReadySeconds,
			Selector:        selector,
			Template:        *template,
		},
	}, nil
}

func withLabel(labels map[string]string, hash string) map[string]string {
	out := maps.Clone(labels)
	if out == nil {
		out = map[string]string{}
	}
	out[hashLabel] = hash
	return out
}

// revisionOf reads an object's revision; 0 if it has none.
func revisionOf(o metav1.Object) int64 {
	v, err := strconv.ParseInt(o.GetAnnotations()[revisionAnnotation], 10, 64)
	if err != nil {
		return 0
	}
	return v
}
