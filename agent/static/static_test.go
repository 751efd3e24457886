package static

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/features"
)

const webPod = `apiVersion: v1
kind: Pod
metadata: {name: web}
spec: {containers: [{name: main, image: "web:1"}]}
`

func TestDecode(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want string // names, or the beginning of an error
	}{
		"YAML":             {webPod, "default/web-n1"},
		"JSON":             {`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","namespace":"ns"},"spec":{"containers":[{"name":"main","image":"web:1"}]}}`, "ns/web-n1"},
		"two documents":    {webPod + "---\n" + strings.Replace(webPod, "web}", "db}", 1), "default/web-n1 default/db-n1"},
		"a PodList":        {`{"apiVersion":"v1","kind":"PodList","items":[{"metadata":{"name":"web"},"spec":{"containers":[{"name":"main","image":"web:1"}]}}]}`, "default/web-n1"},
		"a List":           {"apiVersion: v1\nkind: List\nitems:\n- " + strings.ReplaceAll(strings.TrimSpace(webPod), "\n", "\n  "), "default/web-n1"},
		"nothing":          {"# to come\n", ""},
		"no YAML":          {"a: b: c", "error: it is neither YAML nor JSON"},
		"another kind":     {"apiVersion: apps/v1\nkind: Deployment", `error: apiVersion "apps/v1", kind "Deployment": only v1 Pod`},
		"no kind":          {"metadata: {name: web}", `error: apiVersion "", kind "": only v1 Pod`},
		"a slip":           {strings.Replace(webPod, "image:", "imgae:", 1), `error: json: unknown field "imgae"`},
		"no name":          {strings.Replace(webPod, "name: web", "labels: {}", 1), "error: metadata.name: Required value"},
		"the same twice":   {webPod + "---\n" + webPod, "error: pod default/web-n1 is in it twice"},
		"no image":         {strings.Replace(webPod, "web:1", "", 1), "error: pod web: spec.containers[0].image: Required value"},
		"another node":     {strings.Replace(webPod, "spec: {", "spec: {nodeName: n2, ", 1), `error: pod web: spec.nodeName "n2": this node is "n1"`},
		"a Secret":         {strings.Replace(webPod, "spec: {", "spec: {volumes: [{name: v, secret: {secretName: s}}], ", 1), `error: pod web: spec.volumes[0].secret "s": a static pod cannot refer`},
		"a ConfigMap":      {strings.Replace(webPod, "image:", "envFrom: [{configMapRef: {name: c}}], image:", 1), `error: pod web: spec.containers[0].envFrom[0]: a static pod cannot refer`},
		"a ServiceAccount": {strings.Replace(webPod, "spec: {", "spec: {serviceAccountName: sa, ", 1), `error: pod web: spec.serviceAccountName "sa": a static pod cannot refer`},
	} {
		t.Run(name, func(t *testing.T) {
			pods, err := decode(test.text, "/etc/pods/web.yaml", "file", "n1")
			var names []string
			for _, p := range pods {
				names = append(names, p.Namespace+"/"+p.Name)
			}
			got := strings.Join(names, " ")
			if err != nil {
				got = "error: " + err.Error()
			}
			if got != test.want && (!strings.HasPrefix(test.want, "error: ") || !strings.HasPrefix(got, test.want)) {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// TestIdentity: a pod is another one when its content, its place or its node
// is, and the same after a restart or a change of a comment.
func TestIdentity(t *testing.T) {
	uid := func(text, where, node string) string {
		t.Helper()
		pods, err := decode(text, where, "file", node)
		if err != nil {
			t.Fatal(err)
		}
		return string(pods[0].UID)
	}
	base := uid(webPod, "/a", "n1")
	if uid("# hello\n"+webPod, "/a", "n1") != base {
		t.Error("a comment makes another pod")
	}
	for what, other := range map[string]string{
		"content": uid(strings.Replace(webPod, "web:1", "web:2", 1), "/a", "n1"), "place": uid(webPod, "/b", "n1"), "node": uid(webPod, "/a", "n2"),
	} {
		if other == base {
			t.Errorf("another %s makes the same pod", what)
		}
	}
	pods, err := decode(webPod, "/a", "file", "n1")
	if err != nil {
		t.Fatal(err)
	}
	p := pods[0]
	if p.Spec.NodeName != "n1" || p.Annotations[SourceAnnotation] != "file" || p.Annotations[HashAnnotation] != base ||
		p.Spec.RestartPolicy != v1.RestartPolicyAlways || p.Spec.Containers[0].ImagePullPolicy != v1.PullIfNotPresent {
		t.Errorf("not complete: %+v", p)
	}
}

// seen collects what a Reader tells.
type seen struct {
	t        *testing.T
	mu       sync.Mutex
	changed  *sync.Cond
	pods     []string
	complete bool
	faults   []string
}

func read(t *testing.T, cfg Config) *seen {
	t.Helper()
	s := &seen{t: t}
	s.changed = sync.NewCond(&s.mu)
	cfg.NodeName = "n1"
	cfg.OnFault = func(where string, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.faults = append(s.faults, filepath.Base(where)+": "+err.Error())
		s.changed.Broadcast()
	}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- r.Run(ctx, func(pods []*v1.Pod, complete bool) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.pods, s.complete = nil, complete
			for _, p := range pods {
				s.pods = append(s.pods, p.Name+"="+p.Spec.Containers[0].Image)
			}
			s.changed.Broadcast()
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// until waits for a state; the test's own deadline bounds it.
func (s *seen) until(what string, is func() bool) {
	s.t.Helper()
	stuck := time.AfterFunc(2*time.Minute, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		panic(fmt.Sprintf("%s: never seen; pods %q, faults %q", what, s.pods, s.faults))
	})
	defer stuck.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for !is() {
		s.changed.Wait()
	}
}

func (s *seen) has(pods ...string) {
	s.t.Helper()
	s.until(fmt.Sprintf("pods %q", pods), func() bool { return slices.Equal(s.pods, pods) })
}

func (s *seen) fault(prefix string) {
	s.t.Helper()
	s.until("fault "+prefix, func() bool {
		return slices.ContainsFunc(s.faults, func(f string) bool { return strings.HasPrefix(f, prefix) })
	})
}

// TestFolder: files come, change, break and go. The period is an hour, so
// that what is seen was seen by inotify.
func TestFolder(t *testing.T) {
	features.Shows(t, 185)
	dir := filepath.Join(t.TempDir(), "pods") // made by the reader
	write := func(name, text string) {
		t.Helper()
		// As careful programs do it: nobody sees half a file.
		tmp := filepath.Join(dir, "."+name)
		if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s := read(t, Config{Dir: dir, Period: time.Hour})
	s.until("the empty folder", func() bool { return s.complete })
	write("web.yaml", webPod)
	s.has("web-n1=web:1")
	write("db.json", `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"db"},"spec":{"containers":[{"name":"main","image":"db:1"}]}}`)
	s.has("db-n1=db:1", "web-n1=web:1")
	write("bad.yaml", "kind: Pod\n")
	s.fault(`bad.yaml: apiVersion "", kind "Pod"`)
	write("web.yaml", strings.Replace(webPod, "web:1", "web:2", 1))
	s.has("db-n1=db:1", "web-n1=web:2")
	// A slip stops no pod, and the others go on.
	write("web.yaml", strings.Replace(webPod, "spec:", "sepc:", 1))
	s.fault(`web.yaml: json: unknown field "sepc"; its pods run on as they were`)
	write("copy.yaml", webPod)
	s.has("web-n1=web:1", "db-n1=db:1") // copy.yaml comes first by name
	s.fault(`web.yaml#web-n1: pod default/web-n1 is named in`)
	for _, name := range []string{"copy.yaml", "db.json"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s.has("web-n1=web:2")
}

// TestURL: until the address has answered once, nothing is said to be
// complete; afterwards its last answer stands.
func TestURL(t *testing.T) {
	var mu sync.Mutex
	status, text := http.StatusServiceUnavailable, ""
	answer := func(code int, body string) {
		mu.Lock()
		defer mu.Unlock()
		status, text = code, body
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		w.WriteHeader(status)
		fmt.Fprint(w, text)
	}))
	defer server.Close()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "db.yaml"), []byte(strings.Replace(webPod, "web}", "db}", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	s := read(t, Config{Dir: dir, URL: server.URL, Period: 10 * time.Millisecond})
	s.has("db-n1=web:1") // files do not wait
	s.fault(filepath.Base(server.URL) + ": it answers 503")
	s.mu.Lock()
	if s.complete {
		t.Error("complete before the address has answered")
	}
	s.mu.Unlock()
	answer(http.StatusOK, webPod)
	s.has("db-n1=web:1", "web-n1=web:1")
	s.until("complete", func() bool { return s.complete })
	answer(http.StatusInternalServerError, "")
	s.fault(filepath.Base(server.URL) + ": it answers 500")
	s.has("db-n1=web:1", "web-n1=web:1")
	answer(http.StatusOK, "")
	s.has("db-n1=web:1")
}

func TestNew(t *testing.T) {
	for _, cfg := range []Config{{}, {NodeName: "n1", URL: "pods.yaml"}, {NodeName: "n1", URL: "ftp://h/x"}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v: no error", cfg)
		}
	}
}

func TestIsUID(t *testing.T) {
	pods, err := decode("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: c, image: i}]}\n", "a.yaml", "file", "n1")
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d pods, %v", len(pods), err)
	}
	if !IsUID(pods[0].UID) {
		t.Errorf("%s is not known as a static pod's", pods[0].UID)
	}
	for _, uid := range []types.UID{"", "0b6c4f0e-9d0c-4d39-a7b8-5c1d8f0a2e11", "xyz"} {
		if IsUID(uid) {
			t.Errorf("%q counts as a static pod's", uid)
		}
	}
}
