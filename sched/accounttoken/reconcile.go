package accounttoken

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"

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
// nil: there is none. keys are the ids of the keys that verify tokens; nil: they
// are not known.
func decide(secret *corev1.Secret, account *corev1.ServiceAccount, rootCA []byte, keys []string) action {
	uid := secret.Annotations[corev1.ServiceAccountUIDKey]
	if account == nil || uid != "" && uid != string(account.UID) {
		return drop
	}
	data := secret.Data
	if uid == "" || len(data[corev1.ServiceAccountTokenKey]) == 0 || outlived(data[corev1.ServiceAccountTokenKey], keys) ||
		string(data[corev1.ServiceAccountNamespaceKey]) != secret.Namespace ||
		len(rootCA) > 0 && !bytes.Equal(data[corev1.ServiceAccountRootCAKey], rootCA) {
		return fill
	}
	return keep
}

// outlived reports whether the key that signed a token is none that verifies
// one. What is no token of a key that has an id was put there by somebody else, and stays.
func outlived(token []byte, keys []string) bool {
	id := keyOf(token)
	return id != "" && len(keys) > 0 && !slices.Contains(keys, id)
}

// keyOf is the id of the key that signed a token; "": it says none.
func keyOf(token []byte) string {
	first, _, _ := strings.Cut(string(token), ".")
	raw, err := base64.RawURLEncoding.DecodeString(first)
	if err != nil {
		return ""
	}
	var header struct {
		Key string `json:"kid"`
	}
	if json.Unmarshal(raw, &header) != nil {
		return ""
	}
	return header.Key
}

// filled is secret with all that it should hold but for a token that it lacks,
// or whose key is none of keys any more.
func filled(secret *corev1.Secret, account *corev1.ServiceAccount, rootCA []byte, keys []string) *corev1.Secret {
	updated := secret.DeepCopy()
	if updated.Data == nil {
		updated.Data = map[string][]byte{}
	}
	updated.Annotations[corev1.ServiceAccountUIDKey] = string(account.UID)
	if outlived(updated.Data[corev1.ServiceAccountTokenKey], keys) {
		delete(updated.Data, corev1.ServiceAccountTokenKey)
	}
	updated.Data[corev1.ServiceAccountNamespaceKey] = []byte(secret.Namespace)
	if len(rootCA) > 0 {
		updated.Data[corev1.ServiceAccountRootCAKey] = rootCA
	}
	return updated
}
