package checkpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// server is an API that is out of reach until it has an answer for a path.
type server struct {
	answer atomic.Pointer[func(*http.Request) *http.Response]
	asked  atomic.Int32
}

func (s *server) RoundTrip(req *http.Request) (*http.Response, error) {
	s.asked.Add(1)
	if fn := s.answer.Load(); fn != nil {
		if resp := (*fn)(req); resp != nil {
			return resp, nil
		}
	}
	return nil, errors.New("no route to host")
}

func (s *server) says(fn func(*http.Request) *http.Response) { s.answer.Store(&fn) }

func reply(req *http.Request, code int, objects ...any) *http.Response {
	var b bytes.Buffer
	for _, o := range objects {
		_ = json.NewEncoder(&b).Encode(o)
	}
	body := io.NopCloser(&b)
	if req.URL.Query().Get("watch") != "" { // there is nothing more to read until it is given up
		ctx, cancel := context.WithCancel(req.Context())
		body = &stream{now: b.Bytes(), last: []byte("never"), ctx: ctx, cancel: cancel}
	}
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: body, Request: req}
}

func service(name string) *v1.Service {
	return &v1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}}
}

// records are of a pod with a Secret and a claim, and of a cluster with Services and no pods.
func records(t *testing.T) ([]*Pod, *Cluster) {
	t.Helper()
	p := withSecret(t, "a")
	p.Claims = []Claim{{
		Claim:  &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "default"}},
		Volume: &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}},
	}}
	old, err := Encode(service("old"))
	must(t, err)
	same, err := Encode(service("same"))
	must(t, err)
	settings, err := Encode(&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kube-dns", Namespace: "kube-system"}})
	must(t, err)
	return []*Pod{p}, &Cluster{Node: &v1.Node{}, Lists: map[string][]json.RawMessage{"Service": {old.Object, same.Object}, "ConfigMap": {settings.Object}}}
}

func clientOf(t *testing.T, g *Gate, s *server) kubernetes.Interface {
	t.Helper()
	c, err := kubernetes.NewForConfig(&rest.Config{Host: "https://kubernetes", Transport: g.Wrap(s), QPS: -1})
	must(t, err)
	return c
}

// TestGateAnswersFromRecords: an informer that found no API is synced from the records as soon
// as the node is isolated, and shows what the API has when that answers. Requests are held
// back meanwhile and never wait in a back-off of client-go's.
func TestGateAnswersFromRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, s := NewGate("n1"), &server{}
		client := clientOf(t, g, s)
		factory := informers.NewSharedInformerFactory(client, 0)
		services := factory.Core().V1().Services().Informer()
		ctx, cancel := context.WithCancel(t.Context())
		factory.StartWithContext(ctx)
		defer factory.Shutdown()
		defer cancel()
		time.Sleep(5 * time.Minute)
		if services.HasSynced() || s.asked.Load() < 200 {
			t.Fatalf("synced %v without an API, which was asked %d times in five minutes", services.HasSynced(), s.asked.Load())
		}
		pods, cluster := records(t)
		if ok, err := g.Isolate(pods, cluster); !ok || err != nil {
			t.Fatal(ok, err)
		}
		time.Sleep(10 * time.Millisecond)
		if got := services.GetStore().ListKeys(); !services.HasSynced() || len(got) != 2 {
			t.Fatalf("%v after the isolation", got)
		}
		s.says(func(req *http.Request) *http.Response {
			if req.URL.Query().Get("sendInitialEvents") == "" {
				return nil
			}
			bookmark := service("")
			bookmark.ResourceVersion, bookmark.Annotations = "70", map[string]string{"k8s.io/initial-events-end": "true"}
			return reply(req, http.StatusOK, map[string]any{"type": "ADDED", "object": service("same")}, map[string]any{"type": "ADDED", "object": service("new")}, map[string]any{"type": "BOOKMARK", "object": bookmark})
		})
		time.Sleep(time.Minute)
		if keys := strings.Join(services.GetStore().ListKeys(), " "); closed(g.Live()) || !strings.Contains(keys, "default/old") {
			t.Errorf("live %v before the node's pods are listed, Services %s", closed(g.Live()), keys)
		}
		g.Open()
		time.Sleep(3 * time.Second)
		keys := strings.Join(services.GetStore().ListKeys(), " ")
		if !closed(g.Live()) || len(services.GetStore().ListKeys()) != 2 || !strings.Contains(keys, "default/new") || !strings.Contains(keys, "default/same") {
			t.Errorf("live %v, Services %s", closed(g.Live()), keys)
		}
		if ok, err := g.Isolate(pods, cluster); ok || err != nil {
			t.Errorf("isolated after the API has answered: %v", err)
		}
	})
}

