// Package stream answers the node's calls: logs, exec, attach, port-forward,
// images and the list of pods. The listener has authenticated and authorized
// the client.
package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/klog/v2"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	utilexec "k8s.io/utils/exec"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/apis/paths"
)

// Pods finds the pods of this node.
type Pods interface {
	Find(namespace, name string, uid types.UID) (*pod.View, bool)
	Views() []*pod.View
	// Seen is closed when Find and Views know all pods.
	Seen() <-chan struct{}
}

// Runtime runs commands in containers.
type Runtime interface {
	Exec(ctx context.Context, e api.Exec, io runtime.ExecIO) (int, error)
	Attach(ctx context.Context, id string, io runtime.ExecIO, tty bool) error
}

// Dialer connects to a port inside a pod.
type Dialer interface {
	Dial(ctx context.Context, podUID string, hostNetwork bool, port int32) (net.Conn, error)
}

// Config of a Handler.
type Config struct {
	Pods    Pods
	Runtime Runtime
	Images  Images
	Network Dialer
	LogDir  string
	// Healthy says whether the agent does its work; nil: always.
	Healthy func() error
	// Configz is the running configuration, for /configz.
	Configz any
	// Summary measures the node and its pods, for /stats/summary.
	Summary func(ctx context.Context, onlyCPUAndMemory bool) (*summary.Summary, error)
	// Metrics are, by path, what Prometheus may read here.
	Metrics map[string]prometheus.Gatherer
	// NodeLogs answers with the machine's logs, at /logs/; nil: there are none.
	NodeLogs http.Handler
	// Paths is what is known of the ways to other nodes, for /paths; nil: nothing.
	Paths func() paths.Report
	// ImagesChanged is called after images were loaded, removed or pinned. It must not
	// block.
	ImagesChanged func()
}

// Time limits of exec, attach and port-forward connections.
const (
	idleTimeout   = 4 * time.Hour
	streamTimeout = 30 * time.Second
)

// podTimeout is how long a call waits for an agent that has just begun to see
// the API's pods.
const podTimeout = 10 * time.Second

// NewHandler returns the handler of the node's calls.
func NewHandler(cfg Config) http.Handler {
	h := &handler{cfg}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /containerLogs/{ns}/{pod}/{container}", h.logs)
	for _, m := range []string{"GET", "POST"} {
		mux.HandleFunc(m+" /exec/{ns}/{pod}/{container}", h.exec)
		mux.HandleFunc(m+" /exec/{ns}/{pod}/{uid}/{container}", h.exec)
		mux.HandleFunc(m+" /attach/{ns}/{pod}/{container}", h.attach)
		mux.HandleFunc(m+" /attach/{ns}/{pod}/{uid}/{container}", h.attach)
		mux.HandleFunc(m+" /portForward/{ns}/{pod}", h.portForward)
		mux.HandleFunc(m+" /portForward/{ns}/{pod}/{uid}", h.portForward)
	}
	h.routeImages(mux)
	mux.HandleFunc("GET /pods", h.pods)
	mux.HandleFunc("GET /stats/summary", h.summary)
	mux.HandleFunc("GET /healthz", h.healthz)
	for path, g := range cfg.Metrics {
		mux.Handle("GET "+path, promhttp.HandlerFor(g, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	}
	if cfg.NodeLogs != nil {
		mux.Handle("GET /logs/", cfg.NodeLogs)
	}
	if cfg.Paths != nil {
		mux.HandleFunc("GET /paths", func(w http.ResponseWriter, _ *http.Request) { answer(w, cfg.Paths()) })
	}
	mux.HandleFunc("GET /configz", func(w http.ResponseWriter, _ *http.Request) { answer(w, cfg.Configz) })
	return mux
}

type handler struct{ cfg Config }

// summary tells what the node and its pods use. With only_cpu_and_memory=true
// no directory is measured.
func (h *handler) summary(w http.ResponseWriter, r *http.Request) {
	if !h.ready(w, r) {
		return
	}
	out, err := h.cfg.Summary(r.Context(), r.FormValue("only_cpu_and_memory") == "true")
	if err != nil {
		refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError, "%v", err)
		return
	}
	answer(w, out)
}

// answer writes a value as JSON.
func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // a reader that left needs no answer
}

// refuse writes an error as the API writes them.
func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason, format string, args ...any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure,
		Code: int32(code), Reason: reason, Message: fmt.Sprintf(format, args...),
	})
}

