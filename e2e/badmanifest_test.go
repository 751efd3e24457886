package e2e

import (
	"strings"
	"testing"

	"github.com/clusterd/clusterd/features"
)

// TestE2EBadManifest sends manifests with mistakes: each answer names the
// mistake as kubectl's users know it, and nothing is stored.
func TestE2EBadManifest(t *testing.T) {
	e := startBare(t, 1)
	e.eventuallyHas([]string{"get", "namespaces"}, "default")
	const pod = `apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  containers:
  - {name: c, image: "clusterd.local/hello:1"}
`
	change := func(from, to string) string { return strings.Replace(pod, from, to, 1) }
	for _, tt := range []struct {
		name, manifest string
		words          []string
		rows           []int
	}{
		{"unknown field", change("spec:", "spec:\n  restrtPolicy: Never"), []string{`unknown field "spec.restrtPolicy"`}, nil},
		{"bad quantity", change(`hello:1"`, `hello:1", resources: {limits: {memory: 64Megs}}`), []string{"quantities must match the regular expression"}, nil},
		{"request above the limit", change(`hello:1"`, `hello:1", resources: {requests: {cpu: 2}, limits: {cpu: 1}}`), []string{"is invalid", "must be less than or equal to cpu limit"}, nil},
		{"unknown kind", change("kind: Pod", "kind: Pot"), []string{`no matches for kind "Pot" in version "v1"`}, []int{19}},
		{"wrong version", change("apiVersion: v1", "apiVersion: v2"), []string{`no matches for kind "Pod" in version "v2"`}, nil},
		{"no containers", "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: []}\n", []string{`The Pod "p" is invalid`, "spec.containers: Required value"}, []int{73}},
		{"no name", change("{name: p}", "{}"), []string{"resource name may not be empty"}, nil},
		{"bad name", change("{name: p}", "{name: Bad_Name}"), []string{`"Bad_Name"`, "lowercase RFC 1123"}, nil},
		{"number for a string", change("name: c,", "name: 7,"), []string{"cannot unmarshal number into Go struct field"}, nil},
		{"unknown policy", change("spec:", "spec:\n  restartPolicy: Sometimes"), []string{`Unsupported value: "Sometimes"`, `"Always"`, `"OnFailure"`, `"Never"`}, nil},
		{"volume that is not there", change(`hello:1"`, `hello:1", volumeMounts: [{name: v, mountPath: /v}]`), []string{`spec.containers[0].volumeMounts[0].name: Not found: "v"`}, nil},
		{"no such namespace", change("{name: p}", "{name: p, namespace: nowhere}"), []string{`namespaces "nowhere" not found`}, nil},
		{"no YAML", "kind: [", []string{"error converting YAML to JSON", "yaml:"}, nil},
		{"selector and labels differ", `apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: c}}
    spec: {containers: [{name: c, image: x}]}
`, []string{`The Deployment "d" is invalid`, "`selector` does not match template `labels`"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if len(tt.rows) > 0 {
				features.Shows(t, tt.rows...)
			}
			for _, prog := range kubectls() {
				out, errs, code := e.run(prog, tt.manifest, "apply", "-f", "-")
				if code != 1 {
					t.Fatalf("%s: exit %d: %s%s", prog, code, out, errs)
				}
				mustContain(t, prog, errs, tt.words...)
			}
		})
	}
	t.Run("one of three", func(t *testing.T) {
		features.Shows(t, 2)
		cm := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %}\n---\n"
		three := strings.Replace(cm, "%", "one", 1) + change("spec:", "spec:\n  nonsense: 1") + "---\n" + strings.Replace(cm, "%", "two", 1)
		out, errs, code := e.run("clusterctl", three, "apply", "-f", "-")
		if code != 1 {
			t.Fatalf("exit %d", code)
		}
		mustContain(t, "output", out, "configmap/one created", "configmap/two created")
		mustContain(t, "errors", errs, `unknown field "spec.nonsense"`)
	})
	if out := e.ctl("get", "pods,deployments", "-A"); strings.TrimSpace(out) != "" {
		t.Errorf("something was stored:\n%s", out)
	}
}