// TestGateKnows: isolated, reads of what is on record are answered, and nothing else is made up.
func TestGateKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, s := NewGate("n1"), &server{}
		client := clientOf(t, g, s)
		core := client.CoreV1()
		pods, cluster := records(t)
		if ok, err := g.Isolate(pods, cluster); !ok || err != nil {
			t.Fatal(ok, err)
		}
		ctx := t.Context()
		secret, err := core.Secrets("default").Get(ctx, "s", metav1.GetOptions{})
		if err != nil || secret.StringData["k"] != word {
			t.Error(secret, err)
		}
		list, err := core.Secrets("default").List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=s"})
		if err != nil || len(list.Items) != 1 || list.ResourceVersion != replayedVersion {
			t.Error(list, err)
		}
		if pvc, err := core.PersistentVolumeClaims("default").Get(ctx, "c", metav1.GetOptions{}); err != nil || pvc.Name != "c" {
			t.Error(pvc, err)
		}
		if pv, err := core.PersistentVolumes().Get(ctx, "pv", metav1.GetOptions{}); err != nil || pv.Name != "pv" {
			t.Error(pv, err)
		}
		if none, err := core.Services("other").List(ctx, metav1.ListOptions{}); err != nil || len(none.Items) != 0 {
			t.Error(none, err)
		}
		for what, ask := range map[string]func() error{
			"a Secret that is not on record": func() error { _, err := core.Secrets("default").Get(ctx, "t", metav1.GetOptions{}); return err },
			"one of the name elsewhere":      func() error { _, err := core.Secrets("other").Get(ctx, "s", metav1.GetOptions{}); return err },
			"a Service that is not there":    func() error { _, err := core.Services("default").Get(ctx, "t", metav1.GetOptions{}); return err },
			"a write":                        func() error { return core.Services("default").Delete(ctx, "old", metav1.DeleteOptions{}) },
			"a token: at once": func() error {
				_, err := core.ServiceAccounts("default").CreateToken(ctx, "a", nil, metav1.CreateOptions{})
				return err
			},
			"what the node's lease is": func() error {
				_, err := client.CoordinationV1().Leases("x").Get(ctx, "n1", metav1.GetOptions{})
				return err
			},
			"whether there is such a namespace": func() error { _, err := core.Namespaces().Get(ctx, "default", metav1.GetOptions{}); return err },
		} {
			if err := ask(); err == nil || apierrors.IsNotFound(err) {
				t.Errorf("%s: %v", what, err)
			}
		}
		// Lists of what is not known as a whole wait for the API.
		for what, ask := range map[string]func(metav1.ListOptions) error{
			"the node's pods": func(o metav1.ListOptions) error {
				o.FieldSelector = "spec.nodeName=n1"
				_, err := core.Pods("").List(ctx, o)
				return err
			},
			"all Secrets":    func(o metav1.ListOptions) error { _, err := core.Secrets("default").List(ctx, o); return err },
			"all ConfigMaps": func(o metav1.ListOptions) error { _, err := core.ConfigMaps("").List(ctx, o); return err },
			"a label": func(o metav1.ListOptions) error {
				o.LabelSelector = "a=b"
				_, err := core.Services("").List(ctx, o)
				return err
			},
		} {
			s.answer.Store(nil)
			done := make(chan error, 1)
			go func() { done <- ask(metav1.ListOptions{}) }()
			time.Sleep(time.Minute)
			select {
			case err := <-done:
				t.Errorf("%s: answered without an API: %v", what, err)
			default:
			}
			// A refusal is passed on. Only what the node itself may know in any case says that it is refused.
			s.says(func(req *http.Request) *http.Response {
				return reply(req, http.StatusForbidden, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden})
			})
			if err := <-done; !apierrors.IsForbidden(err) || closed(g.Live()) || g.Refused() {
				t.Errorf("%s: %v, live %v", what, err, closed(g.Live()))
			}
		}
	})
}

