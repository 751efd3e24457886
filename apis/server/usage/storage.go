package usage

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/warning"
	metrics "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

// parallel is how many nodes are asked at a time by one request.
const parallel = 16

// Objects are the nodes or pods that are in the API.
type Objects interface {
	rest.Getter
	List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error)
}

// common is what both resources have in common.
type common struct {
	rest.TableConvertor
	objects Objects
	source  *Source
}

// Destroy does nothing: nothing is stored.
func (common) Destroy() {}

// GetSingularName is empty: "node" and "pod" are of the core group.
func (common) GetSingularName() string { return "" }

// Nodes serves nodes of metrics.k8s.io.
type Nodes struct{ common }

// Pods serves pods of metrics.k8s.io.
type Pods struct{ common }

var (
	_ rest.Getter               = &Nodes{}
	_ rest.Lister               = &Nodes{}
	_ rest.Scoper               = &Nodes{}
	_ rest.SingularNameProvider = &Nodes{}
	_ rest.Getter               = &Pods{}
	_ rest.Lister               = &Pods{}
	_ rest.Scoper               = &Pods{}
	_ rest.SingularNameProvider = &Pods{}
)

// NewNodes tells the usage of the given nodes.
func NewNodes(nodes Objects, source *Source) *Nodes {
	return &Nodes{common{table{}, nodes, source}}
}

// NewPods tells the usage of the given pods.
func NewPods(pods Objects, source *Source) *Pods {
	return &Pods{common{table{}, pods, source}}
}

// New returns an empty object.
func (*Nodes) New() runtime.Object { return &metrics.NodeMetrics{} }

// NewList returns an empty list.
func (*Nodes) NewList() runtime.Object { return &metrics.NodeMetricsList{} }

// NamespaceScoped is false.
func (*Nodes) NamespaceScoped() bool { return false }

// Get asks one node. If it does not answer, the error says why.
func (n *Nodes) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	obj, err := n.objects.Get(ctx, name, options)
	if err != nil {
		return nil, err
	}
	u, err := n.source.Of(ctx, name)
	if err != nil {
		return nil, apierrors.NewServiceUnavailable(err.Error())
	}
	m, err := nodeMetrics(obj, u)
	return &m, err
}

// List asks the nodes that options select. Those that do not answer are left
// out, and a warning names them.
func (n *Nodes) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	list, err := n.objects.List(ctx, options)
	if err != nil {
		return nil, err
	}
	byName := map[string]runtime.Object{}
	err = meta.EachListItem(list, func(obj runtime.Object) error {
		m, err := meta.Accessor(obj)
		if err == nil {
			byName[m.GetName()] = obj
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	page, err := listMeta(list)
	if err != nil {
		return nil, err
	}
	if whole(options) && page.Continue == "" {
		n.source.Keep(byName)
	}
	used := n.source.all(ctx, byName)
	out := &metrics.NodeMetricsList{ListMeta: page, Items: []metrics.NodeMetrics{}}
	for name, u := range used {
		m, err := nodeMetrics(byName[name], u)
		if err != nil {
			return nil, err
		}
		out.Items = append(out.Items, m)
	}
	slices.SortFunc(out.Items, func(a, b metrics.NodeMetrics) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// whole: a list with these options is of all there are.
func whole(o *internalversion.ListOptions) bool {
	return o == nil || (o.LabelSelector == nil || o.LabelSelector.Empty()) && (o.FieldSelector == nil || o.FieldSelector.Empty()) &&
		o.Limit == 0 && o.Continue == ""
}

// listMeta is where a list goes on, if it is a page of more.
func listMeta(list runtime.Object) (metav1.ListMeta, error) {
	m, err := meta.ListAccessor(list)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	return metav1.ListMeta{ResourceVersion: m.GetResourceVersion(), Continue: m.GetContinue(), RemainingItemCount: m.GetRemainingItemCount()}, nil
}

// all asks nodes side by side. It warns of those that do not answer.
func (s *Source) all(ctx context.Context, nodes map[string]runtime.Object) map[string]*Usage {
	type answer struct {
		node  string
		usage *Usage
		err   error
	}
	answers := make(chan answer, len(nodes))
	var g errgroup.Group
	g.SetLimit(parallel)
	for name := range nodes {
		g.Go(func() error {
			u, err := s.Of(ctx, name)
			answers <- answer{name, u, err}
			return nil
		})
	}
	_ = g.Wait() // the answers tell
	close(answers)
	out := map[string]*Usage{}
	for a := range answers {
		if a.err != nil {
			warning.AddWarning(ctx, "", "nothing is known of the usage on "+a.err.Error())
			continue
		}
		out[a.node] = a.usage
	}
	return out
}

func nodeMetrics(obj runtime.Object, u *Usage) (metrics.NodeMetrics, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return metrics.NodeMetrics{}, err
	}
	return metrics.NodeMetrics{
		ObjectMeta: objectMeta(m), Usage: u.Node.list(),
		Timestamp: metav1.NewTime(u.Node.At), Window: metav1.Duration{Duration: u.Node.Window.Round(time.Millisecond)},
	}, nil
}

func objectMeta(of metav1.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: of.GetName(), Namespace: of.GetNamespace(), Labels: of.GetLabels(), CreationTimestamp: metav1.Now()}
}

// New returns an empty object.
func (*Pods) New() runtime.Object { return &metrics.PodMetrics{} }

// NewList returns an empty list.
func (*Pods) NewList() runtime.Object { return &metrics.PodMetricsList{} }

// NamespaceScoped is true.
func (*Pods) NamespaceScoped() bool { return true }

// Get asks the pod's node. A pod none of whose containers runs has no metrics.
func (p *Pods) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	obj, err := p.objects.Get(ctx, name, options)
	if err != nil {
		return nil, err
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("a pod is a %T", obj))
	}
	if runs(pod) {
		u, err := p.source.Of(ctx, pod.Spec.NodeName)
		if err != nil {
			return nil, apierrors.NewServiceUnavailable(err.Error())
		}
		if m, ok := podMetrics(pod, u); ok {
			return &m, nil
		}
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Group: metrics.GroupName, Resource: "podmetrics"}, pod.Namespace+"/"+name)
}

