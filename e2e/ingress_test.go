package e2e

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// shop is what a chart would bring: no class is named, and none of its objects
// knows clusterd.
const shop = `
apiVersion: v1
kind: Service
metadata: {name: shop}
spec:
  selector: {app: shop}
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: Secret
metadata: {name: shop-tls}
type: kubernetes.io/tls
data: {tls.crt: "%s", tls.key: "%s"}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: shop}
spec:
  tls: [{hosts: [shop.example], secretName: shop-tls}]
  rules:
  - host: shop.example
    http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: shop, port: {name: http}}}}]}
  - host: plain.example
    http:
      paths:
      - {path: /, pathType: Prefix, backend: {service: {name: shop, port: {number: 80}}}}
      - {path: /absent, pathType: Prefix, backend: {service: {name: absent, port: {number: 80}}}}
`

// wayIn asks an address from n1's network for hosts that no DNS knows.
type wayIn struct {
	e      *env
	vip    string
	roots  *x509.CertPool
	header http.Header
}

func (w wayIn) dial(ctx context.Context, port string) (conn net.Conn, err error) {
	err = w.e.Do("n1", func() (err error) {
		conn, err = (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", net.JoinHostPort(w.vip, port))
		return err
	})
	return conn, err
}

// get returns the status, the page, and where a redirect leads.
func (w wayIn) get(url string) (int, string, string, error) {
	code, page, h, err := w.ask(http.MethodGet, url)
	return code, page, h.Get("Location"), err
}

// ask returns the status, the page and the header of the answer.
func (w wayIn) ask(method, url string) (int, string, http.Header, error) {
	t := &http.Transport{
		DisableKeepAlives: true, ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: w.roots},
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			_, port, _ := net.SplitHostPort(addr)
			return w.dial(ctx, port)
		},
	}
	c := &http.Client{Timeout: 10 * time.Second, Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	req, err := http.NewRequestWithContext(w.e.t.Context(), method, url, nil)
	if err != nil {
		return 0, "", nil, err
	}
	req.Header = w.header.Clone()
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), resp.Header, err
}

// answer is ask, again where there was no answer: on a busy machine one may not come in time.
func (w wayIn) answer(method, url string) (code int, page string, h http.Header, err error) {
	for range 5 {
		if code, page, h, err = w.ask(method, url); err == nil {
			break
		}
	}
	return code, page, h, err
}

// says waits until a URL is answered so.
func (w wayIn) says(url string, code int, text string) {
	w.e.t.Helper()
	w.e.eventually(fmt.Sprintf("%s: %d", url, code), func(context.Context) error {
		got, page, _, err := w.get(url)
		if err == nil && (got != code || !strings.Contains(page, text)) {
			err = fmt.Errorf("%d %s", got, page)
		}
		return err
	})
}

// ingress sends requests by host name into a cluster that has one free address
// for a load balancer.
func ingress(t *testing.T, e *env, vip string) {
	ns := e.namespace("ways")
	cert, key, roots := shopCertificate(t)
	_, errs, code := e.run("clusterctl", fmt.Sprintf(shop, cert, key), "-n", ns, "apply", "-f", "-")
	if code != 0 || errs != "" {
		t.Fatalf("apply: exit %d: %s", code, errs)
	}
	d := deployment("shop", 2)
	e.createDeployment(ns, d)
	var names []string
	for _, p := range e.podsReady(ns, "app=shop", 2) {
		names = append(names, p.Name)
	}
	e.eventually("the Ingress has the address", func(ctx context.Context) error {
		i, err := e.api.NetworkingV1().Ingresses(ns).Get(ctx, "shop", metav1.GetOptions{})
		if err == nil && (len(i.Status.LoadBalancer.Ingress) != 1 || i.Status.LoadBalancer.Ingress[0].IP != vip) {
			err = fmt.Errorf("class %v, status %+v", i.Spec.IngressClassName, i.Status)
		}
		return err
	})
	e.podsReady("kube-system", "app.kubernetes.io/name=clusterd-ingress", len(e.Nodes()))
	w := wayIn{e: e, vip: vip, roots: roots}
	everybody := func(names []string) {
		t.Helper()
		e.eventually("all pods answer by the host's name", func(context.Context) error {
			seen := map[string]bool{}
			for range 24 {
				code, page, _, err := w.get("http://plain.example/")
				if err != nil || code != http.StatusOK {
					return errors.Join(err, fmt.Errorf("%d %s", code, page))
				}
				if !slices.Contains(names, answerer(page)) {
					return errors.New("another pod answered: " + page)
				}
				seen[answerer(page)] = true
			}
			if len(seen) != len(names) {
				return fmt.Errorf("only %v", seen)
			}
			return nil
		})
	}
	everybody(names)
	w.says("https://shop.example/", http.StatusOK, "I am pod shop-") // the certificate is verified
	if code, _, h, err := w.answer(http.MethodGet, "http://shop.example/a?b=c"); err != nil || code != http.StatusPermanentRedirect || h.Get("Location") != "https://shop.example/a?b=c" {
		t.Errorf("a host with TLS, asked without: %d to %q, %v", code, h.Get("Location"), err)
	}
	w.says("http://other.example/", http.StatusNotFound, `no Ingress of this cluster has a rule for host "other.example"`)
	w.says("http://plain.example/absent/here", http.StatusServiceUnavailable, "Service ways/absent does not exist")

	conn, err := w.dial(t.Context(), "80")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(testTimeout))
	fmt.Fprint(conn, "GET /echo HTTP/1.1\r\nHost: plain.example\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil) //nolint:bodyclose // the connection is
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %v, %v", resp, err)
	}
	for _, word := range []string{"one\n", "two\n"} {
		fmt.Fprint(conn, word)
		if line, err := in.ReadString('\n'); err != nil || line != word {
			t.Errorf("over the upgraded connection: %q, %v", line, err)
		}
	}

	e.ctl("-n", ns, "scale", "deployment", "shop", "--replicas=1")
	var left []string
	for _, p := range e.podsReady(ns, "app=shop", 1) {
		left = append(left, p.Name)
	}
	everybody(left)
	e.ctl("-n", ns, "patch", "ingress", "shop", "--type=json", `-p=[{"op":"replace","path":"/spec/rules/1/host","value":"moved.example"}]`)
	w.says("http://moved.example/", http.StatusOK, "I am pod shop-")
	w.says("http://plain.example/", http.StatusNotFound, `"plain.example"`)
	e.ctl("-n", ns, "delete", "ingress", "shop")
	w.says("http://moved.example/", http.StatusNotFound, `"moved.example"`)
}

// shopCertificate is for shop.example alone, as a Secret has it, and trusted by
// the pool.
func shopCertificate(t *testing.T) (cert, key string, roots *x509.CertPool) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"shop.example"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	roots.AddCert(parsed)
	text := func(kind string, b []byte) string {
		return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}))
	}
	return text("CERTIFICATE", der), text("PRIVATE KEY", raw), roots
}
