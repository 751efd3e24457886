package probe

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

type execFunc func(ctx context.Context, cmd []string) ([]byte, int, error)

func (f execFunc) ExecProbe(ctx context.Context, _ string, cmd []string) ([]byte, int, error) {
	return f(ctx, cmd)
}

func TestCounter(t *testing.T) {
	for _, tt := range []struct {
		success, failure int
		rounds           string // + and -
		want             string // state told after each round, . for nothing
	}{
		{1, 3, "+--+---", "+.....-"},
		{1, 1, "-+-+", "-+-+"},
		{2, 1, "++-+-++", ".+-...+"},
		{1, 3, "---+", "..-+"},
		{3, 3, "++-+++", ".....+"},
	} {
		c := counter{success: tt.success, failure: tt.failure}
		var got strings.Builder
		for _, r := range tt.rounds {
			ok, crossed := c.count(r == '+')
			switch {
			case !crossed:
				got.WriteByte('.')
			case ok:
				got.WriteByte('+')
			default:
				got.WriteByte('-')
			}
		}
		if got.String() != tt.want {
			t.Errorf("%d/%d %s: %s, want %s", tt.success, tt.failure, tt.rounds, got.String(), tt.want)
		}
	}
}

func TestLoop(t *testing.T) {
	run := func(t *testing.T, eager bool, good time.Duration, spec v1.Probe, until time.Duration) (rounds []time.Duration, verdicts []string) {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			spec.Exec = &v1.ExecAction{Command: []string{"x"}}
			p := &Prober{Exec: execFunc(func(context.Context, []string) ([]byte, int, error) {
				if time.Since(began) >= good {
					return nil, 0, nil
				}
				return []byte("no"), 1, nil
			})}
			ctx, cancel := context.WithTimeout(t.Context(), until)
			defer cancel()
			var wg sync.WaitGroup
			wg.Go(func() {
				p.Loop(ctx, Readiness, &spec, Target{}, eager, func(Round) { rounds = append(rounds, time.Since(began).Round(time.Second)) },
					func(ok bool, msg string) {
						verdicts = append(verdicts, strconv.FormatBool(ok)+" "+time.Since(began).Round(time.Second).String())
					})
			})
			wg.Wait()
		})
		return rounds, verdicts
	}
	sec := time.Second
	if r, v := run(t, false, time.Hour, v1.Probe{PeriodSeconds: 10, FailureThreshold: 3, InitialDelaySeconds: 5, TimeoutSeconds: 1}, 40*sec); !slices.Equal(r, []time.Duration{5 * sec, 15 * sec, 25 * sec, 35 * sec}) || !slices.Equal(v, []string{"false 25s"}) {
		t.Errorf("rounds %v, verdicts %v", r, v)
	}
	// An eager loop sees readiness soon, and tells nothing of the rounds before.
	if r, v := run(t, true, 2*sec, v1.Probe{PeriodSeconds: 10, FailureThreshold: 3, TimeoutSeconds: 1}, 9*sec); len(r) != 1 || len(v) != 1 || !strings.HasPrefix(v[0], "true 3") {
		t.Errorf("rounds %v, verdicts %v", r, v)
	}
	if _, v := run(t, true, time.Hour, v1.Probe{PeriodSeconds: 10, FailureThreshold: 2, TimeoutSeconds: 1}, 40*sec); len(v) != 1 || !strings.HasPrefix(v[0], "false") {
		t.Errorf("verdicts %v", v)
	}
}

