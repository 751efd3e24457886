package networking

import networkingv1 "k8s.io/api/networking/v1"

// DefaultIngressClass is the annotation of the class for Ingresses that name
// none.
const DefaultIngressClass = networkingv1.AnnotationIsDefaultIngressClass

// ClassOf is the name of an Ingress's class; "": it has none.
func ClassOf(i *networkingv1.Ingress) string {
	if i.Spec.IngressClassName != nil {
		return *i.Spec.IngressClassName
	}
	return i.Annotations[classAnnotation]
}

// DefaultClass is the class for Ingresses that name none, nil: there is none. Of
// several that are marked, the newest counts, and of equally new ones the first
// by name.
func DefaultClass(classes []networkingv1.IngressClass) *networkingv1.IngressClass {
	var best *networkingv1.IngressClass
	for i := range classes {
		c := &classes[i]
		if c.Annotations[DefaultIngressClass] != "true" {
			continue
		}
		newer := best == nil || best.CreationTimestamp.Before(&c.CreationTimestamp)
		if newer || best.CreationTimestamp.Equal(&c.CreationTimestamp) && c.Name < best.Name {
			best = c
		}
	}
	return best
}