// List asks the nodes of the pods that options select. Pods that do not run
// are left out; so are those of nodes that do not answer, which a warning
// names.
func (p *Pods) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	list, err := p.objects.List(ctx, options)
	if err != nil {
		return nil, err
	}
	pods, ok := list.(*corev1.PodList)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("a list of pods is a %T", list))
	}
	nodes := map[string]runtime.Object{}
	for i := range pods.Items {
		if runs(&pods.Items[i]) {
			nodes[pods.Items[i].Spec.NodeName] = nil
		}
	}
	used := p.source.all(ctx, nodes)
	out := &metrics.PodMetricsList{ListMeta: pods.ListMeta, Items: []metrics.PodMetrics{}}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if u := used[pod.Spec.NodeName]; u != nil && runs(pod) {
			if m, ok := podMetrics(pod, u); ok {
				out.Items = append(out.Items, m)
			}
		}
	}
	return out, nil
}

func runs(pod *corev1.Pod) bool {
	return pod.Spec.NodeName != "" && pod.Status.Phase == corev1.PodRunning
}

// podMetrics finds a pod in what its node tells; false: it is not there, as it
// has just started or ended.
func podMetrics(pod *corev1.Pod, u *Usage) (metrics.PodMetrics, bool) {
	used, ok := u.Pods[Pod{pod.Namespace, pod.Name}]
	if !ok {
		return metrics.PodMetrics{}, false
	}
	m := metrics.PodMetrics{ObjectMeta: objectMeta(pod)}
	for name, s := range used {
		m.Containers = append(m.Containers, metrics.ContainerMetrics{Name: name, Usage: s.list()})
		if m.Timestamp.IsZero() || s.At.Before(m.Timestamp.Time) { // the earliest, as readings of a pod follow each other closely
			m.Timestamp, m.Window = metav1.NewTime(s.At), metav1.Duration{Duration: s.Window.Round(time.Millisecond)}
		}
	}
	slices.SortFunc(m.Containers, func(a, b metrics.ContainerMetrics) int { return cmp.Compare(a.Name, b.Name) })
	return m, true
}

// table shows metrics as rows.
type table struct{}

var columns = []metav1.TableColumnDefinition{
	{Name: "Name", Type: "string", Format: "name", Description: "Name of the node or pod"},
	{Name: "cpu", Type: "string", Description: "Processors in use"},
	{Name: "memory", Type: "string", Description: "Working set"},
	{Name: "Window", Type: "string", Description: "The time over which the processors' use was measured"},
}

// ConvertToTable makes a row of each object.
func (table) ConvertToTable(_ context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	out := &metav1.Table{}
	if meta.IsListType(obj) {
		page, err := listMeta(obj)
		if err != nil {
			return nil, err
		}
		out.ListMeta = page
	}
	if o, ok := options.(*metav1.TableOptions); !ok || !o.NoHeaders {
		out.ColumnDefinitions = columns
	}
	row := func(obj runtime.Object, name string, used corev1.ResourceList, window metav1.Duration) {
		out.Rows = append(out.Rows, metav1.TableRow{
			Cells:  []any{name, used.Cpu().String(), used.Memory().String(), window.Duration.String()},
			Object: runtime.RawExtension{Object: obj},
		})
	}
	node := func(n *metrics.NodeMetrics) { row(n, n.Name, n.Usage, n.Window) }
	pod := func(p *metrics.PodMetrics) {
		sum := corev1.ResourceList{}
		for _, c := range p.Containers {
			for what, amount := range c.Usage {
				total := sum[what]
				total.Add(amount)
				sum[what] = total
			}
		}
		row(p, p.Name, sum, p.Window)
	}
	switch list := obj.(type) {
	case *metrics.NodeMetrics:
		node(list)
	case *metrics.NodeMetricsList:
		for i := range list.Items {
			node(&list.Items[i])
		}
	case *metrics.PodMetrics:
		pod(list)
	case *metrics.PodMetricsList:
		for i := range list.Items {
			pod(&list.Items[i])
		}
	default:
		return nil, fmt.Errorf("a table of metrics is asked for a %T", obj)
	}
	return out, nil
}
