package e2e

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// TestE2EAuthorities gives the purposes of a cluster with one authority, as earlier versions
// founded them, authorities of their own, under load and with the leader killed in the middle. Then
// the key of each, which was stolen, makes what it is for and nothing else, and a rotation of one
// leaves what was opened by others alone.
func TestE2EAuthorities(t *testing.T) {
	need(t)
	if os.Getenv("CLUSTERD_KEYS") == "" {
		t.Skip("takes minutes: make keys-test")
	}
	t.Setenv("CLUSTERD_DEBUG_ONE_AUTHORITY", "1")
	e := startBare(t, 3, func(c *cluster.Config) { c.Agents = 1 })
	e.ready(4)
	ns := e.namespace("authorities")
	p := pod("on-a1")
	p.Spec.NodeName = "a1"
	e.create(ns, p)
	e.podReady(ns, "on-a1")
	e.ctl("create", "secret", "generic", "-n", ns, "kept", "--from-literal=word=from-before")
	leader := e.leader()
	asked := e.other(leader, "a1")
	e.use(asked)
	by := "--kubeconfig=" + nodeOf(e, asked).Kubeconfig()
	tokens := tokensBefore(e, ns, "on-a1")

	// With one authority its key makes everything.
	only := stealAuthority(e, "n1")
	for what, err := range forge(t, e, only) {
		if err != nil {
			t.Errorf("the only authority's key makes no %s, so that what follows shows nothing: %v", what, err)
		}
	}
	mustContain(t, "status", e.ctl("ca", "status", by), "all ", only.ID())
	mustContain(t, "rotate of what is not there", e.refused("", "ca", "rotate", "client", "--yes", by), "clusterctl ca split")

	before := beginLoad(t, e.config, ns, "before")
	follow := e.following(by, ns)
	mustContain(t, "split", e.ctl("ca", "split", "--yes", "--grace=1h", by), "distribute", "(of client, front, node, secrets)")
	if err := e.Kill(leader); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), leader); err != nil {
		t.Fatal(err)
	}
	e.eventually("all members have what the new ones signed", func(context.Context) error {
		s, err := e.authorities(by)
		if err != nil || s.Phase != "reissue" || len(s.waited()) > 0 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	before.check(t, "from before the split to its grace")
	follow.check(t, "from before the split to its grace")

	e.use(asked)
	oldAdmin := rest.CopyConfig(e.config)
	after := beginLoad(t, e.config, ns, "after")
	followNew := e.following(by, ns)
	mustContain(t, "finish", e.ctl("ca", "finish", "--wait", "--yes", by), "old authority")
	e.stableEverywhere(by)
	after.check(t, "through the end of the split")
	followNew.check(t, "through the end of the split")
	for _, server := range []string{"n1", "n2", "n3"} {
		from := "--kubeconfig=" + nodeOf(e, server).Kubeconfig()
		mustContain(t, "a secret from before, by "+server, e.ctl("get", "secret", "-n", ns, "kept", "-o", "jsonpath={.data.word}", from), "ZnJvbS1iZWZvcmU=")
		e.eventuallyHas([]string{"exec", "-n", ns, "on-a1", from, "--", "/hello", "echo", "still"}, "still")
		for what, token := range tokens {
			if err := shows(e, server, token); err != nil {
				t.Errorf("%s token from before the split, to %s: %v", what, server, err)
			}
		}
	}
	if now := stealAuthority(e, "n1"); now.ID() != only.ID() {
		t.Error("the servers' authority is another one after the split: join tokens and kubeconfigs know it no more")
	}

	t.Run("stolen keys", func(t *testing.T) {
		for _, p := range pki.Purposes {
			stolen := stealPurpose(e, "n1", p)
			for what, err := range forge(t, e, stolen) {
				makes := map[string]pki.Purpose{"server": pki.ForPeers, "agent": pki.ForNodes, "administrator": pki.ForClients}[what]
				if (err == nil) != (makes == p) {
					t.Errorf("the authority for %s makes a %s: %v", p, what, err)
				}
			}
		}
		cm, err := e.api.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for key, p := range map[string]pki.Purpose{"requestheader-client-ca-file": pki.ForFront, "client-ca-file": pki.ForClients} {
			if want := string(pki.EncodeCert(stealPurpose(e, "n1", p).Cert)); cm.Data[key] != want {
				t.Errorf("aggregated APIs are told in %s\n%swant\n%s", key, cm.Data[key], want)
			}
		}
	})

	t.Run("of one purpose", func(t *testing.T) {
		asNode := e.nodeConfig("a1", asked)
		certs := func() (out string) {
			for _, n := range []string{"n1", "n2", "n3", "a1"} {
				out += certOf(e, n).SerialNumber.String() + " "
			}
			return out
		}
		was := certs()
		open := watchPods(t, asNode, "a1")
		mustContain(t, "rotate client", e.ctl("ca", "rotate", "client", "--finish", "--wait", "--yes", by), "certificates of people are good no more")
		e.stableEverywhere(by)
		if err := stillOpen(t, e, open, ns, "client"); err != nil {
			t.Errorf("a node's watch through the rotation for clients: %v", err)
		}
		if now := certs(); now != was {
			t.Errorf("nodes have other certificates after it: %s, were %s", now, was)
		}
		client, err := kubernetes.NewForConfig(oldAdmin)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
			t.Errorf("an administrator of before: %v", err)
		}

		e.use(asked)
		load := beginLoad(t, e.config, ns, "nodes")
		open = watchPods(t, asNode, "a1")
		e.ctl("ca", "rotate", "node", "--finish", "--wait", "--yes", by)
		e.stableEverywhere(by)
		load.check(t, "through the rotation for nodes")
		if err := stillOpen(t, e, open, ns, "node"); err != nil {
			t.Errorf("a node's own watch through the rotation for nodes: %v", err)
		}
		if !stealPurpose(e, "n1", pki.ForNodes).Signed(certOf(e, "a1")) {
			t.Error("the agent's certificate is not of the new authority")
		}
		for what, token := range tokens {
			if err := shows(e, asked, token); err != nil {
				t.Errorf("%s token from before: %v", what, err)
			}
		}
	})

	for _, node := range []string{"a1", leader} { // what is on disk is whole
		if err := e.Kill(node); err != nil {
			t.Fatal(err)
		}
		if err := e.Start(t.Context(), node); err != nil {
			t.Fatal(err)
		}
	}
	e.use(leader)
	e.eventually("the server that was killed answers", func(ctx context.Context) error {
		_, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		return err
	})
	e.ready(4)
}

