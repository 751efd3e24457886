package stream_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/stream"
)

type pods []*pod.View

func (p pods) Views() []*pod.View { return p }

func (p pods) Find(ns, name string, uid types.UID) (*pod.View, bool) {
	for _, v := range p {
		if v.Pod.Namespace == ns && v.Pod.Name == name && (uid == "" || uid == v.Pod.UID) {
			return v, true
		}
	}
	return nil, false
}

// seen is closed: all pods are known.
var seen = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (p pods) Seen() <-chan struct{} { return seen }

// latePods are not known until told.
type latePods struct {
	mu   sync.Mutex // guards pods
	pods pods
	seen chan struct{}
}

func (p *latePods) list() pods {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pods
}

func (p *latePods) Views() []*pod.View    { return p.list() }
func (p *latePods) Seen() <-chan struct{} { return p.seen }
func (p *latePods) Find(ns, name string, uid types.UID) (*pod.View, bool) {
	return p.list().Find(ns, name, uid)
}

// TestNotSeenYet: a call in the agent's first moments waits for the pods; if
// they do not come it says so and does not deny the pod.
func TestNotSeenYet(t *testing.T) {
	for _, tt := range []struct {
		path, want string // want when seen
		code       int
	}{
		{"/containerLogs/ns/p/waiting", "is waiting to start", 400},
		{"/containerLogs/ns/nope/c", "not on this node", 404},
		{"/exec/ns/p/waiting?command=true", "is not running", 400},
		{"/portForward/ns/nope", "not on this node", 404},
		{"/pods", `"name":"p"`, 200},
	} {
		for _, sees := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				p := &latePods{seen: make(chan struct{})}
				h := stream.NewHandler(stream.Config{Pods: p, Runtime: agenttest.NewRuntime(), Images: images{}, Network: &agenttest.Network{}, LogDir: t.TempDir()})
				if sees {
					time.AfterFunc(3*time.Second, func() {
						p.mu.Lock()
						defer p.mu.Unlock()
						p.pods = pods{view()}
						close(p.seen)
					})
				}
				w, began := httptest.NewRecorder(), time.Now()
				h.ServeHTTP(w, httptest.NewRequest("GET", tt.path, nil))
				code, want, took := tt.code, tt.want, 3*time.Second
				if !sees {
					code, want, took = 503, "has not seen its pods", 10*time.Second
				}
				if w.Code != code || !strings.Contains(w.Body.String(), want) || time.Since(began) != took {
					t.Errorf("%s: %d %s after %s", tt.path, w.Code, w.Body, time.Since(began))
				}
			})
		}
	}
	// A caller that leaves is not waited for.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h := stream.NewHandler(stream.Config{Pods: &latePods{seen: make(chan struct{})}, Runtime: agenttest.NewRuntime(), Images: images{}, Network: &agenttest.Network{}})
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/exec/ns/p/c", nil).WithContext(ctx))
}

type images struct{ err error }

func (i images) List(context.Context) ([]image.Image, error) {
	return []image.Image{{ID: "sha256:1", Refs: []string{"docker.io/library/a:1"}, Size: 7}}, i.err
}

func (i images) Remove(_ context.Context, ref string) error { return named(ref) }

func (i images) Pin(_ context.Context, ref string, _ bool) error { return named(ref) }

func (i images) Preload(_ context.Context, ref string) error { return named(ref) }

func (i images) Pulling() []image.Progress {
	return []image.Progress{{Ref: "docker.io/library/b:1", Done: 3, Total: 9}}
}

// named is what the store says of the names of TestChangeImages.
func named(ref string) error {
	switch ref {
	case "used:1":
		return fmt.Errorf("remove image %s: %w: pod default/web names it", ref, image.ErrInUse)
	case "closed:1":
		return &image.PullError{Ref: "docker.io/library/closed:1", Reason: image.ReasonUnauthorized, Says: "who are you"}
	case "none:1":
		return fmt.Errorf("%w", image.ErrNotFound)
	}
	return nil
}

func (i images) Prune(ctx context.Context) ([]image.Image, error) { return i.List(ctx) }

func (i images) Load(_ context.Context, r io.Reader) ([]image.Image, error) {
	b, err := io.ReadAll(r)
	if err != nil || string(b) != "tar" {
		return nil, errors.Join(err, image.ErrNotAnArchive)
	}
	l, err := i.List(context.Background())
	return l, err
}

