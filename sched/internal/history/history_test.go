package history

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/utils/ptr"

	"encoding/json"

	"github.com/clusterd/clusterd/sched/schedtest"
)

var setKind = appsv1.SchemeGroupVersion.WithKind("StatefulSet")

func set(image string) *appsv1.StatefulSet {
	return &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "default", UID: "u"},
		Spec:       appsv1.StatefulSetSpec{Template: schedtest.Template("db", image)},
	}
}

func revision(t *testing.T, image string, number int64, collisions *int32) *appsv1.ControllerRevision {
	t.Helper()
	s := set(image)
	r, err := New(s, setKind, &s.Spec.Template, number, collisions)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// What kubectl rollout undo does with a revision's data.
func TestDataIsAPatch(t *testing.T) {
	r := revision(t, "v1", 1, nil)
	now := set("v2")
	now.Spec.Template.Annotations = map[string]string{"later": "yes"}
	before, err := json.Marshal(now)
	if err != nil {
		t.Fatal(err)
	}
	after, err := strategicpatch.StrategicMergePatch(before, r.Data.Raw, now)
	if err != nil {
		t.Fatal(err)
	}
	var undone appsv1.StatefulSet
	if err := json.Unmarshal(after, &undone); err != nil {
		t.Fatal(err)
	}
	if !Same(r, &undone.Spec.Template) || undone.Spec.Template.Annotations != nil {
		t.Errorf("undone to %+v", undone.Spec.Template)
	}
}

func TestNames(t *testing.T) {
	a, b, c := revision(t, "v1", 1, nil), revision(t, "v1", 9, nil), revision(t, "v1", 1, ptr.To[int32](1))
	if a.Name != b.Name {
		t.Error("the name depends on more than the template")
	}
	if a.Name == c.Name {
		t.Error("a collision does not change the name")
	}
	if a.Labels[HashLabel] == "" || a.Labels["app"] != "db" {
		t.Errorf("labels %v", a.Labels)
	}
}

func TestFind(t *testing.T) {
	v1, v2 := revision(t, "v1", 1, nil), revision(t, "v2", 2, nil)
	tests := []struct {
		name   string
		image  string
		have   []*appsv1.ControllerRevision
		found  *appsv1.ControllerRevision
		number int64
	}{
		{"first", "v1", nil, nil, 1},
		{"newest", "v2", []*appsv1.ControllerRevision{v1, v2}, v2, 2},
		{"back", "v1", []*appsv1.ControllerRevision{v1, v2}, v1, 3},
		{"new", "v3", []*appsv1.ControllerRevision{v1, v2}, nil, 3},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			template := schedtest.Template("db", test.image)
			got := Find(test.have, &template)
			if got.Found != test.found || got.Number != test.number {
				t.Errorf("found %v, number %d", got.Found, got.Number)
			}
		})
	}
	broken := &appsv1.ControllerRevision{}
	broken.Data.Raw = []byte(`{"spec":{}}`)
	if Same(broken, &corev1.PodTemplateSpec{}) {
		t.Error("a revision without a template is that of an empty one")
	}
}

func TestSurplus(t *testing.T) {
	var all []*appsv1.ControllerRevision
	for i, image := range []string{"v1", "v2", "v3", "v4"} {
		all = append(all, revision(t, image, int64(i+1), nil))
	}
	inUse := func(r *appsv1.ControllerRevision) bool { return r.Revision == 1 || r.Revision == 4 }
	if got := Surplus(all, 1, inUse); len(got) != 1 || got[0].Revision != 2 {
		t.Errorf("surplus %v", got)
	}
	if got := Surplus(all, -1, inUse); got != nil {
		t.Errorf("a negative limit drops %v", got)
	}
}

// Whoever may write revisions could end the leader, and each next one, with a quantity
// that nothing can compute with: a million digits take half a second here, and two
// billions all memory.
func TestDataIsLookedAtBeforeItIsParsed(t *testing.T) {
	const huge = "1e-1000000"
	for _, data := range []string{
		`{"spec":{"template":{"spec":{"containers":[{"resources":{"limits":{"cpu":"` + huge + `"}}}]}}}}`,
		`{"spec":{"template":{"spec":{"overhead":{"cpu":"` + huge + `"},"overhead":{"cpu":"1"}}}}}`,
		`{"spec":{"template":{"spec":{"volumes":[{"emptyDir":{"sizeLimit":"1\u0065-1000000"}}]}}}}`,
	} {
		r := &appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Name: "db-1"}}
		r.Data.Raw = []byte(data)
		if _, err := Template(r); err == nil || !strings.Contains(err.Error(), "revision db-1: data: spec.template.spec.") || !strings.Contains(err.Error(), "exponent") {
			t.Errorf("%s: %v", data, err)
		}
	}
	// Names are read by the letter, as they are looked at.
	r := &appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Name: "db-1"}}
	r.Data.Raw = []byte(`{"spec":{"template":{"Spec":{"Overhead":{"cpu":"` + huge + `"}}}}}`)
	template, err := Template(r)
	if err != nil || template.Spec.Overhead != nil {
		t.Errorf("names in other letters are read: %v, %v", template, err)
	}
}
