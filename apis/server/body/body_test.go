package body

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// repeated is n parts with what join says between.
func repeated(n int, join string, part func(int) string) string {
	parts := make([]string, n)
	for i := range parts {
		parts[i] = part(i)
	}
	return strings.Join(parts, join)
}

func key(i int) string { return fmt.Sprintf("k%d: v", i) }

func TestMembers(t *testing.T) {
	const more = maxMembers + 1
	jsonKeys := func(n int) string {
		return repeated(n, ",", func(i int) string { return fmt.Sprintf(`"k%d":"a,b{"`, i) })
	}
	const json, yaml = "application/json", "application/apply-patch+yaml"
	for name, test := range map[string]struct {
		contentType, body string
		tooMany           bool
	}{
		"as many as may be":        {json, `{"data":{` + jsonKeys(maxMembers) + `}}`, false},
		"one more":                 {json, `{"data":{` + jsonKeys(more) + `}}`, true},
		"with a charset":           {json + "; charset=utf-8", `{"data":{` + jsonKeys(more) + `}}`, true},
		"a patch":                  {"application/strategic-merge-patch+json", `{"data":{` + jsonKeys(more) + `}}`, true},
		"in two maps":              {json, `{"data":{` + jsonKeys(maxMembers-1) + `},"more":{` + jsonKeys(maxMembers-1) + `}}`, false},
		"a list":                   {json, `{"env":[` + strings.Repeat(`{"a":1},`, maxMembers) + `{}]}`, true},
		"text":                     {json, `{"data":{"k":"` + strings.Repeat(`a,\",{`, more) + `"}}`, false},
		"another form":             {"text/plain", strings.Repeat("a,", more), false},
		"JSON as YAML":             {yaml, `{"data":{` + jsonKeys(more) + `}}`, true},
		"YAML":                     {yaml, "data:\n  " + repeated(more, "\n  ", key) + "\n", true},
		"YAML, as many as may be":  {yaml, "kind: X\ndata:\n  " + repeated(maxMembers, "\n  ", key) + "\n", false},
		"YAML, a list of maps":     {yaml, "env:\n" + repeated(more, "\n", func(i int) string { return fmt.Sprintf("- name: n%d\n  value: v", i) }), true},
		"YAML, text of many lines": {yaml, "data:\n  file: |\n    " + repeated(more, "\n    ", key) + "\n  other: x\n", false},
		"YAML, in braces":          {yaml, "data: {" + repeated(more, ", ", key) + "}\n", true},
		"a parameter that is none": {"application/merge-patch+json;x", `{"data":{` + jsonKeys(more) + `}}`, true},
		"in capitals":              {"Application/JSON ;", `{"data":{` + jsonKeys(more) + `}}`, true},
		"YAML, after a mark":       {yaml + ";x", "--- {apiVersion: v1, data: {" + repeated(more, ", ", key) + "}}\n", true},
		"YAML, with a tag":         {yaml, "!!map {" + repeated(more, ", ", key) + "}\n", true},
		"YAML, with an anchor":     {yaml, "&x {" + repeated(more, ", ", key) + "}\n", true},
		"YAML, a question":         {yaml, `{a: what? "x, ` + repeated(more, ", ", key) + "}\n", true},
		"doubled keys":             {json, `{"data":{` + strings.Repeat(`"k":"v",`, maxMembers) + `"k":"v"}}`, true},
		"YAML, unusual keys":       {yaml, "data:\n  " + repeated(more, "\n  ", func(i int) string { return fmt.Sprintf("? k%d\n  : v", i) }), true},
	} {
		if err := Check(test.contentType, []byte(test.body), nil, 64<<20); (err != nil) != test.tooMany {
			t.Errorf("%s: %v, want too many: %v", name, err, test.tooMany)
		}
	}
	// Depth alone is the decoder's business.
	if err := Check(json, []byte(strings.Repeat("[", 3<<20)), nil, 64<<20); err != nil {
		t.Error(err)
	}
}

