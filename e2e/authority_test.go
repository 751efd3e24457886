package e2e

import (
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// TestE2EAuthority rotates the CA of three servers and an agent under
// load, with one server down when it begins and the leader killed in the middle.
// Then the old authority's key, which was stolen, opens nothing.
func TestE2EAuthority(t *testing.T) {
	e := startBare(t, 3, func(c *cluster.Config) { c.Agents = 1 })
	e.ready(4)
	ns := e.namespace("authority")
	p := pod("on-a1")
	p.Spec.NodeName = "a1"
	e.create(ns, p)
	e.podReady(ns, "on-a1")
	e.ctl("create", "secret", "generic", "-n", ns, "kept", "--from-literal=word=from-before")

	stolen, stolenClients := stealAuthority(e, "n1"), stealPurpose(e, "n1", pki.ForClients)
	if forged, _ := forgedServer(t, e, stolen); holdOpen(t, forged, e, "a1", transport.Node) != nil {
		t.Error("the stolen key opens nothing even before: what follows shows nothing")
	}
	firstGossipKey := e.gossipRing("n1").Keys[0]
	leader := e.leader()
	asked := e.other(leader, "a1") // of all that follows; it runs throughout
	away := e.other(leader, asked, "a1")
	e.use(asked)
	kubeconfig := "--kubeconfig=" + nodeOf(e, asked).Kubeconfig()
	oldConfig := rest.CopyConfig(e.config)
	oldTokens := tokensBefore(e, ns, "on-a1")

	before := beginLoad(t, e.config, ns, "before")
	follow := e.following(kubeconfig, ns)
	status := func() (s authorityState, err error) {
		out, errs, code := e.run("clusterctl", "", "ca", "status", "-o", "json", kubeconfig)
		if code != 0 {
			return s, fmt.Errorf("exit %d: %s", code, errs)
		}
		return s, json.Unmarshal([]byte(out), &s)
	}
	e.eventually("each purpose has the authority that it began with", func(context.Context) error {
		s, err := status()
		if err != nil || s.Phase != "stable" || s.Number != 0 || len(s.Authorities) != 5 || s.Authorities[0].ID != stolen.ID() {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})

	if err := e.Kill(away); err != nil {
		t.Fatal(err)
	}
	mustContain(t, "rotate", e.ctl("ca", "rotate", "--yes", "--grace=1h", kubeconfig), "distribute")
	mustContain(t, "rotate again", e.refused("", "ca", "rotate", "--yes", kubeconfig), "CA rotation in progress")
	e.eventually("it waits for the server that is away, and for no other member", func(context.Context) error {
		s, err := status()
		names := s.waited()
		if err != nil || s.Phase != "distribute" || !slices.Equal(names, []string{away}) {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	mustContain(t, "status", e.ctl("ca", "status", kubeconfig), "distribute; the new CA is being distributed, waiting for 1 members", "waited for")
	if err := e.Start(t.Context(), away); err != nil {
		t.Fatal(err)
	}
	e.eventually("the new authority signs", func(context.Context) error {
		if s, err := status(); err != nil || s.Phase != "reissue" {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	if err := e.Kill(leader); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), leader); err != nil {
		t.Fatal(err)
	}
	e.eventually("all members have certificates of it", func(context.Context) error {
		if s, err := status(); err != nil || len(s.waited()) > 0 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		for _, node := range []string{"n1", "n2", "n3", "a1"} {
			if cert := certOf(e, node); stolen.Signed(cert) {
				return fmt.Errorf("%s shows a certificate of the old authority", node)
			}
		}
		return nil
	})
	before.check(t, "from before the rotation to its grace")
	follow.check(t, "from before the rotation to its grace")

	// From here on by what a server's kubeconfig holds now.
	e.use(asked)
	after := beginLoad(t, e.config, ns, "after")
	followNew := e.following(kubeconfig, ns)
	mustContain(t, "finish", e.ctl("ca", "finish", "--wait", "--yes", kubeconfig), "The old authority is gone")
	e.eventually("there is one authority", func(context.Context) error {
		s, err := status()
		if err != nil || s.Phase != "stable" || len(s.Authorities) != 5 || s.Authorities[0].ID == stolen.ID() {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	e.eventually("all members trust it alone", func(context.Context) error {
		for _, node := range []string{"n1", "n2", "n3", "a1"} {
			b, err := os.ReadFile(filepath.Join(e.data(node), "pki", "ca.crt"))
			if err != nil {
				return err
			}
			if trust, err := pki.ParseTrust(0, b, nil); err != nil || len(trust.All()) != 1 || trust.Find(stolen.ID()) != nil {
				return fmt.Errorf("%s trusts %s (%v)", node, b, err)
			}
		}
		return nil
	})
	after.check(t, "through the end")
	followNew.check(t, "through the end")

	t.Run("the stolen key", func(t *testing.T) { stolenAuthority(t, e, stolen, stolenClients, oldConfig) })

	t.Run("tokens of service accounts", func(t *testing.T) { tokensAfter(t, e, ns, "on-a1", kubeconfig, oldTokens) })

	t.Run("what goes on", func(t *testing.T) {
		e.use(asked)
		for _, server := range []string{"n1", "n2", "n3"} {
			by := "--kubeconfig=" + nodeOf(e, server).Kubeconfig()
			mustContain(t, "a secret from before, by "+server, e.ctl("get", "secret", "-n", ns, "kept", "-o", "jsonpath={.data.word}", by), "ZnJvbS1iZWZvcmU=")
			e.eventuallyHas([]string{"exec", "-n", ns, "on-a1", by, "--", "/hello", "echo", "still"}, "still")
		}
		e.eventually("pods get the new authority", func(ctx context.Context) error {
			cm, err := e.api.CoreV1().ConfigMaps(ns).Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
			if err != nil {
				return err
			}
			inside, _, code := e.run("clusterctl", "", "exec", "-n", ns, "on-a1", kubeconfig, "--", "/hello", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
			trust, err := pki.ParseTrust(0, []byte(cm.Data["ca.crt"]), nil)
			if err != nil || len(trust.All()) != 1 || trust.Find(stolen.ID()) != nil || code != 0 || strings.TrimSpace(inside) != strings.TrimSpace(cm.Data["ca.crt"]) {
				return fmt.Errorf("ConfigMap %q, in the pod %q (%v)", cm.Data["ca.crt"], inside, err)
			}
			return nil
		})
		restarted := time.Now()
		for _, node := range []string{"a1", away} { // and what is on disk is whole
			if err := e.Kill(node); err != nil {
				t.Fatal(err)
			}
			if err := e.Start(t.Context(), node); err != nil {
				t.Fatal(err)
			}
		}
		e.backSince(restarted, "a1", away)
		e.eventually("every node is Ready", func(ctx context.Context) error {
			list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, n := range list.Items {
				if !nodeReady(&n) {
					return fmt.Errorf("%s: %+v", n.Name, n.Status.Conditions)
				}
			}
			return nil
		})
	})

	t.Run("the gossip key", func(t *testing.T) {
		e.use(asked)
		e.gossipKeyChanged(t, firstGossipKey, "n1", "n2", "n3") // the end of the rotation has
		gossipKeyAway(t, e, asked, away, leader)
	})
	t.Run("revoked users", func(t *testing.T) { revokedUsers(t, e, asked) })
}

// authorityState is what clusterctl ca status says.
type authorityState struct {
	Phase       string
	Number      int
	Of          []string
	Authorities []struct {
		ID       string
		Purposes []string
	}
	Members []struct {
		Name   string
		Waited bool
	}
}

func (s authorityState) waited() (names []string) {
	for _, m := range s.Members {
		if m.Waited {
			names = append(names, m.Name)
		}
	}
	return names
}

func nodeOf(e *env, name string) cluster.Node {
	return e.Nodes()[slices.IndexFunc(e.Nodes(), func(n cluster.Node) bool { return n.Name == name })]
}

func certOf(e *env, node string) *x509.Certificate {
	b, err := os.ReadFile(filepath.Join(e.data(node), "pki", "node.crt"))
	if err != nil {
		e.t.Fatal(err)
	}
	cert, err := pki.ParseCert(b)
	if err != nil {
		e.t.Fatal(err)
	}
	return cert
}

// stealAuthority reads a server's copy of the servers' authority.
func stealAuthority(e *env, server string) *pki.CA { return stealPurpose(e, server, pki.ForPeers) }

// stealPurpose reads a server's copy of the authority for a purpose.
func stealPurpose(e *env, server string, p pki.Purpose) *pki.CA {
	e.t.Helper()
	name := "ca-" + string(p)
	if p == pki.ForPeers {
		name = "ca"
	}
	var files [2][]byte
	for i, ext := range []string{".crt", ".key"} {
		b, err := os.ReadFile(filepath.Join(e.data(server), "pki", name+ext))
		if err != nil {
			e.t.Fatal(err)
		}
		files[i] = b
	}
	ca, err := pki.LoadCA(files[0], files[1])
	if err != nil {
		e.t.Fatal(err)
	}
	return ca
}

// stolenAuthority makes itself identities with the old authorities' keys.
func stolenAuthority(t *testing.T, e *env, stolen, stolenClients *pki.CA, old *rest.Config) {
	// It trusts the cluster; the cluster does not trust it.
	id, key := forgedServer(t, e, stolen)
	for _, to := range []string{"n1", "n2", "n3", "a1"} {
		for _, protocol := range []string{transport.Raft, transport.Gossip, transport.Node, transport.Member} {
			if to == "a1" && protocol != transport.Node {
				continue
			}
			// That its disk holds one authority is a moment before it goes by that.
			e.eventually(fmt.Sprintf("%s of %s refuses a certificate of the old authority", protocol, to), func(context.Context) error {
				if err := holdOpen(t, id, e, to, protocol); err == nil {
					return errors.New("it is open")
				}
				return nil
			})
		}
	}
	admin, err := stolenClients.IssueClient(key.Public(), "admin", []string{pki.AdminsGroup}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, server := range []string{"n1", "n2", "n3"} {
		e.eventually(server+" refuses an administrator of the old authority", func(context.Context) error {
			if err := asAdmin(t, e, server, admin, key); !apierrors.IsUnauthorized(err) {
				return fmt.Errorf("%w", err)
			}
			return nil
		})
	}
	client, err := kubernetes.NewForConfig(old)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err == nil {
		t.Error("the kubeconfig of before is good still")
	}
}

// asAdmin does what an administrator may, with that certificate.
func asAdmin(t *testing.T, e *env, server string, cert *x509.Certificate, key crypto.Signer) error {
	t.Helper()
	keyPEM, err := pki.EncodeKey(key)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "https://" + addrOf(e, server).String(), TLSClientConfig: rest.TLSClientConfig{
		CAData: pki.EncodeCert(stealAuthority(e, server).Cert), CertData: pki.EncodeCert(cert), KeyData: keyPEM,
	}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
	return err
}

// forgedServer is a server by the stolen authority, which trusts those of the cluster as they are now.
func forgedServer(t *testing.T, e *env, stolen *pki.CA) (transport.Identity, crypto.Signer) {
	t.Helper()
	trusts, err := clustertest.Trust(nodeOf(e, "n2"))
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := stolen.IssueServer(key.Public(), "n1", nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, stolen.Cert.Raw}, PrivateKey: key, Leaf: cert}
	return transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: trusts.Roots}, key
}

// holdOpen opens a connection, and reports whether its other end kept it open.
func holdOpen(t *testing.T, id transport.Identity, e *env, to, protocol string) error {
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	c, err := id.Dial(ctx, addrOf(e, to), "", protocol)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(3 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return nil
}

// load writes ConfigMaps, and watches them over one request.
type load struct {
	stop    context.CancelFunc
	working sync.WaitGroup

	mu      sync.Mutex
	failed  []error
	written map[string]bool
	seen    map[string]bool
}

func beginLoad(t *testing.T, config *rest.Config, ns, name string) *load {
	t.Helper()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{stop: cancel, written: map[string]bool{}, seen: map[string]bool{}}
	t.Cleanup(func() { cancel(); l.working.Wait() })
	watch, err := client.CoreV1().ConfigMaps(ns).Watch(ctx, metav1.ListOptions{LabelSelector: "load=" + name})
	if err != nil {
		t.Fatal(err)
	}
	l.working.Go(func() {
		for event := range watch.ResultChan() {
			if cm, ok := event.Object.(*corev1.ConfigMap); ok {
				l.mu.Lock()
				l.seen[cm.Name] = true
				l.mu.Unlock()
			}
		}
	})
	l.working.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", name, i), Labels: map[string]string{"load": name}}}
			_, err := client.CoreV1().ConfigMaps(ns).Create(ctx, cm, metav1.CreateOptions{})
			l.mu.Lock()
			switch {
			case ctx.Err() != nil:
			case err != nil:
				l.failed = append(l.failed, err)
			default:
				l.written[cm.Name] = true
			}
			l.mu.Unlock()
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	return l
}

// check ends the load: every write has succeeded, and the watch, which was never
// opened again, has reported each.
func (l *load) check(t *testing.T, when string) {
	t.Helper()
	for deadline := time.Now().Add(testTimeout); ; time.Sleep(50 * time.Millisecond) {
		l.mu.Lock()
		missing := 0
		for name := range l.written {
			if !l.seen[name] {
				missing++
			}
		}
		written := len(l.written)
		l.mu.Unlock()
		if missing <= 1 { // the one that is on its way
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("%s: the watch lacks %d of %d", when, missing, written)
			break
		}
	}
	l.stop()
	l.working.Wait()
	t.Logf("%s: %d writes, %d refused", when, len(l.written), len(l.failed))
	if len(l.failed) > 0 || len(l.written) < 10 {
		t.Errorf("%s: of %d writes failed %d: %v", when, len(l.written)+len(l.failed), len(l.failed), l.failed)
	}
}

// session is an exec that stays open, and echoes its input.
type session struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  io.Reader
	errs bytes.Buffer
}

// following opens an exec in the pod on the agent that echoes its input.
func (e *env) following(kubeconfig, ns string) *session {
	e.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	s := &session{cmd: exec.CommandContext(ctx, e.Bin("clusterctl"), "exec", "-i", "-n", ns, "on-a1", kubeconfig, "--", "/hello", "cat", "/dev/stdin")}
	s.cmd.Stderr = &s.errs
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		e.t.Fatal(err)
	}
	if s.out, err = s.cmd.StdoutPipe(); err != nil {
		e.t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(cancel)
	return s
}

// check says a word, and expects it back.
func (s *session) check(t *testing.T, when string) {
	t.Helper()
	if _, err := io.WriteString(s.in, "a word\n"); err != nil {
		t.Errorf("exec %s: %v", when, err)
	}
	s.in.Close()
	out, err := io.ReadAll(s.out)
	if werr := s.cmd.Wait(); err != nil || werr != nil || string(out) != "a word\n" {
		t.Errorf("exec %s: %q, %v, %v: %s", when, out, err, werr, &s.errs)
	}
}
