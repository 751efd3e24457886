package hpa

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	customv1beta2 "k8s.io/metrics/pkg/apis/custom_metrics/v1beta2"
	externalv1beta1 "k8s.io/metrics/pkg/apis/external_metrics/v1beta1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

// The APIs of metrics, as errors call them.
const (
	resourceMetrics = "resource metrics API (metrics.k8s.io)"
	customMetrics   = "custom metrics API (custom.metrics.k8s.io)"
	externalMetrics = "external metrics API (external.metrics.k8s.io)"
)

// customVersions are those of custom.metrics.k8s.io, the newest first. What is read
// of their answers is the same.
var customVersions = []string{"v1beta2", "v1beta1"}

// ask fills in what the metrics of the autoscaler are now. selector is of the target's
// pods.
func (c *controller) ask(ctx context.Context, in *Input, selector string) {
	ctx, cancel := context.WithTimeout(ctx, metricsTimeout)
	defer cancel()
	namespace, asked := in.Autoscaler.Namespace, false
	in.Answers = map[int]Answer{}
	for i := range in.Autoscaler.Spec.Metrics {
		switch m := &in.Autoscaler.Spec.Metrics[i]; {
		case m.Resource != nil || m.ContainerResource != nil:
			if !asked { // one answer serves all
				asked = true
				in.Metrics, in.MetricsErr = c.usage(ctx, namespace, selector)
			}
		case m.Pods != nil:
			in.Answers[i] = c.custom(ctx, m.Pods.Metric, selector, "namespaces", namespace, "pods", "*")
		case m.Object != nil:
			in.Answers[i] = c.object(ctx, namespace, m.Object)
		case m.External != nil:
			in.Answers[i] = c.external(ctx, namespace, m.External.Metric)
		}
	}
}

// usage asks what the pods of a selector use of resources.
func (c *controller) usage(ctx context.Context, namespace, selector string) ([]metricsv1beta1.PodMetrics, error) {
	var list metricsv1beta1.PodMetricsList
	err := c.fetch(ctx, resourceMetrics, &list, url.Values{"labelSelector": {selector}}, "metrics.k8s.io", "v1beta1", "namespaces", namespace, "pods")
	if err == nil && len(list.Items) == 0 {
		err = fmt.Errorf("no metrics returned from %s", resourceMetrics)
	}
	return list.Items, err
}

// object asks for a metric of one object.
func (c *controller) object(ctx context.Context, namespace string, m *autoscalingv2.ObjectMetricSource) Answer {
	of := m.DescribedObject
	if of.Kind == "Namespace" && of.APIVersion == "v1" {
		return c.custom(ctx, m.Metric, "", "namespaces", of.Name, "metrics")
	}
	gvk := schema.FromAPIVersionAndKind(of.APIVersion, of.Kind)
	mapping, err := c.scales.Mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		if meta.IsNoMatchError(err) {
			c.scales.Mapper.Reset() // a kind that is defined later is found next time
		}
		return Answer{Err: err}
	}
	at := []string{mapping.Resource.GroupResource().String(), of.Name}
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		at = append([]string{"namespaces", namespace}, at...)
	}
	return c.custom(ctx, m.Metric, "", at...)
}

// custom asks for a metric of the objects at a path. pods selects among many.
func (c *controller) custom(ctx context.Context, metric autoscalingv2.MetricIdentifier, pods string, at ...string) Answer {
	params, err := selectorParam("metricLabelSelector", metric)
	if err != nil {
		return Answer{Err: err}
	}
	if pods != "" {
		params.Set("labelSelector", pods)
	}
	var list customv1beta2.MetricValueList
	for _, version := range customVersions {
		err = c.fetch(ctx, customMetrics, &list, params, append(append([]string{"custom.metrics.k8s.io", version}, at...), metric.Name)...)
		if !apierrors.IsNotFound(err) { // this version is not served, or no version knows the metric
			break
		}
	}
	a := Answer{Err: err}
	for _, v := range list.Items {
		a.Values = append(a.Values, Value{Pod: v.DescribedObject.Name, Milli: v.Value.MilliValue()})
	}
	return a.orNone(customMetrics)
}

// external asks for a metric that is of no object.
func (c *controller) external(ctx context.Context, namespace string, metric autoscalingv2.MetricIdentifier) Answer {
	params, err := selectorParam("labelSelector", metric)
	if err != nil {
		return Answer{Err: err}
	}
	var list externalv1beta1.ExternalMetricValueList
	a := Answer{Err: c.fetch(ctx, externalMetrics, &list, params, "external.metrics.k8s.io", "v1beta1", "namespaces", namespace, metric.Name)}
	for _, v := range list.Items {
		a.Values = append(a.Values, Value{Milli: v.Value.MilliValue()})
	}
	return a.orNone(externalMetrics)
}

func (a Answer) orNone(api string) Answer {
	if a.Err == nil && len(a.Values) == 0 {
		a.Err = fmt.Errorf("no metrics returned from %s", api)
	}
	return a
}

func selectorParam(name string, metric autoscalingv2.MetricIdentifier) (url.Values, error) {
	params := url.Values{}
	if metric.Selector == nil {
		return params, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(metric.Selector)
	if err != nil {
		return nil, err
	}
	params.Set(name, selector.String())
	return params, nil
}

// fetch reads one answer of an API of metrics, at a path below /apis.
func (c *controller) fetch(ctx context.Context, api string, into any, params url.Values, path ...string) error {
	request := c.client.AutoscalingV2().RESTClient().Get().AbsPath(append([]string{"/apis"}, path...)...).SetHeader("Accept", "application/json")
	for name, values := range params {
		for _, value := range values {
			request = request.Param(name, value)
		}
	}
	body, err := request.Do(ctx).Raw()
	if err != nil {
		return fmt.Errorf("unable to fetch metrics from %s: %w", api, err)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("unable to read the answer of %s: %w", api, err)
	}
	return nil
}
