package server

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/apis/server/alloc"
	"github.com/clusterd/clusterd/apis/server/resource"
)

// storageMediaType is how objects are kept.
const storageMediaType = "application/vnd.kubernetes.protobuf"

// stores are the stores of all kinds. They also answer what authorizer and
// admission look up: reads of the storage in this process, past the handler,
// because they happen inside requests.
type stores struct {
	storage generic.StorageDecorator
	codecs  map[schema.GroupVersion]storageCodec
	list    []*resource.Store // in the order of the kinds
	byName  map[schema.GroupResource]*resource.Store
	// destroy ends the storage of cluster addresses; nil: there is none.
	destroy func()
}

type storageCodec struct {
	codec     runtime.Codec
	versioner runtime.GroupVersioner
}

func newStores(kinds []apis.Kind, scheme *runtime.Scheme, storage generic.StorageDecorator) (*stores, error) {
	s := &stores{
		storage: storage,
		codecs:  map[schema.GroupVersion]storageCodec{},
		byName:  map[schema.GroupResource]*resource.Store{},
	}
	for _, kind := range kinds {
		version := kind.GVK.GroupVersion()
		if _, ok := s.codecs[version]; !ok {
			codec, versioner, err := serverstorage.NewStorageCodec(serverstorage.StorageCodecConfig{
				StorageMediaType:  storageMediaType,
				StorageSerializer: apis.Codecs,
				StorageVersion:    version,
				// Objects in memory carry no kind and version of their own.
				MemoryVersion: schema.GroupVersion{Group: version.Group, Version: runtime.APIVersionInternal},
			})
			if err != nil {
				return nil, fmt.Errorf("codec of %s: %w", version, err)
			}
			s.codecs[version] = storageCodec{codec, versioner}
		}
		store, err := resource.New(kind, scheme, s.options(kind))
		if err != nil {
			return nil, err
		}
		s.list = append(s.list, store)
		s.byName[store.DefaultQualifiedResource] = store
	}
	return s, nil
}

// options are where and how objects of kind are stored: under
// /GROUP/RESOURCE/[NAMESPACE/]NAME, in protobuf.
func (s *stores) options(kind apis.Kind) generic.RESTOptions {
	name := schema.GroupResource{Group: kind.GVK.Group, Resource: kind.Resource}
	codec := s.codecs[kind.GVK.GroupVersion()]
	return generic.RESTOptions{
		StorageConfig: &storagebackend.ConfigForResource{
			Config:        storagebackend.Config{Codec: codec.codec, EncodeVersioner: codec.versioner},
			GroupResource: name,
		},
		Decorator:               s.storage,
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 16,
		ResourcePrefix:          prefix(name),
	}
}

func prefix(name schema.GroupResource) string { return StoragePrefix(name.Group, name.Resource) }

// StoragePrefix is the folder of the storage that holds the objects of a
// resource; the core group is "".
func StoragePrefix(group, resource string) string {
	if group == "" {
		group = "core"
	}
	return "/" + group + "/" + resource
}

// StoredResource is the resource whose objects lie under a key of the storage.
func StoredResource(key string) schema.GroupResource {
	parts := strings.SplitN(strings.TrimPrefix(key, "/"), "/", 3)
	if len(parts) < 2 {
		return schema.GroupResource{}
	}
	if parts[0] == "core" {
		parts[0] = ""
	}
	return schema.GroupResource{Group: parts[0], Resource: parts[1]}
}

// GetRESTOptions answers the library, which wants to know whether two
// resources share their storage: they do if they share the prefix.
func (s *stores) GetRESTOptions(name schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	store, ok := s.byName[name]
	if !ok {
		return generic.RESTOptions{}, fmt.Errorf("%s is not stored", name)
	}
	return s.options(store.Kind()), nil
}

// ready is nil when every storage can be read and written.
func (s *stores) ready() error {
	for _, store := range s.list {
		if err := store.ReadinessCheck(); err != nil {
			return fmt.Errorf("%s: %w", store.DefaultQualifiedResource, err)
		}
	}
	return nil
}