// authorities is what clusterctl ca status says.
func (e *env) authorities(by string) (s authorityState, err error) {
	out, errs, code := e.run("clusterctl", "", "ca", "status", "-o", "json", by)
	if code != 0 {
		return s, fmt.Errorf("exit %d: %s", code, errs)
	}
	return s, json.Unmarshal([]byte(out), &s)
}

// stableEverywhere waits until each purpose has one authority, and all members have taken that up.
func (e *env) stableEverywhere(by string) {
	e.t.Helper()
	e.eventually("each purpose has one authority", func(context.Context) error {
		s, err := e.authorities(by)
		if err != nil || s.Phase != "stable" || len(s.Authorities) != 5 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		for _, a := range s.Authorities {
			name := "ca-" + a.Purposes[0] + ".crt"
			if a.Purposes[0] == "peer" {
				name = "ca.crt"
			}
			for _, node := range []string{"n1", "n2", "n3", "a1"} {
				b, err := os.ReadFile(filepath.Join(e.data(node), "pki", name))
				if err != nil {
					return err
				}
				trust, err := pki.ParseTrust(0, b, nil)
				if err != nil || len(trust.All()) != 1 || trust.Signer().ID() != a.ID || len(a.Purposes) != 1 {
					return fmt.Errorf("%s has %s %s (%v), not %+v", node, name, b, err, a)
				}
			}
		}
		return nil
	})
}

