package storepast

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/past"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// apiOver is an API server over a store, put together as a node does it.
func apiOver(t *testing.T, store *raftstore.Store, configure ...func(*server.Config)) *servertest.Server {
	t.Helper()
	return servertest.Start(t, func(c *server.Config) {
		for _, f := range configure {
			f(c)
		}
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: server.Caller})
		c.Past = New(store)
	})
}

// ask sends one GET and returns the answer's code, header and body.
func ask(t *testing.T, config *rest.Config, path string, query url.Values) (int, http.Header, []byte) {
	t.Helper()
	return askBy(t, config, http.MethodGet, path, query)
}

// askBy sends one request of a method without a body.
func askBy(t *testing.T, config *rest.Config, method, path string, query url.Values) (int, http.Header, []byte) {
	t.Helper()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, config.Host+path+"?"+query.Encode(), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, body
}

func at(moment any) url.Values { return url.Values{past.AtParameter: {fmt.Sprint(moment)}} }

func revisionOf(t *testing.T, obj metav1.Object) int64 {
	t.Helper()
	rev, err := strconv.ParseInt(obj.GetResourceVersion(), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return rev
}

// Objects and lists are shown as they were, any member answers the same, and
// a user who may not read the present may not read the past.
func TestMultiLookingBack(t *testing.T) {
	t.Parallel()
	members := raftstoretest.New(t, 3, nil)
	writer, reader := apiOver(t, members.Leader()), apiOver(t, members.Follower())
	ctx := t.Context()
	maps := writer.ClientFor(t, "ann", "system:masters").CoreV1().ConfigMaps("default")
	write := func(name, value string) *corev1.ConfigMap {
		t.Helper()
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"k": value}}
		made, err := maps.Update(ctx, m, metav1.UpdateOptions{FieldManager: "test"})
		if apierrors.IsNotFound(err) {
			made, err = maps.Create(ctx, m, metav1.CreateOptions{FieldManager: "test"})
		}
		if err != nil {
			t.Fatal(err)
		}
		return made
	}
	one := write("a", "1")
	two := write("a", "2")
	write("b", "1")
	full := write("c", "1")
	if err := maps.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	const all, a = "/api/v1/namespaces/default/configmaps", "/api/v1/namespaces/default/configmaps/a"
	for name, s := range map[string]*servertest.Server{"writer": writer, "reader": reader} {
		config := s.LoopbackConfig()
		for _, want := range []*corev1.ConfigMap{one, two} {
			code, header, body := ask(t, config, a, at(want.ResourceVersion))
			var got corev1.ConfigMap
			if err := json.Unmarshal(body, &got); err != nil || code != 200 || got.Data["k"] != want.Data["k"] ||
				got.ResourceVersion != want.ResourceVersion || header.Get(past.RevisionHeader) != want.ResourceVersion {
				t.Errorf("%s: get at %s: %d %s", name, want.ResourceVersion, code, body)
			}
		}
		if code, _, body := ask(t, config, a, at(revisionOf(t, one)-1)); code != 404 {
			t.Errorf("%s: get before the creation: %d %s", name, code, body)
		}
		// A list in pages, all of one revision, of which one object is gone.
		query := at(full.ResourceVersion)
		query.Set("limit", "1")
		var names []string
		for {
			code, _, body := ask(t, config, all, query)
			var list corev1.ConfigMapList
			if err := json.Unmarshal(body, &list); err != nil || code != 200 || list.ResourceVersion != full.ResourceVersion {
				t.Fatalf("%s: list at %s: %d %s", name, full.ResourceVersion, code, body)
			}
			for _, m := range list.Items {
				names = append(names, m.Name+m.Data["k"])
			}
			if list.Continue == "" {
				break
			}
			query.Set("continue", list.Continue)
		}
		if got := strings.Join(names, " "); got != "a2 b1 c1" {
			t.Errorf("%s: list at %s: %s", name, full.ResourceVersion, got)
		}

		code, _, body := ask(t, config, a, url.Values{past.HistoryParameter: {""}})
		var h past.History
		if err := json.Unmarshal(body, &h); err != nil || code != 200 || len(h.Changes) != 3 {
			t.Fatalf("%s: history: %d %s", name, code, body)
		}
		for i, want := range []struct{ kind, value string }{{past.Added, "1"}, {past.Modified, "2"}, {past.Deleted, "2"}} {
			var m corev1.ConfigMap
			c := h.Changes[i]
			if err := json.Unmarshal(c.Object, &m); err != nil || c.Type != want.kind || m.Data["k"] != want.value || !strings.HasPrefix(c.Origin, "ann") || c.Time.IsZero() {
				t.Errorf("%s: change %d: %+v", name, i, c)
			}
			// The state at the time of the change is the state after it.
			code, header, _ := ask(t, config, all, at(c.Time.Format(time.RFC3339Nano)))
			if rev, _ := strconv.ParseInt(header.Get(past.RevisionHeader), 10, 64); code != 200 || rev < c.Revision {
				t.Errorf("%s: at the time of revision %d: %d, revision %d", name, c.Revision, code, rev)
			}
		}
		code, _, body = ask(t, config, a, url.Values{past.HistoryParameter: {"1"}})
		h = past.History{}
		if err := json.Unmarshal(body, &h); err != nil || code != 200 || len(h.Changes) != 1 || !h.More || h.Changes[0].Type != past.Deleted || !strings.Contains(string(h.Changes[0].Object), `"k":"2"`) {
			t.Errorf("%s: last change: %d %s", name, code, body)
		}
	}

	config := reader.LoopbackConfig()
	for _, refused := range []struct {
		path  string
		query url.Values
		code  int
		say   string
	}{
		{a, at("yesterday"), 400, "no moment"},
		{a, at("10m"), 400, "did you mean -10m?"},
		{a, at(1 << 40), 400, "has not happened yet"},
		{a, at("2100-01-01T00:00:00Z"), 400, "lies in the future"},
		{a, at("-1000h"), 410, "the oldest revision is"},
		{all, at("2001-01-01T00:00:00Z"), 410, "the oldest revision is"},
		{all, url.Values{"at": {"5"}, "watch": {"1"}}, 400, "not watch"},
		{all, url.Values{"at": {"5"}, "resourceVersion": {"5"}}, 400, "cannot be combined"},
		{all, url.Values{"history": {"5"}}, 400, "only a get of one object"},
		{a, url.Values{"history": {"0"}}, 400, "between 1 and 1000"},
		{a, url.Values{"history": {""}, "at": {"5"}}, 400, "cannot be combined"},
		{"/api/v1/namespaces/default/configmaps/never", url.Values{"history": {""}}, 404, "neither now nor in the history"},
	} {
		code, _, body := ask(t, config, refused.path, refused.query)
		var status metav1.Status
		if err := json.Unmarshal(body, &status); err != nil || code != refused.code || status.Kind != "Status" || !strings.Contains(status.Message, refused.say) {
			t.Errorf("%s?%s: %d %s, want %d %q", refused.path, refused.query.Encode(), code, body, refused.code, refused.say)
		}
	}
	// A write cannot be made in the past.
	if err := writer.Client.CoreV1().RESTClient().Delete().AbsPath(all, "b").Param("at", "5").Do(ctx).Error(); !apierrors.IsBadRequest(err) {
		t.Errorf("delete in the past: %v", err)
	}
	// History needs the right to get, a past list the right to list.
	for _, path := range []string{a, "/api/v1/namespaces/default/secrets/s", all} {
		for _, query := range []url.Values{{past.HistoryParameter: {""}}, at(full.ResourceVersion)} {
			if code, _, body := ask(t, reader.ClientConfigFor("eve"), path, query); code != 403 {
				t.Errorf("eve reads the past of %s: %d %s", path, code, body)
			}
		}
	}
	// Namespaces name themselves.
	if code, _, body := ask(t, config, "/api/v1/namespaces/default", url.Values{past.HistoryParameter: {""}}); code != 200 || !strings.Contains(string(body), past.Added) {
		t.Errorf("history of a namespace: %d %s", code, body)
	}
}

