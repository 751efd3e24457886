// Package components serves ComponentStatus, which is deprecated: whether the
// scheduler, the controllers and the store work, as far as this server knows. It
// stores nothing.
package components

import (
	"cmp"
	"context"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Component is one row.
type Component struct {
	Name string
	// Check says in a few words that the component works, or why it does not. It is
	// called on requests, from many goroutines, and ends with ctx.
	Check func(ctx context.Context) (message string, err error)
}

// Storage answers for componentstatuses.
type Storage struct{ components []Component }

var (
	_ rest.Getter               = &Storage{}
	_ rest.Lister               = &Storage{}
	_ rest.Scoper               = &Storage{}
	_ rest.SingularNameProvider = &Storage{}
	_ rest.ShortNamesProvider   = &Storage{}
)

// New makes the storage of the given components.
func New(components []Component) *Storage {
	sorted := slices.Clone(components)
	slices.SortFunc(sorted, func(a, b Component) int { return cmp.Compare(a.Name, b.Name) })
	return &Storage{sorted}
}

// New returns an empty object.
func (*Storage) New() runtime.Object { return &corev1.ComponentStatus{} }

// NewList returns an empty list.
func (*Storage) NewList() runtime.Object { return &corev1.ComponentStatusList{} }

// Destroy does nothing: nothing is stored.
func (*Storage) Destroy() {}

// NamespaceScoped is false.
func (*Storage) NamespaceScoped() bool { return false }

// GetSingularName is the name of the kind in discovery.
func (*Storage) GetSingularName() string { return "componentstatus" }

// ShortNames are what `kubectl get cs` means.
func (*Storage) ShortNames() []string { return []string{"cs"} }

// Get looks at one component.
func (s *Storage) Get(ctx context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	for _, c := range s.components {
		if c.Name == name {
			status := c.status(ctx)
			return &status, nil
		}
	}
	return nil, apierrors.NewNotFound(corev1.Resource("componentstatuses"), name)
}

// List looks at all components at once.
func (s *Storage) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	items := make([]corev1.ComponentStatus, len(s.components))
	var checks sync.WaitGroup
	for i, c := range s.components {
		checks.Go(func() { items[i] = c.status(ctx) })
	}
	checks.Wait()
	return &corev1.ComponentStatusList{Items: slices.DeleteFunc(items, func(c corev1.ComponentStatus) bool {
		return options != nil && (options.LabelSelector != nil && !options.LabelSelector.Matches(labels.Set(c.Labels)) ||
			options.FieldSelector != nil && !options.FieldSelector.Matches(fields.Set{"metadata.name": c.Name}))
	})}, nil
}

func (c Component) status(ctx context.Context) corev1.ComponentStatus {
	healthy := corev1.ComponentCondition{Type: corev1.ComponentHealthy, Status: corev1.ConditionTrue}
	var err error
	if healthy.Message, err = c.Check(ctx); err != nil {
		healthy.Status, healthy.Error = corev1.ConditionFalse, err.Error()
	}
	return corev1.ComponentStatus{ObjectMeta: metav1.ObjectMeta{Name: c.Name}, Conditions: []corev1.ComponentCondition{healthy}}
}

var columns = []metav1.TableColumnDefinition{
	{Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]},
	{Name: "Status", Type: "string", Description: "Status of the component conditions"},
	{Name: "Message", Type: "string", Description: "Message of the component conditions"},
	{Name: "Error", Type: "string", Description: "Error of the component conditions"},
}

// ConvertToTable makes upstream's table.
func (*Storage) ConvertToTable(_ context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	table := &metav1.Table{}
	if o, ok := options.(*metav1.TableOptions); !ok || !o.NoHeaders {
		table.ColumnDefinitions = columns
	}
	add := func(c *corev1.ComponentStatus) {
		status, message, fault := "Unknown", "", ""
		for _, condition := range c.Conditions {
			if condition.Type != corev1.ComponentHealthy {
				continue
			}
			if status = "Unhealthy"; condition.Status == corev1.ConditionTrue {
				status = "Healthy"
			}
			message, fault = condition.Message, condition.Error
		}
		table.Rows = append(table.Rows, metav1.TableRow{Cells: []any{c.Name, status, message, fault}, Object: runtime.RawExtension{Object: c}})
	}
	switch o := obj.(type) {
	case *corev1.ComponentStatus:
		add(o)
	case *corev1.ComponentStatusList:
		for i := range o.Items {
			add(&o.Items[i])
		}
	}
	return table, nil
}
