package subresource

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	streamproxy "k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/clusterd/clusterd/apis/core"
)

// stream is a subresource that upgrades the connection and hands it to the
// agent of the pod's node.
type stream struct {
	pods       rest.Getter
	authorizer authorizer.UnconditionalAuthorizer
	transport  NodeTransport
	options    func() runtime.Object
	target     func(pod *corev1.Pod, options runtime.Object) (path string, query url.Values, err error)
	// translate turns the client's WebSocket into what agents speak, SPDY.
	// toAgent passes the connection on as it is.
	translate func(w http.ResponseWriter, req *http.Request, toAgent http.Handler, agent *url.URL, transport http.RoundTripper, options runtime.Object)
	// translated reports whether req needs translate.
	translated func(req *http.Request) bool
	// terminal: output may come at once, see readsTooSoon.
	terminal bool
}

var _ rest.Connecter = &stream{}

// NewExec serves pods/exec: run a command in a container.
func NewExec(pods rest.Getter, z authorizer.UnconditionalAuthorizer, transport NodeTransport) rest.Storage {
	return &stream{
		pods: pods, authorizer: z, transport: transport,
		options: func() runtime.Object { return &corev1.PodExecOptions{} },
		target: func(pod *corev1.Pod, options runtime.Object) (string, url.Values, error) {
			opts := options.(*corev1.PodExecOptions)
			if len(opts.Command) == 0 {
				return "", nil, errors.NewBadRequest("you must specify at least one command for the container")
			}
			path, query, err := terminal("exec", pod, opts.Container, streamOptions(options))
			if err == nil {
				query["command"] = opts.Command
			}
			return path, query, err
		},
		translate:  translateTerminal,
		translated: wsstream.IsWebSocketRequestWithStreamCloseProtocol,
		terminal:   true,
	}
}

// NewAttach serves pods/attach: join the streams of a container's process.
func NewAttach(pods rest.Getter, z authorizer.UnconditionalAuthorizer, transport NodeTransport) rest.Storage {
	return &stream{
		pods: pods, authorizer: z, transport: transport,
		options: func() runtime.Object { return &corev1.PodAttachOptions{} },
		target: func(pod *corev1.Pod, options runtime.Object) (string, url.Values, error) {
			return terminal("attach", pod, options.(*corev1.PodAttachOptions).Container, streamOptions(options))
		},
		translate:  translateTerminal,
		translated: wsstream.IsWebSocketRequestWithStreamCloseProtocol,
		terminal:   true,
	}
}

// NewPortForward serves pods/portforward: connections to ports of a pod.
func NewPortForward(pods rest.Getter, z authorizer.UnconditionalAuthorizer, transport NodeTransport) rest.Storage {
	return &stream{
		pods: pods, authorizer: z, transport: transport,
		options: func() runtime.Object { return &corev1.PodPortForwardOptions{} },
		target: func(pod *corev1.Pod, options runtime.Object) (string, url.Values, error) {
			query := url.Values{}
			for _, port := range options.(*corev1.PodPortForwardOptions).Ports {
				query.Add("port", strconv.Itoa(int(port)))
			}
			return fmt.Sprintf("/portForward/%s/%s/%s", pod.Namespace, pod.Name, pod.UID), query, nil
		},
		translate: func(w http.ResponseWriter, req *http.Request, toAgent http.Handler, _ *url.URL, _ http.RoundTripper, _ runtime.Object) {
			streamproxy.NewTunnelingHandler(toAgent).ServeHTTP(w, req)
		},
		translated: wsstream.IsWebSocketRequestWithTunnelingProtocol,
	}
}

// New returns the options: they are what a connect is about, to admission too.
func (s *stream) New() runtime.Object { return s.options() }

// Destroy does nothing.
func (s *stream) Destroy() {}

// NewConnectOptions returns the options of the kind of stream.
func (s *stream) NewConnectOptions() (runtime.Object, bool, string) { return s.options(), false, "" }

// ConnectMethods: WebSockets come as GET, SPDY as POST.
func (s *stream) ConnectMethods() []string { return []string{"GET", "POST"} }