// ready waits until the pods of the node are known. It has answered when it
// is false.
func (h *handler) ready(w http.ResponseWriter, r *http.Request) bool {
	timer := time.NewTimer(podTimeout)
	defer timer.Stop()
	select {
	case <-h.cfg.Pods.Seen():
		return true
	case <-r.Context().Done(): // the client is gone
	case <-timer.C:
		refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable,
			"the node has just started and has not seen its pods in the API yet, try again")
	}
	return false
}

// find looks up the pod and container that the path names. It has answered
// when ok is false.
func (h *handler) find(w http.ResponseWriter, r *http.Request) (v *pod.View, container *v1.Container, ok bool) {
	look := func() (*pod.View, bool) {
		return h.cfg.Pods.Find(r.PathValue("ns"), r.PathValue("pod"), types.UID(r.PathValue("uid")))
	}
	if v, ok = look(); !ok {
		if !h.ready(w, r) {
			return nil, nil, false
		}
		v, ok = look()
	}
	if !ok {
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound, "pod %q is not on this node", r.PathValue("ns")+"/"+r.PathValue("pod"))
		return nil, nil, false
	}
	name := r.PathValue("container")
	if name == "" {
		return v, nil, true
	}
	for _, list := range [][]v1.Container{v.Pod.Spec.Containers, v.Pod.Spec.InitContainers} {
		for i := range list {
			if list[i].Name == name {
				return v, &list[i], true
			}
		}
	}
	for i := range v.Pod.Spec.EphemeralContainers {
		if c := v1.Container(v.Pod.Spec.EphemeralContainers[i].EphemeralContainerCommon); c.Name == name {
			return v, &c, true
		}
	}
	refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound, "container %s is not valid for pod %s", name, v.Pod.Name)
	return nil, nil, false
}

func (h *handler) logs(w http.ResponseWriter, r *http.Request) {
	v, c, ok := h.find(w, r)
	if !ok {
		return
	}
	o, previous, err := logOptions(r)
	if err != nil {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	view := v.Containers[c.Name]
	attempt := view.Attempt
	done := view.Exited
	switch {
	case previous && view.Previous == nil && !(view.Made && !view.Running && waitsToRestart(v, c.Name)):
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "previous terminated container %q in pod %q not found", c.Name, v.Pod.Name)
		return
	case previous && view.Made && !view.Running && waitsToRestart(v, c.Name):
		// Between two runs the newest instance is the previous one.
	case previous:
		attempt = *view.Previous
		done = nil
	case !view.Made:
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "container %q in pod %q is waiting to start: %s", c.Name, v.Pod.Name, waitingReason(v, c.Name))
		return
	}
	if done == nil {
		ended := make(chan struct{})
		close(ended)
		done = ended
	}
	path := filepath.Join(h.cfg.LogDir, podspec.LogFolder(v.Pod), c.Name, strconv.Itoa(int(attempt))+".log")
	w.Header().Set("Content-Type", "text/plain")
	w.WriteHeader(http.StatusOK)
	out := &flusher{w: w}
	if o.Follow {
		out.now()
		out.always = true
	}
	if err := ReadLog(r.Context(), path, o, done, out); err != nil && r.Context().Err() == nil {
		klog.FromContext(r.Context()).Info("Log was not read to its end", "path", path, "err", err)
		fmt.Fprintf(w, "unable to retrieve container logs: %v\n", err)
	}
}

// status finds a container's status.
func status(v *pod.View, name string) *v1.ContainerStatus {
	if v.Status == nil {
		return nil
	}
	for _, list := range [][]v1.ContainerStatus{v.Status.ContainerStatuses, v.Status.InitContainerStatuses, v.Status.EphemeralContainerStatuses} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}

func waitsToRestart(v *pod.View, name string) bool {
	s := status(v, name)
	return s != nil && s.State.Waiting != nil && s.LastTerminationState.Terminated != nil
}

func waitingReason(v *pod.View, name string) string {
	if s := status(v, name); s != nil && s.State.Waiting != nil {
		if m := s.State.Waiting.Message; m != "" {
			return s.State.Waiting.Reason + ": " + m
		}
		return s.State.Waiting.Reason
	}
	return "ContainerCreating"
}

// flusher passes each write on at once when the client follows.
type flusher struct {
	w      http.ResponseWriter
	always bool
}

func (f *flusher) now() { _ = http.NewResponseController(f.w).Flush() }

func (f *flusher) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if f.always && err == nil {
		f.now()
	}
	return n, err
}

