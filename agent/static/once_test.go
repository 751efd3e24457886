package static

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

func onePod(name, policy string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + "}\nspec:\n  " + policy + "\n  containers: [{name: main, image: app}]\n"
}

func TestReadOnce(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  string // of the error; "": the pods a and b
	}{
		{"good", map[string]string{"a.yaml": onePod("a", "restartPolicy: Never"), "b.yaml": onePod("b", "restartPolicy: OnFailure")}, ""},
		{"none", nil, "there is none"},
		{"a slip", map[string]string{"a.yaml": onePod("a", "restartPolicy: Never"), "b.yaml": "kind: Pod\n"}, "b.yaml"},
		{"for ever", map[string]string{"a.yaml": onePod("a", "restartPolicy: Always")}, "pod a-n1: restartPolicy is Always"},
		{"for ever by default", map[string]string{"a.yaml": onePod("a", "")}, "restartPolicy is Always"},
		{"twice", map[string]string{"a.yaml": onePod("a", "restartPolicy: Never"), "b.yaml": onePod("a", "restartPolicy: Never")}, "named in"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			o, err := ReadOnce(t.Context(), Config{NodeName: "n1", Dir: dir})
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("error %v, want %s", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var told [][]*v1.Pod
			ctx, cancel := context.WithCancel(t.Context())
			o.Release()
			err = o.Run(ctx, func(pods []*v1.Pod, complete bool) {
				if told = append(told, pods); !complete {
					t.Error("not complete")
				}
				if len(told) == 2 {
					cancel()
				}
			})
			if err != nil || len(told) != 2 || len(told[0]) != 2 || len(told[1]) != 0 {
				t.Errorf("%v: %v", err, told)
			}
		})
	}
	if _, err := ReadOnce(t.Context(), Config{NodeName: "n1", URL: "http://127.0.0.1:1/pods", Dir: filepath.Join(t.TempDir(), "none")}); err == nil {
		t.Error("an address that does not answer passed")
	}
}
