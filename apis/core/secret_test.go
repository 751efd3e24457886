package core

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newSecret(kind corev1.SecretType, data map[string][]byte) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "hello", ResourceVersion: "7"}, Type: kind, Data: data}
}

func TestValidateSecret(t *testing.T) {
	tests := []struct {
		name string
		kind corev1.SecretType
		data map[string][]byte
		want []string
	}{
		{"empty", corev1.SecretTypeOpaque, nil, nil},
		{"own type", "example.com/mine", nil, nil},
		{"bad key", corev1.SecretTypeOpaque, map[string][]byte{"a b": nil}, []string{`data[a b]: Invalid value: "a b": a valid config key`}},
		{"too big", corev1.SecretTypeOpaque, map[string][]byte{"a": make([]byte, 1<<20+1)}, []string{"data: Too long: may not be more than 1048576 bytes"}},
		{"token of no account", corev1.SecretTypeServiceAccountToken, nil, []string{"metadata.annotations[kubernetes.io/service-account.name]: Required value"}},
		{"TLS without key", corev1.SecretTypeTLS, map[string][]byte{"tls.crt": nil}, []string{"data[tls.key]: Required value"}},
		{"basic auth", corev1.SecretTypeBasicAuth, map[string][]byte{"password": nil}, nil},
		{"basic auth of nobody", corev1.SecretTypeBasicAuth, nil, []string{"data[username]: Required value", "data[password]: Required value"}},
		{"ssh without key", corev1.SecretTypeSSHAuth, nil, []string{"data[ssh-privatekey]: Required value"}},
		{"docker config", corev1.SecretTypeDockerConfigJson, map[string][]byte{".dockerconfigjson": []byte(`{"auths":{}}`)}, nil},
		{"docker config missing", corev1.SecretTypeDockercfg, nil, []string{"data[.dockercfg]: Required value"}},
		{"docker config broken", corev1.SecretTypeDockerConfigJson, map[string][]byte{".dockerconfigjson": []byte("hunter2")}, []string{`data[.dockerconfigjson]: Invalid value: "<secret contents redacted>": not a JSON object`}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			errs := validateSecret(newSecret(test.kind, test.data))
			checktest.Faults(t, errs, test.want...)
			for _, err := range errs {
				if strings.Contains(err.Error(), "hunter2") {
					t.Errorf("the message tells the secret: %v", err)
				}
			}
		})
	}
}

func TestValidateSecretUpdate(t *testing.T) {
	old := newSecret(corev1.SecretTypeOpaque, map[string][]byte{"a": {1}})
	retyped := old.DeepCopy()
	retyped.Type = "example.com/mine"
	checktest.Faults(t, validateSecretUpdate(retyped, old), `type: Invalid value: "example.com/mine": field is immutable`)

	old.Immutable = ptr.To(true)
	changed := old.DeepCopy()
	changed.Immutable = ptr.To(false)
	changed.Data["a"] = []byte{2}
	checktest.Faults(t, validateSecretUpdate(changed, old),
		"immutable: Forbidden: field is immutable when `immutable` is set",
		"data: Forbidden: field is immutable when `immutable` is set",
	)
}