// logOptions reads the query in the form of PodLogOptions.
func logOptions(r *http.Request) (o LogOptions, previous bool, err error) {
	q := r.URL.Query()
	flag := func(name string) bool {
		b, perr := strconv.ParseBool(q.Get(name))
		if perr != nil && q.Get(name) != "" {
			err = fmt.Errorf("%s: %q is not true or false", name, q.Get(name))
		}
		return b
	}
	number := func(name string) *int64 {
		s := q.Get(name)
		if s == "" {
			return nil
		}
		n, perr := strconv.ParseInt(s, 10, 64)
		if perr != nil || n < 0 {
			err = fmt.Errorf("%s: %q is not a number of zero or more", name, s)
		}
		return &n
	}
	o.Follow, o.Timestamps, previous = flag("follow"), flag("timestamps"), flag("previous")
	o.Tail, o.LimitBytes = number("tailLines"), number("limitBytes")
	if s := number("sinceSeconds"); s != nil {
		o.Since = time.Now().Add(-time.Duration(*s) * time.Second)
	}
	if s := q.Get("sinceTime"); s != "" {
		t, perr := time.Parse(time.RFC3339Nano, s)
		if perr != nil {
			err = fmt.Errorf("sinceTime: %w", perr)
		}
		o.Since = t
	}
	switch s := q.Get("stream"); s {
	case "", "All":
	case "Stdout":
		o.Stream = "stdout"
	case "Stderr":
		o.Stream = "stderr"
	default:
		err = fmt.Errorf("stream: %q is not All, Stdout or Stderr", s)
	}
	return o, previous, err
}

// running finds a running container. It has answered when ok is false.
func (h *handler) running(w http.ResponseWriter, r *http.Request) (v *pod.View, c *v1.Container, id string, ok bool) {
	if v, c, ok = h.find(w, r); !ok {
		return nil, nil, "", false
	}
	view := v.Containers[c.Name]
	if !view.Running {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "container %q in pod %q is not running", c.Name, v.Pod.Name)
		return nil, nil, "", false
	}
	return v, c, view.ID, true
}

// options reads the streams wanted, in the node's form (input=1) and in the
// form of PodExecOptions (stdin=true).
func options(r *http.Request) (*remotecommand.Options, error) {
	q := r.URL.Query()
	is := func(names ...string) bool {
		for _, n := range names {
			if b, err := strconv.ParseBool(q.Get(n)); err == nil && b {
				return true
			}
		}
		return false
	}
	o := &remotecommand.Options{Stdin: is("input", "stdin"), Stdout: is("output", "stdout"), Stderr: is("error", "stderr"), TTY: is("tty")}
	if o.TTY {
		o.Stderr = false // a terminal has one output
	}
	if !o.Stdin && !o.Stdout && !o.Stderr {
		return nil, fmt.Errorf("you must specify at least one of stdin, stdout, stderr")
	}
	return o, nil
}

