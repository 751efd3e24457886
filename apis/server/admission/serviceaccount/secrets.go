package serviceaccount

import (
	"errors"
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/server/auth"
)

// enforceMountable is the annotation of a service account by which its pods may
// use no Secrets but those that it lists.
const enforceMountable = "kubernetes.io/enforce-mountable-secrets"

// limitsSecrets reports whether pods of account may use only the Secrets that it lists.
func limitsSecrets(account *corev1.ServiceAccount) bool {
	limits, err := strconv.ParseBool(account.Annotations[enforceMountable])
	return err == nil && limits
}

// checkMirror refuses a mirror pod that refers to what its node could then read.
func checkMirror(pod *corev1.Pod) error {
	if pod.Spec.ServiceAccountName != "" {
		return errors.New("a mirror pod may not reference service accounts")
	}
	secrets := false
	auth.References(pod, func(resource, _ string) { secrets = secrets || resource == "secrets" })
	for _, volume := range pod.Spec.Volumes {
		secrets = secrets || inTreeSecret(&volume)
	}
	if secrets {
		return errors.New("a mirror pod may not reference secrets")
	}
	for _, volume := range pod.Spec.Volumes {
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if source.ServiceAccountToken != nil {
				return errors.New("a mirror pod may not use ServiceAccountToken volume projections")
			}
		}
	}
	return nil
}

// inTreeSecret reports whether a volume of a type that nodes do not mount names a Secret.
func inTreeSecret(v *corev1.Volume) bool {
	return v.AzureFile != nil && v.AzureFile.SecretName != "" ||
		v.CephFS != nil && v.CephFS.SecretRef != nil ||
		v.Cinder != nil && v.Cinder.SecretRef != nil ||
		v.FlexVolume != nil && v.FlexVolume.SecretRef != nil ||
		v.ISCSI != nil && v.ISCSI.SecretRef != nil ||
		v.RBD != nil && v.RBD.SecretRef != nil ||
		v.ScaleIO != nil && v.ScaleIO.SecretRef != nil ||
		v.StorageOS != nil && v.StorageOS.SecretRef != nil
}

// checkSecrets refuses a pod that uses a Secret which account does not list.
func checkSecrets(pod *corev1.Pod, account *corev1.ServiceAccount) error {
	listed := listedBy(account)
	for _, volume := range pod.Spec.Volumes {
		if volume.Secret != nil && !listed[volume.Secret.SecretName] {
			return fmt.Errorf("volume with secret.secretName=%q is not allowed because service account %s does not reference that secret", volume.Secret.SecretName, account.Name)
		}
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if source.Secret != nil && !listed[source.Secret.Name] {
				return fmt.Errorf("volume %s with projected secret.name=%q is not allowed because service account %s does not reference that secret", volume.Name, source.Secret.Name, account.Name)
			}
		}
	}
	for _, of := range []struct {
		kind       string
		containers []corev1.Container
	}{{"init container", pod.Spec.InitContainers}, {"container", pod.Spec.Containers}} {
		for _, c := range of.containers {
			if err := checkEnv(of.kind, c.Name, c.Env, c.EnvFrom, listed, account.Name); err != nil {
				return err
			}
		}
	}
	if err := checkEphemeral(pod, account); err != nil {
		return err
	}
	pulls := map[string]bool{}
	for _, ref := range account.ImagePullSecrets {
		pulls[ref.Name] = true
	}
	for i, ref := range pod.Spec.ImagePullSecrets {
		if !pulls[ref.Name] {
			return fmt.Errorf("imagePullSecrets[%d].name=%q is not allowed because service account %s does not reference that imagePullSecret", i, ref.Name, account.Name)
		}
	}
	return nil
}

// checkEphemeral is checkSecrets for the containers that were added later.
func checkEphemeral(pod *corev1.Pod, account *corev1.ServiceAccount) error {
	listed := listedBy(account)
	for _, c := range pod.Spec.EphemeralContainers {
		if err := checkEnv("ephemeral container", c.Name, c.Env, c.EnvFrom, listed, account.Name); err != nil {
			return err
		}
	}
	return nil
}

func listedBy(account *corev1.ServiceAccount) map[string]bool {
	listed := map[string]bool{}
	for _, ref := range account.Secrets {
		listed[ref.Name] = true
	}
	return listed
}

func checkEnv(kind, name string, env []corev1.EnvVar, from []corev1.EnvFromSource, listed map[string]bool, account string) error {
	for _, v := range env {
		if v.ValueFrom != nil && v.ValueFrom.SecretKeyRef != nil && !listed[v.ValueFrom.SecretKeyRef.Name] {
			return fmt.Errorf("%s %s with envVar %s referencing secret.secretName=%q is not allowed because service account %s does not reference that secret",
				kind, name, v.Name, v.ValueFrom.SecretKeyRef.Name, account)
		}
	}
	for _, f := range from {
		if f.SecretRef != nil && !listed[f.SecretRef.Name] {
			return fmt.Errorf("%s %s with envFrom referencing secret.secretName=%q is not allowed because service account %s does not reference that secret", kind, name, f.SecretRef.Name, account)
		}
	}
	return nil
}
