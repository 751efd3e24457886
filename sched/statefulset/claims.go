package statefulset

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// newClaim returns the claim that a template makes for an ordinal.
func newClaim(set *appsv1.StatefulSet, template *corev1.PersistentVolumeClaim, ordinal int) *corev1.PersistentVolumeClaim {
	labels := maps.Clone(template.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, set.Spec.Selector.MatchLabels)
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name:        claimName(set, template, ordinal),
			Namespace:   set.Namespace,
			Labels:      labels,
			Annotations: maps.Clone(template.Annotations),
		},
		Spec: *template.Spec.DeepCopy(),
	}
}

// claimOwners returns the owner references that a claim should have: the set's
// if claims go with the set, the pod's if they go with a pod that is scaled
// away. Those of others stay.
//
// condemned is the pod about to be scaled away, nil for one that stays.
func claimOwners(set *appsv1.StatefulSet, condemned *corev1.Pod, have []metav1.OwnerReference) []metav1.OwnerReference {
	var whenDeleted, whenScaled appsv1.PersistentVolumeClaimRetentionPolicyType
	if p := set.Spec.PersistentVolumeClaimRetentionPolicy; p != nil {
		whenDeleted, whenScaled = p.WhenDeleted, p.WhenScaled
	}
	const remove = appsv1.DeletePersistentVolumeClaimRetentionPolicyType
	byPod := condemned != nil && whenScaled == remove
	bySet := !byPod && whenDeleted == remove
	out := slices.DeleteFunc(slices.Clone(have), func(ref metav1.OwnerReference) bool {
		switch {
		case ref.UID == set.UID:
			return true
		case ref.Kind == "Pod" && ref.APIVersion == "v1":
			return ordinalOf(set, ref.Name) >= 0 // of a pod of this set, this one or a former
		}
		return false
	})
	if bySet {
		out = append(out, metav1.OwnerReference{APIVersion: Kind.GroupVersion().String(), Kind: Kind.Kind, Name: set.Name, UID: set.UID})
	}
	if byPod {
		out = append(out, metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: condemned.Name, UID: condemned.UID})
	}
	return out
}

// ensureClaims makes the claims of an ordinal before its pod is made. A claim
// that is there already is the ordinal's own, from before, and is kept; it is looked
// for first, as a quota that is used up refuses to make one whether it is there or not.
func (c *controller) ensureClaims(ctx context.Context, set *appsv1.StatefulSet, ordinal int) error {
	for i := range set.Spec.VolumeClaimTemplates {
		claim := newClaim(set, &set.Spec.VolumeClaimTemplates[i], ordinal)
		err := c.ownClaim(ctx, set, claim.Name, nil)
		if err == nil {
			continue
		}
		if !apierrors.IsNotFound(err) {
			return err
		}
		claim.OwnerReferences = claimOwners(set, nil, nil)
		_, err = c.client.CoreV1().PersistentVolumeClaims(set.Namespace).Create(ctx, claim, metav1.CreateOptions{})
		switch {
		case err == nil:
			c.pods.Events.Eventf(set, corev1.EventTypeNormal, "SuccessfulCreate", "create Claim %s Pod %s in StatefulSet %s success", claim.Name, podName(set, ordinal), set.Name)
		case apierrors.IsAlreadyExists(err):
			if err := c.ownClaim(ctx, set, claim.Name, nil); err != nil {
				return err
			}
		default:
			if ctx.Err() == nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
				c.pods.Events.Eventf(set, corev1.EventTypeWarning, "FailedCreate", "create Claim %s for Pod %s in StatefulSet %s failed error: %v", claim.Name, podName(set, ordinal), set.Name, err)
			}
			return fmt.Errorf("create claim %s: %w", claim.Name, err)
		}
	}
	return nil
}

// remakeClaims makes claims of the ordinals that are missing. One that is being
// deleted is no error: its end wakes the set.
func (c *controller) remakeClaims(ctx context.Context, set *appsv1.StatefulSet, ordinals []int) error {
	var errs []error
	for _, ordinal := range ordinals {
		missing := slices.ContainsFunc(set.Spec.VolumeClaimTemplates, func(t corev1.PersistentVolumeClaim) bool {
			_, err := c.claims.PersistentVolumeClaims(set.Namespace).Get(claimName(set, &t, ordinal))
			return apierrors.IsNotFound(err)
		})
		if !missing {
			continue
		}
		err := c.ensureClaims(ctx, set, ordinal)
		if err != nil && !errors.Is(err, errClaimGoing) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// claimed reports whether a claim of that name is one of the set's ordinals'.
func claimed(set *appsv1.StatefulSet, name string) bool {
	start, end := span(set)
	for i := range set.Spec.VolumeClaimTemplates {
		number, ok := strings.CutPrefix(name, set.Spec.VolumeClaimTemplates[i].Name+"-"+set.Name+"-")
		if !ok {
			continue
		}
		ordinal, err := strconv.Atoi(number)
		if err == nil && ordinal >= start && ordinal < end && claimName(set, &set.Spec.VolumeClaimTemplates[i], ordinal) == name {
			return true
		}
	}
	return false
}

// ownClaims gives the claims of an ordinal the owners that the set's retention
// policy asks for.
func (c *controller) ownClaims(ctx context.Context, set *appsv1.StatefulSet, ordinal int, condemned *corev1.Pod) error {
	for i := range set.Spec.VolumeClaimTemplates {
		err := c.ownClaim(ctx, set, claimName(set, &set.Spec.VolumeClaimTemplates[i], ordinal), condemned)
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func (c *controller) ownClaim(ctx context.Context, set *appsv1.StatefulSet, name string, condemned *corev1.Pod) error {
	api := c.client.CoreV1().PersistentVolumeClaims(set.Namespace)
	claim, err := api.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read claim: %w", err)
	}
	if claim.DeletionTimestamp != nil && condemned == nil {
		return fmt.Errorf("claim %s: %w", name, errClaimGoing)
	}
	owners := claimOwners(set, condemned, claim.OwnerReferences)
	if apiequality.Semantic.DeepEqual(owners, claim.OwnerReferences) {
		return nil
	}
	claim.OwnerReferences = owners
	if _, err := api.Update(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("set owners of claim %s: %w", name, err)
	}
	return nil
}
