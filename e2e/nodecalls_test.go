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

// callIs makes a node call until it is answered so: the node may be about to reach the
// server again by which it looks up what a user may.
func callIs(e *env, key, to string, who *transport.Caller, method, path string, want int, words string) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s by %+v to %s is %d", path, who, to, want), func(context.Context) error {
		code, body := callAs(e, key, to, who, method, path)
		if code == http.StatusOK && want != code {
			e.t.Fatalf("%s by %+v to %s: %s", path, who, to, body)
		}
		if code != want || !strings.Contains(body, words) {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
}

// stolenServerKey makes node calls with a server's own key. A node answers what the
// user may whom the server names, and nothing without one.
func stolenServerKey(t *testing.T, e *env, ns string) {
	log := "/containerLogs/" + ns + "/on-a1/main"
	eve := &transport.Caller{User: "eve"}
	for _, to := range []string{"a1", "n2"} {
		callIs(e, "n1", to, nil, "GET", "/healthz", http.StatusOK, "")
		for _, call := range []string{"GET " + log, "POST /exec/" + ns + "/on-a1/main?command=/hello&output=1", "GET /pods", "GET /images", "POST /images/load", "GET /logs/", "GET /configz"} {
			method, path, _ := strings.Cut(call, " ")
			callIs(e, "n1", to, nil, method, path, http.StatusForbidden, "names no user")
			callIs(e, "n1", to, eve, method, path, http.StatusForbidden, `user "eve" may not`)
			if code, body := callAs(e, "a2", to, nil, method, path); code != 0 {
				t.Errorf("%s: %s with another agent's key: %d %s", to, call, code, body)
			}
		}
	}
	// A server is believed whom it names, as an API server is by kubelets.
	callIs(e, "n1", "a1", &transport.Caller{User: "admin", Groups: []string{"system:masters"}}, "GET", log, http.StatusOK, "serving on")

	// What servers ask each other is for no user, by whatever path.
	for _, path := range []string{"/clusterd/v1/store", "/clusterd/v1/recovery"} {
		e.eventually(path+" is forbidden through a node", func(ctx context.Context) error {
			req := e.api.CoreV1().RESTClient().Post().Body([]byte("{}"))
			if path == "/clusterd/v1/store" {
				req = e.api.CoreV1().RESTClient().Get()
			}
			err := req.AbsPath("/api/v1/nodes/n2/proxy" + path).Do(ctx).Error()
			if err == nil {
				t.Fatalf("%s is answered through a node", path)
			}
			if !apierrors.IsForbidden(err) {
				return fmt.Errorf("the answer: %w", err)
			}
			return nil
		})
	}

	// A user who may read the logs of one namespace, and nothing else.
	e.ctl("create", "role", "reader", "-n", ns, "--verb=get", "--resource=pods,pods/log")
	e.ctl("create", "rolebinding", "reader", "-n", ns, "--role=reader", "--user=ann")
	// Each server, and the node, learns of the binding by a watch of its own.
	e.eventuallyHas([]string{"logs", "-n", ns, "on-a1", "--as=ann"}, "serving on")
	mustContain(t, "and runs nothing", e.refused("", "exec", "-n", ns, "on-a1", "--as=ann", "--", "/hello", "echo", "hi"), "forbidden")
	ann := &transport.Caller{User: "ann"}
	callIs(e, "n1", "a1", ann, "GET", log, http.StatusOK, "")
	callIs(e, "n1", "a1", ann, "GET", "/containerLogs/default/on-a1/main", http.StatusForbidden, "")
}
