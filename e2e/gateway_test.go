package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// doors are a Gateway and its routes: weights, a header, a redirect, TLS, a port
// beside 80 and 443, and calls of gRPC.
const doors = `
apiVersion: v1
kind: Secret
metadata: {name: shop-tls}
type: kubernetes.io/tls
data: {tls.crt: "%s", tls.key: "%s"}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: doors, annotations: {clusterd.local/shared-address: "true"}}
spec:
  gatewayClassName: clusterd
  listeners:
  - {name: plain, port: 80, protocol: HTTP, hostname: "*.example"}
  - {name: secure, port: 443, protocol: HTTPS, hostname: shop.example, tls: {certificateRefs: [{name: shop-tls}]}}
  - {name: calls, port: 7070, protocol: HTTP}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: web}
spec:
  parentRefs: [{name: doors, sectionName: plain}, {name: doors, sectionName: secure}]
  hostnames: [shop.example]
  rules:
  - backendRefs: [{name: blue, port: 80, weight: 3}, {name: green, port: 80, weight: 1}]
  - matches: [{headers: [{name: version, value: green}]}]
    backendRefs: [{name: green, port: 80}]
  - matches: [{path: {value: /old}}]
    filters: [{type: RequestRedirect, requestRedirect: {scheme: https, statusCode: 301, path: {type: ReplacePrefixMatch, replacePrefixMatch: /new}}}]
  - matches: [{path: {value: /copied}}]
    filters:
    - {type: RequestMirror, requestMirror: {backendRef: {name: green, port: 80}}}
    - {type: CORS, cors: {allowOrigins: ["https://page.example"], allowMethods: [PUT], exposeHeaders: [X-Request-Id], maxAge: 60}}
    backendRefs: [{name: blue, port: 80}]
  - matches: [{path: {value: /absent}}]
    backendRefs: [{name: absent, port: 80}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: calls}
spec:
  parentRefs: [{name: doors, sectionName: calls}]
  rules:
  - matches: [{method: {service: grpc.health.v1.Health, method: Check}}]
    backendRefs: [{name: green, port: 80}]
---
apiVersion: v1
kind: Service
metadata: {name: blue}
spec: {selector: {app: blue}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: green}
spec: {selector: {app: green}, ports: [{port: 80, targetPort: 8080}]}
`

// gatewayClass waits until the leader has made the kinds and their class.
func (e *env) gatewayClass() {
	e.t.Helper()
	e.eventually("the class clusterd is accepted", func(context.Context) error {
		out, errs, _ := e.run("clusterctl", "", "get", "gatewayclass", "clusterd", "-o", `jsonpath={.status.conditions[?(@.type=="Accepted")].status}`)
		if strings.TrimSpace(out) != "True" {
			return errors.New(out + errs)
		}
		return nil
	})
}

