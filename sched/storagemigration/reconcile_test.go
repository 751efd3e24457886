package storagemigration

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/clusterd/clusterd/apis/storagemigration"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var (
	begin = time.Unix(1_000_000, 0)
	pans  = schema.GroupResource{Group: "kitchen.example.com", Resource: "pans"}
)

func migrationOf(group, resource string) *storagemigrationv1.StorageVersionMigration {
	return &storagemigrationv1.StorageVersionMigration{
		ObjectMeta: metav1.ObjectMeta{Name: "m", CreationTimestamp: metav1.NewTime(begin), ResourceVersion: "1"},
		Spec:       storagemigrationv1.StorageVersionMigrationSpec{Resource: metav1.GroupResource{Group: group, Resource: resource}},
	}
}

func TestNext(t *testing.T) {
	fresh := migrationOf(pans.Group, pans.Resource)
	running := runs(fresh, "The migration is running", begin)
	marked := running.DeepCopy()
	marked.Status.ResourceVersion = "12"
	for _, test := range []struct {
		name  string
		m     *storagemigrationv1.StorageVersionMigration
		after time.Duration
		want  phase
		wait  time.Duration
	}{
		{"new", fresh, time.Hour, announce, 0},
		{"announced", running, time.Second, settleDown, settle - time.Second},
		{"announced, by a clock that was ahead", running, -time.Hour, settleDown, settle},
		{"settled", running, settle, mark, 0},
		{"marked", marked, settle, rewrite, 0},
		{"done", ends(marked, "", "all", begin), time.Hour, over, 0},
		{"failed before it ran", ends(fresh, "no such thing", "", begin), time.Hour, over, 0},
	} {
		if got, wait := next(test.m, begin.Add(test.after)); got != test.want || wait != test.wait {
			t.Errorf("%s: phase %d in %v, want %d in %v", test.name, got, wait, test.want, test.wait)
		}
		// The kind takes every status that is written.
		if errs := storagemigration.StorageVersionMigration().Status.ValidateUpdate(test.m, fresh); len(errs) > 0 {
			t.Errorf("%s: %v", test.name, errs)
		}
	}
}

func TestFinal(t *testing.T) {
	for _, test := range []struct {
		err  error
		want bool
	}{
		{apierrors.NewInvalid(schema.GroupKind{Kind: "Pan"}, "a", nil), true},
		{apierrors.NewForbidden(pans, "a", errors.New("a webhook said no")), true},
		{apierrors.NewBadRequest("no"), true},
		{apierrors.NewInternalError(errors.New("a webhook is down")), false},
		{apierrors.NewServiceUnavailable("no leader"), false},
		{apierrors.NewTooManyRequests("slowly", 1), false},
		{apierrors.NewTimeoutError("late", 1), false},
		{errors.New("connection reset"), false},
	} {
		if got := final(test.err); got != test.want {
			t.Errorf("%v: final %t", test.err, got)
		}
	}
}

func definition(generation int64, conditions ...any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "pans.kitchen.example.com", "resourceVersion": "9", "generation": generation},
		"spec": map[string]any{"versions": []any{
			map[string]any{"name": "v1", "storage": false}, map[string]any{"name": "v2", "storage": true},
		}},
		"status": map[string]any{"storedVersions": []any{"v1", "v2"}, "conditions": append([]any{map[string]any{"type": "Established", "status": "True"}}, conditions...)},
	}}
}

func TestDefinitions(t *testing.T) {
	said := func(status string, generation int64) any {
		return map[string]any{"type": migrating, "status": status, "observedGeneration": generation}
	}
	for _, test := range []struct {
		name   string
		patch  func() ([]byte, error)
		status string // of the condition; "": no patch
		stored string
	}{
		{"begun", func() ([]byte, error) { return begun(definition(3), "m", begin) }, "True", ""},
		{"begun already", func() ([]byte, error) { return begun(definition(3, said("True", 3)), "m", begin) }, "", ""},
		{"begun before a change", func() ([]byte, error) { return begun(definition(4, said("True", 3)), "m", begin) }, "True", ""},
		{"begun once more", func() ([]byte, error) { return begun(definition(3, said("False", 3)), "m", begin) }, "True", ""},
		{"finished", func() ([]byte, error) { return finished(definition(3, said("True", 3)), true, begin) }, "False", "v2"},
		{"finished, but changed meanwhile", func() ([]byte, error) { return finished(definition(4, said("True", 3)), true, begin) }, "False", ""},
		{"failed", func() ([]byte, error) { return finished(definition(3, said("True", 3)), false, begin) }, "False", ""},
		{"finished already", func() ([]byte, error) { return finished(definition(3, said("False", 3)), true, begin) }, "", ""},
		{"recreated", func() ([]byte, error) { return finished(definition(1), true, begin) }, "", ""},
	} {
		patch, err := test.patch()
		if err != nil || (patch == nil) != (test.status == "") {
			t.Errorf("%s: %s, %v", test.name, patch, err)
			continue
		}
		if patch == nil {
			continue
		}
		var got struct {
			Metadata metav1.ObjectMeta
			Status   struct {
				StoredVersions []string
				Conditions     []metav1.Condition
			}
		}
		if err := json.Unmarshal(patch, &got); err != nil {
			t.Fatal(err)
		}
		last := got.Status.Conditions[len(got.Status.Conditions)-1]
		if got.Metadata.ResourceVersion != "9" || len(got.Status.Conditions) != 2 || got.Status.Conditions[0].Type != "Established" ||
			last.Type != migrating || string(last.Status) != test.status || strings.Join(got.Status.StoredVersions, ",") != test.stored {
			t.Errorf("%s: %s", test.name, patch)
		}
	}
}