func (h *handler) exec(w http.ResponseWriter, r *http.Request) {
	v, c, id, ok := h.running(w, r)
	if !ok {
		return
	}
	o, err := options(r)
	command := r.URL.Query()["command"]
	if err == nil && len(command) == 0 {
		err = fmt.Errorf("you must specify a command")
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	remotecommand.ServeExec(w, r, &session{h.cfg.Runtime, id}, v.Pod.Name, string(v.Pod.UID), c.Name, command, o,
		idleTimeout, streamTimeout, remotecommand.SupportedStreamingProtocols)
}

func (h *handler) attach(w http.ResponseWriter, r *http.Request) {
	v, c, id, ok := h.running(w, r)
	if !ok {
		return
	}
	o, err := options(r)
	if err != nil {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	o.TTY = c.TTY // as the container was made
	o.Stderr = o.Stderr && !o.TTY
	remotecommand.ServeAttach(w, r, &session{h.cfg.Runtime, id}, v.Pod.Name, string(v.Pod.UID), c.Name, o,
		idleTimeout, streamTimeout, remotecommand.SupportedStreamingProtocols)
}

// session is one exec or attach to a container.
type session struct {
	runtime Runtime
	id      string
}

// ExecInContainer implements remotecommand.Executor.
func (s *session) ExecInContainer(ctx context.Context, _, _, _ string, cmd []string, in io.Reader, out, errw io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	eio := streams(ctx, in, out, errw, resize)
	code, err := s.runtime.Exec(ctx, api.Exec{
		ContainerID: s.id, Args: cmd, TTY: tty, HasStdin: in != nil, HasStdout: out != nil, HasStderr: errw != nil,
	}, eio)
	if err != nil {
		return err
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", code), Code: code}
	}
	return nil
}

// AttachContainer implements remotecommand.Attacher.
func (s *session) AttachContainer(ctx context.Context, _, _, _ string, in io.Reader, out, errw io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return s.runtime.Attach(ctx, s.id, streams(ctx, in, out, errw, resize), tty)
}

// streams translates; nil interfaces stay nil.
func streams(ctx context.Context, in io.Reader, out, errw io.WriteCloser, resize <-chan remotecommand.TerminalSize) runtime.ExecIO {
	eio := runtime.ExecIO{Stdin: in}
	if out != nil {
		eio.Stdout = out
	}
	if errw != nil {
		eio.Stderr = errw
	}
	if resize != nil {
		sizes := make(chan api.Resize)
		eio.Resize = sizes
		go func() { // ends with ctx, which ends with the session
			defer close(sizes)
			for {
				select {
				case <-ctx.Done():
					return
				case s, ok := <-resize:
					if !ok {
						return
					}
					select {
					case sizes <- api.Resize{Width: s.Width, Height: s.Height}:
					case <-ctx.Done():
						return
					}
				}
			}
		}()
	}
	return eio
}

func (h *handler) portForward(w http.ResponseWriter, r *http.Request) {
	v, _, ok := h.find(w, r)
	if !ok {
		return
	}
	if v.SandboxID == "" {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "pod %q is not running", v.Pod.Name)
		return
	}
	o, err := portforward.NewV4Options(r)
	if err != nil {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	ctx, over := context.WithCancel(r.Context())
	defer over() // when the session has ended: what it had open in the pod is closed
	portforward.ServePortForward(w, r, &forwarder{h.cfg.Network, v.Pod.Spec.HostNetwork, ctx, answerSilence}, v.Pod.Name, string(v.Pod.UID), o,
		idleTimeout, streamTimeout, portforward.SupportedProtocols)
}

// answerSilence is how long a pod may be silent after the client has said all it had
// to say, before the connection to it is closed.
const answerSilence = time.Minute

type forwarder struct {
	network     Dialer
	hostNetwork bool
	session     context.Context //nolint:containedctx // PortForward's own does not end with the session
	silence     time.Duration
}

// PortForward implements portforward.PortForwarder.
func (f *forwarder) PortForward(ctx context.Context, _ string, uid string, port int32, stream io.ReadWriteCloser) error {
	defer stream.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(f.session, cancel)()
	conn, err := f.network.Dial(ctx, uid, f.hostNetwork, port)
	if err != nil {
		return fmt.Errorf("connect to port %d inside the pod: %w", port, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close(); _ = stream.Close() })()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stream.Close() // ends the copy below
	answer := &silentEnd{conn: conn, limit: f.silence}
	wg.Go(func() {
		_, _ = io.Copy(conn, stream) // an end of either side is the end, not a fault
		if c, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite()
		}
		answer.begin()
	})
	if _, err = io.Copy(stream, answer); answer.over() || ctx.Err() != nil {
		err = nil
	}
	return err
}

// silentEnd reads from a connection, and once it has begun, only as long as something
// comes.
type silentEnd struct {
	conn  net.Conn
	limit time.Duration

	mu     sync.Mutex // guards both
	begun  bool
	silent bool
}

func (s *silentEnd) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun = true
	_ = s.conn.SetReadDeadline(time.Now().Add(s.limit))
}

// over reports whether nothing came for too long.
func (s *silentEnd) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.silent
}

// Read implements io.Reader.
func (s *silentEnd) Read(p []byte) (int, error) {
	n, err := s.conn.Read(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.silent = errors.Is(err, os.ErrDeadlineExceeded)
	if s.begun && n > 0 {
		_ = s.conn.SetReadDeadline(time.Now().Add(s.limit))
	}
	return n, err
}

func (h *handler) pods(w http.ResponseWriter, r *http.Request) {
	if !h.ready(w, r) {
		return
	}
	list := v1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: []v1.Pod{}}
	for _, v := range h.cfg.Pods.Views() {
		p := *v.Pod
		if v.Status != nil {
			p.Status = *v.Status
		}
		list.Items = append(list.Items, p)
	}
	answer(w, list)
}

func (h *handler) healthz(w http.ResponseWriter, _ *http.Request) {
	if h.cfg.Healthy != nil {
		if err := h.cfg.Healthy(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	fmt.Fprint(w, "ok")
}
