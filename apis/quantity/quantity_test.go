package quantity

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

var pod = reflect.TypeFor[corev1.Pod]()

// wrong is the field of a quantity that err refuses; "": err is nil, or of another sort.
func wrong(err error) string {
	var at *field.Error
	if errors.As(err, &at) {
		return at.Field
	}
	return ""
}

func TestInJSON(t *testing.T) {
	const text = `{"kind":"Pod","apiVersion":"v1","metadata":{"labels":{"commit":"12e4567"}},"spec":{"containers":[{"name":"a","args":["1e9999"],` +
		`"env":[{"name":"E","value":"1e2000000000"}],"resources":{"limits":{"cpu":QUANTITY}}}]}}`
	const place = "spec.containers[0].resources.limits[cpu]"
	for quantity, refused := range map[string]bool{
		`"1"`: false, `"100m"`: false, `"1e3"`: false, `"1E"`: false, `"1Ei"`: false, `1`: false, `1.5`: false, `"1e-9"`: false, `"12E99"`: false, `null`: false, `"e"`: false, `true`: false,
		`{"a":"1e5000"}`: false, `["1e5000"]`: false, // no quantities: the decoder says so
		`"1e2000000000"`: true, `"1e-2000000000"`: true, `"1E+100"`: true, `".5e0000100"`: true, `1e2000000000`: true, `"-1e99999999999999999999"`: true,
		`"e5000"`: true, `"+e5000"`: true, `" -e5000"`: true, `"\ne5000"`: true, `"E+5000"`: true, `"-.e-5000"`: true, `"-e99"`: false,
		`" 1e5000"`: true, `"` + strings.Repeat("9", 200) + `"`: true, `"1\u0065-2000000000"`: true, `"1e-\u0032000000000"`: true,
		`"1e5000","cpu":"1"`: true, `"1","cpu":"1e5000"`: true, `"1"},"limits":{"cpu":"1e5000"`: true, `"1e5000"},"limits":null,"limits":{"cpu":"1"`: true,
	} {
		err := InJSON([]byte(strings.Replace(text, "QUANTITY", quantity, 1)), pod)
		if (err != nil) != refused || refused && wrong(err) != place {
			t.Errorf("%s: %v", quantity, err)
		}
	}
	for _, test := range []struct {
		object      any
		text, where string
	}{
		{corev1.ConfigMap{}, `{"data":{"a":"1e2000000000"}}`, ""}, // where there is no quantity, any text will do
		{corev1.ResourceQuota{}, `{"spec":{"hard":{"pods":"1e2000000000"}}}`, "spec.hard[pods]"},
		{corev1.Pod{}, `{"spec":{"volumes":[{"name":"a","emptyDir":{"sizeLimit":"1e2000000000"}}]}}`, "spec.volumes[0].emptyDir.sizeLimit"},
		{autoscalingv2.HorizontalPodAutoscaler{}, `{"spec":{"metrics":[{"pods":{"target":{"averageValue":"1e-2000000000"}}}]}}`, "spec.metrics[0].pods.target.averageValue"},
		{resourcev1.ResourceSlice{}, `{"spec":{"devices":[{"capacity":{"a":{"value":"1e2000000000"}}}]}}`, "spec.devices[0].capacity[a].value"},
		{corev1.PodList{}, `{"items":[{"spec":{"overhead":{"cpu":"1e2000000000"}}}]}`, "items[0].spec.overhead[cpu]"},
	} {
		err := InJSON([]byte(test.text), reflect.TypeOf(test.object))
		if wrong(err) != test.where || (err != nil) != (test.where != "") {
			t.Errorf("%T %s: %v", test.object, test.text, err)
		}
	}
	if err := InJSON([]byte(`{"broken":"1e2000`), pod); err == nil || wrong(err) != "" {
		t.Errorf("what is no JSON: %v", err)
	}
}

func TestBounded(t *testing.T) {
	for text, ok := range map[string]bool{"1Gi": true, "2Mi": true, "": true, "1e9": true, "1e-2000000000": false, "1e2000000000": false, strings.Repeat("1", 500): false,
		"e5000": false, "+e5000": false, " -e5000": false, ".E5000": false, "e-100": false, "-e99": true,
	} {
		if err := Bounded(text); (err == nil) != ok {
			t.Errorf("%.40q: %v", text, err)
		}
	}
}

