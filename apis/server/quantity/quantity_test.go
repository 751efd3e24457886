package quantity

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"sigs.k8s.io/yaml"
)

func TestCheck(t *testing.T) {
	const pod = `{"kind":"Pod","apiVersion":"v1","metadata":{"labels":{"commit":"12e4567"}},"spec":{"containers":[{"name":"a","args":["1e9999"],` +
		`"env":[{"name":"E","value":"1e2000000000"}],"resources":{"limits":{"cpu":QUANTITY}}}]}}`
	const place = "spec.containers[0].resources.limits[cpu]"
	for quantity, refused := range map[string]bool{
		`"1"`: false, `"100m"`: false, `"1e3"`: false, `"1E"`: false, `"1Ei"`: false, `1`: false, `1.5`: false, `"1e-9"`: false, `"12E99"`: false, `null`: false, `"e"`: false, `"x1e5000"`: false,
		`"1e2000000000"`: true, `"1e-2000000000"`: true, `"1E+100"`: true, `".5e0000100"`: true, `1e2000000000`: true, `"-1e99999999999999999999"`: true,
		`" 1e5000"`: true, `"` + strings.Repeat("9", 200) + `"`: true,
	} {
		text := strings.Replace(pod, "QUANTITY", quantity, 1)
		bodies := map[string][]byte{"application/json": []byte(text), "application/merge-patch+json; charset=utf-8": []byte(text), "": []byte(text)}
		bodies["application/json-patch+json"] = []byte(`[{"op":"test","path":"/metadata/labels/commit","value":"1e5000"},` +
			`{"op":"add","path":"/spec/containers/0/resources","value":{"limits":{"cpu":` + quantity + `}}}]`)
		var v any
		if err := json.Unmarshal([]byte(text), &v); err == nil { // as a float64 it may be none
			y, err := yaml.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			bodies["application/apply-patch+yaml"] = y
			if bodies["application/cbor"], err = direct.Marshal(v); err != nil {
				t.Fatal(err)
			}
		}
		for media, body := range bodies {
			err := Check(media, body, &corev1.Pod{})
			if (err != nil) != refused {
				t.Errorf("%s %s: %v", media, quantity, err)
			}
			if where := strings.Replace(place, "containers[0]", "containers.0", 1); err != nil && err.Field != place && err.Field != where {
				t.Errorf("%s %s: field %s", media, quantity, err.Field)
			}
		}
	}
	// Where there is no quantity, any text will do.
	for _, object := range []any{&corev1.ConfigMap{}, nil} {
		if err := Check("application/json", []byte(`{"data":{"a":"1e2000000000"}}`), object); err != nil {
			t.Errorf("%T: %v", object, err)
		}
	}
	if err := Check("application/json", []byte(`{"spec":{"hard":{"pods":"1e2000000000"}}}`), &corev1.ResourceQuota{}); err == nil || err.Field != "spec.hard[pods]" {
		t.Errorf("a quota: %v", err)
	}
	if err := Check("application/json", []byte(`{"broken":"1e2000`), &corev1.Pod{}); err != nil {
		t.Errorf("what is no JSON: %v", err)
	}
}

// A Quantity in protobuf is a message with one text.
func TestProtobuf(t *testing.T) {
	for text, refused := range map[string]bool{"12345": false, "1e200": true, "1e-2000000000": true, "1e20": false} {
		// The encoder of a Quantity with such an exponent would compute with it: a text of
		// the same length stands in.
		stand := strings.Repeat("7", len(text))
		p := &corev1.Pod{TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"commit": "12e4567"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a", Args: []string{"1e200"}, Env: []corev1.EnvVar{{Name: "1e200", Value: "1e200"}}}}}}
		if err := json.Unmarshal([]byte(`{"limits":{"cpu":"`+stand+`"}}`), &p.Spec.Containers[0].Resources); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := protobuf.NewSerializer(runtime.NewScheme(), runtime.NewScheme()).Encode(p, &b); err != nil {
			t.Fatal(err)
		}
		body := bytes.Replace(b.Bytes(), []byte(stand), []byte(text), 1)
		if bytes.Equal(body, b.Bytes()) {
			t.Fatalf("%s is not in the message", stand)
		}
		if err := Check("application/vnd.kubernetes.protobuf", body, p); (err != nil) != refused {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func BenchmarkSuspicious(b *testing.B) {
	body := []byte(strings.Repeat(`{"name":"web-6f9f7cd766-cmdqn","cpu":"100m","memory":"128Mi"}`, 32))
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if suspicious(body) {
			b.Fatal()
		}
	}
}
