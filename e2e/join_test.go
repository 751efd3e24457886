package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EJoinRefused: a token that is wrong gives one sentence and exit code
// 1, and leaves nothing half joined.
func TestE2EJoinRefused(t *testing.T) {
	e := startBare(t, 1)
	addr := e.Nodes()[0].Addr.String() + ":6443"
	newToken := func(flags ...string) string {
		out := strings.TrimSpace(e.ctl(append([]string{"token", "create"}, flags...)...))
		if _, after, ok := strings.Cut(out, "--token "); ok {
			return strings.Fields(after)[0]
		}
		return out
	}
	token := newToken()
	flipped := []byte(token)
	for i := len(flipped) - 3; i > 0; i-- { // a letter near the end, changed
		if c := flipped[i]; c >= 'a' && c < 'z' {
			flipped[i]++
			break
		}
	}
	expired := newToken("--ttl=1s")
	for _, tt := range []struct{ name, addr, token, says string }{
		{"altered", addr, string(flipped), "altered"},
		{"cut short", addr, token[:len(token)/2], "cut when it was copied"},
		{"nonsense", addr, "letmein", "not a join token"},
		{"connection refused", e.Nodes()[0].Addr.String() + ":6444", token, "connection refused"},
		{"expired", addr, expired, "expired"},
		{"for another name", addr, newToken("--name=other"), "is for the machine other, and this one is joiner"},
		{"from elsewhere", addr, newToken("--from=203.0.113.0/24", "--role=agent"), "is good from 203.0.113.0/24"},
	} {
		t.Run(strings.ReplaceAll(tt.name, " ", "_"), func(t *testing.T) {
			data := filepath.Join(t.TempDir(), "joiner")
			refuse := func() (string, error) {
				ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
				defer cancel()
				cmd := e.Exec(ctx, "n1", e.Bin("clusterd"), "join", tt.addr, "--token", tt.token, "--data", data, "--name", "joiner", "--port", "7443", "--prepare")
				var out strings.Builder
				cmd.Stdout, cmd.Stderr = &out, &out
				err := cmd.Run()
				return out.String(), err
			}
			var out string
			var err error
			if tt.name == "expired" {
				e.eventually("the token has expired", func(context.Context) error {
					if out, err = refuse(); err == nil {
						_ = os.RemoveAll(data)
						return errors.New("it still opens")
					}
					return nil
				})
			} else {
				out, err = refuse()
			}
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 1 {
				t.Fatalf("got %v: %s", err, out)
			}
			lines := strings.Split(strings.TrimSpace(out), "\n")
			if strings.HasSuffix(lines[0], "trying for up to 30s …") {
				lines = lines[1:]
			}
			if len(lines) != 1 || len(lines[0]) > 400 {
				t.Errorf("not one clear sentence:\n%s", out)
			}
			if !strings.Contains(out, tt.says) {
				t.Errorf("%q is not in: %s", tt.says, out)
			}
			if _, err := os.Stat(filepath.Join(data, "pki", "node.crt")); !os.IsNotExist(err) {
				t.Errorf("an identity is left (%v)", err)
			}
		})
	}
	list, err := e.api.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) > 1 {
		t.Errorf("nodes: %d, %v", len(list.Items), err)
	}
}

// TestE2EMembers looks at the members, then stops one in order: its node is
// not Ready while it is away, and comes back by itself.
func TestE2EMembers(t *testing.T) {
	features.Shows(t, 153)
	e := start(t)
	members := e.ctl("members")
	mustContain(t, "members", members, "n1", "n2", "n3", "voter", "leader")
	away := e.other(e.leader(), "n1")
	if err := e.Stop(t.Context(), away); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	ready := func(want bool) func(context.Context) error {
		return func(ctx context.Context) error {
			n, err := e.api.CoreV1().Nodes().Get(ctx, away, metav1.GetOptions{})
			if err == nil && nodeReady(n) != want {
				err = fmt.Errorf("Ready is %v", !want)
			}
			return err
		}
	}
	e.eventually(away+" is not Ready", ready(false))
	t.Logf("%s was not Ready %s after it stopped", away, time.Since(stopped).Round(time.Millisecond))
	if err := e.Start(t.Context(), away); err != nil {
		t.Fatal(err)
	}
	e.eventually(away+" is Ready", ready(true))
	e.showRegistration(t, away)
}

// showRegistration: a node without a Node object makes one within seconds of its
// start. It is measured up to five times, and the best counts: a busy machine makes one
// measurement long, a wait in the program makes all of them so.
func (e *env) showRegistration(t *testing.T, name string) {
	const bound = 10 * time.Second
	best := time.Duration(math.MaxInt64)
	for range 5 {
		if err := e.Stop(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		e.ctl("delete", "node", name)
		began := time.Now()
		if err := e.Start(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		// The API tells whole seconds: one made 9.9 s later counts as 9 s.
		var made *corev1.Node
		e.eventually(name+" has a Node again", func(ctx context.Context) (err error) {
			made, err = e.api.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			return err
		})
		mustContain(t, "get nodes", e.ctl("get", "nodes"), name)
		best = min(best, made.CreationTimestamp.Sub(began)+time.Second)
		e.eventually(name+" is Ready", func(ctx context.Context) error {
			n, err := e.api.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err == nil && !nodeReady(n) {
				err = errors.New("it is not")
			}
			return err
		})
		if best <= bound {
			t.Logf("the Node was made at most %s after the start", best.Round(time.Millisecond))
			return
		}
	}
	t.Errorf("the best of five Nodes was made %s after the start, want %s at most", best, bound)
}
