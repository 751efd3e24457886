package resource

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/clusterd/clusterd/apis"
)

// Table makes the server-side table of kind: its own columns, or name and age
// where it has none.
func Table(kind apis.Kind) rest.TableConvertor {
	if kind.Row == nil {
		return rest.NewDefaultTableConvertor(schema.GroupResource{Group: kind.GVK.Group, Resource: kind.Resource})
	}
	return table{kind: kind, now: time.Now}
}

type table struct {
	kind apis.Kind
	now  func() time.Time
}

func (t table) ConvertToTable(_ context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	out := &metav1.Table{}
	if o, ok := options.(*metav1.TableOptions); !ok || !o.NoHeaders {
		out.ColumnDefinitions = t.kind.Columns
	}
	if !meta.IsListType(obj) {
		common, err := meta.CommonAccessor(obj)
		if err != nil {
			return nil, fmt.Errorf("table of %s: %w", t.kind.Resource, err)
		}
		out.ResourceVersion = common.GetResourceVersion()
		return out, t.add(out, obj)
	}
	list, err := meta.ListAccessor(obj)
	if err != nil {
		return nil, fmt.Errorf("table of %s: %w", t.kind.Resource, err)
	}
	out.ResourceVersion = list.GetResourceVersion()
	out.Continue = list.GetContinue()
	out.RemainingItemCount = list.GetRemainingItemCount()
	return out, meta.EachListItem(obj, func(item runtime.Object) error { return t.add(out, item) })
}

func (t table) add(out *metav1.Table, obj runtime.Object) error {
	cells := t.kind.Row(obj, t.now())
	if len(cells) != len(t.kind.Columns) {
		return fmt.Errorf("table of %s: a row of %d cells under %d columns", t.kind.Resource, len(cells), len(t.kind.Columns))
	}
	out.Rows = append(out.Rows, metav1.TableRow{Cells: cells, Object: runtime.RawExtension{Object: obj}})
	return nil
}
