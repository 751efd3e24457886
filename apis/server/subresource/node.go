package subresource

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/registry/rest"
)

// NodeTransport reaches the agent of a node: a transport, and the base URL to
// use with it. How the node is found, which credentials are shown and which
// are demanded is its own business. For streams (exec, attach, port-forward)
// the transport has to be an *http.Transport or wrap one: the connection is
// dialled with its DialContext, and with scheme https wrapped in its
// TLSClientConfig. It may block and is called concurrently.
type NodeTransport func(ctx context.Context, node string) (http.RoundTripper, *url.URL, error)

// location asks for the agent of node and joins path and query to its URL.
func (t NodeTransport) location(ctx context.Context, node, urlPath string, query url.Values) (http.RoundTripper, *url.URL, error) {
	if t == nil {
		return nil, nil, errors.NewServiceUnavailable("this server has no way to reach node " + node)
	}
	transport, base, err := t(ctx, node)
	if err != nil {
		return nil, nil, errors.NewInternalError(fmt.Errorf("reach node %s: %w", node, err))
	}
	target := *base
	target.Path = strings.TrimSuffix(base.Path, "/") + urlPath
	target.RawQuery = query.Encode()
	return transport, &target, nil
}

// NodeProxy serves nodes/proxy: the agent's HTTP API, as the agent serves it. The name of
// the request is [SCHEME:]NODE[:PORT], where the port is the agent's own or a kubelet's
// usual one, which clients have written down. Other ports are refused: monitoring commonly
// holds this right, a node says its address by itself, and a server would ask there.
type NodeProxy struct {
	nodes      rest.Getter
	authorizer authorizer.UnconditionalAuthorizer
	transport  NodeTransport
}

// kubeletPort is where a kubelet serves its API.
const kubeletPort = "10250"

var _ rest.Connecter = &NodeProxy{}

// NewNodeProxy proxies to the nodes that nodes knows.
func NewNodeProxy(nodes rest.Getter, z authorizer.UnconditionalAuthorizer, transport NodeTransport) *NodeProxy {
	return &NodeProxy{nodes: nodes, authorizer: z, transport: transport}
}

// named reads a request's name, [SCHEME:]NODE[:PORT], and returns the node's.
func (p *NodeProxy) named(ctx context.Context, id string) (string, error) {
	_, name, port, valid := utilnet.SplitSchemeNamePort(id)
	if !valid {
		return "", errors.NewBadRequest(fmt.Sprintf("invalid name %q: want [http:|https:]NODE[:PORT]", id))
	}
	obj, err := p.nodes.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	node, ok := obj.(*corev1.Node)
	if !ok {
		return "", errors.NewInternalError(fmt.Errorf("read node %s: got a %T", name, obj))
	}
	if own := strconv.Itoa(int(node.Status.DaemonEndpoints.KubeletEndpoint.Port)); port != "" && port != kubeletPort && port != own {
		return "", errors.NewBadRequest(fmt.Sprintf("port %q of node %s: want none, %s or %s, which lead to its agent: other ports of a node are reached by pods or Services", port, name, own, kubeletPort))
	}
	return name, nil
}

// New returns the options of the connection.
func (p *NodeProxy) New() runtime.Object { return &corev1.NodeProxyOptions{} }

// Destroy does nothing.
func (p *NodeProxy) Destroy() {}

// ConnectMethods is every method.
func (p *NodeProxy) ConnectMethods() []string {
	return []string{"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
}

// NewConnectOptions takes the rest of the path as option "path".
func (p *NodeProxy) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.NodeProxyOptions{}, true, "path"
}

// acting are the calls of a node, by the first element of their path, that act in
// containers, also when the method is GET.
var acting = []string{"exec", "attach", "portForward", "run"}

// Connect proxies the request to the agent of a node.
func (p *NodeProxy) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	opts, ok := options.(*corev1.NodeProxyOptions)
	if !ok {
		return nil, errors.NewInternalError(fmt.Errorf("proxy to node %s: options are a %T", id, options))
	}
	name, err := p.named(ctx, id)
	if err != nil {
		return nil, err
	}
	// Clean, so that no ".." reaches past what the agent publishes.
	target := path.Clean("/" + opts.Path)
	if strings.HasSuffix(opts.Path, "/") && target != "/" {
		target += "/"
	}
	if first, _, _ := strings.Cut(target[1:], "/"); slices.Contains(acting, first) {
		if err := mayCreate(ctx, p.authorizer); err != nil {
			return nil, err
		}
	}
	transport, location, err := p.transport.location(ctx, name, target, nil)
	if err != nil {
		return nil, err
	}
	handler := proxy.NewUpgradeAwareHandler(location, transport, false, false, proxy.NewErrorResponder(responder))
	handler.UseLocationHost = true
	return handler, nil
}
