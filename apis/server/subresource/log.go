package subresource

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericrest "k8s.io/apiserver/pkg/registry/generic/rest"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Log serves pods/log: the log of one container, streamed from its node.
type Log struct {
	pods      rest.Getter
	transport NodeTransport
}

var (
	_ rest.GetterWithOptions = &Log{}
	_ rest.StorageMetadata   = &Log{}
)

// NewLog streams the logs of the pods that pods knows.
func NewLog(pods rest.Getter, transport NodeTransport) *Log {
	return &Log{pods: pods, transport: transport}
}

// New returns an empty Pod: the log is of a pod.
func (l *Log) New() runtime.Object { return &corev1.Pod{} }

// Destroy does nothing.
func (l *Log) Destroy() {}

// ProducesMIMETypes says that a log is text.
func (l *Log) ProducesMIMETypes(string) []string { return []string{"text/plain"} }

// ProducesObject says that a log is a string.
func (l *Log) ProducesObject(string) any { return "" }

// NewGetOptions returns empty PodLogOptions.
func (l *Log) NewGetOptions() (runtime.Object, bool, string) {
	return &corev1.PodLogOptions{}, false, ""
}

// Get finds the node of the pod called name and returns the log as a stream.
func (l *Log) Get(ctx context.Context, name string, options runtime.Object) (runtime.Object, error) {
	opts, ok := options.(*corev1.PodLogOptions)
	if !ok {
		return nil, errors.NewInternalError(fmt.Errorf("log of pod %s: options are a %T", name, options))
	}
	if faults := validateLogOptions(opts); len(faults) > 0 {
		return nil, errors.NewInvalid(corev1.SchemeGroupVersion.WithKind("PodLogOptions").GroupKind(), name, faults)
	}
	pod, err := getPod(ctx, l.pods, name)
	if err != nil {
		return nil, err
	}
	container, err := chooseContainer(pod, opts.Container)
	if err != nil {
		return nil, err
	}
	if pod.Spec.NodeName == "" {
		return nil, errors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", name))
	}
	transport, location, err := l.transport.location(ctx, pod.Spec.NodeName,
		fmt.Sprintf("/containerLogs/%s/%s/%s", pod.Namespace, pod.Name, container), logQuery(opts))
	if err != nil {
		return nil, err
	}
	return &logStream{genericrest.LocationStreamer{
		Location:        location,
		Transport:       transport,
		ContentType:     "text/plain",
		Flush:           opts.Follow,
		ResponseChecker: logChecker{pod: pod, container: container, previous: opts.Previous},
		RedirectChecker: genericrest.PreventRedirects,
	}}, nil
}

// logStream is a log on its way from a node.
type logStream struct{ genericrest.LocationStreamer }

// InputStream opens the log. What its reader gives comes before its end, not
// together with it: the library's way to a websocket forgets the last read.
func (s *logStream) InputStream(ctx context.Context, version, accept string) (io.ReadCloser, bool, string, error) {
	r, flush, contentType, err := s.LocationStreamer.InputStream(ctx, version, accept)
	if r != nil {
		r = endApart{r}
	}
	return r, flush, contentType, err
}

// endApart tells of the end in a read of its own.
type endApart struct{ io.ReadCloser }

func (r endApart) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if n > 0 && err == io.EOF {
		err = nil // the next read says so
	}
	return n, err
}

func validateLogOptions(o *corev1.PodLogOptions) field.ErrorList {
	var faults field.ErrorList
	if o.TailLines != nil && *o.TailLines < 0 {
		faults = append(faults, field.Invalid(field.NewPath("tailLines"), *o.TailLines, "must be greater than or equal to 0"))
	}
	if o.LimitBytes != nil && *o.LimitBytes < 1 {
		faults = append(faults, field.Invalid(field.NewPath("limitBytes"), *o.LimitBytes, "must be greater than 0"))
	}
	switch {
	case o.SinceSeconds != nil && o.SinceTime != nil:
		faults = append(faults, field.Forbidden(field.NewPath(""), "at most one of `sinceTime` or `sinceSeconds` may be specified"))
	case o.SinceSeconds != nil && *o.SinceSeconds < 1:
		faults = append(faults, field.Invalid(field.NewPath("sinceSeconds"), *o.SinceSeconds, "must be greater than 0"))
	}
	return faults
}

// logQuery is what the agent is asked for.
func logQuery(o *corev1.PodLogOptions) url.Values {
	query := url.Values{}
	flag := func(key string, set bool) {
		if set {
			query.Set(key, "true")
		}
	}
	number := func(key string, n *int64) {
		if n != nil {
			query.Set(key, strconv.FormatInt(*n, 10))
		}
	}
	flag("follow", o.Follow)
	flag("previous", o.Previous)
	flag("timestamps", o.Timestamps)
	number("sinceSeconds", o.SinceSeconds)
	number("tailLines", o.TailLines)
	number("limitBytes", o.LimitBytes)
	if o.SinceTime != nil {
		query.Set("sinceTime", o.SinceTime.Format(time.RFC3339))
	}
	if o.Stream != nil && *o.Stream != corev1.LogStreamAll {
		query.Set("stream", *o.Stream)
	}
	return query
}

// maxAgentWords is how much of an agent's refusal is passed on, in bytes.
const maxAgentWords = 4 << 10

// logChecker turns an agent's refusal into a Status. A 400 carries the agent's
// words; for a 404, "I have no such log", the pod's status says why.
type logChecker struct {
	pod       *corev1.Pod
	container string
	previous  bool
}

func (c logChecker) Check(resp *http.Response) error {
	if resp.StatusCode == http.StatusNotFound {
		resp.Body.Close()
		return errors.NewBadRequest(noLog(c.pod, c.container, c.previous))
	}
	var refusal func(reason string) *errors.StatusError
	switch resp.StatusCode {
	case http.StatusBadRequest:
		refusal = errors.NewBadRequest
	case http.StatusServiceUnavailable:
		refusal = errors.NewServiceUnavailable
	default:
		return genericrest.NewGenericHttpResponseChecker(podsResource, c.pod.Name).Check(resp)
	}
	defer resp.Body.Close()
	words, err := agentWords(resp)
	if err != nil {
		return errors.NewInternalError(fmt.Errorf("read the answer of node %s: %w", c.pod.Spec.NodeName, err))
	}
	return refusal(words)
}

// agentWords are what an agent says of its refusal, bare or in a Status.
func agentWords(resp *http.Response) (string, error) {
	words, err := io.ReadAll(io.LimitReader(resp.Body, maxAgentWords))
	if err != nil {
		return "", err
	}
	var status metav1.Status
	if json.Unmarshal(words, &status) == nil && status.Message != "" {
		return status.Message, nil
	}
	return string(words), nil
}

// noLog says why a container has no log.
func noLog(pod *corev1.Pod, container string, previous bool) string {
	who := fmt.Sprintf("container %q in pod %q", container, pod.Name)
	status, ok := containerStatus(pod, container)
	switch {
	case previous:
		return fmt.Sprintf("previous terminated %s not found", who)
	case !ok:
		return who + " is not available"
	case status.State.Waiting != nil:
		return who + " is waiting to start: " + waiting(status.State.Waiting.Reason)
	case status.State.Terminated != nil:
		return who + " is terminated"
	}
	return who + " is waiting to start - no logs yet"
}

func waiting(reason string) string {
	switch reason {
	case "ErrImagePull":
		return "image can't be pulled"
	case "ImagePullBackOff":
		return "trying and failing to pull image"
	}
	return reason
}