func TestOnce(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/ok", func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "my.host" || r.Header.Get("X") != "y" || !strings.HasPrefix(r.UserAgent(), "kube-probe/") {
			w.WriteHeader(500)
		}
	})
	mux.HandleFunc("/bad", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) })
	mux.HandleFunc("/away", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "http://elsewhere.invalid/", 302) })
	mux.HandleFunc("/within", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/bad", 302) })
	mux.HandleFunc("/circle", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/circle", 302) })
	mux.HandleFunc("/query", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "a=b%20c&d" {
			w.WriteHeader(500)
		}
	})
	mux.HandleFunc("/slow", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	plain, secure := httptest.NewServer(mux), httptest.NewTLSServer(mux)
	defer plain.Close()
	defer secure.Close()
	port := func(s *httptest.Server) int32 {
		_, p, _ := net.SplitHostPort(s.Listener.Addr().String())
		n, _ := strconv.Atoi(p)
		return int32(n)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g, h := grpc.NewServer(), health.NewServer()
	h.SetServingStatus("well", grpc_health_v1.HealthCheckResponse_SERVING)
	h.SetServingStatus("sick", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	grpc_health_v1.RegisterHealthServer(g, h)
	var wg sync.WaitGroup
	wg.Go(func() { _ = g.Serve(l) })
	defer wg.Wait()
	defer g.Stop()
	gport := int32(l.Addr().(*net.TCPAddr).Port)
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	deadPort := dead.Addr().(*net.TCPAddr).Port
	dead.Close()

	httpGet := func(path string, p intstr.IntOrString, scheme v1.URIScheme) v1.ProbeHandler {
		return v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: path, Port: p, Scheme: scheme, HTTPHeaders: []v1.HTTPHeader{{Name: "Host", Value: "my.host"}, {Name: "X", Value: "y"}}}}
	}
	for _, tt := range []struct {
		name string
		h    v1.ProbeHandler
		ok   bool
		msg  string
	}{
		{"http", httpGet("/ok", intstr.FromInt32(port(plain)), ""), true, ""},
		{"https", httpGet("/ok", intstr.FromInt32(port(secure)), v1.URISchemeHTTPS), true, ""},
		{"named port", httpGet("ok", intstr.FromString("web"), ""), true, ""},
		{"unknown port", httpGet("/ok", intstr.FromString("nope"), ""), false, `couldn't find port: "nope"`},
		{"status", httpGet("/bad", intstr.FromInt32(port(plain)), ""), false, "HTTP probe failed with statuscode: 503"},
		{"redirect away is an answer", httpGet("/away", intstr.FromInt32(port(plain)), ""), true, "Probe terminated redirects, Response body: <a href=\"http://elsewhere.invalid/\">Found</a>"},
		{"redirect within is followed", httpGet("/within", intstr.FromInt32(port(plain)), ""), false, "statuscode: 503"},
		{"redirect in a circle", httpGet("/circle", intstr.FromInt32(port(plain)), ""), false, "stopped after 10 redirects"},
		{"query", httpGet("/query?a=b%20c&d", intstr.FromInt32(port(plain)), ""), true, ""},
		{"https to a plain server", httpGet("/ok", intstr.FromInt32(port(plain)), v1.URISchemeHTTPS), false, "server gave HTTP response to HTTPS client"},
		{"port of no number", httpGet("/ok", intstr.FromInt32(0), ""), false, "invalid port number: 0"},
		{"timeout", httpGet("/slow", intstr.FromInt32(port(plain)), ""), false, "deadline exceeded"},
		{"tcp", v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(port(plain))}}, true, ""},
		{"tcp refused", v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(int32(deadPort))}}, false, "refused"},
		{"grpc", v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: gport}}, true, ""},
		{"grpc, a service by name", v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: gport, Service: ptr.To("well")}}, true, ""},
		{"grpc, an unknown service", v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: gport, Service: ptr.To("who")}}, false, "error: health rpc probe failed: "},
		{"grpc refused", v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: int32(deadPort)}}, false, "refused"},
		{"grpc sick", v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: gport, Service: ptr.To("sick")}}, false, "NOT_SERVING"},
		{"exec", v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"0"}}}, true, ""},
		{"exec fails", v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"2"}}}, false, "output"},
		{"exec hangs", v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"hang"}}}, false, `command timed out: "hang" timed out after 1s`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &Prober{Exec: execFunc(func(ctx context.Context, cmd []string) ([]byte, int, error) {
				if cmd[0] == "hang" {
					<-ctx.Done()
					return nil, 0, ctx.Err()
				}
				n, _ := strconv.Atoi(cmd[0])
				return []byte("output"), n, nil
			})}
			timeout := int32(60) // of what is answered
			if tt.name == "timeout" || tt.name == "exec hangs" {
				timeout = 1
			}
			r := p.Once(t.Context(), &v1.Probe{ProbeHandler: tt.h, TimeoutSeconds: timeout}, Target{PodIP: "127.0.0.1", Ports: []v1.ContainerPort{{Name: "web", ContainerPort: port(plain)}}})
			if r.OK != tt.ok || !strings.Contains(r.Message, tt.msg) {
				t.Errorf("%+v", r)
			}
		})
	}
}

