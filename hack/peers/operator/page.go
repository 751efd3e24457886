package main

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/conversion"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

const (
	group = "peers.clusterd.local"
	// most is how many servers a Page may have.
	most = 5
)

// Page asks for web servers that say something. This is v1, which is stored.
type Page struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   PageSpec   `json:"spec"`
	Status PageStatus `json:"status,omitempty"`
}

// PageSpec is what is asked for.
type PageSpec struct {
	Message  string `json:"message"`
	Replicas *int32 `json:"replicas,omitempty"`
}

// PageStatus is what there is, and which pod of the operator says so.
type PageStatus struct {
	Ready int32  `json:"ready"`
	By    string `json:"by,omitempty"`
}

// Hub makes v1 the version that others are converted by.
func (*Page) Hub() {}

// DeepCopyObject copies a Page.
func (p *Page) DeepCopyObject() runtime.Object {
	out := *p
	p.DeepCopyInto(&out.ObjectMeta)
	if p.Spec.Replicas != nil {
		n := *p.Spec.Replicas
		out.Spec.Replicas = &n
	}
	return &out
}

// PageList is a list of Pages.
type PageList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []Page `json:"items"`
}

// DeepCopyObject copies a list of Pages.
func (l *PageList) DeepCopyObject() runtime.Object {
	out := *l
	out.Items = make([]Page, len(l.Items))
	for i := range l.Items {
		out.Items[i] = *l.Items[i].DeepCopyObject().(*Page)
	}
	return &out
}

// OldPage is a Page in v1alpha1, whose fields are elsewhere and named otherwise.
type OldPage struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Text    string     `json:"text"`
	Servers *int32     `json:"servers,omitempty"`
	Status  PageStatus `json:"status,omitempty"`
}

// DeepCopyObject copies an OldPage.
func (p *OldPage) DeepCopyObject() runtime.Object {
	out := *p
	p.DeepCopyInto(&out.ObjectMeta)
	if p.Servers != nil {
		n := *p.Servers
		out.Servers = &n
	}
	return &out
}

// ConvertTo makes a v1 of it.
func (p *OldPage) ConvertTo(hub conversion.Hub) error {
	page := hub.(*Page)
	page.ObjectMeta = p.ObjectMeta
	page.Spec = PageSpec{Message: p.Text, Replicas: p.Servers}
	page.Status = p.Status
	return nil
}

// ConvertFrom is made of a v1.
func (p *OldPage) ConvertFrom(hub conversion.Hub) error {
	page := hub.(*Page)
	p.ObjectMeta = page.ObjectMeta
	p.Text, p.Servers = page.Spec.Message, page.Spec.Replicas
	p.Status = page.Status
	return nil
}

func addKnownTypes(scheme *runtime.Scheme) {
	v1, old := schema.GroupVersion{Group: group, Version: "v1"}, schema.GroupVersion{Group: group, Version: "v1alpha1"}
	scheme.AddKnownTypes(v1, &Page{}, &PageList{})
	scheme.AddKnownTypeWithName(old.WithKind("Page"), &OldPage{})
	metav1.AddToGroupVersion(scheme, v1)
	metav1.AddToGroupVersion(scheme, old)
}

// rules fill in and judge Pages.
type rules struct{}

// Default gives a Page two servers unless it says how many.
func (rules) Default(_ context.Context, page *Page) error {
	if page.Spec.Replicas == nil {
		two := int32(2)
		page.Spec.Replicas = &two
	}
	return nil
}

// ValidateCreate refuses too many servers and warns of a Page that has none.
func (rules) ValidateCreate(_ context.Context, page *Page) (admission.Warnings, error) {
	switch n := *page.Spec.Replicas; {
	case n > most:
		return nil, fmt.Errorf("spec.replicas: %d servers are more than %d", n, most)
	case n == 0:
		return admission.Warnings{"spec.replicas: no pod will answer"}, nil
	}
	return nil, nil
}

// ValidateUpdate judges as ValidateCreate does.
func (r rules) ValidateUpdate(ctx context.Context, _, page *Page) (admission.Warnings, error) {
	return r.ValidateCreate(ctx, page)
}

// ValidateDelete refuses to delete a Page that is marked to be kept.
func (rules) ValidateDelete(_ context.Context, page *Page) (admission.Warnings, error) {
	if page.Labels["keep"] == "yes" {
		return nil, fmt.Errorf("page %s is to be kept", page.Name)
	}
	return nil, nil
}