// TestGateKnowsAnAPIWithQuorum: what a server without quorum answers is no sign of an API, nor is its
// refusal of a role that it has not read. A read of the node's own object is, and a renewed Lease.
func TestGateKnowsAnAPIWithQuorum(t *testing.T) {
	says := func(code int) *server {
		s := &server{}
		s.says(func(req *http.Request) *http.Response { return reply(req, code) })
		return s
	}
	const api = "https://kubernetes/api/v1/"
	const lease = "https://kubernetes/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1"
	own := func(g *Gate, s *server) http.RoundTripper { return g.Wrap(s) }
	network := func(g *Gate, s *server) http.RoundTripper { return g.WrapOther(s) }
	heartbeat := func(g *Gate, s *server) http.RoundTripper { return g.WrapHeartbeat(s) }
	for what, c := range map[string]struct {
		by                func(*Gate, *server) http.RoundTripper
		method, url       string
		code              int
		answered, refused bool
	}{
		"its own object":                {own, "GET", api + "nodes/n1", 200, true, false},
		"it is not registered":          {own, "GET", api + "nodes/n1", 404, true, false},
		"it is refused":                 {own, "GET", api + "nodes/n1", 403, false, true},
		"its certificate is not known":  {own, "GET", api + "nodes/n1", 401, false, true},
		"no quorum":                     {own, "GET", api + "nodes/n1", 503, false, false},
		"too many":                      {own, "GET", api + "nodes/n1", 429, false, false},
		"any version of its object":     {own, "GET", api + "nodes/n1?resourceVersion=0", 200, false, false},
		"another's object":              {own, "GET", api + "nodes/n2", 200, false, false},
		"a part of its own":             {own, "GET", api + "nodes/n1/status", 200, false, false},
		"keys of tokens":                {own, "GET", "https://kubernetes/openid/v1/jwks", 200, false, false},
		"discovery":                     {own, "GET", api, 200, false, false},
		"who shows a token":             {own, "POST", "https://kubernetes/apis/authentication.k8s.io/v1/tokenreviews", 201, false, false},
		"a list":                        {own, "GET", api + "pods", 200, false, false},
		"roles are not in force":        {network, "GET", api + "services", 403, false, false},
		"nor for its object":            {network, "GET", api + "nodes/n1", 403, false, false},
		"its Lease is renewed":          {heartbeat, "PUT", lease, 200, true, false},
		"its Lease is made":             {heartbeat, "POST", lease, 201, true, false},
		"its Lease is read":             {heartbeat, "GET", lease, 200, false, false},
		"its Lease cannot be renewed":   {heartbeat, "PUT", lease, 503, false, false},
		"another has written its Lease": {heartbeat, "PUT", lease, 409, false, false},
	} {
		g := NewGate("n1")
		req, err := http.NewRequestWithContext(t.Context(), c.method, c.url, nil)
		must(t, err)
		resp, err := c.by(g, says(c.code)).RoundTrip(req)
		if err != nil || resp.StatusCode != c.code {
			// 5xx of lists are tried again: there are none here.
			t.Fatalf("%s: %v", what, err)
		}
		if got := !g.Answered().IsZero(); got != c.answered || g.Refused() != c.refused || closed(g.Live()) {
			t.Errorf("%s: answered %v, refused %v, live %v", what, got, g.Refused(), closed(g.Live()))
		}
	}
	// Refused once, and then out of reach.
	g := NewGate("n1")
	req, err := http.NewRequestWithContext(t.Context(), "GET", api+"nodes/n1", nil)
	must(t, err)
	_, err = g.Wrap(says(403)).RoundTrip(req)
	must(t, err)
	if _, err = g.Wrap(&server{}).RoundTrip(req); err == nil || g.Refused() {
		t.Errorf("refused %v by an API that is out of reach", g.Refused())
	}
}

