package storagemigration

import (
	"strings"
	"testing"
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func ovens(change ...func(*migration)) *migration {
	m := &migration{ObjectMeta: metav1.ObjectMeta{Name: "ovens", ResourceVersion: "7"}}
	m.Spec.Resource = metav1.GroupResource{Group: "kitchen.example.com", Resource: "ovens"}
	for _, f := range change {
		f(m)
	}
	return m
}

func is(t storagemigrationv1.MigrationConditionType) func(*migration) {
	return func(m *migration) {
		m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{Type: string(t), Status: metav1.ConditionTrue, Reason: "Because", LastTransitionTime: metav1.Time{Time: time.Unix(1, 0)}})
	}
}

func at(version string) func(*migration) {
	return func(m *migration) { m.Status.ResourceVersion = version }
}

func TestRules(t *testing.T) {
	k := StorageVersionMigration()
	for _, test := range []struct {
		name     string
		now, old *migration
		status   bool
		want     string
	}{
		{name: "as it should be", now: ovens()},
		{name: "of the core group", now: ovens(func(m *migration) { m.Spec.Resource = metav1.GroupResource{Resource: "secrets"} })},
		{name: "no resource", now: ovens(func(m *migration) { m.Spec.Resource.Resource = "" }), want: "spec.resource.resource: Required value"},
		{name: "a subresource", now: ovens(func(m *migration) { m.Spec.Resource.Resource = "ovens/status" }), want: `spec.resource.resource: Invalid value: "ovens/status"`},
		{name: "a kind", now: ovens(func(m *migration) { m.Spec.Resource.Resource = "Oven" }), want: `spec.resource.resource: Invalid value: "Oven"`},
		{name: "a group and version", now: ovens(func(m *migration) { m.Spec.Resource.Group = "kitchen.example.com/v1" }), want: "spec.resource.group: Invalid value"},
		{name: "a name", now: ovens(func(m *migration) { m.Name = "A B" }), want: "metadata.name: Invalid value"},
		{name: "another resource", now: ovens(func(m *migration) { m.Spec.Resource.Resource = "pans" }), old: ovens(), want: "spec: Invalid value"},
		{name: "a label", now: ovens(func(m *migration) { m.Labels = map[string]string{"a": "b"} }), old: ovens()},

		{name: "it runs", now: ovens(is("Running"), at("12")), old: ovens(), status: true},
		{name: "no number", now: ovens(at("latest")), old: ovens(), status: true, want: "status.resourceVersion: Invalid value"},
		{name: "another version", now: ovens(at("13")), old: ovens(at("12")), status: true, want: "status.resourceVersion: Invalid value"},
		{name: "no version any more", now: ovens(), old: ovens(at("12")), status: true, want: "status.resourceVersion: Invalid value"},
		{name: "both ends", now: ovens(is("Succeeded"), is("Failed")), old: ovens(), status: true, want: "status.conditions: Invalid value"},
		{name: "one twice", now: ovens(is("Failed"), is("Failed")), old: ovens(), status: true, want: "status.conditions[1]: Duplicate value"},
		{name: "without a reason", now: ovens(is("Failed"), func(m *migration) { m.Status.Conditions[0].Reason = "" }), old: ovens(), status: true, want: "status.conditions[0].reason: Required value"},
		{name: "success taken back", now: ovens(), old: ovens(is("Succeeded")), status: true, want: "Succeeded must stay True"},
		{name: "failure turned", now: ovens(is("Succeeded")), old: ovens(is("Failed")), status: true, want: "Failed must stay True"},
	} {
		errs := k.Validate(test.now)
		switch {
		case test.status:
			errs = k.Status.ValidateUpdate(test.now, test.old)
		case test.old != nil:
			errs = k.ValidateUpdate(test.now, test.old)
		}
		if got := errs.ToAggregate(); (got == nil) != (test.want == "") || got != nil && !strings.Contains(got.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, got, test.want)
		}
	}
}

func TestWhoWritesWhat(t *testing.T) {
	k := StorageVersionMigration()
	made := ovens(is("Succeeded"), at("12"))
	k.PrepareCreate(made)
	if len(made.Status.Conditions) > 0 || made.Status.ResourceVersion != "" {
		t.Errorf("a creator wrote the status: %+v", made.Status)
	}
	updated := ovens(is("Succeeded"))
	k.PrepareUpdate(updated, ovens(at("3")))
	if len(updated.Status.Conditions) > 0 || updated.Status.ResourceVersion != "3" {
		t.Errorf("an update wrote the status: %+v", updated.Status)
	}
	status := ovens(func(m *migration) { m.Spec.Resource.Resource = "pans" })
	k.Status.PrepareUpdate(status, ovens())
	if status.Spec.Resource.Resource != "ovens" {
		t.Error("a status update wrote the spec")
	}
	for want, m := range map[string]*migration{"Unknown": ovens(), "Running": ovens(is("Running")), "Succeeded": ovens(is("Running"), is("Succeeded"))} {
		if row := k.Row(m, time.Unix(1, 0)); row[1] != "ovens.kitchen.example.com" || row[2] != want {
			t.Errorf("row: %v, want %s", row, want)
		}
	}
}