// A revision that has left the history is refused with the oldest that is left.
func TestMultiHistoryMovesOn(t *testing.T) {
	t.Parallel()
	members := raftstoretest.New(t, 1, func(c *raftstore.Config) { c.HistoryBytes = 32 << 10 })
	store := members.Leader()
	s := apiOver(t, store)
	maps := s.Client.CoreV1().ConfigMaps("default")
	made, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rev := revisionOf(t, made)
	members.Wait("the history to move on", func() bool {
		_, err := maps.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "b"}, Data: map[string]string{"k": strings.Repeat("x", 8<<10)},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return store.OldestRevision() > rev
	})
	code, _, body := ask(t, s.LoopbackConfig(), "/api/v1/namespaces/default/configmaps/a", at(rev))
	if want := regexp.MustCompile(`the oldest revision is \d+, of 2`); code != 410 || !want.Match(body) { // it moves on all the time
		t.Errorf("at a forgotten revision: %d %s, want %q", code, body, want)
	}
	// What has not changed since is known all the same.
	code, _, body = ask(t, s.LoopbackConfig(), "/api/v1/namespaces/default/configmaps/a", url.Values{past.HistoryParameter: {""}})
	var h past.History
	if err := json.Unmarshal(body, &h); err != nil || code != 200 || len(h.Changes) != 0 || len(h.Base) == 0 || h.OldestRevision <= rev {
		t.Errorf("history of what was made before: %d %s", code, body)
	}
	if _, err := New(store).RevisionAt(context.Background(), time.UnixMilli(1)); !apierrors.IsResourceExpired(err) {
		t.Errorf("revision at a forgotten time: %v", err)
	}
}
