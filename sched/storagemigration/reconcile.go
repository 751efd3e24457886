package storagemigration

import (
	"encoding/json"
	"fmt"
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// Reasons of conditions, upstream's.
const (
	reasonRunning   = "StorageVersionMigrationRunning"
	reasonSucceeded = "StorageVersionMigrationSucceeded"
	reasonFailed    = "StorageVersionMigrationFailed"
	reasonCompleted = "MigrationCompleted"
)

// migrating is the condition of a CustomResourceDefinition whose objects are
// being rewritten.
const migrating = "StorageMigrating"

// phase is what has to be done next about a migration.
type phase int

const (
	// over: it has succeeded or failed.
	over phase = iota
	// announce: its conditions, and those of its definition, have to say that it runs.
	announce
	// settleDown: servers may not have seen yet how the resource is stored by now.
	settleDown
	// mark: the revision has to be noted up to which objects are written.
	mark
	// rewrite: they have to be written.
	rewrite
)

// next is the phase of m, and how long it has to wait in settleDown. Pure.
func next(m *storagemigrationv1.StorageVersionMigration, now time.Time) (phase, time.Duration) {
	running := meta.FindStatusCondition(m.Status.Conditions, string(storagemigrationv1.MigrationRunning))
	switch {
	case ended(m):
		return over, 0
	case running == nil || running.Status != metav1.ConditionTrue:
		return announce, 0
	case m.Status.ResourceVersion != "":
		return rewrite, 0
	}
	if wait := running.LastTransitionTime.Add(settle).Sub(now); wait > 0 {
		return settleDown, min(wait, settle)
	}
	return mark, 0
}

func ended(m *storagemigrationv1.StorageVersionMigration) bool {
	return meta.IsStatusConditionTrue(m.Status.Conditions, string(storagemigrationv1.MigrationSucceeded)) ||
		meta.IsStatusConditionTrue(m.Status.Conditions, string(storagemigrationv1.MigrationFailed))
}

// runs is m's status while it runs.
func runs(m *storagemigrationv1.StorageVersionMigration, message string, now time.Time) *storagemigrationv1.StorageVersionMigration {
	m = m.DeepCopy()
	set(m, storagemigrationv1.MigrationRunning, metav1.ConditionTrue, reasonRunning, message, now)
	return m
}

// ends is m's status when it is over; fault is why it failed, "": it succeeded.
func ends(m *storagemigrationv1.StorageVersionMigration, fault, message string, now time.Time) *storagemigrationv1.StorageVersionMigration {
	m = m.DeepCopy()
	set(m, storagemigrationv1.MigrationRunning, metav1.ConditionFalse, reasonCompleted, "Migration completed", now)
	if fault != "" {
		set(m, storagemigrationv1.MigrationFailed, metav1.ConditionTrue, reasonFailed, fault, now)
		return m
	}
	set(m, storagemigrationv1.MigrationSucceeded, metav1.ConditionTrue, reasonSucceeded, message, now)
	return m
}

func set(m *storagemigrationv1.StorageVersionMigration, kind storagemigrationv1.MigrationConditionType, status metav1.ConditionStatus, reason, message string, now time.Time) {
	meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{
		Type: string(kind), Status: status, Reason: reason, Message: message,
		ObservedGeneration: m.Generation, LastTransitionTime: metav1.NewTime(now),
	})
}

// final reports whether a write that failed with err would fail again: the
// object is refused as it is. All else passes, or may.
func final(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) ||
		apierrors.IsMethodNotSupported(err) || apierrors.IsRequestEntityTooLargeError(err) || apierrors.IsUnsupportedMediaType(err)
}

// newer reports whether an object was written after the revision mark: it is
// stored in the newest form already.
func newer(version, mark string) (bool, error) {
	order, err := resourceversion.CompareResourceVersion(version, mark)
	return order > 0, err
}

// touch is a patch that changes nothing of the version that it names.
func touch(version string) ([]byte, error) {
	return json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": version}})
}

// begun is the status patch of a definition whose objects are about to be written
// again; nil: it says so already. Pure.
func begun(definition *unstructured.Unstructured, name string, now time.Time) ([]byte, error) {
	if c := conditionOf(definition); c != nil && c["status"] == "True" && generationOf(c) == definition.GetGeneration() {
		return nil, nil
	}
	return statusPatch(definition, "True", "MigrationRunning", "Migration "+name+" is running", false, now)
}

// finished is the status patch of a definition whose objects are written; nil:
// there is nothing to say. What it says of the versions in the store is true only
// if the definition has not changed meanwhile. Pure.
func finished(definition *unstructured.Unstructured, succeeded bool, now time.Time) ([]byte, error) {
	c := conditionOf(definition)
	if c == nil || c["status"] != "True" {
		return nil, nil
	}
	switch {
	case !succeeded:
		return statusPatch(definition, "False", "MigrationFailed", "The migration has failed", false, now)
	case generationOf(c) != definition.GetGeneration():
		return statusPatch(definition, "False", "MigrationSucceeded", "The migration has succeeded but the stored versions have not been updated: the definition was changed meanwhile", false, now)
	}
	return statusPatch(definition, "False", "MigrationSucceeded", "The migration has succeeded and the stored versions have been updated", true, now)
}

// statusPatch is a merge patch that holds only for the definition as it was read.
func statusPatch(definition *unstructured.Unstructured, status, reason, message string, stored bool, now time.Time) ([]byte, error) {
	list, _, err := unstructured.NestedSlice(definition.Object, "status", "conditions")
	if err != nil {
		return nil, fmt.Errorf("conditions of %s: %w", definition.GetName(), err)
	}
	conditions := []any{}
	for _, c := range list {
		if c, ok := c.(map[string]any); !ok || c["type"] != migrating {
			conditions = append(conditions, c)
		}
	}
	conditions = append(conditions, map[string]any{
		"type": migrating, "status": status, "reason": reason, "message": message,
		"lastTransitionTime": now.UTC().Format(time.RFC3339), "observedGeneration": definition.GetGeneration(),
	})
	patched := map[string]any{"conditions": conditions}
	if stored {
		version, err := storageVersion(definition)
		if err != nil {
			return nil, err
		}
		patched["storedVersions"] = []any{version}
	}
	return json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": definition.GetResourceVersion()}, "status": patched})
}

// storageVersion is the version in which a definition's objects are stored.
func storageVersion(definition *unstructured.Unstructured) (string, error) {
	versions, _, err := unstructured.NestedSlice(definition.Object, "spec", "versions")
	for _, v := range versions {
		if v, ok := v.(map[string]any); ok && v["storage"] == true {
			if name, ok := v["name"].(string); ok {
				return name, nil
			}
		}
	}
	return "", fmt.Errorf("CustomResourceDefinition %s has no storage version: %w", definition.GetName(), err)
}

func conditionOf(definition *unstructured.Unstructured) map[string]any {
	list, _, _ := unstructured.NestedSlice(definition.Object, "status", "conditions")
	for _, c := range list {
		if c, ok := c.(map[string]any); ok && c["type"] == migrating {
			return c
		}
	}
	return nil
}

func generationOf(condition map[string]any) int64 {
	generation, _ := condition["observedGeneration"].(int64)
	return generation
}