func serve(t *testing.T, rt *agenttest.Runtime, views ...*pod.View) (*httptest.Server, string) {
	logs := t.TempDir()
	s := httptest.NewServer(stream.NewHandler(stream.Config{Pods: pods(views), Runtime: rt, Images: images{}, Network: &agenttest.Network{}, LogDir: logs, Configz: map[string]int{"a": 1}}))
	t.Cleanup(s.Close)
	return s, logs
}

func view() *pod.View {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"}, Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c"}, {Name: "waiting"}}}}
	one := uint32(1)
	return &pod.View{Pod: p, SandboxID: "s", Status: &v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{
		{Name: "waiting", State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}},
	}}, Containers: map[string]pod.ContainerView{"c": {ID: "id", Running: true, Made: true, Attempt: 2, Previous: &one}}}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

func TestLogs(t *testing.T) {
	s, logs := serve(t, agenttest.NewRuntime(), view())
	dir := filepath.Join(logs, "ns_p_u", "c")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for n, text := range []string{"", "before", "now"} {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(n, ".log")), []byte("2026-01-02T03:04:05Z stdout F "+text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		path string
		code int
		want string // is contained
	}{
		{"ns/p/c", 200, "now\n"},
		{"ns/p/c?previous=true", 200, "before\n"},
		{"ns/p/c?timestamps=true", 200, "2026-01-02T03:04:05Z now\n"},
		{"ns/p/c?tailLines=0", 200, ""},
		{"ns/p/c?tailLines=-1", 400, "tailLines"},
		{"ns/p/c?follow=maybe", 400, "follow"},
		{"ns/p/c?sinceTime=yesterday", 400, "sinceTime"},
		{"ns/p/waiting", 400, `container \"waiting\" in pod \"p\" is waiting to start: ImagePullBackOff`},
		{"ns/p/waiting?previous=true", 400, `previous terminated container \"waiting\" in pod \"p\" not found`},
		{"ns/p/nope", 404, "container nope is not valid for pod p"},
		{"ns/nope/c", 404, "not on this node"},
	} {
		code, body := get(t, s.URL+"/containerLogs/"+tt.path)
		if code != tt.code || !strings.Contains(body, tt.want) {
			t.Errorf("%s: %d %s", tt.path, code, body)
		}
	}
}

