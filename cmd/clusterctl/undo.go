package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	utilcomp "k8s.io/kubectl/pkg/util/completion"
	"k8s.io/kubectl/pkg/util/templates"

	"github.com/clusterd/clusterd/apis/past"
)

func newUndoCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var u undo
	cmd := &cobra.Command{
		Use:   "undo (TYPE NAME | TYPE/NAME) [--to TIME]",
		Short: "Restore an earlier state of an object",
		Long: templates.LongDesc(`
			Restore an earlier state of an object: its spec (or data), labels and annotations.
			The default of --to is the latest state in the history that differs from the present
			one in these, so undoing twice restores the present state. A deleted object is created
			again.

			It is an ordinary update: admission and validation apply, changes of immutable fields
			are refused, and nothing is written if the object changes concurrently.`),
		Example: templates.Examples(`
			# Undo the last change
			clusterctl undo deploy/web

			# Restore the state of ten minutes ago, or of a revision that history shows
			clusterctl undo deploy/web --to=-10m
			clusterctl undo deploy/web --to 1234

			# Restore a deleted ConfigMap
			clusterctl undo configmap/settings

			# Validate on the server without changing anything
			clusterctl undo deploy/web --dry-run=server`),
		Args:              objectArgs,
		ValidArgsFunction: utilcomp.ResourceTypeAndNameCompletionFunc(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			if u.to != "" {
				if _, err := past.ParseMoment(u.to); err != nil {
					return fmt.Errorf("--to %w", err)
				}
			}
			if u.dryRun != "none" && u.dryRun != "server" {
				return fmt.Errorf("--dry-run %q: none or server", u.dryRun)
			}
			var err error
			if u.objectPath, err = newObjectPath(f, args); err != nil {
				return err
			}
			done, err := u.run(cmd.Context())
			if err != nil {
				return err
			}
			if u.dryRun == "server" {
				done += " (server dry run)"
			}
			fmt.Fprintln(streams.Out, done)
			return nil
		},
	}
	cmd.Flags().StringVar(&u.to, "to", "", "Point in time to restore: a revision (1234), a relative time (-10m) or an absolute time (2006-01-02T15:04:05Z)")
	cmd.Flags().StringVar(&u.dryRun, "dry-run", "none", "none, or server: validate without storing")
	return cmd
}

// undoManager is the field manager of what undo writes.
const undoManager = "clusterctl-undo"

type undo struct {
	*objectPath
	to, dryRun string
}

// run writes the earlier state and says what it has done.
func (u *undo) run(ctx context.Context) (string, error) {
	h, err := u.history(ctx, past.MaxChanges)
	if err != nil {
		return "", err
	}
	states, err := statesOf(h)
	if err != nil {
		return "", err
	}
	present := states[len(states)-1]
	target, when, err := u.target(ctx, h, states)
	if err != nil {
		return "", err
	}
	switch owner := metav1.GetControllerOf(target); {
	case owner != nil:
		return "", fmt.Errorf("%s is controlled by %s %s, which would take the change back: undo the change there", u, owner.Kind, owner.Name)
	case present == nil:
		return u.recreate(ctx, target, when)
	case present.GetDeletionTimestamp() != nil:
		return "", fmt.Errorf("%s is being deleted: try again when it is gone, then it is created anew", u)
	case reflect.DeepEqual(intent(target), intent(present)):
		return "", fmt.Errorf("%s is as it was at %s already", u, when)
	}
	return u.restore(ctx, present, target, when)
}

// target chooses the state to go back to, and says of when it is.
func (u *undo) target(ctx context.Context, h *past.History, states []*unstructured.Unstructured) (*unstructured.Unstructured, string, error) {
	since := fmt.Sprintf("revision %d of %s", h.OldestRevision, h.OldestTime.UTC().Format(time.RFC3339))
	if u.to != "" {
		target, err := u.get(ctx, u.to)
		if err == nil && target == nil {
			err = fmt.Errorf("%s did not exist at %s: delete it, if that is what you want", u, u.to)
		}
		if err != nil {
			return nil, "", err
		}
		return target, "revision " + target.GetResourceVersion(), nil
	}
	present := states[len(states)-1]
	for _, state := range slices.Backward(states[:len(states)-1]) {
		switch {
		case state == nil:
		case present == nil && state.GetDeletionTimestamp() != nil: // on its way out
		case present != nil && reflect.DeepEqual(intent(state), intent(present)):
		default:
			return state, "revision " + state.GetResourceVersion(), nil
		}
	}
	switch {
	case h.More:
		return nil, "", fmt.Errorf("the last %d changes of %s are of its status only: choose an earlier state with --to (clusterctl history shows them)", len(h.Changes), u)
	case present == nil:
		return nil, "", fmt.Errorf("%s was deleted, and what it was before has left the history, which begins with %s", u, since)
	}
	return nil, "", fmt.Errorf("no earlier state of %s is in the history, which begins with %s", u, since)
}

