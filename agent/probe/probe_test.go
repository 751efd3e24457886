package probe

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
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
		{"redirect away is an answer", httpGet("/away", intstr.FromInt32(port(plain)), ""), true, ""},
		{"timeout", httpGet("/slow", intstr.FromInt32(port(plain)), ""), false, "deadline exceeded"},
		{"tcp", v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(port(plain))}}, true, ""},
		{"tcp refused", v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(int32(deadPort))}}, false, "refused"},
		{"grpc", v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: gport}}, true, ""},
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
			r := p.Once(t.Context(), &v1.Probe{ProbeHandler: tt.h, TimeoutSeconds: 1}, Target{PodIP: "127.0.0.1", Ports: []v1.ContainerPort{{Name: "web", ContainerPort: port(plain)}}})
			if r.OK != tt.ok || !strings.Contains(r.Message, tt.msg) {
				t.Errorf("%+v", r)
			}
		})
	}
}