// allocate makes Services get cluster addresses from cidrs, and node ports.
func (s *stores) allocate(cidrs string, ports utilnet.PortRange) error {
	networks, err := serviceNetworks(cidrs)
	if err != nil {
		return fmt.Errorf("API server config: ServiceCIDR: %w", err)
	}
	leases := s.byName[coordinationv1.Resource("leases")].Kind()
	// Of the storage of Leases these have only the form: each is a place of its
	// own, named as the resource it would be.
	place := func(name, prefix string) (storage.Interface, error) {
		options := s.options(leases)
		options.StorageConfig.GroupResource = schema.GroupResource{Group: "alloc", Resource: name}
		store, destroy, err := s.storage(options.StorageConfig, prefix, alloc.Key(prefix), leases.New, leases.NewList, resource.Attrs(leases), nil, nil)
		if err != nil {
			return nil, fmt.Errorf("storage of %s: %w", name, err)
		}
		before := s.destroy
		s.destroy = func() {
			destroy()
			if before != nil {
				before()
			}
		}
		return store, nil
	}
	store, err := place("clusterips", alloc.Prefix)
	if err != nil {
		return err
	}
	var addresses []*alloc.Addresses
	for _, network := range networks {
		one, err := alloc.New(store, network, s.holds, alloc.Others{Ranges: s.serviceRanges, Reserved: s.reserved})
		if err != nil {
			s.destroy()
			s.destroy = nil
			return fmt.Errorf("API server config: ServiceCIDR: %w", err)
		}
		addresses = append(addresses, one)
	}
	if store, err = place("nodeports", alloc.PortsPrefix); err != nil {
		return err
	}
	alloc.Attach(s.core("services").Store, alloc.NewFamilies(addresses...), alloc.NewPorts(store, s.holdsPort, ports))
	return nil
}

// serviceNetworks parses one range, or two of different IP families with a comma
// between.
func serviceNetworks(cidrs string) ([]netip.Prefix, error) {
	var networks []netip.Prefix
	for text := range strings.SplitSeq(cidrs, ",") {
		network, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		if len(networks) > 1 || len(networks) == 1 && networks[0].Addr().Is4() == network.Addr().Is4() {
			return nil, fmt.Errorf("%q: give one range, or one of each IP family", cidrs)
		}
		networks = append(networks, network)
	}
	return networks, nil
}

// holdsPort reports whether a Service is stored with a node port.
func (s *stores) holdsPort(ctx context.Context, owner alloc.Owner, port int32) (bool, error) {
	service, err := getAt[*corev1.Service](lookup(ctx, corev1.Resource("services"), owner.Namespace), s, corev1.Resource("services"), owner.Name, "")
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return service.UID == owner.UID && (service.Spec.HealthCheckNodePort == port ||
		slices.ContainsFunc(service.Spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort == port })), nil
}

// holds reports whether a Service is stored with an address.
func (s *stores) holds(ctx context.Context, owner alloc.Owner, address netip.Addr) (bool, error) {
	service, err := getAt[*corev1.Service](lookup(ctx, corev1.Resource("services"), owner.Namespace), s, corev1.Resource("services"), owner.Name, "")
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return service.UID == owner.UID && slices.Contains(service.Spec.ClusterIPs, address.String()), nil
}

var (
	serviceCIDRs = networkingv1.Resource("servicecidrs")
	ipAddresses  = networkingv1.Resource("ipaddresses")
)

// serviceRanges are the ranges that ServiceCIDRs add, in the order of their
// names, newest state.
func (s *stores) serviceRanges(ctx context.Context) ([]netip.Prefix, error) {
	list, err := s.byName[serviceCIDRs].List(lookup(ctx, serviceCIDRs, ""), &internalversion.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list ServiceCIDRs: %w", err)
	}
	all, ok := list.(*networkingv1.ServiceCIDRList)
	if !ok {
		return nil, fmt.Errorf("list ServiceCIDRs: got a %T", list)
	}
	var ranges []netip.Prefix
	for i := range all.Items {
		ranges = append(ranges, networking.ServiceRanges(&all.Items[i])...)
	}
	return ranges, nil
}

// reserved reports whether an IPAddress, as this process knows it, keeps an
// address for something else than owner. Those that mirror Services keep
// nothing: the Services say who has what.
func (s *stores) reserved(ctx context.Context, address netip.Addr, owner alloc.Owner) (bool, error) {
	kept, err := getAt[*networkingv1.IPAddress](lookup(ctx, ipAddresses, ""), s, ipAddresses, address.String(), "0")
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return kept.Labels[networkingv1.LabelManagedBy] != networking.IPAddressManager && !networking.IsOf(kept, owner.Namespace, owner.Name), nil
}

func (s *stores) core(plural string) *resource.Store { return s.byName[corev1.Resource(plural)] }

