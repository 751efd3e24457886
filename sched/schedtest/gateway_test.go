package schedtest_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/ingress/kinds"
	"github.com/clusterd/clusterd/sched"
	"github.com/clusterd/clusterd/sched/gateway/crds"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// gatewayObjects have statuses of all shapes, which the kinds' schemas may refuse.
var gatewayObjects = []string{`
kind: Gateway
metadata: {name: g, namespace: shop}
spec:
  gatewayClassName: clusterd
  listeners:
  - {name: web, port: 80, protocol: HTTP}
  - {name: more, port: 8081, protocol: HTTP}
  - {name: tls, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: none}]}}
  - {name: tcp, port: 9000, protocol: TCP}`, `
kind: HTTPRoute
metadata: {name: r, namespace: shop}
spec:
  parentRefs: [{name: g, sectionName: web}, {name: g, sectionName: none}]
  rules: [{backendRefs: [{name: none, port: 80}]}]`, `
kind: GRPCRoute
metadata: {name: r, namespace: shop}
spec:
  parentRefs: [{name: g, sectionName: more}]
  rules: [{matches: [{method: {service: a.B}}]}]`,
}

// TestGateways: the kinds and the class are made on the real server and stay
// others' to change; statuses say what the API asks for.
func TestGateways(t *testing.T) {
	all, _, err := crds.Read()
	if err != nil {
		if os.Getenv("CLUSTERD_TEST_ALL") != "" {
			t.Fatal(err)
		}
		t.Skip(err) // nothing was built yet: the error says what to do
	}
	ctx := t.Context()
	s := servertest.Start(t, nil)
	custom, err := dynamic.NewForConfig(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	md, err := metadata.NewForConfig(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	lead := func() (stop func()) {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() {
			err := sched.Run(ctx, sched.Config{Client: s.Client, Metadata: md, RootCA: []byte("PEM"), Dynamic: custom, Gateways: kinds.New(custom, s.Client.Discovery())})
			if err != nil {
				t.Errorf("loops ended with %v", err)
			}
		})
		return sync.OnceFunc(func() { cancel(); wg.Wait() })
	}
	stop := lead()
	t.Cleanup(func() { stop() })
	of := func(resource, namespace string) dynamic.ResourceInterface {
		return custom.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: resource}).Namespace(namespace)
	}
	// says waits until the conditions at a path of an object are these.
	says := func(resource, name, want string, at ...string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			ns := "shop"
			if resource == "gatewayclasses" {
				ns = ""
			}
			u, err := of(resource, ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			var got []string
			for _, list := range lists(u.Object["status"], at) {
				for _, c := range list {
					c := c.(map[string]any)
					sign := map[any]string{"False": "!"}[c["status"]]
					got = append(got, fmt.Sprint(sign, c["type"], "=", c["reason"]))
				}
			}
			if got := strings.Join(got, " "); got != want {
				return fmt.Sprintf("%s %s: %s", resource, name, got)
			}
			return ""
		})
	}
	says("gatewayclasses", "clusterd", "Accepted=Accepted")
	if _, err := s.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, text := range gatewayObjects {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
			t.Fatal(err)
		}
		u.SetAPIVersion("gateway.networking.k8s.io/v1")
		resource := strings.ToLower(u.GetKind()) + "s"
		if _, err := of(resource, "shop").Create(ctx, u, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	says("gateways", "g", "Accepted=ListenersNotValid !Programmed=AddressNotAssigned")
	says("httproutes", "r", "Accepted=Accepted !ResolvedRefs=BackendNotFound !Accepted=NoMatchingParent !ResolvedRefs=BackendNotFound", "parents")
	says("grpcroutes", "r", "Accepted=Accepted ResolvedRefs=ResolvedRefs", "parents")
	services := s.Client.CoreV1().Services("kube-system")
	// own waits until the Services that Gateways have to themselves are so.
	own := func(want string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			list, err := services.List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=clusterd-gateway"})
			if err != nil {
				return err.Error()
			}
			var got []string
			for _, s := range list.Items {
				name := s.Name[:strings.LastIndexByte(s.Name, '-')]
				for _, p := range s.Spec.Ports {
					name += fmt.Sprintf(" %d>%d", p.Port, p.TargetPort.IntVal)
				}
				got = append(got, name)
			}
			if got := strings.Join(got, ", "); got != want {
				return fmt.Sprintf("%q, want %q", got, want)
			}
			return ""
		})
	}
	own("gateway-shop-g 80>10000 8081>8081")
	if _, err := services.Get(ctx, "clusterd-ingress", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("there is no Ingress, but a Service for them: %v", err)
	}
	if _, err := s.Client.CoreV1().ConfigMaps("kube-system").Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "clusterd-load-balancer"}, Data: map[string]string{"addresses": "192.0.2.1/32"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	says("gateways", "g", "Accepted=ListenersNotValid Programmed=Programmed")
	good := "!Conflicted=NoConflicts Accepted=Accepted ResolvedRefs=ResolvedRefs Programmed=Programmed "
	says("gateways", "g", good+good+"!Conflicted=NoConflicts Accepted=Accepted !ResolvedRefs=InvalidCertificateRef !Programmed=Invalid "+
		"!Conflicted=NoConflicts !Accepted=UnsupportedProtocol ResolvedRefs=ResolvedRefs !Programmed=Invalid", "listeners")

	// The route loses its parents.
	patch := []byte(`{"spec":{"parentRefs":[{"name":"other"}]}}`) // its status may be written meanwhile
	if _, err := of("httproutes", "shop").Patch(ctx, "r", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	says("httproutes", "r", "", "parents")

	// Somebody installs another release as its makers say.
	definitions := custom.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	next := all[3].DeepCopy()
	next.SetAnnotations(map[string]string{"api-approved.kubernetes.io": "unapproved, a test", crds.BundleVersion: "v9.0.0"})
	if _, err := definitions.Apply(ctx, next.GetName(), next, metav1.ApplyOptions{FieldManager: "kubectl"}); err != nil {
		t.Errorf("another release is in conflict with ours: %v", err)
	}
	// What is deleted stays deleted, and what was changed stays changed, under the
	// next leader and the next release of ours.
	if err := of("gatewayclasses", "").Delete(ctx, "clusterd", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	own("gateway-shop-g 80>10000 8081>8081") // a class may come back, and the address is kept for it
	if err := of("gateways", "shop").Delete(ctx, "g", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	own("")
	if err := definitions.Delete(ctx, all[4].GetName(), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		if _, err := definitions.Get(ctx, all[4].GetName(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprint("the definition is not deleted yet: ", err)
		}
		return ""
	})
	stop()
	marks := s.Client.CoreV1().ConfigMaps("kube-system")
	m, err := marks.Get(ctx, "clusterd-gateway-api", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	release := m.Data["release"]
	m.Data["release"] = "v1.0.0"
	if _, err := marks.Update(ctx, m, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	stop = lead()
	schedtest.Eventually(t, func() string {
		m, err := marks.Get(ctx, "clusterd-gateway-api", metav1.GetOptions{})
		if err != nil || m.Data["release"] != release {
			return fmt.Sprint(m, err)
		}
		return ""
	})
	if u, err := definitions.Get(ctx, next.GetName(), metav1.GetOptions{}); err != nil || u.GetAnnotations()[crds.BundleVersion] != "v9.0.0" {
		t.Error("another's release was replaced", err)
	}
	if _, err := definitions.Get(ctx, all[4].GetName(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Error("a kind that was deleted came back", err)
	}
	if _, err := of("gatewayclasses", "").Get(ctx, "clusterd", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Error("a class that was deleted came back", err)
	}

	// In a cluster whose kinds were made before the mark named them, one that is new
	// is made.
	stop()
	const added = "backendtlspolicies.gateway.networking.k8s.io"
	if err := definitions.Delete(ctx, added, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		if _, err := definitions.Get(ctx, added, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprint("the definition is not deleted yet: ", err)
		}
		return ""
	})
	if m, err = marks.Get(ctx, "clusterd-gateway-api", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	delete(m.Data, "kinds")
	if _, err := marks.Update(ctx, m, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	stop = lead()
	schedtest.Eventually(t, func() string {
		if _, err := definitions.Get(ctx, added, metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
}

// lists are the lists of conditions under a status: its own, or those of each
// element of a list in it.
func lists(status any, at []string) (out [][]any) {
	s, _ := status.(map[string]any)
	if len(at) == 0 {
		list, _ := s["conditions"].([]any)
		return [][]any{list}
	}
	elements, _ := s[at[0]].([]any)
	for _, e := range elements {
		list, _ := e.(map[string]any)["conditions"].([]any)
		out = append(out, list)
	}
	return out
}
