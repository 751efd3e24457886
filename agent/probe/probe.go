// Package probe asks containers how they are: by a command, an HTTP request,
// a TCP connection or the gRPC health protocol. One Loop serves one probe of
// one instance; it keeps no connection between two rounds and does nothing
// between them but wait for its timer.
package probe

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Execer runs a command inside a container and returns what it wrote
// (truncated) and its exit code; a command that cannot be started has one, too. An
// error says that the command was not run to its end for a reason of the node.
type Execer interface {
	ExecProbe(ctx context.Context, containerID string, command []string) (output []byte, code int, err error)
}

// Target is the container that is asked.
type Target struct {
	ContainerID string
	PodIP       string // where HTTP, TCP and gRPC go when the probe names no host
	Ports       []v1.ContainerPort
	// StartedAt is when it started, which the initial delay counts from; zero:
	// now.
	StartedAt time.Time
	// Whose container it is, for the metrics alone.
	Namespace, Pod, PodUID, Container string
}

// Round is the outcome of one question.
type Round struct {
	OK      bool
	Unknown bool   // the question could not be asked: that says nothing of the container
	Warning bool   // OK, but perhaps not as it was meant
	Message string // of a failure or warning, or the output
}

// Prober asks questions. It is safe for concurrent use.
type Prober struct {
	Exec Execer
	// Version goes into the User-Agent header.
	Version string
	// Metrics count the rounds of loops; nil: not counted.
	Metrics *Metrics

	once sync.Once
	web  *http.Client // set by once
}

// limit is how much of an answer is kept.
const limit = 10 << 10

// Once asks a single question within the probe's timeout.
func (p *Prober) Once(ctx context.Context, spec *v1.Probe, t Target) Round {
	timeout := max(time.Duration(spec.TimeoutSeconds), 1) * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch {
	case spec.Exec != nil:
		out, code, err := p.Exec.ExecProbe(ctx, t.ContainerID, spec.Exec.Command)
		switch {
		case errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil:
			return Round{Message: fmt.Sprintf("command timed out: %q timed out after %s", strings.Join(spec.Exec.Command, " "), timeout)}
		case err != nil:
			return Round{Unknown: true, Message: err.Error()}
		}
		if code != 0 && len(bytes.TrimSpace(out)) == 0 {
			return Round{Message: fmt.Sprintf("command exited with code %d and printed nothing", code)}
		}
		return Round{OK: code == 0, Message: string(out)}
	case spec.HTTPGet != nil:
		return p.http(ctx, spec.HTTPGet, t)
	case spec.TCPSocket != nil:
		port, err := Port(spec.TCPSocket.Port, t.Ports)
		if err != nil {
			return Round{Message: err.Error()}
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(host(spec.TCPSocket.Host, t), strconv.Itoa(port)))
		if err != nil {
			return Round{Message: err.Error()}
		}
		conn.Close()
		return Round{OK: true}
	case spec.GRPC != nil:
		return p.grpc(ctx, spec.GRPC, t, timeout)
	}
	return Round{Message: "probe without an action"}
}

func host(name string, t Target) string {
	if name != "" {
		return name
	}
	return t.PodIP
}

// HTTP sends the request of a probe or hook and returns the answer's status
// and (truncated) body.
func (p *Prober) HTTP(ctx context.Context, get *v1.HTTPGetAction, t Target) (code int, body string, err error) {
	port, err := Port(get.Port, t.Ports)
	if err != nil {
		return 0, "", err
	}
	u, err := url.Parse(get.Path)
	if err != nil {
		u = &url.URL{Path: get.Path}
	}
	u.Scheme = strings.ToLower(string(get.Scheme))
	if u.Scheme == "" {
		u.Scheme = "http"
	}
	if !strings.HasPrefix(u.Path, "/") {
		u.Path = "/" + u.Path
	}
	u.Host = net.JoinHostPort(host(get.Host, t), strconv.Itoa(port))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return 0, "", err
	}
	p.setHeaders(req, get.HTTPHeaders)
	res, err := p.client().Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, limit))
	if err != nil {
		return 0, "", err
	}
	return res.StatusCode, string(b), nil
}

// setHeaders sets the headers of a probe, and ours where it names none of them.
// The same name may come several times. An empty User-Agent or Accept means that
// none is sent.
func (p *Prober) setHeaders(req *http.Request, headers []v1.HTTPHeader) {
	for _, h := range headers {
		req.Header.Add(h.Name, h.Value)
	}
	if host := req.Header.Get("Host"); host != "" {
		req.Host = host
	}
	req.Header.Del("Host") // net/http sends req.Host
	if _, given := req.Header["User-Agent"]; !given {
		req.Header.Set("User-Agent", "kube-probe/"+p.Version)
	}
	if values, given := req.Header["Accept"]; !given {
		req.Header.Set("Accept", "*/*")
	} else if len(values) == 1 && values[0] == "" {
		req.Header.Del("Accept")
	}
}

// client sends requests over connections of their own: a probe asks whether
// the app still accepts one.
func (p *Prober) client() *http.Client {
	p.once.Do(func() {
		p.web = &http.Client{
			Transport: &http.Transport{
				DisableKeepAlives: true, DisableCompression: true, Proxy: nil,
				TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the certificate is the app's own affair
				// A probe's request is short, and most answers are.
				WriteBufferSize: 1 << 10, ReadBufferSize: 1 << 10,
			},
			CheckRedirect: func(req *http.Request, via []*http.Request) error {
				if req.URL.Hostname() != via[0].URL.Hostname() {
					return http.ErrUseLastResponse // a redirect away is an answer by itself
				}
				if len(via) >= 10 {
					return errors.New("stopped after 10 redirects")
				}
				return nil
			},
		}
	})
	return p.web
}

