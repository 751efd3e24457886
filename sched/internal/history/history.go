// Package history keeps the ControllerRevisions of one owner: each template
// that its pods were made of, numbered, in the form that kubectl rollout
// history and undo read.
package history

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"reflect"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/quantity"
)

// HashLabel tells the revisions of one owner, and the pods made of them, apart.
const HashLabel = appsv1.ControllerRevisionHashLabelKey

// encode returns the revision's data: a strategic merge patch that replaces
// the owner's template, which is what kubectl rollout undo sends.
func encode(template *corev1.PodTemplateSpec) ([]byte, error) {
	raw, err := json.Marshal(template)
	if err != nil {
		return nil, fmt.Errorf("encode pod template: %w", err)
	}
	var fields map[string]any
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, fmt.Errorf("encode pod template: %w", err)
	}
	fields["$patch"] = "replace"
	return json.Marshal(map[string]any{"spec": map[string]any{"template": fields}})
}

var errNoTemplate = errors.New("data holds no spec.template")

// Template returns the pod template that a revision holds, with today's
// defaults. To the API the data is opaque: whoever may write revisions may write
// anything there, so that quantities are looked at before they are parsed, and names
// are read by the letter, as there.
func Template(r *appsv1.ControllerRevision) (*corev1.PodTemplateSpec, error) {
	var data struct {
		Spec struct {
			Template *corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	if err := quantity.InJSON(r.Data.Raw, reflect.TypeOf(data)); err != nil {
		return nil, fmt.Errorf("revision %s: data: %w", r.Name, err)
	}
	if err := utiljson.Unmarshal(r.Data.Raw, &data); err != nil {
		return nil, fmt.Errorf("revision %s: %w", r.Name, err)
	}
	if data.Spec.Template == nil {
		return nil, fmt.Errorf("revision %s: %w", r.Name, errNoTemplate)
	}
	core.DefaultPodTemplate(data.Spec.Template)
	return data.Spec.Template, nil
}

// Same reports whether the revision holds the template. Templates are compared,
// not hashes: a later clusterd may hash or default differently without a
// rollout.
func Same(r *appsv1.ControllerRevision, template *corev1.PodTemplateSpec) bool {
	held, err := Template(r)
	if err != nil {
		return false
	}
	want := template.DeepCopy()
	core.DefaultPodTemplate(want)
	return apiequality.Semantic.DeepEqual(held, want)
}

// New returns the revision of a template that none of the owner's has. Its
// name is a function of template and collisions: creating it twice is refused
// by the server, however old a cache is.
func New(owner metav1.Object, kind schema.GroupVersionKind, template *corev1.PodTemplateSpec, number int64, collisions *int32) (*appsv1.ControllerRevision, error) {
	data, err := encode(template)
	if err != nil {
		return nil, err
	}
	h := fnv.New32a()
	h.Write(data)
	if collisions != nil {
		h.Write(strconv.AppendInt(nil, int64(*collisions), 10))
	}
	hash := rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10))
	labels := maps.Clone(template.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[HashLabel] = hash
	annotations := maps.Clone(owner.GetAnnotations()) // the change's cause among them
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	return &appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{
			Name:            owner.GetName() + "-" + hash,
			Namespace:       owner.GetNamespace(),
			Labels:          labels,
			Annotations:     annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, kind)},
		},
		Data:     runtime.RawExtension{Raw: data},
		Revision: number,
	}, nil
}

// Sort orders revisions by number, oldest first.
func Sort(revisions []*appsv1.ControllerRevision) {
	slices.SortFunc(revisions, func(a, b *appsv1.ControllerRevision) int {
		return cmp.Or(cmp.Compare(a.Revision, b.Revision), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}

// Step says how the owner's history has to change for a template.
type Step struct {
	// Found is the revision that holds the template, nil if there is none.
	Found *appsv1.ControllerRevision
	// Number is the one that the template's revision should have; Found has
	// another one if the owner went back to it.
	Number int64
}

// Find looks for the template among sorted revisions.
func Find(sorted []*appsv1.ControllerRevision, template *corev1.PodTemplateSpec) Step {
	if len(sorted) == 0 {
		return Step{Number: 1}
	}
	newest := sorted[len(sorted)-1]
	// The newest match wins, so that every pass picks the same one.
	for _, r := range slices.Backward(sorted) {
		if !Same(r, template) {
			continue
		}
		if r == newest {
			return Step{Found: r, Number: r.Revision}
		}
		return Step{Found: r, Number: newest.Revision + 1}
	}
	return Step{Number: newest.Revision + 1}
}

// Surplus returns the oldest revisions beyond the limit, those in use not
// counted. A negative limit keeps all.
func Surplus(sorted []*appsv1.ControllerRevision, limit int, inUse func(*appsv1.ControllerRevision) bool) []*appsv1.ControllerRevision {
	if limit < 0 {
		return nil
	}
	var idle []*appsv1.ControllerRevision
	for _, r := range sorted {
		if r.DeletionTimestamp == nil && !inUse(r) {
			idle = append(idle, r)
		}
	}
	if len(idle) <= limit {
		return nil
	}
	return idle[:len(idle)-limit]
}
