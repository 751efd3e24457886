package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// forgetJob takes out of a deleted Job what the server made of its identity: a Job
// that is created again has another.
func forgetJob(job *unstructured.Unstructured) {
	if manual, _, _ := unstructured.NestedBool(job.Object, "spec", "manualSelector"); manual {
		return
	}
	unstructured.RemoveNestedField(job.Object, "spec", "selector")
	generated := []string{batchv1.ControllerUidLabel, batchv1.JobNameLabel, "controller-uid", "job-name"}
	for _, labels := range [][]string{{"metadata", "labels"}, {"spec", "template", "metadata", "labels"}} {
		for _, key := range generated {
			unstructured.RemoveNestedField(job.Object, append(labels[:len(labels):len(labels)], key)...)
		}
	}
}

// forgetVolume takes out of a deleted claim how far its binding was. Where its
// volume is gone, too, it gets another one. It returns what its user has to know.
func (u *undo) forgetVolume(ctx context.Context, claim *unstructured.Unstructured) string {
	annotations := claim.GetAnnotations()
	maps.DeleteFunc(annotations, func(key, _ string) bool {
		return strings.HasPrefix(key, "pv.kubernetes.io/") || key == "volume.kubernetes.io/selected-node" ||
			key == "volume.kubernetes.io/storage-provisioner" || key == "volume.beta.kubernetes.io/storage-provisioner"
	})
	claim.SetAnnotations(annotations)
	name, _, _ := unstructured.NestedString(claim.Object, "spec", "volumeName")
	if name == "" {
		return ""
	}
	var volume unstructured.Unstructured
	err := u.api.do(ctx, http.MethodGet, "/api/v1/persistentvolumes/"+url.PathEscape(name), nil, &volume.Object)
	policy, _, _ := unstructured.NestedString(volume.Object, "spec", "persistentVolumeReclaimPolicy")
	phase, _, _ := unstructured.NestedString(volume.Object, "status", "phase")
	if isCode(err, http.StatusNotFound) || err == nil && (volume.GetDeletionTimestamp() != nil || policy == "Delete" && phase == "Released") {
		unstructured.RemoveNestedField(claim.Object, "spec", "volumeName")
		return fmt.Sprintf("; its volume %s is gone, with what was on it: it gets another one", name)
	}
	if err != nil {
		return fmt.Sprintf("; whether its volume %s is still there could not be looked at: %v", name, err)
	}
	return fmt.Sprintf("; it waits for its volume %s, which is of the deleted claim until an administrator runs:\n"+
		`  clusterctl patch pv %s --type json -p '[{"op":"remove","path":"/spec/claimRef/uid"},{"op":"remove","path":"/spec/claimRef/resourceVersion"}]'`, name, name)
}