// Names in YAML make long of short.
func TestYAMLWrittenOut(t *testing.T) {
	const limit = 3 << 20
	long := strings.Repeat("x", 1<<20)
	for name, test := range map[string]struct {
		body string
		want error
	}{
		"a long text, often": {"a: &a " + long + "\nb: [" + strings.Repeat("*a, ", 1000) + "]\n", ErrTooLarge},
		"as a key":           {"a: &a " + long + "\nb: [" + strings.Repeat("{*a : 1}, ", 1000) + "]\n", ErrTooLarge},
		"maps in maps": {"a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\n" +
			"e: &e [*d, *d, *d, *d, *d, *d, *d, *d, *d]\nf: &f [*e, *e, *e, *e, *e, *e, *e, *e, *e]\ng: [*f, *f, *f, *f, *f, *f, *f, *f, *f]\n", ErrTooLarge},
		"a long binary, often":    {"a: &a !!binary " + long + "\nb: [" + strings.Repeat("*a, ", 10_000) + "]\n", ErrTooLarge},
		"a binary by a full tag":  {"a: &a !<tag:yaml.org,2002:binary> " + long + "\nb: [" + strings.Repeat("*a, ", 10_000) + "]\n", ErrTooLarge},
		"a binary by a directive": {"%TAG !e! tag:yaml.org,2002:bin\n---\na: &a !e!ary " + long + "\nb: [" + strings.Repeat("*a, ", 10_000) + "]\n", ErrTooLarge},
		"of doubled keys":         {"a: &a !!binary " + long + "\n" + strings.Repeat("b: *a\n", 10_000), ErrTooLarge},
		"of null keys":            {"a: &a !!binary " + long + "\n" + strings.Repeat("~: *a\n", 10_000), ErrUnreadable},
		"in what is not null":     {"a: &a !!binary " + long + "\nb: !!null {" + strings.Repeat("c: *a, ", 10_000) + "}\n", ErrTooLarge},
		"in an overridden map":    {"a: &a !!binary " + long + "\nb: {" + strings.Repeat("<<: {c: *a}, ", 10_000) + "d: 1}\n", ErrTooLarge},
		"of what it is part of":   {"a: &a [*a, *a]\n", ErrUnreadable},
		"a short text":            {"a: &a x\nb: [" + strings.Repeat("*a, ", 1000) + "]\n", nil},
		"a binary, twice":         {"a: &a !!binary " + long + "\nb: *a\n", nil},
		"maps merged":             {"a: &a {x: 1}\nb: {<<: *a, x: 2, 3: 4.5, t: 2001-01-01, n: ~, u: !!null ''}\nc: {<<: [*a, {y: 2}]}\n", nil},
		"a text, no names":        {"a: " + long + "\nb: 'x & y *'\n", nil},
		"not YAML":                {"a: &a [\nb: *a", ErrUnreadable},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if err := Check("application/yaml", []byte(test.body), nil, limit); !errors.Is(err, test.want) {
			t.Errorf("%s: %.300v, want %v", name, err, test.want)
		}
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > 200<<20 {
			t.Errorf("%s: %d MiB were taken to look at %d KiB", name, used>>20, len(test.body)>>10)
		}
	}
}

