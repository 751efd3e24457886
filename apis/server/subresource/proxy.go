package subresource

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/registry/rest"
	endpointproxy "k8s.io/apiserver/pkg/util/proxy"
)

// httpProxy serves pods/proxy and services/proxy: HTTP to what a pod serves.
// The name of the request is [SCHEME:]NAME[:PORT].
type httpProxy struct {
	options func() runtime.Object
	path    func(options runtime.Object) string
	// find gives the address and port behind a name, for a scheme.
	find func(ctx context.Context, scheme, name, port string) (host string, err error)
	// refuse says why an address must not be asked: who may proxy to pods may
	// not by that speak to the API server's own machine.
	refuse    func(addr netip.Addr) error
	transport *http.Transport
}

var _ rest.Connecter = &httpProxy{}

// NewPodProxy serves pods/proxy.
func NewPodProxy(pods rest.Getter) rest.Storage {
	p := newProxy(func(ctx context.Context, scheme, name, port string) (string, error) {
		pod, err := getPod(ctx, pods, name)
		if err != nil {
			return "", err
		}
		return podHost(pod, scheme, port)
	})
	p.options = func() runtime.Object { return &corev1.PodProxyOptions{} }
	p.path = func(options runtime.Object) string { return options.(*corev1.PodProxyOptions).Path }
	return p
}

// NewServiceProxy serves services/proxy: each request goes to one of the
// Service's ready endpoints.
func NewServiceProxy(services rest.Getter, slices rest.Lister) rest.Storage {
	p := newProxy(func(ctx context.Context, _, name, port string) (string, error) {
		obj, err := services.Get(ctx, name, &metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		service, ok := obj.(*corev1.Service)
		if !ok {
			return "", errors.NewInternalError(fmt.Errorf("read service %s: got a %T", name, obj))
		}
		portName, err := servicePort(service, port)
		if err != nil {
			return "", err
		}
		list, err := slices.List(ctx, &internalversion.ListOptions{LabelSelector: labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: name})})
		if err != nil {
			return "", err
		}
		found, ok := list.(*discoveryv1.EndpointSliceList)
		if !ok {
			return "", errors.NewInternalError(fmt.Errorf("list endpoint slices: got a %T", list))
		}
		var all []*discoveryv1.EndpointSlice
		for i := range found.Items {
			if found.Items[i].AddressType != discoveryv1.AddressTypeFQDN { // a name may stand for any address
				all = append(all, &found.Items[i])
			}
		}
		family := corev1.IPFamilyUnknown
		if len(service.Spec.IPFamilies) > 0 {
			family = service.Spec.IPFamilies[0]
		}
		return endpointproxy.RandomEndpoint(name, all, portName, family, nil)
	})
	p.options = func() runtime.Object { return &corev1.ServiceProxyOptions{} }
	p.path = func(options runtime.Object) string { return options.(*corev1.ServiceProxyOptions).Path }
	return p
}

func newProxy(find func(ctx context.Context, scheme, name, port string) (string, error)) *httpProxy {
	dialer := &net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second}
	return &httpProxy{find: find, refuse: refuseAddr, transport: &http.Transport{
		DialContext: dialer.DialContext,
		// What a pod serves has no name that the cluster could vouch for; the
		// caller's credentials are never sent there.
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		TLSHandshakeTimeout: 15 * time.Second, IdleConnTimeout: 30 * time.Second, MaxIdleConns: 100,
	}}
}

// refuseAddr names addresses that mean this very machine or its neighbours.
func refuseAddr(addr netip.Addr) error {
	addr = addr.Unmap()
	if addr.IsUnspecified() || addr.IsLoopback() || addr.IsLinkLocalUnicast() || addr.IsMulticast() {
		return errors.NewBadRequest(fmt.Sprintf("address %s must not be proxied to: it is this server's own or of its link", addr))
	}
	return nil
}

// podHost is where a pod serves a port: a number, the name of a container's
// port, or "" for the first that its containers declare, else the scheme's.
func podHost(pod *corev1.Pod, scheme, port string) (string, error) {
	number := port
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		number = ""
		for i := range pod.Spec.Containers {
			for _, p := range pod.Spec.Containers[i].Ports {
				if number == "" && (port == "" || p.Name == port) {
					number = strconv.Itoa(int(p.ContainerPort))
				}
			}
		}
		if number == "" && port == "" {
			number = "80"
			if scheme == "https" {
				number = "443"
			}
		}
		if number == "" {
			return "", errors.NewBadRequest(fmt.Sprintf("pod %s has no port called %q", pod.Name, port))
		}
	}
	if pod.Status.PodIP == "" {
		return "", errors.NewServiceUnavailable(fmt.Sprintf("pod %s has no address yet", pod.Name))
	}
	return net.JoinHostPort(pod.Status.PodIP, number), nil
}

// servicePort gives the name of the port that is meant by name, by number, or
// as the only one.
func servicePort(service *corev1.Service, port string) (string, error) {
	if port == "" && len(service.Spec.Ports) == 1 {
		return service.Spec.Ports[0].Name, nil
	}
	for _, p := range service.Spec.Ports {
		if p.Name == port || strconv.Itoa(int(p.Port)) == port {
			return p.Name, nil
		}
	}
	return "", errors.NewServiceUnavailable(fmt.Sprintf("no service port %q found for service %q", port, service.Name))
}

// New returns the options of the connection.
func (p *httpProxy) New() runtime.Object { return p.options() }

// Destroy closes what is idle.
func (p *httpProxy) Destroy() { p.transport.CloseIdleConnections() }

// ConnectMethods is every method.
func (p *httpProxy) ConnectMethods() []string {
	return []string{"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
}

// NewConnectOptions takes the rest of the path as option "path".
func (p *httpProxy) NewConnectOptions() (runtime.Object, bool, string) {
	return p.options(), true, "path"
}

// Connect proxies the request, upgrades too, to what is called id.
func (p *httpProxy) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	scheme, name, port, valid := utilnet.SplitSchemeNamePort(id)
	if !valid {
		return nil, errors.NewBadRequest(fmt.Sprintf("invalid name %q: want [http:|https:]NAME[:PORT]", id))
	}
	if scheme == "" {
		scheme = "http"
	}
	host, err := p.find(ctx, scheme, name, port)
	if err != nil {
		return nil, err
	}
	at, err := netip.ParseAddrPort(host)
	if err != nil {
		return nil, errors.NewInternalError(fmt.Errorf("proxy to %s: %w", id, err))
	}
	if err := p.refuse(at.Addr()); err != nil {
		return nil, err
	}
	location := &url.URL{Scheme: scheme, Host: host}
	// Without a path, not even "/", the handler redirects to one, as links that are
	// relative need it.
	if path := p.path(options); path != "" {
		location.Path = "/" + strings.TrimPrefix(path, "/")
	}
	handler := proxy.NewUpgradeAwareHandler(location, p.transport, true, false, proxy.NewErrorResponder(responder))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		req = req.Clone(req.Context())
		withoutIdentity(req.Header)
		handler.ServeHTTP(w, req)
	}), nil
}

// withoutIdentity takes away what says who the caller is to the API server: a
// pod could use it.
func withoutIdentity(h http.Header) {
	for name := range h {
		lower := strings.ToLower(name)
		if lower == "authorization" || lower == "proxy-authorization" || strings.HasPrefix(lower, "impersonate-") || strings.HasPrefix(lower, "x-remote-") {
			delete(h, name)
		}
	}
}
