// Package kubedns keeps the Service "kube-dns" in kube-system: the place where
// programs look for the address of the cluster's name server. Nothing stands
// behind it, since each node answers that address by itself.
package kubedns

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/loop"
)

const (
	// labelProxyName tells nodes, and whatever else spreads connections, that the
	// Service is not theirs: a rule for its address would keep questions from
	// the name server that has it on the node's loopback.
	labelProxyName = "service.kubernetes.io/service-proxy-name"
	labelManagedBy = "app.kubernetes.io/managed-by"
	own            = "clusterd"
)

// the is the one object this loop is about.
var the = loop.Key{Namespace: metav1.NamespaceSystem, Name: "kube-dns"}

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	services corelisters.ServiceLister
	addrs    []netip.Addr
}

// New returns the loop. addrs are where each node answers, one of each IP family;
// none: the cluster's names are answered by another server, which has the Service.
func New(env loop.Env, addrs []netip.Addr) loop.Loop {
	services := env.Informers.Core().V1().Services()
	c := &controller{client: env.Client, services: services.Lister(), addrs: addrs}
	c.Controller = loop.New("kubedns", env, 1, c.reconcile)
	loop.Watch(c.Controller, services.Informer(), func(old, s *corev1.Service) {
		// One that goes may have had the address.
		if loop.KeyOf(loop.Latest(old, s)) == the || s == nil && slices.ContainsFunc(addrs, func(a netip.Addr) bool { return slices.Contains(old.Spec.ClusterIPs, a.String()) }) {
			c.Enqueue(the)
		}
	})
	return loop.Loop{Name: "kubedns", Run: func(ctx context.Context) error {
		return c.RunReady(ctx, func() { c.Enqueue(the) })
	}}
}

func (c *controller) reconcile(ctx context.Context, _ loop.Key) error {
	if len(c.addrs) == 0 {
		return nil
	}
	api := c.client.CoreV1().Services(the.Namespace)
	service, err := c.services.Services(the.Namespace).Get(the.Name)
	if apierrors.IsNotFound(err) {
		_, err = api.Create(ctx, newService(c.addrs), metav1.CreateOptions{})
		switch {
		case apierrors.IsAlreadyExists(err):
			return nil // the cache will show it
		case apierrors.IsInvalid(err): // another Service has the address: its owner wants it so
			klog.FromContext(ctx).Info("the Service of the cluster's DNS was not made", "service", the.String(), "err", err)
			return nil
		case err != nil:
			return fmt.Errorf("make service %s: %w", the, err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	if fixed := fix(service, c.addrs); fixed != nil {
		_, err := api.Update(ctx, fixed, metav1.UpdateOptions{})
		if apierrors.IsInvalid(err) { // as above: of the second address
			klog.FromContext(ctx).Info("the Service of the cluster's DNS does not get what it lacks", "service", the.String(), "err", err)
			return nil
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("service %s: %w", the, err)
		}
	}
	return nil
}

func newService(addrs []netip.Addr) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: the.Namespace, Name: the.Name,
			Labels: map[string]string{"k8s-app": "kube-dns", labelManagedBy: own, labelProxyName: own},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: addrs[0].String(),
			Ports: []corev1.ServicePort{
				{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(53)},
				{Name: "dns-tcp", Port: 53, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(53)},
			},
		},
	}
	addSecond(&s.Spec, addrs)
	return s
}

// addSecond gives the Service the address of the second family, if there is one.
func addSecond(spec *corev1.ServiceSpec, addrs []netip.Addr) {
	if len(addrs) == 2 {
		spec.ClusterIPs = []string{addrs[0].String(), addrs[1].String()}
		spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyPreferDualStack)
		spec.IPFamilies = nil // the addresses say them
	}
}

// fix returns the corrected Service, nil: it is correct. What an administrator has made
// under that name with another address is left alone; one with ours keeps the
// label without which no client would be answered. Pure.
func fix(s *corev1.Service, addrs []netip.Addr) *corev1.Service {
	if s.Spec.ClusterIP != addrs[0].String() {
		return nil
	}
	want := s.DeepCopy()
	if want.Labels == nil {
		want.Labels = map[string]string{}
	}
	if want.Labels[labelProxyName] == "" {
		want.Labels[labelProxyName] = own
	}
	if want.Labels[labelManagedBy] == own {
		want.Spec.Selector, want.Spec.Ports = nil, newService(addrs).Spec.Ports
		if len(want.Spec.ClusterIPs) < len(addrs) { // the cluster has got a second family
			addSecond(&want.Spec, addrs)
		}
	}
	if apiequality.Semantic.DeepEqual(s, want) {
		return nil
	}
	return want
}