// TestGateAsksForTheNewestState: until the node's pods are listed no list is one of a server's own copy.
func TestGateAsksForTheNewestState(t *testing.T) {
	g, s := NewGate("n1"), &server{}
	var asked []string
	s.says(func(req *http.Request) *http.Response {
		asked = append(asked, req.URL.RawQuery)
		return reply(req, http.StatusOK, v1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}})
	})
	pods := clientOf(t, g, s).CoreV1().Pods("")
	list := func() {
		_, err := pods.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=n1", ResourceVersion: "0"})
		must(t, err)
	}
	list()
	g.Open()
	list()
	if len(asked) != 2 || strings.Contains(asked[0], "resourceVersion") || !strings.Contains(asked[0], "spec.nodeName") || !strings.Contains(asked[1], "resourceVersion=0") {
		t.Error(asked)
	}
}

// TestGateGivesUpSilentWatches: a watch that a server began and says nothing of does not keep an
// informer from the records.
func TestGateGivesUpSilentWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, s := NewGate("n1"), &server{}
		s.says(func(req *http.Request) *http.Response { return reply(req, http.StatusOK) })
		factory := informers.NewSharedInformerFactory(clientOf(t, g, s), 0)
		services := factory.Core().V1().Services().Informer()
		ctx, cancel := context.WithCancel(t.Context())
		factory.StartWithContext(ctx)
		defer factory.Shutdown()
		defer cancel()
		time.Sleep(time.Minute)
		s.answer.Store(nil)
		if ok, err := g.Isolate(records(t)); !ok || err != nil {
			t.Fatal(ok, err)
		}
		time.Sleep(10 * time.Second)
		if !services.HasSynced() {
			t.Error("the records are not read")
		}
	})
}

// TestGateKnowsWhatIsAbsent: what a pod names and the API did not have is answered for as it was, as
// the pod tolerates that; of other names nothing is said.
func TestGateKnowsWhatIsAbsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate("n1")
		client := clientOf(t, g, &server{})
		p := &Pod{Pod: runs("a"), Absent: []Absent{{Kind: "ConfigMap", Namespace: "default", Name: "optional"}, {Kind: "Secret", Namespace: "default", Name: "pull"}, {Kind: "ClusterTrustBundle", Signer: "example.com/s"}}}
		if ok, err := g.Isolate([]*Pod{p}, nil); !ok || err != nil {
			t.Fatal(ok, err)
		}
		ctx, core := t.Context(), client.CoreV1()
		if _, err := core.ConfigMaps("default").Get(ctx, "optional", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Error(err)
		}
		if list, err := core.Secrets("default").List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=pull"}); err != nil || len(list.Items) != 0 {
			t.Error(list, err)
		}
		if list, err := client.CertificatesV1().ClusterTrustBundles().List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=example.com/s"}); err != nil || len(list.Items) != 0 {
			t.Error(list, err)
		}
		for _, ask := range []func() error{
			func() error { _, err := core.ConfigMaps("default").Get(ctx, "other", metav1.GetOptions{}); return err },
			func() error { _, err := core.ConfigMaps("other").Get(ctx, "optional", metav1.GetOptions{}); return err },
		} {
			if err := ask(); err == nil || apierrors.IsNotFound(err) {
				t.Errorf("made up: %v", err)
			}
		}
	})
}
