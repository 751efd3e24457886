package apis

import (
	"net/url"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
)

func TestSchemeKnowsSubresourceTypes(t *testing.T) {
	for _, obj := range []runtime.Object{
		&corev1.Binding{}, &corev1.PodLogOptions{}, &corev1.PodExecOptions{}, &corev1.PodAttachOptions{},
		&corev1.PodPortForwardOptions{}, &corev1.NodeProxyOptions{}, &policyv1.Eviction{}, &autoscalingv1.Scale{},
		&authenticationv1.TokenRequest{}, &authenticationv1.TokenReview{}, &authenticationv1.SelfSubjectReview{},
		&authorizationv1.SubjectAccessReview{}, &authorizationv1.SelfSubjectAccessReview{}, &authorizationv1.SelfSubjectRulesReview{},
		&eventsv1.Event{}, &metav1.Status{}, &metav1.DeleteOptions{},
	} {
		if _, _, err := Scheme.ObjectKinds(obj); err != nil {
			t.Errorf("%T: %v", obj, err)
		}
	}
}

// The internal version is the versioned Go type: converting copies nothing but
// the stamp.
func TestInternalVersionIsTheSameType(t *testing.T) {
	for _, k := range Kinds() {
		internal := schema.GroupVersionKind{Group: k.GVK.Group, Version: runtime.APIVersionInternal, Kind: k.GVK.Kind}
		obj, err := Scheme.New(internal)
		if err != nil {
			t.Errorf("%s: %v", internal, err)
			continue
		}
		if diff := cmp.Diff(k.New(), obj); diff != "" {
			t.Errorf("%s is another type:\n%s", internal, diff)
		}
		if _, err := Scheme.ConvertToVersion(obj, k.GVK.GroupVersion()); err != nil {
			t.Errorf("convert %s: %v", internal, err)
		}
	}
}

func TestFieldSelectors(t *testing.T) {
	tests := []struct {
		kind, label string
		want        string // "" means refused
	}{
		{"Pod", "metadata.name", "metadata.name"},
		{"Pod", "metadata.namespace", "metadata.namespace"},
		{"Pod", "spec.nodeName", "spec.nodeName"},
		{"Pod", "spec.host", "spec.nodeName"},
		{"Pod", "status.phase", "status.phase"},
		{"Pod", "spec.color", ""},
		{"Node", "spec.unschedulable", "spec.unschedulable"},
		{"Node", "metadata.namespace", ""},
		{"Event", "involvedObject.uid", "involvedObject.uid"},
		{"Secret", "type", "type"},
		{"ConfigMap", "metadata.name", "metadata.name"},
		{"ConfigMap", "data", ""},
	}
	for _, test := range tests {
		got, value, err := Scheme.ConvertFieldLabel(corev1.SchemeGroupVersion.WithKind(test.kind), test.label, "x")
		switch {
		case test.want == "" && err == nil:
			t.Errorf("%s %s is accepted", test.kind, test.label)
		case test.want != "" && (err != nil || got != test.want || value != "x"):
			t.Errorf("%s %s: %s, %v; want %s", test.kind, test.label, got, err, test.want)
		}
	}
}

// events.k8s.io names what it selects by otherwise than core/v1, which it
// shows.
func TestFieldSelectorsOfAView(t *testing.T) {
	for label, want := range map[string]string{
		"metadata.name": "metadata.name", "metadata.namespace": "metadata.namespace", "reason": "reason",
		"regarding.name": "involvedObject.name", "reportingController": "reportingComponent",
		"involvedObject.name": "", "source": "",
	} {
		got, _, err := Scheme.ConvertFieldLabel(eventsv1.SchemeGroupVersion.WithKind("Event"), label, "x")
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v; want %q", label, got, err, want)
		}
	}
}

func TestKindsOfNoGroupAreRefused(t *testing.T) {
	kinds := []Kind{{GVK: schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Ghost"}}}
	if err := build(runtime.NewScheme(), kinds); err == nil {
		t.Error("a kind outside all groups was registered")
	}
}

func TestQueryParameters(t *testing.T) {
	tests := []struct {
		query string
		into  runtime.Object
		want  runtime.Object // nil means refused
	}{
		{"container=web&follow=true&previous=false&tailLines=5&sinceTime=2026-01-02T03:04:05Z&limitBytes=9&timestamps&stream=Stderr", &corev1.PodLogOptions{}, &corev1.PodLogOptions{
			Container: "web", Follow: true, TailLines: ptr.To[int64](5), LimitBytes: ptr.To[int64](9), Timestamps: true, Stream: ptr.To("Stderr"),
			SinceTime: &metav1.Time{Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
		}},
		{"tailLines=many", &corev1.PodLogOptions{}, nil},
		{"sinceTime=yesterday", &corev1.PodLogOptions{}, nil},
		{"command=sh&command=-c&stdin=1&tty=0", &corev1.PodExecOptions{}, &corev1.PodExecOptions{Command: []string{"sh", "-c"}, Stdin: true}},
		{"container=web&stdout=true", &corev1.PodAttachOptions{}, &corev1.PodAttachOptions{Container: "web", Stdout: true}},
		{"ports=80&ports=443", &corev1.PodPortForwardOptions{}, &corev1.PodPortForwardOptions{Ports: []int32{80, 443}}},
		{"ports=http", &corev1.PodPortForwardOptions{}, nil},
		{"path=/metrics", &corev1.NodeProxyOptions{}, &corev1.NodeProxyOptions{Path: "/metrics"}},
		{"fieldSelector=spec.nodeName%3Dn1&limit=5", &metav1.ListOptions{}, &metav1.ListOptions{FieldSelector: "spec.nodeName=n1", Limit: 5}},
	}
	for _, test := range tests {
		values, err := url.ParseQuery(test.query)
		if err != nil {
			t.Fatal(err)
		}
		err = ParameterCodec.DecodeParameters(values, corev1.SchemeGroupVersion, test.into)
		if test.want == nil {
			if err == nil {
				t.Errorf("%s is accepted: %+v", test.query, test.into)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", test.query, err)
			continue
		}
		if diff := cmp.Diff(test.want, test.into); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.query, diff)
		}
	}
}
