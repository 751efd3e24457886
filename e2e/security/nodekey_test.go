package security

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// agentCalls are what an agent's key must not do at the API; it is a1's.
var agentCalls = []call{
	// Secrets and ConfigMaps of others.
	{name: "reads a Secret of another node's pod", method: "GET", path: "/api/v1/namespaces/$NS/secrets/others"},
	{name: "reads a Secret that no pod uses", method: "GET", path: "/api/v1/namespaces/$NS/secrets/unused"},
	{name: "lists the Secrets of a namespace", method: "GET", path: "/api/v1/namespaces/$NS/secrets"},
	{name: "lists all Secrets", method: "GET", path: "/api/v1/secrets"},
	{name: "watches all Secrets", method: "GET", path: "/api/v1/secrets?watch=true&timeoutSeconds=1"},
	{name: "watches another's Secret by a field", method: "GET", path: "/api/v1/namespaces/$NS/secrets?watch=true&timeoutSeconds=1&fieldSelector=metadata.name%3Dothers"},
	{name: "lists all Secrets but its own", method: "GET", path: "/api/v1/namespaces/$NS/secrets?fieldSelector=metadata.name%21%3Down"},
	{name: "writes a Secret of its pod", method: "PATCH", path: "/api/v1/namespaces/$NS/secrets/own", body: `{"data":{"key":"eA=="}}`},
	{name: "makes a Secret", method: "POST", path: "/api/v1/namespaces/$NS/secrets", body: `{"metadata":{"generateName":"made-"}}`},
	{name: "reads a ConfigMap of another node's pod", method: "GET", path: "/api/v1/namespaces/$NS/configmaps/others"},
	{name: "lists all ConfigMaps", method: "GET", path: "/api/v1/configmaps"},
	{name: "writes a ConfigMap", method: "PATCH", path: "/api/v1/namespaces/$NS/configmaps/own", body: `{"data":{"key":"x"}}`},

	// Nodes.
	{name: "writes another Node", method: "PATCH", path: "/api/v1/nodes/a2", body: `{"metadata":{"annotations":{"x":"y"}}}`},
	{name: "writes another Node's status", method: "PATCH", path: "/api/v1/nodes/a2/status", body: `{"status":{"capacity":{"example.com/x":"1"}}}`},
	{name: "deletes another Node", method: "DELETE", path: "/api/v1/nodes/a2"},
	{name: "deletes its Node", method: "DELETE", path: "/api/v1/nodes/a1"},
	{name: "makes a Node of another name", method: "POST", path: "/api/v1/nodes", body: `{"metadata":{"name":"a99"}}`},
	{name: "labels itself a control plane", method: "PATCH", path: "/api/v1/nodes/a1", body: `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`},
	{name: "labels itself with another role", method: "PATCH", path: "/api/v1/nodes/a1", body: `{"metadata":{"labels":{"node-role.kubernetes.io/ingress":""}}}`},
	{name: "labels itself with a restricted label", method: "PATCH", path: "/api/v1/nodes/a1", body: `{"metadata":{"labels":{"node-restriction.kubernetes.io/trusted":"yes"}}}`},
	{name: "labels itself with one below it", method: "PATCH", path: "/api/v1/nodes/a1", body: `{"metadata":{"labels":{"a.node-restriction.kubernetes.io/trusted":"yes"}}}`},
	{name: "labels itself through its status", method: "PATCH", path: "/api/v1/nodes/a1/status", body: `{"metadata":{"labels":{"node-restriction.kubernetes.io/trusted":"yes"}}}`},
	{name: "takes its own taint", method: "PATCH", path: "/api/v1/nodes/a1", body: `{"spec":{"taints":[{"key":"x","effect":"NoSchedule"}]}}`},

	// Leases.
	{name: "renews another's Lease", method: "PATCH", path: "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/a2", body: `{"spec":{"leaseDurationSeconds":39}}`},
	{name: "deletes another's Lease", method: "DELETE", path: "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/a2"},
	{name: "makes a Lease elsewhere", method: "POST", path: "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", body: `{"metadata":{"name":"a1"}}`},

	// Pods.
	{name: "writes the status of another node's pod", method: "PATCH", path: "/api/v1/namespaces/$NS/pods/on-a2/status", body: `{"status":{"message":"x"}}`},
	{name: "deletes another node's pod", method: "DELETE", path: "/api/v1/namespaces/$NS/pods/on-a2"},
	{name: "evicts another node's pod", method: "POST", path: "/api/v1/namespaces/$NS/pods/on-a2/eviction", body: `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"on-a2"}}`},
	{name: "labels a pod through its status", method: "PATCH", path: "/api/v1/namespaces/$NS/pods/on-a1/status", body: `{"metadata":{"labels":{"app":"other"}}}`},
	{name: "changes a pod of its own", method: "PATCH", path: "/api/v1/namespaces/$NS/pods/on-a1", body: `{"metadata":{"annotations":{"x":"y"}}}`},
	{name: "makes a pod for itself", method: "POST", path: "/api/v1/namespaces/$NS/pods", body: `{"metadata":{"name":"made"},"spec":{"nodeName":"a1","containers":[{"name":"c","image":"x"}]}}`},
	{name: "makes a pod with another's Secret", method: "POST", path: "/api/v1/namespaces/$NS/pods", alone: true,
		body: `{"metadata":{"name":"made","annotations":{"kubernetes.io/config.mirror":"x"},"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"a1","uid":"x","controller":true}]},"spec":{"nodeName":"a1","containers":[{"name":"c","image":"x","envFrom":[{"secretRef":{"name":"others"}}]}]}}`},
	{name: "makes a mirror pod on another node", method: "POST", path: "/api/v1/namespaces/$NS/pods", alone: true,
		body: `{"metadata":{"name":"made","annotations":{"kubernetes.io/config.mirror":"x"},"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"a2","uid":"x","controller":true}]},"spec":{"nodeName":"a2","containers":[{"name":"c","image":"x"}]}}`},
	{name: "makes a pod in kube-system", method: "POST", path: "/api/v1/namespaces/kube-system/pods", body: `{"metadata":{"name":"made"},"spec":{"nodeName":"a1","containers":[{"name":"c","image":"x"}]}}`},
	{name: "binds a pod to itself", method: "POST", path: "/api/v1/namespaces/$NS/pods/on-a2/binding", body: `{"metadata":{"name":"on-a2"},"target":{"kind":"Node","name":"a1"}}`, right: []int{http.StatusConflict}},
	{name: "reads another's logs", method: "GET", path: "/api/v1/namespaces/$NS/pods/on-a2/log"},
	{name: "reads logs of its pod by the API", method: "GET", path: "/api/v1/namespaces/$NS/pods/on-a1/log"},
	{name: "runs a command in another's pod", method: "POST", path: "/api/v1/namespaces/$NS/pods/on-a2/exec?command=/hello&command=id&stdout=true", right: []int{http.StatusBadRequest}},
	{name: "attaches to another's pod", method: "POST", path: "/api/v1/namespaces/$NS/pods/on-a2/attach?stdout=true", right: []int{http.StatusBadRequest}},
	{name: "forwards a port of another's pod", method: "POST", path: "/api/v1/namespaces/$NS/pods/on-a2/portforward?ports=8080", right: []int{http.StatusBadRequest}},
	{name: "asks another's pod by the proxy", method: "GET", path: "/api/v1/namespaces/$NS/pods/on-a2:8080/proxy/"},
	{name: "asks another node by the proxy", method: "GET", path: "/api/v1/nodes/a2/proxy/pods"},
	{name: "adds a container to another's pod", method: "PATCH", path: "/api/v1/namespaces/$NS/pods/on-a2/ephemeralcontainers", kind: "application/strategic-merge-patch+json",
		body: `{"spec":{"ephemeralContainers":[{"name":"e","image":"x"}]}}`},

	// Tokens and certificates.
	{name: "asks for a token bound to nothing", method: "POST", path: "/api/v1/namespaces/$NS/serviceaccounts/default/token", body: `{"spec":{}}`},
	{name: "asks for a token of another namespace", method: "POST", path: "/api/v1/namespaces/kube-system/serviceaccounts/default/token", body: `{"spec":{}}`},
	{name: "asks for an authority's certificate", method: "POST", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests/none/approval", body: `{}`, alone: true, refused: []int{403, 405}},
	{name: "approves a request", method: "PUT", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests/none/approval", body: `{"metadata":{"name":"none"}}`, alone: true},

	// Rights.
	{name: "binds itself to cluster-admin", method: "POST", path: "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		body: `{"metadata":{"name":"made"},"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"cluster-admin"},"subjects":[{"kind":"User","apiGroup":"rbac.authorization.k8s.io","name":"system:node:a1"}]}`},
	{name: "names another user", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "admin"}, alone: true},
	{name: "names another node", method: "GET", path: "/api/v1/namespaces/$NS/secrets/others", header: map[string]string{"Impersonate-User": "system:node:a2", "Impersonate-Group": "system:nodes"}},
	{name: "names system:masters", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "system:node:a1", "Impersonate-Group": "system:masters"}},
	{name: "makes a namespace", method: "POST", path: "/api/v1/namespaces", body: `{"metadata":{"name":"made"}}`},
	{name: "makes a webhook", method: "POST", path: "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", body: `{"metadata":{"name":"made"}}`},
	{name: "makes a volume of the host", method: "POST", path: "/api/v1/persistentvolumes",
		body: `{"metadata":{"name":"made"},"spec":{"capacity":{"storage":"1Gi"},"accessModes":["ReadWriteOnce"],"hostPath":{"path":"/"}}}`},
	{name: "writes a Service", method: "POST", path: "/api/v1/namespaces/$NS/services", body: `{"metadata":{"name":"made"},"spec":{"ports":[{"port":80}]}}`},
	{name: "writes an EndpointSlice", method: "POST", path: "/apis/discovery.k8s.io/v1/namespaces/$NS/endpointslices",
		body: `{"metadata":{"name":"made"},"addressType":"IPv4","endpoints":[{"addresses":["192.0.2.1"]}]}`},

	// The cluster's own calls.
	{name: "lists join tokens", method: "GET", path: "/clusterd/v1/tokens"},
	{name: "makes a join token", method: "POST", path: "/clusterd/v1/tokens", body: `{"role":"server"}`, alone: true},
	{name: "takes a snapshot", method: "GET", path: "/clusterd/v1/snapshot", alone: true},
	{name: "removes a member", method: "DELETE", path: "/clusterd/v1/members/a2", alone: true},
	{name: "makes itself a server", method: "PUT", path: "/clusterd/v1/members/a1/role", body: `{"role":"server"}`, alone: true},
	{name: "approves a machine", method: "POST", path: "/clusterd/v1/asking", body: `{"code":"AAAA-AAAA","role":"server"}`, alone: true},
	{name: "rotates the CA", method: "POST", path: "/clusterd/v1/authority", body: `{}`, alone: true},
	{name: "changes the gossip key", method: "POST", path: "/clusterd/v1/gossip-key", body: `{}`, alone: true},
	{name: "revokes the administrator", method: "POST", path: "/clusterd/v1/revocations", body: `{"user":"admin"}`, alone: true},
	{name: "rolls out a release", method: "PUT", path: "/clusterd/v1/upgrade", body: `{}`, alone: true},
	{name: "trusts a key of releases", method: "POST", path: "/clusterd/v1/upgrade/keys", body: `{}`, alone: true},
	{name: "orders a recovery", method: "POST", path: "/clusterd/v1/recovery", body: `{}`, alone: true},
	{name: "reads the profile of a server", method: "GET", path: "/debug/pprof/heap?debug=1"},
	{name: "reads a server's metrics", method: "GET", path: "/metrics"},
}

// door opens a connection for a protocol with a stolen identity and watches whether
// the other end closes it; greeting is sent first.
func (s *suite) door(id transport.Identity, to, protocol string, greeting []byte) verdict {
	ctx, cancel := context.WithTimeout(s.t.Context(), waitLimit)
	defer cancel()
	c, err := id.Dial(ctx, s.addr(to), "", protocol)
	if err != nil {
		var refused *net.OpError
		if errors.As(err, &refused) && refused.Op == "dial" {
			return broken(err)
		}
		return shut("%v", err)
	}
	defer c.Close()
	if _, err := c.Write(greeting); err != nil {
		return shut("%v", err)
	}
	_ = c.SetReadDeadline(time.Now().Add(opens))
	var b [64]byte
	switch n, err := c.Read(b[:]); {
	case n > 0:
		return open("it answers %x", b[:n])
	case errors.Is(err, os.ErrDeadlineExceeded):
		return open("it stays open")
	default:
		return shut("%v", err)
	}
}

// httpOver makes one request of HTTP/1.1 inside a protocol between nodes.
func (s *suite) httpOver(id transport.Identity, to, protocol string, who *transport.Caller, method, path string) (code int, body string, err error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), opens)
	defer cancel()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := id.Dial(ctx, s.addr(to), "", protocol)
		if err == nil && who != nil {
			err = transport.Announce(c, *who)
		}
		return c, err
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+to+path, nil)
	if err != nil {
		return 0, "", err
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(res.Body, 2048))
	return res.StatusCode, string(b), nil
}

// adminCaller is whom a server names that passes an administrator's call on.
var adminCaller = &transport.Caller{User: "admin", Groups: []string{"system:masters"}}

// nodeCalls are what only servers may ask of nodes.
var nodeCalls = []string{
	"GET /containerLogs/" + ns + "/on-a2/main", "POST /exec/" + ns + "/on-a2/main?command=/hello&command=id&output=1", "POST /attach/" + ns + "/on-a2/main?output=1",
	"POST /portForward/" + ns + "/on-a2", "GET /pods", "GET /images", "POST /images/load", "GET /configz", "GET /logs/", "GET /metrics/resource", "GET /healthz",
}

// agentKey is what whoever has read agent a1's disk can do.
func agentKey(s *suite) []attack {
	out := calls(s.asNode("a1", "n2"), agentCalls)
	id := s.stolen("a1")

	// A token for a pod that runs elsewhere.
	p, err := s.api.CoreV1().Pods(ns).Get(s.t.Context(), "on-a2", metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	out = append(out, calls(s.asNode("a1", "n2"), []call{{name: "asks for a token of another node's pod", method: "POST", path: "/api/v1/namespaces/$NS/serviceaccounts/default/token",
		body: fmt.Sprintf(`{"spec":{"boundObjectRef":{"apiVersion":"v1","kind":"Pod","name":"on-a2","uid":%q}}}`, p.UID)}})...)

	// Protocols between nodes. A voter's key shows that the doors open for some.
	voter := s.stolen("n2")
	for _, to := range []string{"n1", "n2", "n3", "a2"} {
		for _, protocol := range []string{transport.Raft, transport.Gossip, transport.Node, transport.Tunnel, transport.Member} {
			if !s.node(to).Agent && (protocol == transport.Tunnel || protocol == transport.Member) {
				continue // which are there for agents
			}
			out = append(out, attack{name: fmt.Sprintf("dials %s at %s", protocol, to), try: func(s *suite) verdict { return s.door(id, to, protocol, nil) }})
		}
		for _, call := range nodeCalls {
			method, path, _ := strings.Cut(call, " ")
			a := attack{name: fmt.Sprintf("%s %s at %s in an administrator's name", method, path, to), try: func(s *suite) verdict {
				code, body, err := s.httpOver(id, to, transport.Node, adminCaller, method, path)
				if err != nil {
					return shut("%v", err)
				}
				return open("%d %.200s", code, body)
			}}
			if to == "a2" && (path == "/pods" || path == nodeCalls[0][len("GET "):]) {
				a.control = func(s *suite) error {
					code, body, err := s.httpOver(voter, to, transport.Node, adminCaller, method, path)
					if err == nil && code != http.StatusOK {
						err = fmt.Errorf("%d %.200s", code, body)
					}
					return err
				}
			}
			out = append(out, a)
		}
	}
	out = append(out, raftAttacks("n1", "n2", id, voter)...)
	out = append(out,
		submitAttack(id, voter),
		attack{name: "asks a server for the cluster's keys",
			try: func(s *suite) verdict {
				_, err := join.FetchKeys(s.t.Context(), s.dials(id, "n2", transport.Member))
				var no *join.Refusal
				if errors.As(err, &no) {
					return shut("%v", err)
				}
				if err != nil {
					return broken(err)
				}
				return open("it has the authority's key")
			},
			control: func(s *suite) error {
				_, err := join.FetchKeys(s.t.Context(), s.dials(voter, "n1", transport.Member))
				return err
			}},
		attack{name: "asks the authority for a server's certificate", control: func(s *suite) error { _, err := s.renewed(id, "a1", "a1"); return err }, try: func(s *suite) verdict {
			cert, err := s.renewed(id, "a1", "a1")
			if err != nil {
				return broken(err)
			}
			if role := pki.NodeRole(cert); role != pki.Agent {
				return open("the certificate's role is %q", role)
			}
			return shut("the certificate is an agent's again")
		}},
		attack{name: "asks the authority for another's name", try: func(s *suite) verdict {
			cert, err := s.renewed(id, "a1", "n1")
			if err != nil {
				return shut("%v", err)
			}
			if name, _ := pki.NodeName(cert); name != "a1" || len(cert.IPAddresses) > 0 || len(cert.DNSNames) > 0 {
				return open("the certificate is of %s, %v, %v", name, cert.IPAddresses, cert.DNSNames)
			}
			return shut("the certificate says a1 and no address")
		}},
		attack{name: "joins gossip under another's name", try: func(s *suite) verdict { return s.gossips(id) }},
		attack{name: "is a false server to an agent", try: func(s *suite) verdict {
			return s.believed(id, func(here netip.AddrPort) (net.Conn, error) {
				return s.stolen("a2").DialAPI(s.t.Context(), here, "", nil)
			})
		}, control: func(s *suite) error {
			v := s.believed(voter, func(here netip.AddrPort) (net.Conn, error) {
				return s.stolen("a2").DialAPI(s.t.Context(), here, "", nil)
			})
			if !v.open {
				return fmt.Errorf("a server is not believed to be one: %s", v.said)
			}
			return v.err
		}},
		attack{name: "is a false API to kubectl", try: func(s *suite) verdict {
			return s.believed(id, func(here netip.AddrPort) (net.Conn, error) {
				return tls.Dial("tcp", here.String(), &tls.Config{RootCAs: id.Roots(id.Certificate().Leaf)})
			})
		}},
		attack{name: "is a false API to kubectl by the name of the Service", try: func(s *suite) verdict {
			return s.believed(id, func(here netip.AddrPort) (net.Conn, error) {
				return tls.Dial("tcp", here.String(), &tls.Config{RootCAs: id.Roots(id.Certificate().Leaf), ServerName: "kubernetes.default.svc"})
			})
		}},
		attack{name: "signs a certificate with its own", try: func(s *suite) verdict { return s.signsItself(id) }},
	)
	return out
}

// dials opens connections to a node for a protocol.
func (s *suite) dials(id transport.Identity, to, protocol string) join.Dialer {
	return func(ctx context.Context) (net.Conn, error) { return id.Dial(ctx, s.addr(to), "", protocol) }
}

// renewed is the next certificate that a server gives to a key, when its request
// bears a name.
func (s *suite) renewed(id transport.Identity, node, name string) (*x509.Certificate, error) {
	key, err := pki.ParseKey(s.keyOf(node))
	if err != nil {
		return nil, err
	}
	cert, _, err := join.Renew(s.t.Context(), s.dials(id, "n1", transport.Join), name, key, func(*join.Certificate) *pki.Trust { return s.trust(node) })
	return cert, err
}

func (s *suite) keyOf(node string) []byte {
	s.t.Helper()
	b, err := os.ReadFile(s.node(node).Data + "/pki/node.key")
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// believed serves TLS with an identity on the host, which clients ask.
func (s *suite) believed(id transport.Identity, dial func(netip.AddrPort) (net.Conn, error)) verdict {
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*id.Certificate()}, NextProtos: []string{transport.Member, "h2", "http/1.1"}})
	if err != nil {
		return broken(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(waitLimit))
			_ = c.(*tls.Conn).HandshakeContext(s.t.Context())
			_ = c.Close()
		}
	}()
	defer func() { _ = ln.Close(); <-done }()
	c, err := dial(ln.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		return shut("%v", err)
	}
	_ = c.Close()
	return open("the client believes it")
}

// signsItself makes a certificate of system:masters, signed by a node's key, and
// shows it to the API.
func (s *suite) signsItself(id transport.Identity) verdict {
	own := id.Certificate()
	pair, err := signedBy(own.Leaf, own.PrivateKey, "admin", "system:masters")
	if err != nil {
		return broken(err)
	}
	pair.Certificate = append(pair.Certificate, own.Certificate...)
	return s.shown(*pair)
}

// gossips takes part in gossip as n1, from the host's address, with a key of gossip
// that is none and streams that an agent's key opens.
func (s *suite) gossips(id transport.Identity) verdict {
	addr := netip.AddrPortFrom(s.addr("n1").Addr().Prev(), 0)
	ln, err := net.Listen("tcp", addr.String())
	if err != nil {
		return broken(err)
	}
	defer ln.Close()
	dialled := make(chan error, 64)
	list, err := gossip.New(gossip.Config{
		Meta: gossip.Meta{ID: pki.Fingerprint(s.stolen("n1").Certificate().Leaf.PublicKey), Name: "n1"},
		Addr: ln.Addr().(*net.TCPAddr).AddrPort(), Keys: [][]byte{make([]byte, 32)},
		Stream: gossip.Stream{Listener: ln, Dial: func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
			c, err := id.Dial(ctx, s.addr("n2"), "", transport.Gossip)
			if err == nil {
				_ = c.SetReadDeadline(time.Now().Add(opens))
				_, err = c.Read(make([]byte, 1))
				_ = c.Close()
			}
			select {
			case dialled <- err:
			default:
			}
			return nil, errors.Join(err, errors.New("closed"))
		}},
		Seeds:  func() []netip.AddrPort { return []netip.AddrPort{s.addr("n2"), s.addr("n3")} },
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return broken(err)
	}
	ctx, cancel := context.WithCancel(s.t.Context())
	done := make(chan error, 1)
	go func() { done <- list.Run(ctx) }()
	defer func() { cancel(); <-done }()
	for range 3 { // in which time packets went out, too
		select {
		case err := <-dialled:
			if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				return open("a stream of gossip is open")
			}
		case <-time.After(waitLimit):
			return broken(errors.New("it has not dialled"))
		}
	}
	for _, m := range list.All() {
		if m.Name != "n1" {
			return open("it hears of %+v", m)
		}
	}
	members, err := s.members(s.t.Context())
	if err != nil {
		return broken(err)
	}
	for _, m := range members.Members {
		if m.Name == "n1" && m.Address != s.addr("n1").String() {
			return open("n1 is elsewhere now: %+v", m)
		}
	}
	return shut("no stream opened, and no word was believed")
}