func TestExec(t *testing.T) {
	rt := agenttest.NewRuntime()
	rt.ExecFn = func(_ context.Context, e api.Exec, eio runtime.ExecIO) (int, error) {
		if e.ContainerID != "id" {
			return 0, fmt.Errorf("container %s", e.ContainerID)
		}
		switch e.Args[0] {
		case "echo":
			if eio.Stdin != nil {
				_, _ = io.Copy(eio.Stdout, eio.Stdin)
			}
			fmt.Fprint(eio.Stdout, strings.Join(e.Args[1:], " "))
			fmt.Fprint(eio.Stderr, "err")
			return 0, nil
		case "fail":
			return 3, nil
		}
		return 0, &api.Error{Code: api.CodeStartFailed, Message: `exec: "nope": executable file not found in $PATH`}
	}
	if _, err := rt.CreateSandbox(t.Context(), api.Sandbox{ID: "s"}); err != nil {
		t.Fatal(err)
	}
	if _, err := rt.StartContainer(t.Context(), api.Container{ID: "id", SandboxID: "s"}); err != nil {
		t.Fatal(err)
	}
	s, _ := serve(t, rt, view())
	// The API server speaks SPDY to nodes, whatever its own client speaks.
	run := func(in io.Reader, command ...string) (string, string, error) {
		q := url.Values{"command": command, "stdout": {"true"}, "stderr": {"true"}}
		if in != nil {
			q.Set("stdin", "true")
		}
		u, err := url.Parse(s.URL + "/exec/ns/p/u/c?" + q.Encode())
		if err != nil {
			t.Fatal(err)
		}
		ex, err := remotecommand.NewSPDYExecutor(&rest.Config{Host: s.URL}, "POST", u)
		if err != nil {
			t.Fatal(err)
		}
		var out, errs strings.Builder
		err = ex.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: in, Stdout: &out, Stderr: &errs})
		return out.String(), errs.String(), err
	}
	if out, errs, err := run(strings.NewReader("in "), "echo", "a", "b"); out != "in a b" || errs != "err" || err != nil {
		t.Errorf("%q %q %v", out, errs, err)
	}
	_, _, err := run(nil, "fail")
	var exit interface{ ExitStatus() int }
	if !errors.As(err, &exit) || exit.ExitStatus() != 3 {
		t.Errorf("error %v", err)
	}
	if _, _, err := run(nil, "nope"); err == nil || !strings.Contains(err.Error(), "executable file not found") {
		t.Errorf("error %v", err)
	}
	for path, want := range map[string]string{
		"/exec/ns/p/u/c?stdout=true":              "you must specify a command",
		"/exec/ns/p/u/c?command=x":                "at least one of",
		"/exec/ns/p/u/waiting?command=x&stdout=1": "is not running",
	} {
		if code, body := get(t, s.URL+path); code != 400 || !strings.Contains(body, want) {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if code, _ := get(t, s.URL+"/exec/ns/p/other/c?command=x&stdout=1"); code != 404 {
		t.Errorf("another UID: %d", code)
	}
}

// TestChangeImages: what is said of a removal, a prune and a pin.
func TestChangeImages(t *testing.T) {
	s, _ := serve(t, agenttest.NewRuntime(), view())
	for _, tt := range []struct {
		method, path string
		code         int
		says         string
	}{
		{"DELETE", "/images?name=a:1", 200, "{}"},
		{"DELETE", "/images?name=used:1", 409, "pod default/web names it"},
		{"DELETE", "/images?name=none:1", 404, "clusterctl image ls"},
		{"DELETE", "/images?name=A B", 400, "parameter name"},
		{"DELETE", "/images", 400, "parameter name"},
		{"PUT", "/images/pin?name=a:1", 200, "{}"},
		{"PUT", "/images/pin?name=none:1", 404, "pin image none:1"},
		{"DELETE", "/images/pin?name=a:1", 200, "{}"},
		{"POST", "/images/preload?name=a:1", 200, "{}"},
		{"POST", "/images/preload?name=closed:1", 422, "preload image: pull docker.io/library/closed:1: the registry says: who are you"},
		{"POST", "/images/preload", 400, "parameter name"},
		{"GET", "/images/preload?name=a:1", 405, ""},
		{"POST", "/images/prune", 200, `"docker.io/library/a:1"`},
		{"GET", "/images/prune", 405, ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tt.method, s.URL+strings.ReplaceAll(tt.path, " ", "%20"), nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != tt.code || !strings.Contains(string(b), tt.says) {
			t.Errorf("%s %s: %d %s", tt.method, tt.path, res.StatusCode, b)
		}
	}
}

func TestImagesAndPods(t *testing.T) {
	s, _ := serve(t, agenttest.NewRuntime(), view())
	if code, body := get(t, s.URL+"/images"); code != 200 || body != `{"images":[{"refs":["docker.io/library/a:1"],"id":"sha256:1","size":7}],"pulling":[{"ref":"docker.io/library/b:1","done":3,"total":9}]}`+"\n" {
		t.Errorf("%d %s", code, body)
	}
	for in, want := range map[string]string{
		"tar":  `{"images":[{"ref":"docker.io/library/a:1","digest":"sha256:1","size":7}]}`,
		"junk": "not an image archive",
	} {
		res, err := http.Post(s.URL+"/images/load", "application/x-tar", strings.NewReader(in))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if !strings.Contains(string(b), want) {
			t.Errorf("%s: %d %s", in, res.StatusCode, b)
		}
	}
	_, body := get(t, s.URL+"/pods")
	var list v1.PodList
	if err := json.Unmarshal([]byte(body), &list); err != nil || len(list.Items) != 1 || list.Kind != "PodList" {
		t.Errorf("%v %s", err, body)
	}
	if code, body := get(t, s.URL+"/healthz"); code != 200 || body != "ok" {
		t.Errorf("%d %s", code, body)
	}
	if code, body := get(t, s.URL+"/configz"); code != 200 || strings.TrimSpace(body) != `{"a":1}` {
		t.Errorf("%d %s", code, body)
	}
	if code, body := get(t, s.URL+"/portForward/ns/nope"); code != 404 {
		t.Errorf("%d %s", code, body)
	}
}
