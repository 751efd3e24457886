package storepast

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/past"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestMultiHistoryNamesTheServer: a change through a member that does not lead names it, by its name
// where that is known, beside the user; the user's words are as they were.
func TestMultiHistoryNamesTheServer(t *testing.T) {
	c := raftstoretest.New(t, 3, raftstoretest.Steady)
	store := c.Follower()
	id := store.Status().ID
	known := map[string]string{}
	p := New(store)
	p.Name = func(_ context.Context, id string) string { return known[id] }
	s := servertest.Start(t, func(config *server.Config) {
		config.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: server.Caller})
		config.Past = p
	})
	if _, err := s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "m"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	config := s.Listen(t)
	for _, want := range []string{id, "frankfurt-2"} { // before its name is known, and after
		code, _, body := ask(t, config, "/api/v1/namespaces/default/configmaps/m", url.Values{past.HistoryParameter: {""}})
		var h past.History
		if err := json.Unmarshal(body, &h); code != http.StatusOK || err != nil || len(h.Changes) != 1 {
			t.Fatalf("%d, %v: %s", code, err, body)
		}
		change := h.Changes[0]
		if change.Server != want || change.Origin == "" || strings.Contains(change.Origin, "[from") {
			t.Errorf("%+v, want it through %s", change, want)
		}
		known[id] = "frankfurt-2"
	}
}