// TestUnknownCountsForNothing: a command that could not be run for a reason of the
// node neither fails a probe nor passes it.
func TestUnknownCountsForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		p := &Prober{Exec: execFunc(func(context.Context, []string) ([]byte, int, error) {
			asked++
			if asked < 4 {
				return nil, 0, errors.New("podmon is gone")
			}
			return nil, 1, nil
		})}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var unknown, failed int
		p.Loop(ctx, Liveness, &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"x"}}}, FailureThreshold: 1}, Target{}, false,
			func(r Round) {
				if r.Unknown {
					unknown++
				} else {
					failed++
				}
			},
			func(ok bool, _ string) {
				if ok || asked != 4 {
					t.Errorf("verdict %t after %d questions, want a failure after 4", ok, asked)
				}
				cancel()
			})
		if unknown != 3 || failed != 1 {
			t.Errorf("%d unknown and %d failed rounds, want 3 and 1", unknown, failed)
		}
	})
}

func TestHeaders(t *testing.T) {
	for _, tt := range []struct {
		name  string
		given []v1.HTTPHeader
		want  http.Header
		host  string
	}{
		{"none", nil, http.Header{"User-Agent": {"kube-probe/v1"}, "Accept": {"*/*"}}, "a.b"},
		{
			"own", []v1.HTTPHeader{{Name: "user-agent", Value: "me"}, {Name: "Accept", Value: "text/html"}, {Name: "host", Value: "c.d"}},
			http.Header{"User-Agent": {"me"}, "Accept": {"text/html"}}, "c.d",
		},
		{
			"nothing said on purpose", []v1.HTTPHeader{{Name: "User-Agent"}, {Name: "Accept"}},
			http.Header{"User-Agent": {""}}, "a.b", // net/http sends none for ""
		},
		{
			"twice, and empty", []v1.HTTPHeader{{Name: "X-A", Value: "1"}, {Name: "x-a", Value: "2"}, {Name: "X-B"}},
			http.Header{"User-Agent": {"kube-probe/v1"}, "Accept": {"*/*"}, "X-A": {"1", "2"}, "X-B": {""}}, "a.b",
		},
	} {
		req, err := http.NewRequest(http.MethodGet, "http://a.b/", nil)
		if err != nil {
			t.Fatal(err)
		}
		(&Prober{Version: "v1"}).setHeaders(req, tt.given)
		if !reflect.DeepEqual(req.Header, tt.want) || req.Host != tt.host {
			t.Errorf("%s: %v for %s, want %v for %s", tt.name, req.Header, req.Host, tt.want, tt.host)
		}
	}
}

func TestFirstDelay(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	const soon = 20 * time.Millisecond
	for _, tt := range []struct {
		name     string
		initial  int32
		started  time.Time
		min, max time.Duration
	}{
		{"none", 0, now, 0, soon},
		{"just started", 30, now, 30 * time.Second, 30 * time.Second},
		{"start unknown", 30, time.Time{}, 30 * time.Second, 30 * time.Second},
		{"after a startup probe", 30, now.Add(-20 * time.Second), 10 * time.Second, 10 * time.Second},
		{"long over", 30, now.Add(-time.Hour), 0, soon},
		{"clock set back", 30, now.Add(time.Hour), 30 * time.Second, 30 * time.Second},
	} {
		got := firstDelay(&v1.Probe{InitialDelaySeconds: tt.initial}, 10*time.Second, tt.started, now)
		if got < tt.min || got > tt.max {
			t.Errorf("%s: %s, want %s to %s", tt.name, got, tt.min, tt.max)
		}
	}
}
