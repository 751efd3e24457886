package apis

import (
	"fmt"
	"maps"
	"strings"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	storagev1 "k8s.io/api/storage/v1"
	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

var (
	// Scheme knows every Go type the API speaks. The versioned types of
	// k8s.io/api are also its internal version: nothing is converted between
	// the wire, the store and our functions.
	Scheme = runtime.NewScheme()
	// Codecs reads and writes JSON, YAML and protobuf of Scheme's types.
	Codecs serializer.CodecFactory
	// ParameterCodec reads query parameters into option types (PodLogOptions …).
	ParameterCodec runtime.ParameterCodec
)

// groups are the API groups with a served kind or with a type that some
// subresource takes or gives. Of a group's versions the preferred one is the
// first; a type that it has is the hub of that kind.
var groups = []struct {
	version schema.GroupVersion
	add     func(*runtime.Scheme) error
}{
	{corev1.SchemeGroupVersion, corev1.AddToScheme},
	{admissionregistrationv1.SchemeGroupVersion, admissionregistrationv1.AddToScheme},
	{appsv1.SchemeGroupVersion, appsv1.AddToScheme},
	{authenticationv1.SchemeGroupVersion, authenticationv1.AddToScheme},
	{authorizationv1.SchemeGroupVersion, authorizationv1.AddToScheme},
	{autoscalingv2.SchemeGroupVersion, autoscalingv2.AddToScheme},
	{autoscalingv1.SchemeGroupVersion, autoscalingv1.AddToScheme},
	{batchv1.SchemeGroupVersion, batchv1.AddToScheme},
	{certificatesv1.SchemeGroupVersion, certificatesv1.AddToScheme},
	{coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme},
	{discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme},
	{eventsv1.SchemeGroupVersion, eventsv1.AddToScheme},
	{flowcontrolv1.SchemeGroupVersion, flowcontrolv1.AddToScheme},
	{networkingv1.SchemeGroupVersion, networkingv1.AddToScheme},
	{nodev1.SchemeGroupVersion, nodev1.AddToScheme},
	{policyv1.SchemeGroupVersion, policyv1.AddToScheme},
	{rbacv1.SchemeGroupVersion, rbacv1.AddToScheme},
	{resourcev1.SchemeGroupVersion, resourcev1.AddToScheme},
	{schedulingv1.SchemeGroupVersion, schedulingv1.AddToScheme},
	{schedulingv1beta1.SchemeGroupVersion, addPodGroups},
	{storagev1.SchemeGroupVersion, storagev1.AddToScheme},
	{storagemigrationv1.SchemeGroupVersion, storagemigrationv1.AddToScheme},
	{metricsv1beta1.SchemeGroupVersion, metricsv1beta1.AddToScheme},
}

func init() {
	utilruntime.Must(build(Scheme, Kinds()))
	Codecs = serializer.NewCodecFactory(Scheme)
	ParameterCodec = runtime.NewParameterCodec(Scheme)
}

// build fills s with the types of all groups and with what kinds say of theirs.
func build(s *runtime.Scheme, kinds []Kind) error {
	versions := map[string][]schema.GroupVersion{}
	for _, g := range groups {
		if err := g.add(s); err != nil {
			return fmt.Errorf("add %s to the scheme: %w", g.version, err)
		}
		for _, k := range kinds {
			addViewed(s, k, g.version)
		}
		addInternal(s, g.version)
		if err := s.SetVersionPriority(append(versions[g.version.Group], g.version)...); err != nil {
			return fmt.Errorf("prioritize %s: %w", g.version, err)
		}
		versions[g.version.Group] = append(versions[g.version.Group], g.version)
	}
	// Answers and options that belong to no group of their own.
	v1 := schema.GroupVersion{Version: "v1"}
	metav1.AddToGroupVersion(s, v1)
	s.AddUnversionedTypes(v1, &metav1.Status{}, &metav1.APIVersions{}, &metav1.APIGroupList{}, &metav1.APIGroup{}, &metav1.APIResourceList{})

	for _, k := range kinds {
		if !s.Recognizes(k.GVK) {
			return fmt.Errorf("%s is in no group of the scheme", k.GVK)
		}
		addDefaults(s, k)
		if err := addFieldLabels(s, k, k.GVK, nil); err != nil {
			return fmt.Errorf("field selectors of %s: %w", k.GVK, err)
		}
		for _, view := range k.Views {
			gvk := k.ViewGVK(view)
			if err := view.AddConversions(s); err != nil {
				return fmt.Errorf("conversions of %s: %w", gvk, err)
			}
			if err := addFieldLabels(s, k, gvk, view.FieldLabels); err != nil {
				return fmt.Errorf("field selectors of %s: %w", gvk, err)
			}
		}
	}
	return addQueryConversions(s)
}

// addPodGroups registers what scheduling.k8s.io/v1beta1 holds today. Upstream's
// function adds PriorityClass to it, of which no server serves that version.
func addPodGroups(s *runtime.Scheme) error {
	s.AddKnownTypes(schedulingv1beta1.SchemeGroupVersion,
		&schedulingv1beta1.PodGroup{}, &schedulingv1beta1.PodGroupList{}, &schedulingv1beta1.Workload{}, &schedulingv1beta1.WorkloadList{})
	metav1.AddToGroupVersion(s, schedulingv1beta1.SchemeGroupVersion)
	return nil
}

// addViewed registers k's types as the internal version of another group that
// shows them: core/v1 Event is the hub of events.k8s.io too.
func addViewed(s *runtime.Scheme, k Kind, version schema.GroupVersion) {
	for _, view := range k.Views {
		gvk := k.ViewGVK(view)
		if gvk.GroupVersion() != version || gvk.Group == k.GVK.Group {
			continue
		}
		gvk.Version = runtime.APIVersionInternal
		s.AddKnownTypeWithName(gvk, k.New())
		gvk.Kind += "List"
		s.AddKnownTypeWithName(gvk, k.NewList())
	}
}

// addInternal registers the Go types of version under the internal version
// too, so that converting to it only stamps the kind. Types of apimachinery
// (ListOptions, WatchEvent …) have internal versions of their own.
func addInternal(s *runtime.Scheme, version schema.GroupVersion) {
	internal := schema.GroupVersion{Group: version.Group, Version: runtime.APIVersionInternal}
	for name, t := range s.KnownTypes(version) {
		if strings.HasPrefix(t.PkgPath(), "k8s.io/apimachinery/") {
			continue
		}
		if s.Recognizes(internal.WithKind(name)) {
			continue // an earlier version of the list is its hub
		}
		obj, err := s.New(version.WithKind(name))
		utilruntime.Must(err) // name was just read from s
		s.AddKnownTypeWithName(internal.WithKind(name), obj)
	}
}

// addDefaults makes every decode of k, alone or in a list, run k.Default.
func addDefaults(s *runtime.Scheme, k Kind) {
	if k.Default == nil {
		return
	}
	s.AddTypeDefaultingFunc(k.New(), func(obj any) { k.Default(obj.(runtime.Object)) })
	s.AddTypeDefaultingFunc(k.NewList(), func(list any) {
		// EachListItem fails only for a type that is no list, or if the
		// callback does.
		utilruntime.Must(meta.EachListItem(list.(runtime.Object), func(obj runtime.Object) error {
			k.Default(obj)
			return nil
		}))
	})
}

// addFieldLabels says which field selectors k understands as gvk: metadata.name,
// metadata.namespace and the keys of k.Fields, or those of renamed, whose
// values are such keys.
func addFieldLabels(s *runtime.Scheme, k Kind, gvk schema.GroupVersionKind, renamed map[string]string) error {
	known := map[string]string{"metadata.name": "metadata.name"}
	if k.Namespaced {
		known["metadata.namespace"] = "metadata.namespace"
	}
	if renamed != nil {
		maps.Copy(known, renamed)
	} else if k.Fields != nil {
		for label := range k.Fields(k.New()) {
			known[label] = label
		}
	}
	if gvk == corev1.SchemeGroupVersion.WithKind("Pod") {
		known["spec.host"] = "spec.nodeName" // the name of the field before v1
	}
	return s.AddFieldLabelConversionFunc(gvk, func(label, value string) (string, string, error) {
		own, ok := known[label]
		if !ok {
			return "", "", fmt.Errorf("field label not supported: %s", label)
		}
		return own, value, nil
	})
}