// get reads one object as a T. It takes what this process
// knows if that satisfies good, and asks the store's leader only otherwise: an
// object that is missing or unusable here may be there by now.
func get[T runtime.Object](ctx context.Context, s *stores, plural schema.GroupResource, namespace, name string, good func(T) bool) (T, error) {
	ctx = lookup(ctx, plural, namespace)
	known, err := getAt[T](ctx, s, plural, name, "0")
	if err == nil && good(known) {
		return known, nil
	}
	return getAt[T](ctx, s, plural, name, "")
}

func getAt[T runtime.Object](ctx context.Context, s *stores, plural schema.GroupResource, name, version string) (T, error) {
	var none T
	obj, err := s.byName[plural].Get(ctx, name, &metav1.GetOptions{ResourceVersion: version})
	if err != nil {
		return none, err
	}
	typed, ok := obj.(T)
	if !ok {
		return none, fmt.Errorf("read %s %s: stored as a %T", plural, name, obj)
	}
	return typed, nil
}

// lookup is the context of a read on behalf of another request: errors speak
// of what is looked up, not of what the request is about.
func lookup(ctx context.Context, plural schema.GroupResource, namespace string) context.Context {
	ctx = request.WithRequestInfo(ctx, &request.RequestInfo{
		IsResourceRequest: true, APIGroup: plural.Group, APIVersion: "v1", Resource: plural.Resource, Namespace: namespace,
	})
	return request.WithNamespace(ctx, namespace)
}

// Namespace reads a namespace.
func (s *stores) Namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	return get(ctx, s, corev1.Resource("namespaces"), "", name, func(ns *corev1.Namespace) bool { return ns.DeletionTimestamp == nil })
}

// Pod reads a pod.
func (s *stores) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	return get(ctx, s, corev1.Resource("pods"), namespace, name, func(pod *corev1.Pod) bool { return pod.Spec.NodeName != "" })
}

// Claim reads a claim.
func (s *stores) Claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	return get(ctx, s, corev1.Resource("persistentvolumeclaims"), namespace, name, func(c *corev1.PersistentVolumeClaim) bool { return c.Spec.VolumeName != "" })
}

// Volume reads a volume.
func (s *stores) Volume(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	return get(ctx, s, corev1.Resource("persistentvolumes"), "", name, func(v *corev1.PersistentVolume) bool { return v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID != "" })
}

// Attachment reads what is attached, or to be.
func (s *stores) Attachment(ctx context.Context, name string) (*storagev1.VolumeAttachment, error) {
	return get(ctx, s, storagev1.Resource("volumeattachments"), "", name, func(*storagev1.VolumeAttachment) bool { return true })
}

// PodCertificateRequest reads a request for the certificate of a pod.
func (s *stores) PodCertificateRequest(ctx context.Context, namespace, name string) (*certificatesv1.PodCertificateRequest, error) {
	return get(ctx, s, certificatesv1.Resource("podcertificaterequests"), namespace, name, func(*certificatesv1.PodCertificateRequest) bool { return true })
}

// ResourceSlice reads what a driver of devices offers.
func (s *stores) ResourceSlice(ctx context.Context, name string) (*resourcev1.ResourceSlice, error) {
	return get(ctx, s, resourcev1.Resource("resourceslices"), "", name, func(*resourcev1.ResourceSlice) bool { return true })
}

// Node reads a node.
func (s *stores) Node(ctx context.Context, name string) (*corev1.Node, error) {
	return get(ctx, s, corev1.Resource("nodes"), "", name, func(*corev1.Node) bool { return true })
}

// CSIDriver reads what is said of a driver.
func (s *stores) CSIDriver(ctx context.Context, name string) (*storagev1.CSIDriver, error) {
	return get(ctx, s, storagev1.Resource("csidrivers"), "", name, func(*storagev1.CSIDriver) bool { return true })
}

// ServiceAccount reads a service account.
func (s *stores) ServiceAccount(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error) {
	return get(ctx, s, corev1.Resource("serviceaccounts"), namespace, name, func(*corev1.ServiceAccount) bool { return true })
}

var priorityClasses = schedulingv1.Resource("priorityclasses")

// PriorityClass reads a priority class.
func (s *stores) PriorityClass(ctx context.Context, name string) (*schedulingv1.PriorityClass, error) {
	return get(ctx, s, priorityClasses, "", name, func(*schedulingv1.PriorityClass) bool { return true })
}

