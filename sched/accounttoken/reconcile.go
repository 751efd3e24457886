package accounttoken

import (
	"bytes"

	corev1 "k8s.io/api/core/v1"
)

// action is what a Secret needs.
type action int

const (
	keep action = iota
	fill
	drop
)

// decide says what secret needs, account being the service account it names;
// nil: there is none.
func decide(secret *corev1.Secret, account *corev1.ServiceAccount, rootCA []byte) action {
	uid := secret.Annotations[corev1.ServiceAccountUIDKey]
	if account == nil || uid != "" && uid != string(account.UID) {
		return drop
	}
	data := secret.Data
	if uid == "" || len(data[corev1.ServiceAccountTokenKey]) == 0 ||
		string(data[corev1.ServiceAccountNamespaceKey]) != secret.Namespace ||
		len(rootCA) > 0 && !bytes.Equal(data[corev1.ServiceAccountRootCAKey], rootCA) {
		return fill
	}
	return keep
}

// filled is secret with all that it should hold but for a token that it lacks.
func filled(secret *corev1.Secret, account *corev1.ServiceAccount, rootCA []byte) *corev1.Secret {
	updated := secret.DeepCopy()
	if updated.Data == nil {
		updated.Data = map[string][]byte{}
	}
	updated.Annotations[corev1.ServiceAccountUIDKey] = string(account.UID)
	updated.Data[corev1.ServiceAccountNamespaceKey] = []byte(secret.Namespace)
	if len(rootCA) > 0 {
		updated.Data[corev1.ServiceAccountRootCAKey] = rootCA
	}
	return updated
}
