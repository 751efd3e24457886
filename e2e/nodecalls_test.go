package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/clusterd/clusterd/member/transport"
)

// callAs makes a node call with a node's key, for a user or without one.
func callAs(e *env, key, to string, who *transport.Caller, method, path string) (code int, body string) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), testTimeout)
	defer cancel()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := stolenIdentity(e, key).Dial(ctx, addrOf(e, to), "", transport.Node)
		if err != nil {
			return nil, err
		}
		if who != nil {
			err = transport.Announce(c, *who)
		}
		return c, err
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+to+path, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(res.Body, 4096))
	return res.StatusCode, string(b)
}

// stolenServerKey makes node calls with a server's own key. A node answers what the
// user may whom the server names, and nothing without one.
func stolenServerKey(t *testing.T, e *env, ns string) {
	log := "/containerLogs/" + ns + "/on-a1/main"
	eve := &transport.Caller{User: "eve"}
	for _, to := range []string{"a1", "n2"} {
		if code, body := callAs(e, "n1", to, nil, "GET", "/healthz"); code != http.StatusOK {
			t.Errorf("%s: /healthz: %d %s", to, code, body)
		}
		for _, call := range []string{"GET " + log, "POST /exec/" + ns + "/on-a1/main?command=/hello&output=1", "GET /pods", "GET /images", "POST /images/load", "GET /logs/", "GET /configz"} {
			method, path, _ := strings.Cut(call, " ")
			if code, body := callAs(e, "n1", to, nil, method, path); code != http.StatusForbidden || !strings.Contains(body, "names no user") {
				t.Errorf("%s: %s without a user: %d %s", to, call, code, body)
			}
			if code, body := callAs(e, "n1", to, eve, method, path); code != http.StatusForbidden || !strings.Contains(body, `user "eve" may not`) {
				t.Errorf("%s: %s for eve: %d %s", to, call, code, body)
			}
			if code, body := callAs(e, "a2", to, nil, method, path); code != 0 {
				t.Errorf("%s: %s with another agent's key: %d %s", to, call, code, body)
			}
		}
	}
	// A server is believed whom it names, as an API server is by kubelets.
	if code, body := callAs(e, "n1", "a1", &transport.Caller{User: "admin", Groups: []string{"system:masters"}}, "GET", log); code != http.StatusOK || !strings.Contains(body, "serving on") {
		t.Errorf("for an administrator: %d %s", code, body)
	}

	// What servers ask each other is for no user, by whatever path.
	for _, path := range []string{"/clusterd/v1/store", "/clusterd/v1/recovery"} {
		err := e.api.CoreV1().RESTClient().Post().AbsPath("/api/v1/nodes/n2/proxy" + path).Body([]byte("{}")).Do(t.Context()).Error()
		if path == "/clusterd/v1/store" {
			_, err = e.api.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes/n2/proxy" + path).DoRaw(t.Context())
		}
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s through a node: %v", path, err)
		}
	}

	// A user who may read the logs of one namespace, and nothing else.
	e.ctl("create", "role", "reader", "-n", ns, "--verb=get", "--resource=pods,pods/log")
	e.ctl("create", "rolebinding", "reader", "-n", ns, "--role=reader", "--user=ann")
	// Each server, and the node, learns of the binding by a watch of its own.
	e.eventuallyHas([]string{"logs", "-n", ns, "on-a1", "--as=ann"}, "serving on")
	mustContain(t, "and runs nothing", e.refused("", "exec", "-n", ns, "on-a1", "--as=ann", "--", "/hello", "echo", "hi"), "forbidden")
	ann := &transport.Caller{User: "ann"}
	e.eventually("ann has the logs from the node", func(context.Context) error {
		if code, body := callAs(e, "n1", "a1", ann, "GET", log); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	if code, body := callAs(e, "n1", "a1", ann, "GET", "/containerLogs/default/on-a1/main"); code != http.StatusForbidden {
		t.Errorf("ann's logs of another namespace: %d %s", code, body)
	}
}