// gateways sends requests through a Gateway, beside the Ingress that was.
func gateways(t *testing.T, e *env, vip string) {
	ns := e.namespace("doors")
	cert, key, roots := shopCertificate(t)
	e.createDeployment(ns, deployment("blue", 1))
	e.createDeployment(ns, deployment("green", 1))
	e.gatewayClass()
	e.ctlIn(fmt.Sprintf(doors, cert, key), "-n", ns, "apply", "-f", "-")
	e.podsReady(ns, "app=blue", 1)
	e.podsReady(ns, "app=green", 1)
	e.ctl("-n", ns, "wait", "--for=condition=Programmed", "gateway/doors", "--timeout=110s")
	e.eventually("the Gateway has the address, and each listener a route", func(context.Context) error {
		got := e.ctl("-n", ns, "get", "gateway", "doors", "-o", "jsonpath={.status.addresses[*].value} {.status.listeners[*].attachedRoutes}")
		if strings.TrimSpace(got) != vip+" 1 1 1" {
			return errors.New(got)
		}
		return nil
	})
	e.eventually("the routes say what is wrong with them", func(context.Context) error {
		var got struct {
			Status struct {
				Parents []struct {
					ControllerName string
					Conditions     []struct{ Type, Status, Reason string }
				}
			}
		}
		if err := json.Unmarshal([]byte(e.ctl("-n", ns, "get", "httproute", "web", "-o", "json")), &got); err != nil {
			return err
		}
		one := "{clusterd.local/gateway [{Accepted True Accepted} {ResolvedRefs False BackendNotFound}]}"
		if s := fmt.Sprint(got.Status.Parents); s != "["+one+" "+one+"]" {
			return errors.New(s)
		}
		return nil
	})
	w := wayIn{e: e, vip: vip, roots: roots}
	e.eventually("both versions answer by their weights", func(context.Context) error {
		seen := map[string]int{}
		for range 80 {
			code, page, _, err := w.get("http://shop.example/")
			if err != nil || code != http.StatusOK {
				return errors.Join(err, fmt.Errorf("%d %s", code, page))
			}
			version, _, _ := strings.Cut(answerer(page), "-")
			seen[version]++
		}
		// 20 of 80 are green; less than 5 or more than 42 come by chance less than
		// once in 10⁵.
		if seen["blue"]+seen["green"] != 80 || seen["green"] < 5 || seen["green"] > 42 {
			return fmt.Errorf("%v", seen)
		}
		return nil
	})
	w.header = http.Header{"Version": {"green"}}
	for range 8 {
		if code, page, _, err := w.answer(http.MethodGet, "http://shop.example/"); err != nil || code != http.StatusOK || !strings.HasPrefix(answerer(page), "green-") {
			t.Errorf("by the header: %d %s, %v", code, page, err)
		}
	}
	w.header = nil
	w.says("https://shop.example/", http.StatusOK, "I am pod ") // the certificate is verified
	if code, _, h, err := w.answer(http.MethodGet, "http://shop.example/old/a?b=c"); err != nil || code != http.StatusMovedPermanently || h.Get("Location") != "https://shop.example/new/a?b=c" {
		t.Errorf("the redirect: %d to %q, %v", code, h.Get("Location"), err)
	}
	copies(t, w, ns)
	w.says("http://shop.example/absent", http.StatusInternalServerError, "Service doors/absent does not exist")
	w.says("http://else.example/", http.StatusNotFound, `"else.example"`)

	conn, err := grpc.NewClient("passthrough:///calls.example", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return w.dial(ctx, "7070") }))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	calls := grpc_health_v1.NewHealthClient(conn)
	e.eventually("a call over gRPC is answered by green", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		var header metadata.MD
		got, err := calls.Check(ctx, &grpc_health_v1.HealthCheckRequest{}, grpc.Header(&header))
		if err == nil && (got.Status != grpc_health_v1.HealthCheckResponse_SERVING || !strings.HasPrefix(strings.Join(header["x-pod"], ""), "green-")) {
			err = fmt.Errorf("%v by %v", got, header)
		}
		return err
	})
	e.eventually("a call that no rule is for", func(ctx context.Context) error {
		if _, err := calls.List(ctx, &grpc_health_v1.HealthListRequest{}); status.Code(err) != codes.Unimplemented {
			return fmt.Errorf("it is answered: %v", err)
		}
		return nil
	})
	e.ctl("-n", ns, "delete", "gateway", "doors")
	w.says("http://shop.example/", http.StatusNotFound, `"shop.example"`)
}

// copies: blue answers, green gets a copy; pages of one origin may.
func copies(t *testing.T, w wayIn, ns string) {
	green := w.e.podsReady(ns, "app=green", 1)[0].Name
	if code, page, _, err := w.answer(http.MethodGet, "http://shop.example/copied/a"); err != nil || code != http.StatusOK || !strings.HasPrefix(answerer(page), "blue-") {
		t.Errorf("a request that is mirrored: %d %s, %v", code, page, err)
	}
	w.e.eventually("the mirror got a copy", func(context.Context) error {
		if log := w.e.ctl("-n", ns, "logs", green); !strings.Contains(log, "GET /copied/a from") {
			return errors.New(tail(log, 3))
		}
		return nil
	})
	for origin, allows := range map[string]string{"https://page.example": "https://page.example", "https://other.example": ""} {
		w.header = http.Header{"Origin": {origin}}
		if code, _, h, err := w.answer(http.MethodGet, "http://shop.example/copied"); err != nil || code != http.StatusOK || h.Get("Access-Control-Allow-Origin") != allows {
			t.Errorf("from %s: %d %v, %v", origin, code, h, err)
		}
		w.header.Set("Access-Control-Request-Method", http.MethodPut)
		if code, _, h, err := w.answer(http.MethodOptions, "http://shop.example/copied"); err != nil || code != http.StatusNoContent ||
			h.Get("Access-Control-Allow-Origin") != allows || (h.Get("Access-Control-Allow-Methods") == "PUT") != (allows != "") {
			t.Errorf("%s asks: %d %v, %v", origin, code, h, err)
		}
	}
}