// Messages need not be written as the library writes them: with lengths in more bytes
// than they need, fields that nobody knows, and fields twice.
func TestInProtobuf(t *testing.T) {
	field := func(number protowire.Number, value []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), value)
	}
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	long := func(number protowire.Number, value []byte) []byte { // the length in three bytes
		n := len(value)
		return join(protowire.AppendTag(nil, number, protowire.BytesType), []byte{byte(n)&0x7f | 0x80, byte(n>>7) | 0x80, 0}, value)
	}
	unknown := join(field(77, []byte("x")), protowire.AppendVarint(protowire.AppendTag(nil, 78, protowire.VarintType), 1<<40),
		protowire.AppendTag(nil, 79, protowire.StartGroupType), field(1, []byte("y")), protowire.AppendTag(nil, 79, protowire.EndGroupType))
	within := func(quantity []byte) []byte {
		limit := join(field(1, []byte("cpu")), field(2, quantity))
		return field(2, field(2, field(8, field(1, limit)))) // spec.containers[].resources.limits
	}
	for _, text := range []string{"1e-2000000000", "1e200", "e5000", "+e5000", "-E-5000"} {
		for name, quantity := range map[string][]byte{
			"plain": field(1, []byte(text)), "a long length": long(1, []byte(text)), "something before": join(unknown, field(1, []byte(text))),
			"something after": join(field(1, []byte(text)), unknown), "twice": join(field(1, []byte(text)), field(1, []byte("1"))),
		} {
			if err := InProtobuf(within(quantity), pod); wrong(err) != "spec.containers.resources.limits[cpu]" {
				t.Errorf("%s, %s: %v", text, name, err)
			}
		}
		// The value of an entry may come before its key.
		if err := InProtobuf(field(2, field(2, field(8, field(1, join(field(2, field(1, []byte(text))), field(1, []byte("cpu"))))))), pod); wrong(err) == "" {
			t.Errorf("%s before its key: %v", text, err)
		}
	}
	for _, broken := range [][]byte{[]byte("\xff\xff1e200"), append(within(nil), 0x0a, 0x7f, '1', 'e', '2', '0', '0')} {
		if err := InProtobuf(broken, pod); err == nil || wrong(err) != "" {
			t.Errorf("%q: %v", broken, err)
		}
	}
	// What looks like a quantity, and is a name.
	named := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"commit": "12e4567"}}, Spec: corev1.PodSpec{
		ImagePullSecrets: []corev1.LocalObjectReference{{Name: "1e200"}},
		Containers: []corev1.Container{{Name: "a", Args: []string{"1e200"}, Env: []corev1.EnvVar{{Name: "1e200", Value: "1e200"}},
			EnvFrom: []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "12e4567"}}}}}},
	}}
	body, err := named.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if !Suspicious(body) {
		t.Error("the test of names looks at nothing")
	}
	if err := InProtobuf(body, pod); err != nil {
		t.Errorf("names: %v", err)
	}
}

// What a body of this project's own types says is the same in both forms.
func TestBothForms(t *testing.T) {
	stand := strings.Repeat("7", len("1e200"))
	for i, text := range []string{
		`{"spec":{"containers":[{"resources":{"requests":{"a":"Q"}}}]}}`, `{"spec":{"initContainers":[{"resources":{"limits":{"a":"Q"}}}]}}`,
		`{"spec":{"ephemeralContainers":[{"resources":{"limits":{"a":"Q"}}}]}}`, `{"spec":{"overhead":{"a":"Q"}}}`, `{"spec":{"resources":{"limits":{"a":"Q"}}}}`,
		`{"spec":{"volumes":[{"ephemeral":{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"a":"Q"}}}}}}]}}`,
		`{"spec":{"volumes":[{"downwardAPI":{"items":[{"resourceFieldRef":{"resource":"x","divisor":"Q"}}]}}]}}`,
		`{"spec":{"containers":[{"env":[{"valueFrom":{"resourceFieldRef":{"resource":"x","divisor":"Q"}}}]}]}}`,
		`{"status":{"containerStatuses":[{"allocatedResources":{"a":"Q"}}]}}`,
	} {
		var p corev1.Pod
		if err := json.Unmarshal([]byte(strings.Replace(text, "Q", stand, 1)), &p); err != nil {
			t.Fatal(err)
		}
		body, err := p.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		body = bytes.ReplaceAll(body, []byte(stand), []byte("1e200"))
		if err := InProtobuf(body, pod); wrong(err) == "" {
			t.Errorf("%d in protobuf: %v", i, err)
		}
		if err := InJSON([]byte(strings.Replace(text, "Q", "1e200", 1)), pod); wrong(err) == "" {
			t.Errorf("%d in JSON: %v", i, err)
		}
	}
}

// FuzzBounded compares what passes with the exponent that ParseQuantity reads in it.
func FuzzBounded(f *testing.F) {
	for _, text := range []string{"1e9", "e5000", "+e2000000000", "-.e-700", " 0e400", "00e+12", "1.5E99", "1E", "e4294967296"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if Bounded(text) != nil {
			return
		}
		q, err := resource.ParseQuantity(strings.TrimSpace(text)) // as it does that reads JSON
		if err != nil {
			return
		}
		if scale := q.AsDec().Scale(); scale < -maxLength || scale > maxLength {
			t.Errorf("%q passes with %d zeros", text, scale)
		}
	})
}

func FuzzInJSON(f *testing.F) {
	f.Add([]byte(`{"spec":{"overhead":{"cpu":"1e200"}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var p struct {
			Spec struct {
				Overhead map[string]json.RawMessage `json:"overhead"`
			} `json:"spec"`
		}
		if utiljson.Unmarshal(data, &p) != nil || InJSON(data, pod) != nil {
			return
		}
		for _, raw := range p.Spec.Overhead {
			var text string
			if json.Unmarshal(raw, &text) == nil && exponents([]byte(text)) {
				t.Errorf("%s holds %s", data, text)
			}
		}
	})
}

func BenchmarkSuspicious(b *testing.B) {
	body := []byte(strings.Repeat(`{"name":"web-6f9f7cd766-cmdqn","cpu":"100m","memory":"128Mi"}`, 32))
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if Suspicious(body) {
			b.Fatal()
		}
	}
}

func BenchmarkInJSON(b *testing.B) {
	body := []byte(`{"kind":"Pod","metadata":{"annotations":{"a":"\u0026"}},"spec":{"containers":[` + strings.TrimSuffix(strings.Repeat(`{"name":"a","args":["x","y"],"resources":{"limits":{"cpu":"100m"}}},`, 100), ",") + `]}}`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if err := InJSON(body, pod); err != nil {
			b.Fatal(err)
		}
	}
}
