package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// serveAPI is our API server on a store in memory, for who asks at the loopback: all
// may do everything. CoreDNS follows it as agent/dns does.
func serveAPI(ctx context.Context, port int) error {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard) // it has much to say
	admin := authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{User: &user.DefaultInfo{Name: "bench", Groups: []string{user.SystemPrivilegedGroup}}}, true, nil
	})
	s, err := server.New(server.Config{Storage: servertest.NewMemory().Decorator(), Authenticator: admin, ServiceCIDR: "10.96.0.0/12"})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	web := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: time.Minute}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { _ = web.Serve(l) })
	context.AfterFunc(ctx, func() { _ = web.Close() })
	return s.Run(ctx)
}

// api is the API server's process.
type api struct {
	url string
	cmd *exec.Cmd
}

func (a *api) end() {
	_ = a.cmd.Process.Signal(syscall.SIGINT)
	_ = a.cmd.Wait()
}

// startAPI starts an API server and makes the Services.
func startAPI(ctx context.Context, services int) (a *api, err error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd, err := start(self, "-api", fmt.Sprint(port))
	if err != nil {
		return nil, err
	}
	a = &api{url: fmt.Sprintf("http://127.0.0.1:%d", port), cmd: cmd}
	defer func() {
		if err != nil {
			a.end()
		}
	}()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: a.url, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"}})
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(2 * time.Minute); ; {
		_, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil {
			break
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("the API server is not ready: %w", err), ctx.Err())
		}
		time.Sleep(50 * time.Millisecond)
	}
	if _, err := client.CoreV1().Namespaces().Create(ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i := range services {
		g.Go(func() error { return create(ctx, client, i) })
	}
	return a, g.Wait()
}

// create makes a Service with two endpoints.
func create(ctx context.Context, client kubernetes.Interface, i int) error {
	name := fmt.Sprintf("svc-%d", i)
	_, err := client.CoreV1().Services("prod").Create(ctx, &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       v1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []v1.ServicePort{{Name: "http", Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	var endpoints []discoveryv1.Endpoint
	for j := range 2 {
		endpoints = append(endpoints, discoveryv1.Endpoint{
			Addresses: []string{netip.AddrFrom4([4]byte{10, 244 + byte(j), byte(i >> 8), byte(i)}).String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
			NodeName: ptr.To("node-1"), TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "prod", Name: fmt.Sprintf("%s-%d", name, j)},
		})
	}
	_, err = client.DiscoveryV1().EndpointSlices("prod").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(v1.ProtocolTCP)}},
	}, metav1.CreateOptions{})
	return err
}