// forge makes one of each with an authority's key, and says at which door each failed; nil: nowhere.
func forge(t *testing.T, e *env, stolen *pki.CA) map[string]error {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	agent, err := stolen.IssueAgent(key.Public(), "a1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	admin, err := stolen.IssueClient(key.Public(), "admin", []string{pki.AdminsGroup}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	both, err := stolen.IssueClient(key.Public(), "system:node:a1", []string{pki.NodesGroup, pki.AdminsGroup}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	made := map[string]error{}
	server, _ := forgedServer(t, e, stolen)
	made["server"] = allOrNone(t, stolen, "server", map[string]error{
		"node calls of a1":      holdOpen(t, server, e, "a1", transport.Node),
		"node calls of n2":      holdOpen(t, server, e, "n2", transport.Node),
		"members' questions":    holdOpen(t, server, e, "n2", transport.Member),
		"gossip":                holdOpen(t, server, e, "n2", transport.Gossip),
		"raft before the store": holdOpen(t, server, e, "n2", transport.Raft),
	})
	pair := &tls.Certificate{Certificate: [][]byte{agent.Raw, stolen.Cert.Raw}, PrivateKey: key, Leaf: agent}
	id := transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: server.Roots}
	made["agent"] = allOrNone(t, stolen, "agent", map[string]error{
		"members' questions": holdOpen(t, id, e, "n2", transport.Member),
		"tunnels":            holdOpen(t, id, e, "n2", transport.Tunnel),
	})
	made["administrator"] = allOrNone(t, stolen, "administrator", map[string]error{
		"n1": asAdmin(t, e, "n1", admin, key), "n2": asAdmin(t, e, "n2", admin, key),
	})
	// Its key has no record, so that no authority makes it a node to the API; still less one
	// that is an administrator, too.
	for _, cert := range []*x509.Certificate{agent, both} {
		if err := asAdmin(t, e, "n2", cert, crypto.Signer(key)); !apierrors.IsUnauthorized(err) {
			t.Errorf("the API knows %s of a key without a record: %v", cert.Subject, err)
		}
	}
	return made
}

// allOrNone is one of the errors if all doors are shut, nil if all are open.
func allOrNone(t *testing.T, stolen *pki.CA, what string, doors map[string]error) (shut error) {
	t.Helper()
	var open []string
	for door, err := range doors {
		if err == nil {
			open = append(open, door)
		} else {
			shut = err
		}
	}
	if shut != nil && len(open) > 0 {
		slices.Sort(open)
		t.Errorf("to a %s by %s these are open, and others are not (%v): %s", what, stolen.Cert.Subject, shut, strings.Join(open, ", "))
	}
	return shut
}

// nodeConfig is a client of a server's API with a node's certificate, as it is now.
func (e *env) nodeConfig(node, server string) *rest.Config {
	e.t.Helper()
	var files [3][]byte
	for i, name := range []string{"node.crt", "node.key", "ca.crt"} {
		b, err := os.ReadFile(filepath.Join(e.data(node), "pki", name))
		if err != nil {
			e.t.Fatal(err)
		}
		files[i] = b
	}
	return &rest.Config{Host: "https://" + addrOf(e, server).String(), TLSClientConfig: rest.TLSClientConfig{
		CertData: files[0], KeyData: files[1], CAData: files[2],
	}}
}

// watchPods watches a node's pods over one request.
func watchPods(t *testing.T, config *rest.Config, node string) watch.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	w, err := client.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return w
}

// stillOpen changes the node's pod, and expects the watch to say so.
func stillOpen(t *testing.T, e *env, w watch.Interface, ns, mark string) error {
	t.Helper()
	e.ctl("label", "pod", "-n", ns, "on-a1", "through-"+mark+"=yes", "--kubeconfig="+nodeOf(e, "n1").Kubeconfig())
	deadline := time.After(testTimeout)
	for {
		select {
		case event, open := <-w.ResultChan():
			if !open {
				return fmt.Errorf("it was closed")
			}
			if event.Type == watch.Error {
				return fmt.Errorf("it ended: %+v", event.Object)
			}
			if o, ok := event.Object.(metav1.Object); ok && o.GetLabels()["through-"+mark] == "yes" {
				return nil
			}
		case <-deadline:
			return fmt.Errorf("it says nothing")
		}
	}
}