// PriorityClasses lists the priority classes, as this process knows them.
func (s *stores) PriorityClasses(ctx context.Context) ([]schedulingv1.PriorityClass, error) {
	list, err := s.byName[priorityClasses].List(lookup(ctx, priorityClasses, ""), &internalversion.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("list priority classes: %w", err)
	}
	classes, ok := list.(*schedulingv1.PriorityClassList)
	if !ok {
		return nil, fmt.Errorf("list priority classes: got a %T", list)
	}
	return classes.Items, nil
}

// Workload reads a Workload.
func (s *stores) Workload(ctx context.Context, namespace, name string) (*schedulingv1beta1.Workload, error) {
	return get(ctx, s, schedulingv1beta1.Resource("workloads"), namespace, name, func(*schedulingv1beta1.Workload) bool { return true })
}

var storageClasses = storagev1.Resource("storageclasses")

// StorageClass reads a storage class.
func (s *stores) StorageClass(ctx context.Context, name string) (*storagev1.StorageClass, error) {
	return get(ctx, s, storageClasses, "", name, func(*storagev1.StorageClass) bool { return true })
}

// StorageClasses lists the storage classes, as this process knows them.
func (s *stores) StorageClasses(ctx context.Context) ([]storagev1.StorageClass, error) {
	list, err := s.byName[storageClasses].List(lookup(ctx, storageClasses, ""), &internalversion.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("list storage classes: %w", err)
	}
	classes, ok := list.(*storagev1.StorageClassList)
	if !ok {
		return nil, fmt.Errorf("list storage classes: got a %T", list)
	}
	return classes.Items, nil
}

var ingressClasses = networkingv1.Resource("ingressclasses")

// IngressClasses lists the ingress classes, as this process knows them.
func (s *stores) IngressClasses(ctx context.Context) ([]networkingv1.IngressClass, error) {
	list, err := s.byName[ingressClasses].List(lookup(ctx, ingressClasses, ""), &internalversion.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("list ingress classes: %w", err)
	}
	classes, ok := list.(*networkingv1.IngressClassList)
	if !ok {
		return nil, fmt.Errorf("list ingress classes: got a %T", list)
	}
	return classes.Items, nil
}

// RuntimeClass reads a runtime class.
func (s *stores) RuntimeClass(ctx context.Context, name string) (*nodev1.RuntimeClass, error) {
	return get(ctx, s, nodev1.Resource("runtimeclasses"), "", name, func(*nodev1.RuntimeClass) bool { return true })
}

// OnNode lists the pods bound to node. It may be as old as this server's copy
// of the store, from which the node's own watch was fed too.
func (s *stores) OnNode(ctx context.Context, node, namespace string) ([]*corev1.Pod, error) {
	list, err := s.core("pods").List(lookup(ctx, corev1.Resource("pods"), namespace), &internalversion.ListOptions{
		FieldSelector:   fields.OneTermEqualSelector("spec.nodeName", node),
		ResourceVersion: "0",
	})
	if err != nil {
		return nil, fmt.Errorf("list pods of node %s: %w", node, err)
	}
	pods, ok := list.(*corev1.PodList)
	if !ok {
		return nil, fmt.Errorf("list pods of node %s: got a %T", node, list)
	}
	all := make([]*corev1.Pod, len(pods.Items))
	for i := range pods.Items {
		all[i] = &pods.Items[i]
	}
	return all, nil
}

// Pods lists the pods of a namespace, as this process knows them.
func (s *stores) Pods(ctx context.Context, namespace string) ([]*corev1.Pod, error) {
	list, err := s.core("pods").List(lookup(ctx, corev1.Resource("pods"), namespace), &internalversion.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("list pods of namespace %s: %w", namespace, err)
	}
	pods, ok := list.(*corev1.PodList)
	if !ok {
		return nil, fmt.Errorf("list pods of namespace %s: got a %T", namespace, list)
	}
	all := make([]*corev1.Pod, len(pods.Items))
	for i := range pods.Items {
		all[i] = &pods.Items[i]
	}
	return all, nil
}

// LimitRanges lists those of a namespace, as this process knows them.
func (s *stores) LimitRanges(ctx context.Context, namespace string) ([]corev1.LimitRange, error) {
	list, err := s.core("limitranges").List(lookup(ctx, corev1.Resource("limitranges"), namespace), &internalversion.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("list limit ranges: %w", err)
	}
	limits, ok := list.(*corev1.LimitRangeList)
	if !ok {
		return nil, fmt.Errorf("list limit ranges: got a %T", list)
	}
	return limits.Items, nil
}