// Patches that are merged into an object, and configurations that are applied, are
// compared with the type of what they change.
func TestPatches(t *testing.T) {
	pod := reflect.TypeFor[corev1.Pod]()
	const strategic, apply = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
	for _, test := range []struct {
		contentType, body string
		refused           bool
	}{
		{strategic, `{"spec":{"containers":[{"name":"a","resources":{"limits":{"cpu":"1\u0065-2000000000"}}}]}}`, true},
		{strategic + ";x", `{"spec":{"containers":[{"name":"a","resources":{"limits":{"cpu":"1e2000000000","cpu":"1"}}}]}}`, true},
		{strategic, `{"spec":{"containers":[{"name":"a"}],"containers":[{"$patch":"delete","name":"a","resources":{"limits":{"cpu":1e2000000000}}}]}}`, true},
		{strategic, `{"metadata":{"annotations":{"a":"1e2000000000"}},"spec":{"$setElementOrder/containers":[{"name":"1e2000000000"}],"containers":[{"name":"a","args":["1e2000000000"]}]}}`, false},
		{apply, `spec: {containers: [{name: a, resources: {limits: {cpu: "1\x65-2000000000"}}}]}`, true},
		{apply + ";x", "spec:\n  containers:\n  - name: a\n    resources:\n      limits:\n        cpu: !!binary MWUtMjAwMDAwMDAwMA==\n", true},
		{apply, "spec:\n  containers:\n  - name: a\n    resources:\n      limits: {<<: {cpu: \"1e-2000000000\"}}\n", true},
		{apply, "a: &a 1e2000000000\nspec: {containers: [{name: a, resources: {limits: {cpu: *a}}}]}", true},
		{apply, "spec: {containers: [{name: a, env: [{name: A, value: 1e2000000000}], resources: {limits: {cpu: 1e2}}}]}", false},
		{apply, `{"spec":{"containers":[{"name":"a","resources":{"limits":{"cpu":"1e-2000000000"}}}]}}`, true},
	} {
		err := Check(test.contentType, []byte(test.body), pod, 3<<20)
		var wrong *field.Error
		if errors.As(err, &wrong) != test.refused || (err != nil) != test.refused {
			t.Errorf("%s %s: %v, want a refusal: %v", test.contentType, test.body, err, test.refused)
		}
		if test.refused && (wrong == nil || wrong.Field != "spec.containers[0].resources.limits[cpu]") {
			t.Errorf("%s %s: %v", test.contentType, test.body, err)
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	body := []byte(`{"spec":{"description":"` + strings.Repeat(`{\"type\": \"object\", \u003cp\u003e},`, 1<<20/40) + `"}}`)
	for _, media := range []string{"application/json", "application/apply-patch+yaml"} {
		b.Run(media[len("application/"):], func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				if err := Check(media, body, nil, 3<<20); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// FuzzMembers compares what is counted with what the library would make of a body.
func FuzzMembers(f *testing.F) {
	f.Add("application/json", []byte(`{"a":[1,2,{"b":"\"c,"}]}`), 3)
	f.Add("application/json;x", []byte(`{"a":{"b":"c","b":"\u0022,"}}`), 2)
	f.Add("application/apply-patch+yaml", []byte("a:\n- b: |\n    c\n  d: {e: 'f''g', h: [i]}\n? j\n: k\n"), 2)
	f.Add("application/yaml;;", []byte(`--- !!map {a: what? "x, b: 1, c: 2}`), 2)
	f.Add("application/yaml", []byte("a: &a {b: 1}\nc: {<<: *a, d: 2}\n"), 1)
	f.Fuzz(func(t *testing.T, contentType string, data []byte, most int) {
		if most < 1 || most > 8 || !strings.HasSuffix(Media(contentType), "yaml") && !strings.HasSuffix(Media(contentType), "json") {
			return
		}
		text := data
		if strings.HasSuffix(Media(contentType), "yaml") {
			if _, err := yaml.YAMLToJSON(data); err != nil {
				return
			}
			var err error
			if text, err = fromYAML(data, repeats(data), 1<<20); err != nil {
				t.Fatalf("%q is YAML, but %v", data, err)
			}
		}
		var v any
		if err := json.Unmarshal(text, &v); err != nil {
			return
		}
		if widest(v) > most && !tooMany(text, most) {
			t.Errorf("%q has a map or list of more than %d entries", data, most)
		}
		if tooMany(text, len(text)) {
			t.Errorf("%q: more entries than bytes", data)
		}
	})
}

// widest is how many entries the largest map or list in v has.
func widest(v any) (most int) {
	switch v := v.(type) {
	case map[string]any:
		most = len(v)
		for _, value := range v {
			most = max(most, widest(value))
		}
	case []any:
		most = len(v)
		for _, value := range v {
			most = max(most, widest(value))
		}
	}
	return most
}
