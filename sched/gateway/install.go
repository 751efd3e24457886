package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/sched/gateway/crds"
	"github.com/clusterd/clusterd/sched/ingress"
)

const (
	// mark is the ConfigMap that says which release of the kinds was made, and that
	// the class was: what is deleted stays deleted.
	mark        = "clusterd-gateway-api"
	markRelease = "release"
	markKinds   = "kinds" // with blanks between
	markClass   = "class"

	// owner is who the definitions' fields belong to. It is what `kubectl apply
	// --server-side` calls itself, so that an installation of another release by the
	// project's instructions takes them over without a conflict.
	owner = "kubectl"
	// lastApplied is on what was applied without --server-side.
	lastApplied = "kubectl.kubernetes.io/last-applied-configuration"
)

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// install makes the kinds and the class; false: there is more to do soon.
func (c *controller) install(ctx context.Context) (done bool, _ error) {
	marks := c.client.CoreV1().ConfigMaps(ingress.Name.Namespace)
	m, err := marks.Get(ctx, mark, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		m, err = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: mark}}, nil
	}
	if err != nil {
		return false, err
	}
	all, release, err := crds.Read()
	switch {
	case errors.Is(err, crds.ErrAbsent):
		klog.FromContext(ctx).Info("the kinds of Gateways are not made", "why", err)
	case err != nil:
		return false, err
	default:
		if m, err = c.defineAll(ctx, m, all, release); err != nil {
			return false, err
		}
	}
	if m.Data[markClass] != "" {
		return true, nil
	}
	if !c.kinds.Served() {
		return errors.Is(err, crds.ErrAbsent), nil
	}
	class := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"controllerName": string(gateway.Controller), "description": "The proxies of clusterd, which serve its Ingresses too",
	}}}
	gvr := schema.GroupVersionResource{Group: gateway.Group, Version: "v1", Resource: gateway.Classes}
	class.SetGroupVersionKind(gvr.GroupVersion().WithKind("GatewayClass"))
	class.SetName(gateway.Class)
	if _, err := c.dynamic.Resource(gvr).Create(ctx, class, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return false, fmt.Errorf("make the gateway class: %w", err)
	}
	_, err = c.note(ctx, m, markClass, gateway.Class)
	return true, err
}

// firstKinds are those that were made before the mark named them.
const firstKinds = "gatewayclasses.gateway.networking.k8s.io gateways.gateway.networking.k8s.io httproutes.gateway.networking.k8s.io grpcroutes.gateway.networking.k8s.io referencegrants.gateway.networking.k8s.io"

// defineAll makes the kinds that this cluster never had, brings the others to a newer
// release, and notes both. It returns the mark.
func (c *controller) defineAll(ctx context.Context, m *corev1.ConfigMap, all []*unstructured.Unstructured, release string) (*corev1.ConfigMap, error) {
	made, had := m.Data[markRelease], m.Data[markKinds]
	if made != "" && had == "" {
		had = firstKinds
	}
	later, known := newer(release, made), strings.Fields(had)
	for _, one := range all {
		before := made
		switch old := slices.Contains(known, one.GetName()); {
		case old && !later:
			continue
		case !old:
			before = ""
			known = append(known, one.GetName())
		}
		if err := c.define(ctx, one, before); err != nil {
			return nil, fmt.Errorf("definition %s: %w", one.GetName(), err)
		}
	}
	for key, value := range map[string]string{markRelease: release, markKinds: strings.Join(known, " ")} {
		if m.Data[key] == value || key == markRelease && !later {
			continue
		}
		var err error
		if m, err = c.note(ctx, m, key, value); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// note adds to the mark.
func (c *controller) note(ctx context.Context, m *corev1.ConfigMap, key, value string) (*corev1.ConfigMap, error) {
	next := m.DeepCopy()
	if next.Data == nil {
		next.Data = map[string]string{}
	}
	next.Data[key] = value
	marks := c.client.CoreV1().ConfigMaps(ingress.Name.Namespace)
	if m.ResourceVersion == "" {
		return marks.Create(ctx, next, metav1.CreateOptions{})
	}
	return marks.Update(ctx, next, metav1.UpdateOptions{})
}

// define makes one kind, or brings it from the release that was made here to a
// newer one. What a user has made or changed stays, and what a user has deleted
// stays deleted.
func (c *controller) define(ctx context.Context, one *unstructured.Unstructured, before string) error {
	old, err := c.dynamic.Resource(definitions).Get(ctx, one.GetName(), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		if before != "" {
			return nil
		}
	case err != nil:
		return err
	case before == "" || foreign(old, before):
		return nil
	}
	_, err = c.dynamic.Resource(definitions).Apply(ctx, one.GetName(), one, metav1.ApplyOptions{FieldManager: owner, Force: true})
	return err
}

// foreign reports whether a definition is no longer the one that was made here.
func foreign(old *unstructured.Unstructured, before string) bool {
	a := old.GetAnnotations()
	return a[crds.BundleVersion] != before || a[lastApplied] != ""
}

// newer reports whether a release is of after the one that was made; "": none
// was.
func newer(release, made string) bool {
	if made == "" {
		return true
	}
	a, err1 := version.ParseGeneric(release)
	b, err2 := version.ParseGeneric(made)
	return err1 == nil && err2 == nil && b.LessThan(a)
}
