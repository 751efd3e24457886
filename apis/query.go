package apis

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
)

// addQueryConversions teaches s to read query parameters into the option types
// of the connecting subresources. k8s.io/api has the types, no library has
// these conversions.
func addQueryConversions(s *runtime.Scheme) error {
	for _, add := range []func(*runtime.Scheme) error{
		fromQuery(readPodLogOptions),
		fromQuery(readPodExecOptions),
		fromQuery(readPodAttachOptions),
		fromQuery(readPodPortForwardOptions),
		fromQuery(func(q *query, o *corev1.PodProxyOptions) { o.Path = q.text("path") }),
		fromQuery(func(q *query, o *corev1.NodeProxyOptions) { o.Path = q.text("path") }),
		fromQuery(func(q *query, o *corev1.ServiceProxyOptions) { o.Path = q.text("path") }),
	} {
		if err := add(s); err != nil {
			return fmt.Errorf("add query conversion: %w", err)
		}
	}
	return nil
}

func fromQuery[T any](read func(*query, *T)) func(*runtime.Scheme) error {
	return func(s *runtime.Scheme) error {
		return s.AddConversionFunc((*url.Values)(nil), (*T)(nil), func(in, out any, _ conversion.Scope) error {
			q := query{values: *in.(*url.Values)}
			read(&q, out.(*T))
			return q.err
		})
	}
}

func readPodLogOptions(q *query, o *corev1.PodLogOptions) {
	o.Container = q.text("container")
	o.Follow = q.flag("follow")
	o.Previous = q.flag("previous")
	o.SinceSeconds = q.number("sinceSeconds")
	o.SinceTime = q.time("sinceTime")
	o.Timestamps = q.flag("timestamps")
	o.TailLines = q.number("tailLines")
	o.LimitBytes = q.number("limitBytes")
	o.InsecureSkipTLSVerifyBackend = q.flag("insecureSkipTLSVerifyBackend")
	if stream := q.text("stream"); stream != "" {
		o.Stream = &stream
	}
}

func readPodExecOptions(q *query, o *corev1.PodExecOptions) {
	o.Stdin, o.Stdout, o.Stderr, o.TTY = q.flag("stdin"), q.flag("stdout"), q.flag("stderr"), q.flag("tty")
	o.Container = q.text("container")
	o.Command = q.values["command"]
}

func readPodAttachOptions(q *query, o *corev1.PodAttachOptions) {
	o.Stdin, o.Stdout, o.Stderr, o.TTY = q.flag("stdin"), q.flag("stdout"), q.flag("stderr"), q.flag("tty")
	o.Container = q.text("container")
}

func readPodPortForwardOptions(q *query, o *corev1.PodPortForwardOptions) {
	o.Ports = nil
	for _, text := range q.values["ports"] {
		port, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			q.fail("ports", err)
			return
		}
		o.Ports = append(o.Ports, int32(port))
	}
}

// query reads typed values out of url.Values and remembers the first fault.
type query struct {
	values url.Values
	err    error
}

func (q *query) fail(key string, err error) {
	if q.err == nil {
		q.err = fmt.Errorf("query parameter %s: %w", key, err)
	}
}

func (q *query) text(key string) string { return q.values.Get(key) }

// flag follows the API's convention: a key without a value is true, and so is
// any value but "false" and "0".
func (q *query) flag(key string) bool {
	texts, set := q.values[key]
	return set && len(texts) > 0 && !strings.EqualFold(texts[0], "false") && texts[0] != "0"
}

func (q *query) number(key string) *int64 {
	text := q.values.Get(key)
	if text == "" {
		return nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		q.fail(key, err)
		return nil
	}
	return &n
}

func (q *query) time(key string) *metav1.Time {
	text := q.values.Get(key)
	if text == "" {
		return nil
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		q.fail(key, err)
		return nil
	}
	return &metav1.Time{Time: t}
}
