package serviceaccount

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/tokens"
)

const (
	// MountPath is where programs look for their token.
	MountPath = "/var/run/secrets/kubernetes.io/serviceaccount"
	// volumePrefix begins the name of the volume that holds it.
	volumePrefix = "kube-api-access-"
	rootCAName   = "kube-root-ca.crt"
	caFile       = "ca.crt"
)

// automounts: the pod decides, then its account; unless either says no, a
// token is mounted.
func automounts(pod *corev1.Pod, account *corev1.ServiceAccount) bool {
	if pod.Spec.AutomountServiceAccountToken != nil {
		return *pod.Spec.AutomountServiceAccountToken
	}
	return account == nil || ptr.Deref(account.AutomountServiceAccountToken, true)
}

// mountToken gives each container of pod that has nothing at MountPath a
// volume with a token, the cluster's CA and the namespace's name.
func mountToken(pod *corev1.Pod) {
	spec := &pod.Spec
	at := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool {
		return strings.HasPrefix(v.Name, volumePrefix) && v.Projected != nil
	})
	var name string
	if at >= 0 {
		name = spec.Volumes[at].Name
	} else {
		name = names.SimpleNameGenerator.GenerateName(volumePrefix)
	}
	used := false
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			c := &containers[i]
			if slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == MountPath }) {
				continue
			}
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, ReadOnly: true, MountPath: MountPath})
			used = true
		}
	}
	if used && at < 0 {
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: access()}})
	}
}

// access is what a program needs to reach the API.
func access() *corev1.ProjectedVolumeSource {
	return &corev1.ProjectedVolumeSource{
		DefaultMode: ptr.To[int32](0o644),
		Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: ptr.To(tokens.PodSeconds)}},
			{ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: rootCAName},
				Items:                []corev1.KeyToPath{{Key: caFile, Path: caFile}},
			}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{
				Path: "namespace", FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
			}}}},
		},
	}
}