// Connect proxies the upgraded connection to the agent of the pod called id.
func (s *stream) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	if err := mayCreate(ctx, s.authorizer); err != nil {
		return nil, err
	}
	pod, err := getPod(ctx, s.pods, id)
	if err != nil {
		return nil, err
	}
	path, query, err := s.target(pod, options)
	if err != nil {
		return nil, err
	}
	if pod.Spec.NodeName == "" {
		return nil, errors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", pod.Name))
	}
	transport, agent, err := s.transport.location(ctx, pod.Spec.NodeName, path, query)
	if err != nil {
		return nil, err
	}
	toAgent := proxy.NewUpgradeAwareHandler(agent, transport, false, true, proxy.NewErrorResponder(responder))
	toAgent.UseLocationHost = true
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if s.translated(req) {
			if s.terminal && readsTooSoon(req.UserAgent()) {
				responder.Error(errors.NewBadRequest("kubectl before 1.34 can lose the first output over a WebSocket: ask for SPDY"))
				return
			}
			s.translate(w, req, toAgent, agent, transport, options)
			return
		}
		toAgent.ServeHTTP(w, req)
	}), nil
}

// mayCreate asks for the verb create, whatever the method: a WebSocket comes as GET,
// which the server takes for the verb get, and who may look at things is not meant
// to run commands.
func mayCreate(ctx context.Context, z authorizer.UnconditionalAuthorizer) error {
	info, ok := request.RequestInfoFrom(ctx)
	if !ok || info.Verb == "create" {
		return nil
	}
	caller, ok := request.UserFrom(ctx)
	if !ok {
		return errors.NewInternalError(fmt.Errorf("no user in the context of %s %s", info.Verb, info.Path))
	}
	decision, reason, err := z.Authorize(ctx, authorizer.AttributesRecord{
		User: caller, Verb: "create", ResourceRequest: true, Path: info.Path,
		Namespace: info.Namespace, APIGroup: info.APIGroup, APIVersion: info.APIVersion, Resource: info.Resource, Subresource: info.Subresource, Name: info.Name,
	})
	if decision == authorizer.DecisionAllow {
		return nil
	}
	if err != nil {
		return errors.NewInternalError(err)
	}
	where := ""
	if info.Namespace != "" {
		where = fmt.Sprintf(" in namespace %q", info.Namespace)
	}
	return errors.NewForbidden(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource + "/" + info.Subresource}, info.Name,
		fmt.Errorf("user %q cannot create resource %q%s, which a WebSocket needs as well as %s%s", caller.GetName(), info.Resource+"/"+info.Subresource, where, info.Verb, because(reason)))
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + reason
}

var kubectlMinor = regexp.MustCompile(`^kubectl\S*/v1\.(\d+)`)

// readsTooSoon recognises a kubectl that reads from its WebSocket before it has
// made the streams to read into, and throws away what arrives by then
// (client-go before v0.34). A program in a container here may answer within
// milliseconds, so its whole output can be lost. Refused, such a kubectl asks
// again for SPDY, which it speaks well.
func readsTooSoon(userAgent string) bool {
	m := kubectlMinor.FindStringSubmatch(userAgent)
	if m == nil {
		return false
	}
	minor, err := strconv.Atoi(m[1])
	return err == nil && minor < 34
}

func translateTerminal(w http.ResponseWriter, req *http.Request, _ http.Handler, agent *url.URL, transport http.RoundTripper, options runtime.Object) {
	streamproxy.NewStreamTranslatorHandler(agent, transport, 0, streamOptions(options)).ServeHTTP(w, req)
}

// streamOptions are the streams a terminal wants.
func streamOptions(options runtime.Object) streamproxy.Options {
	switch o := options.(type) {
	case *corev1.PodExecOptions:
		return streamproxy.Options{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, Tty: o.TTY}
	case *corev1.PodAttachOptions:
		return streamproxy.Options{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, Tty: o.TTY}
	}
	return streamproxy.Options{}
}

// terminal is where the agent serves a terminal of a container.
func terminal(verb string, pod *corev1.Pod, container string, streams streamproxy.Options) (string, url.Values, error) {
	if core.Finished(pod) {
		return "", nil, errors.NewBadRequest(fmt.Sprintf("cannot %s a container in a completed pod; current phase is %s", preposition[verb], pod.Status.Phase))
	}
	container, err := chooseContainer(pod, container)
	if err != nil {
		return "", nil, err
	}
	if !streams.Stdin && !streams.Stdout && !streams.Stderr {
		return "", nil, errors.NewBadRequest("you must specify at least one of stdin, stdout, stderr")
	}
	query := url.Values{}
	for key, wanted := range map[string]bool{"input": streams.Stdin, "output": streams.Stdout, "error": streams.Stderr, "tty": streams.Tty} {
		if wanted {
			query.Set(key, "1")
		}
	}
	return fmt.Sprintf("/%s/%s/%s/%s/%s", verb, pod.Namespace, pod.Name, pod.UID, container), query, nil
}

var preposition = map[string]string{"exec": "exec into", "attach": "attach to"}