func (p *Prober) http(ctx context.Context, get *v1.HTTPGetAction, t Target) Round {
	code, body, err := p.HTTP(ctx, get, t)
	if err != nil {
		return Round{Message: err.Error()}
	}
	if code >= 300 && code < 400 {
		return Round{OK: true, Warning: true, Message: "Probe terminated redirects, Response body: " + body}
	}
	if code >= 200 && code < 300 {
		return Round{OK: true, Message: body}
	}
	return Round{Message: fmt.Sprintf("HTTP probe failed with statuscode: %d", code)}
}

func (p *Prober) grpc(ctx context.Context, g *v1.GRPCAction, t Target, timeout time.Duration) Round {
	addr := net.JoinHostPort(t.PodIP, strconv.Itoa(int(g.Port)))
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUserAgent("kube-probe/"+p.Version), grpc.WithNoProxy(), grpc.WithDisableServiceConfig(),
		// One small question: the library's own buffers hold 64 KiB.
		grpc.WithReadBufferSize(1<<10), grpc.WithWriteBufferSize(1<<10))
	if err != nil {
		return Round{Message: err.Error()}
	}
	defer conn.Close()
	req := &grpc_health_v1.HealthCheckRequest{}
	if g.Service != nil {
		req.Service = *g.Service
	}
	res, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, req)
	switch {
	case status.Code(err) == codes.Unimplemented:
		return Round{Message: "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): " + status.Convert(err).Message()}
	case status.Code(err) == codes.DeadlineExceeded || ctx.Err() != nil:
		return Round{Message: fmt.Sprintf("timeout: failed to connect service %q within %s", addr, timeout)}
	case err != nil:
		return Round{Message: "error: health rpc probe failed: " + err.Error()}
	case res.Status != grpc_health_v1.HealthCheckResponse_SERVING:
		return Round{Message: fmt.Sprintf("service unhealthy (responded with %q)", res.Status)}
	}
	return Round{OK: true}
}

// Port finds the number of a port given as number or name.
func Port(p intstr.IntOrString, ports []v1.ContainerPort) (int, error) {
	n := p.IntValue()
	if p.Type == intstr.String {
		for _, c := range ports {
			if c.Name == p.StrVal {
				return int(c.ContainerPort), nil
			}
		}
		var err error
		if n, err = strconv.Atoi(p.StrVal); err != nil {
			return 0, fmt.Errorf("couldn't find port: %q", p.StrVal)
		}
	}
	if n < 1 || n > 65535 {
		return 0, fmt.Errorf("invalid port number: %d", n)
	}
	return n, nil
}

// Loop asks again and again until ctx ends. round is called with every outcome that
// counts (for events); verdict is called when a threshold is crossed, the first
// time whatever the state is. Both are called from the loop and must not block.
//
// An eager loop (startup and readiness) asks more often during its first
// period, so that a container is ready when it is and not up to a period
// later; failures among these extra questions count for nothing.
func (p *Prober) Loop(ctx context.Context, kind Kind, spec *v1.Probe, t Target, eager bool, round func(Round), verdict func(ok bool, message string)) {
	period := max(time.Duration(spec.PeriodSeconds), 1) * time.Second
	step := firstDelay(spec, period, t.StartedAt, time.Now())
	timer := time.NewTimer(step)
	defer timer.Stop()
	c := counter{success: max(int(spec.SuccessThreshold), 1), failure: max(int(spec.FailureThreshold), 1)}
	series := p.Metrics.series(kind, t)
	var early time.Duration // time spent in extra questions
	step = eagerFirst
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		asked := time.Now()
		r := p.Once(ctx, spec, t)
		if ctx.Err() != nil {
			return
		}
		series.count(r, time.Since(asked))
		if eager && !r.OK && !c.reported && early+step < period {
			timer.Reset(step)
			early += step
			step *= 2
			continue
		}
		eager = false
		timer.Reset(period)
		round(r)
		if r.Unknown {
			continue
		}
		if ok, crossed := c.count(r.OK); crossed {
			verdict(ok, r.Message)
		}
	}
}

// eagerFirst is the first distance between extra questions; it doubles.
const eagerFirst = 50 * time.Millisecond

// firstDelay is what is left of the initial delay, which counts from the
// container's start: a startup probe or a new agent does not make it longer, nor
// does a clock that was set back. Without one the question comes almost at once,
// spread a little so that many pods started together do not ask together.
func firstDelay(spec *v1.Probe, period time.Duration, startedAt, now time.Time) time.Duration {
	delay := time.Duration(spec.InitialDelaySeconds) * time.Second
	if !startedAt.IsZero() {
		delay -= max(now.Sub(startedAt), 0)
	}
	if delay > 0 {
		return delay
	}
	return time.Duration(rand.Int64N(int64(min(period, 20*time.Millisecond))))
}

// counter turns rounds into states by the two thresholds.
type counter struct {
	success, failure int // thresholds
	run              int // rounds in a row with the same outcome
	last             bool
	reported         bool
	state            bool
}

func (c *counter) count(ok bool) (state, crossed bool) {
	if c.run > 0 && c.last == ok {
		c.run++
	} else {
		c.run, c.last = 1, ok
	}
	need := c.failure
	if ok {
		need = c.success
	}
	if c.run < need || c.reported && c.state == ok {
		return c.state, false
	}
	c.reported, c.state = true, ok
	return ok, true
}
