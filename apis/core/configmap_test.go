package core

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestValidateConfigMap(t *testing.T) {
	tests := []struct {
		name   string
		data   map[string]string
		binary map[string][]byte
		want   []string
	}{
		{"empty", nil, nil, nil},
		{"sound", map[string]string{"web.conf": "a"}, map[string][]byte{"logo": {1}}, nil},
		{"bad key", map[string]string{"a/b": ""}, map[string][]byte{"..": {1}}, []string{
			`data[a/b]: Invalid value: "a/b": a valid config key must consist of`,
			`binaryData[..]: Invalid value: "..": must not be '..'`,
		}},
		{"key twice", map[string]string{"a": ""}, map[string][]byte{"a": {1}}, []string{`data[a]: Invalid value: "a": duplicate of key present in binaryData`}},
		{"as big as may be", map[string]string{"a": strings.Repeat("x", 1<<20)}, nil, nil},
		{"too big together", map[string]string{"a": strings.Repeat("x", 1<<20)}, map[string][]byte{"b": {1}}, []string{"[]: Too long: may not be more than 1048576 bytes"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "hello"}, Data: test.data, BinaryData: test.binary}
			checktest.Faults(t, validateConfigMap(c), test.want...)
		})
	}
}

func TestImmutableConfigMap(t *testing.T) {
	old := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "hello", ResourceVersion: "7"},
		Immutable:  ptr.To(true),
		Data:       map[string]string{"a": "1"},
	}
	labelled := old.DeepCopy()
	labelled.Labels = map[string]string{"a": "b"}
	checktest.Faults(t, validateConfigMapUpdate(labelled, old))

	changed := old.DeepCopy()
	changed.Immutable = nil
	changed.Data["a"] = "2"
	changed.BinaryData = map[string][]byte{"b": {1}}
	checktest.Faults(t, validateConfigMapUpdate(changed, old),
		"immutable: Forbidden: field is immutable when `immutable` is set",
		"data: Forbidden: field is immutable when `immutable` is set",
		"binaryData: Forbidden: field is immutable when `immutable` is set",
	)
	checktest.Faults(t, validateConfigMapUpdate(old, changed)) // becoming immutable is allowed
}