// controllersAnnotations are prefixes of annotations that controllers keep:
// they go with the present.
var controllersAnnotations = []string{"deployment.kubernetes.io/", "control-plane.alpha.kubernetes.io/"}

func ofControllers(annotation string) bool {
	return slices.ContainsFunc(controllersAnnotations, func(p string) bool { return strings.HasPrefix(annotation, p) })
}

// intent is what somebody has asked for in an object: all that undo brings
// back. The rest is what the server and controllers say.
func intent(u *unstructured.Unstructured) map[string]any {
	in := map[string]any{}
	for key, value := range u.Object {
		if key != "metadata" && key != "status" && key != "apiVersion" && key != "kind" {
			in[key] = value
		}
	}
	// Empty and absent are the same.
	labels, annotations := map[string]string{}, map[string]string{}
	maps.Copy(labels, u.GetLabels())
	for key, value := range u.GetAnnotations() {
		if !ofControllers(key) {
			annotations[key] = value
		}
	}
	in["labels"], in["annotations"] = labels, annotations
	return in
}

// restore gives the present object the target's intent.
func (u *undo) restore(ctx context.Context, present, target *unstructured.Unstructured, when string) (string, error) {
	next := &unstructured.Unstructured{Object: map[string]any{}}
	for key, value := range target.Object {
		if key != "metadata" && key != "status" {
			next.Object[key] = value
		}
	}
	next.Object["metadata"] = present.DeepCopy().Object["metadata"]
	if status, ok := present.Object["status"]; ok {
		next.Object["status"] = status
	}
	next.SetManagedFields(nil) // the server's own record goes on
	next.SetLabels(target.GetLabels())
	annotations := map[string]string{}
	next.SetAnnotations(nil)
	for key, value := range present.GetAnnotations() {
		if ofControllers(key) {
			annotations[key] = value
		}
	}
	for key, value := range target.GetAnnotations() {
		if !ofControllers(key) {
			annotations[key] = value
		}
	}
	if len(annotations) > 0 {
		next.SetAnnotations(annotations)
	}
	made, err := u.send(ctx, http.MethodPut, u.path, next)
	if isCode(err, http.StatusConflict) {
		return "", fmt.Errorf("%s was changed meanwhile, nothing was undone: look at `clusterctl history %s` and try again", u, u)
	}
	if err != nil {
		return "", fmt.Errorf("go back to %s: %w", when, err)
	}
	return fmt.Sprintf("%s is as it was at %s again, now as revision %s", u, when, made.GetResourceVersion()), nil
}

// recreate makes a deleted object again. It is another object to Kubernetes:
// what belonged to the old one's identity is left out.
func (u *undo) recreate(ctx context.Context, target *unstructured.Unstructured, when string) (string, error) {
	next := target.DeepCopy()
	for _, field := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink", "generateName"} {
		unstructured.RemoveNestedField(next.Object, "metadata", field)
	}
	unstructured.RemoveNestedField(next.Object, "status")
	if next.GetKind() == "Pod" && next.GetAPIVersion() == "v1" {
		unstructured.RemoveNestedField(next.Object, "spec", "nodeName") // the scheduler decides again
	}
	// Marks of a deletion under way, which would delete it again.
	next.SetFinalizers(slices.DeleteFunc(next.GetFinalizers(), func(name string) bool {
		return name == metav1.FinalizerDeleteDependents || name == metav1.FinalizerOrphanDependents
	}))
	annotations := next.GetAnnotations()
	maps.DeleteFunc(annotations, func(key, _ string) bool { return ofControllers(key) })
	next.SetAnnotations(annotations)
	remark := ""
	switch next.GroupVersionKind().GroupKind() {
	case schema.GroupKind{Group: "batch", Kind: "Job"}:
		forgetJob(next)
	case schema.GroupKind{Kind: "PersistentVolumeClaim"}:
		remark = u.forgetVolume(ctx, next)
	}
	made, err := u.send(ctx, http.MethodPost, path.Dir(u.path), next)
	if isCode(err, http.StatusConflict) {
		return "", fmt.Errorf("%s exists again, nothing was undone: look at `clusterctl history %s` and try again", u, u)
	}
	if err != nil {
		return "", fmt.Errorf("create it as it was at %s: %w", when, err)
	}
	return fmt.Sprintf("%s was created again as it was at %s, now as revision %s%s", u, when, made.GetResourceVersion(), remark), nil
}

func (u *undo) send(ctx context.Context, method, target string, obj *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	query := url.Values{"fieldManager": {undoManager}}
	if u.dryRun == "server" {
		query.Set("dryRun", metav1.DryRunAll)
	}
	body, err := jsonBody(obj.Object)
	if err != nil {
		return nil, err
	}
	made := &unstructured.Unstructured{}
	if err := u.api.do(ctx, method, target+"?"+query.Encode(), body, &made.Object); err != nil {
		return nil, err
	}
	if _, err := strconv.ParseInt(made.GetResourceVersion(), 10, 64); err != nil && u.dryRun == "none" {
		return nil, errors.New("the server answered with an object that has no resourceVersion")
	}
	return made, nil
}
