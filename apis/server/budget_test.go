package server_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/budget"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestMultiBudget: a writer in a loop is held back by every server, and no other
// writer is; heartbeats go on, its own too.
func TestMultiBudget(t *testing.T) {
	t.Parallel()
	// A quarter of the history at once: more than two servers write when they
	// start. Nothing to speak of comes back while the test runs.
	const history = 8 << 20
	budgets := map[string]*budget.Budget{}
	members := raftstoretest.New(t, 2, func(c *raftstore.Config) {
		raftstoretest.Steady(c)
		b := budget.New(budget.Config{HistoryBytes: history, Window: 1000 * time.Hour, Writer: server.WriterOf})
		budgets[c.ID], c.Events.Written = b, b.Written
	})
	members.Leader()
	var servers []*servertest.Server
	for _, id := range members.IDs() {
		servers = append(servers, servertest.Start(t, func(c *server.Config) {
			c.Storage = kubestore.NewDecorator(kubestore.Config{Store: members.Store(id), Cache: true, Origin: server.Caller, Reserve: budgets[id].Reserve})
		}))
	}
	as := func(s *servertest.Server, name, program string) *rest.Config {
		config := s.ClientConfigFor(name, user.SystemPrivilegedGroup)
		config.UserAgent = program
		return config
	}
	write := func(config *rest.Config, name string) (int, metav1.Status) {
		body := fmt.Sprintf(`{"metadata":{"name":%q},"data":{"k":%q}}`, name, strings.Repeat("x", 64<<10))
		code, status, _ := raw(t, config, "POST", "/api/v1/namespaces/default/configmaps", body)
		return code, status
	}
	renew := func(config *rest.Config, lease string) {
		t.Helper()
		client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
		leases := client.CoordinationV1().Leases(metav1.NamespaceSystem)
		must[*coordinationv1.Lease](t)(leases.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: meta(lease)}, metav1.CreateOptions{}))
		held := must[*coordinationv1.Lease](t)(leases.Get(t.Context(), lease, metav1.GetOptions{}))
		now := metav1.NowMicro()
		held.Spec.RenewTime = &now
		must[*coordinationv1.Lease](t)(leases.Update(t.Context(), held, metav1.UpdateOptions{}))
	}

	loop := as(servers[0], "ann", "loop/1")
	var status metav1.Status
	written, code := 0, http.StatusCreated
	for ; code == http.StatusCreated && written < 100; written++ {
		code, status = write(loop, fmt.Sprint("m", written))
	}
	if code != http.StatusTooManyRequests || written < 20 || written > 40 {
		t.Fatalf("a loop ended with %d after %d writes of 64 KiB, want 429 after 2 MiB: %+v", code, written, status)
	}
	if !strings.Contains(status.Message, `writer "ann" is held back`) || status.Details == nil || status.Details.RetryAfterSeconds < 1 {
		t.Errorf("the loop receives %+v", status)
	}
	renew(loop, "ann")
	renew(as(servers[0], "system:node:n1", "clusterd/1"), "n1")
	if code, status := write(as(servers[0], "bob", "loop/1"), "b"); code != http.StatusCreated {
		t.Errorf("another writer: %d %+v", code, status)
	}
	// The other server has read it from the log, once it has applied it.
	members.Agree()
	if code, status := write(as(servers[1], "ann", "another/1"), "other"); code != http.StatusTooManyRequests {
		t.Errorf("by another program through another server: %d %+v", code, status)
	}
	renew(as(servers[1], "ann", "another/1"), "ann2")

	for _, id := range members.IDs() {
		var ann, all int64
		top := members.Store(id).Top()
		for _, w := range top.Writers {
			if all += w.HistoryBytes; w.Origin == "ann via loop" {
				ann = w.HistoryBytes
			}
			if held, want := budgets[id].HeldBack(w.Origin), strings.HasPrefix(w.Origin, "ann"); held != want {
				t.Errorf("%s: %q is held back: %v", id, w.Origin, held)
			}
		}
		if ann < int64(written-1)*64<<10 || all != top.History.Bytes || ann > all || top.History.Age <= 0 {
			t.Errorf("%s: of the history %d bytes are ann's and %d everybody's: %+v", id, ann, all, top.History)
		}
	}
}
