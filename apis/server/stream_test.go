package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clientportforward "k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	utilexec "k8s.io/client-go/util/exec"
	agentportforward "k8s.io/cri-streaming/pkg/streaming/portforward"
	agentremotecommand "k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// fakeAgent is the HTTP side of a node's agent. Its containers are parrots.
type fakeAgent struct{ *httptest.Server }

func newAgent(t *testing.T) *fakeAgent {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /containerLogs/{ns}/{pod}/{container}", func(w http.ResponseWriter, req *http.Request) {
		switch req.PathValue("pod") {
		case "starting":
			http.NotFound(w, req)
		case "refused":
			if req.URL.Query().Has("previous") {
				w.WriteHeader(http.StatusBadRequest)
				fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"as a Status","code":400}`)
				return
			}
			http.Error(w, "the agent says no", http.StatusBadRequest)
		default:
			fmt.Fprintf(w, "%s/%s %s\n", req.PathValue("pod"), req.PathValue("container"), req.URL.RawQuery)
		}
	})
	mux.HandleFunc("/exec/{ns}/{pod}/{uid}/{container}", func(w http.ResponseWriter, req *http.Request) {
		options, err := agentremotecommand.NewOptions(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		agentremotecommand.ServeExec(w, req, parrot{}, req.PathValue("pod"), req.PathValue("uid"), req.PathValue("container"),
			req.URL.Query()["command"], options, testTimeout, testTimeout, agentremotecommand.SupportedStreamingProtocols)
	})
	mux.HandleFunc("/attach/{ns}/{pod}/{uid}/{container}", func(w http.ResponseWriter, req *http.Request) {
		options, err := agentremotecommand.NewOptions(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		agentremotecommand.ServeAttach(w, req, parrot{}, req.PathValue("pod"), req.PathValue("uid"), req.PathValue("container"),
			options, testTimeout, testTimeout, agentremotecommand.SupportedStreamingProtocols)
	})
	mux.HandleFunc("/portForward/{ns}/{pod}/{uid}", func(w http.ResponseWriter, req *http.Request) {
		options, err := agentportforward.NewV4Options(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		agentportforward.ServePortForward(w, req, parrot{}, req.PathValue("pod"), req.PathValue("uid"), options, testTimeout, testTimeout, agentportforward.SupportedProtocols)
	})
	mux.HandleFunc("/metrics/{rest...}", func(w http.ResponseWriter, req *http.Request) {
		fmt.Fprintf(w, "%s %s?%s", req.Method, req.URL.Path, req.URL.RawQuery)
	})
	agent := &fakeAgent{httptest.NewServer(mux)}
	t.Cleanup(agent.Close)
	return agent
}

func (a *fakeAgent) transport(_ context.Context, node string) (http.RoundTripper, *url.URL, error) {
	if node != "n1" {
		return nil, nil, errors.New("no such node in the membership")
	}
	base, err := url.Parse(a.URL)
	return a.Client().Transport, base, err
}

// parrot repeats its input and then says what it was asked.
type parrot struct{}

func (parrot) ExecInContainer(_ context.Context, name, _, container string, cmd []string, in io.Reader, out, errOut io.WriteCloser, tty bool, _ <-chan agentremotecommand.TerminalSize, _ time.Duration) error {
	if in != nil {
		if _, err := io.Copy(out, in); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "%s/%s %s tty=%t", name, container, strings.Join(cmd, " "), tty)
	if errOut != nil {
		fmt.Fprint(errOut, "oops")
	}
	if cmd[0] == "false" {
		return utilexec.CodeExitError{Err: errors.New("exit status 3"), Code: 3}
	}
	return nil
}

func (parrot) AttachContainer(_ context.Context, name, _, container string, in io.Reader, out, _ io.WriteCloser, _ bool, _ <-chan agentremotecommand.TerminalSize) error {
	if in != nil {
		if _, err := io.Copy(out, in); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(out, "attached to %s/%s", name, container)
	return err
}

func (parrot) PortForward(_ context.Context, name, _ string, port int32, stream io.ReadWriteCloser) error {
	defer stream.Close()
	_, err := fmt.Fprintf(stream, "%s:%d", name, port)
	return err
}

// withAgent starts a server with node n1 and pods on it and elsewhere.
func withAgent(t *testing.T) (*servertest.Server, *rest.Config, kubernetes.Interface) {
	t.Helper()
	agent := newAgent(t)
	s := servertest.Start(t, func(c *server.Config) { c.NodeTransport = agent.transport })
	config := s.Listen(t)
	must[*corev1.Node](t)(s.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: meta("n1")}, metav1.CreateOptions{}))
	two := pod("two")
	two.Spec.Containers = append(two.Spec.Containers, corev1.Container{Name: "side", Image: "side:1"})
	createPod(t, s.Client, pod("one"), "n1")
	createPod(t, s.Client, two, "n1")
	createPod(t, s.Client, pod("refused"), "n1")
	createPod(t, s.Client, pod("lost"), "n2")
	createPod(t, s.Client, pod("waiting"), "")
	starting := createPod(t, s.Client, pod("starting"), "n1")
	starting.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}}}
	must[*corev1.Pod](t)(s.Client.CoreV1().Pods("default").UpdateStatus(t.Context(), starting, metav1.UpdateOptions{}))
	return s, config, must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
}

func TestLog(t *testing.T) {
	_, _, client := withAgent(t)
	pods := client.CoreV1().Pods("default")
	since, tail := int64(9), int64(3)
	for _, test := range []struct {
		name    string
		pod     string
		options corev1.PodLogOptions
		want    string // the log, or
		refusal string // the message
	}{
		{name: "plain", pod: "one", want: "one/main \n"},
		{name: "options", pod: "one", options: corev1.PodLogOptions{Follow: true, Previous: true, Timestamps: true, SinceSeconds: &since, TailLines: &tail},
			want: "one/main follow=true&previous=true&sinceSeconds=9&tailLines=3&timestamps=true\n"},
		{name: "container", pod: "two", options: corev1.PodLogOptions{Container: "side"}, want: "two/side \n"},
		{name: "no container named", pod: "two", refusal: "a container name must be specified for pod two, choose one of: [main side]"},
		{name: "no such container", pod: "two", options: corev1.PodLogOptions{Container: "none"}, refusal: "container none is not valid for pod two"},
		{name: "no pod", pod: "ghost", refusal: `pods "ghost" not found`},
		{name: "no node yet", pod: "waiting", refusal: "pod waiting does not have a host assigned"},
		{name: "not started", pod: "starting", refusal: `container "main" in pod "starting" is waiting to start: ContainerCreating`},
		{name: "no previous", pod: "starting", options: corev1.PodLogOptions{Previous: true}, refusal: `previous terminated container "main" in pod "starting" not found`},
		{name: "the agent's words", pod: "refused", refusal: "the agent says no"},
		{name: "the agent's Status", pod: "refused", options: corev1.PodLogOptions{Previous: true}, refusal: "as a Status"},
		{name: "node out of reach", pod: "lost", refusal: "reach node n2: no such node in the membership"},
		{name: "bad option", pod: "one", options: corev1.PodLogOptions{TailLines: new(int64(-1))}, refusal: "must be greater than or equal to 0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []byte
			stream, err := pods.GetLogs(test.pod, &test.options).Stream(waitContext(t))
			if err == nil {
				got, err = io.ReadAll(stream)
				stream.Close()
			}
			if test.refusal != "" {
				if err == nil || !strings.Contains(err.Error(), test.refusal) || strings.Contains(err.Error(), "{") {
					t.Errorf("%v, want %q", err, test.refusal)
				}
				return
			}
			if err != nil || string(got) != test.want {
				t.Errorf("%q, %v, want %q", got, err, test.want)
			}
		})
	}
}

func TestExecAndAttach(t *testing.T) {
	_, config, client := withAgent(t)
	for _, wire := range []string{"WebSocket", "SPDY"} {
		run := func(t *testing.T, subresource, pod string, options any, in string) (string, string, error) {
			t.Helper()
			request := client.CoreV1().RESTClient().Post().Namespace("default").Resource("pods").Name(pod).SubResource(subresource)
			switch o := options.(type) {
			case *corev1.PodExecOptions:
				request.VersionedParams(o, scheme.ParameterCodec)
			case *corev1.PodAttachOptions:
				request.VersionedParams(o, scheme.ParameterCodec)
			}
			var executor remotecommand.Executor
			var err error
			if wire == "SPDY" {
				executor, err = remotecommand.NewSPDYExecutor(config, "POST", request.URL())
			} else {
				executor, err = remotecommand.NewWebSocketExecutor(config, "GET", request.URL().String())
			}
			if err != nil {
				t.Fatal(err)
			}
			var out, errOut bytes.Buffer
			streams := remotecommand.StreamOptions{Stdout: &out, Stderr: &errOut}
			if in != "" {
				streams.Stdin = strings.NewReader(in)
			}
			err = executor.StreamWithContext(waitContext(t), streams)
			return out.String(), errOut.String(), err
		}
		t.Run(wire, func(t *testing.T) {
			out, errOut, err := run(t, "exec", "one", &corev1.PodExecOptions{Command: []string{"echo", "a b"}, Stdin: true, Stdout: true, Stderr: true}, "hello ")
			if err != nil || out != "hello one/main echo a b tty=false" || errOut != "oops" {
				t.Errorf("exec: %q %q %v", out, errOut, err)
			}
			_, _, err = run(t, "exec", "one", &corev1.PodExecOptions{Command: []string{"false"}, Stdout: true, Stderr: true}, "")
			var exit utilexec.CodeExitError
			if !errors.As(err, &exit) || exit.Code != 3 {
				t.Errorf("exit code: %v, want 3", err)
			}
			out, _, err = run(t, "attach", "two", &corev1.PodAttachOptions{Container: "side", Stdout: true, Stderr: true}, "")
			if err != nil || out != "attached to two/side" {
				t.Errorf("attach: %q %v", out, err)
			}
			for pod, want := range map[string]string{
				"two":     "a container name must be specified for pod two, choose one of: [main side]",
				"ghost":   `pods "ghost" not found`,
				"waiting": "pod waiting does not have a host assigned",
			} {
				_, _, err := run(t, "exec", pod, &corev1.PodExecOptions{Command: []string{"x"}, Stdout: true, Stderr: true}, "")
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("exec in %s: %v, want %q", pod, err, want)
				}
			}
		})
	}
}

func TestPortForward(t *testing.T) {
	_, config, client := withAgent(t)
	target := client.CoreV1().RESTClient().Post().Namespace("default").Resource("pods").Name("one").SubResource("portforward").URL()
	dialers := map[string]func() (httpstream.Dialer, error){
		"WebSocket": func() (httpstream.Dialer, error) {
			return clientportforward.NewSPDYOverWebsocketDialerForStreaming(target, config)
		},
		"SPDY": func() (httpstream.Dialer, error) {
			transport, upgrader, err := spdy.RoundTripperFor(config)
			if err != nil {
				return nil, err
			}
			return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, "POST", target), nil
		},
	}
	for name, dialer := range dialers {
		t.Run(name, func(t *testing.T) {
			d := must[httpstream.Dialer](t)(dialer())
			conn, _, err := d.Dial(agentportforward.ProtocolV1Name)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			header := http.Header{}
			header.Set(corev1.PortHeader, "8080")
			header.Set(corev1.PortForwardRequestIDHeader, "0")
			header.Set(corev1.StreamType, corev1.StreamTypeError)
			failures := must[httpstream.Stream](t)(conn.CreateStream(header))
			failures.Close()
			header.Set(corev1.StreamType, corev1.StreamTypeData)
			data := must[httpstream.Stream](t)(conn.CreateStream(header))
			got, err := io.ReadAll(data)
			if err != nil || string(got) != "one:8080" {
				t.Errorf("%q %v", got, err)
			}
		})
	}
}

func TestNodeProxy(t *testing.T) {
	_, _, client := withAgent(t)
	get := func(node, path string) (string, error) {
		body, err := client.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes/"+node+"/proxy/"+path).Param("a", "b").DoRaw(waitContext(t))
		return string(body), err
	}
	if body, err := get("n1", "metrics/cadvisor"); err != nil || body != "GET /metrics/cadvisor?a=b" {
		t.Errorf("%q %v", body, err)
	}
	for _, agent := range []string{"n1:10250", "https:n1:10250"} { // a kubelet's usual port
		if body, err := get(agent, "metrics/cadvisor"); err != nil || body != "GET /metrics/cadvisor?a=b" {
			t.Errorf("%s: %q %v", agent, body, err)
		}
	}
	if _, err := get("n9", "metrics"); !apierrors.IsNotFound(err) {
		t.Errorf("unknown node: %v, want NotFound", err)
	}
}

func TestNoWayToNodes(t *testing.T) {
	s := servertest.Start(t, nil)
	createPod(t, s.Client, pod("one"), "n1")
	_, err := s.Client.CoreV1().Pods("default").GetLogs("one", &corev1.PodLogOptions{}).DoRaw(t.Context())
	if !apierrors.IsServiceUnavailable(err) {
		t.Errorf("%v, want ServiceUnavailable", err)
	}
}
