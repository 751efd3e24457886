package kubectl

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// hooks answers for webhooks, on the node's loopback: what is asked at a path is
// told by a function.
type hooks struct {
	url string
	ca  []byte
}

func (k *kit) hooks() *hooks {
	k.Helper()
	var l net.Listener
	k.must(k.c.Do(node, func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	mux := http.NewServeMux()
	for path, answer := range map[string]func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse{
		"/deny": denyMarked,
		"/deny-all": func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			return denial("denied by the webhook")
		},
		"/slow": func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			time.Sleep(5 * time.Second) // what the timeouts of the test are about
			return &admissionv1.AdmissionResponse{Allowed: true}
		},
		"/first": func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			return patching(`[{"op":"add","path":"/data/first","value":"yes"}]`)
		},
		"/second": second,
		"/a":      visited("a"), "/b": visited("b"), "/c": visited("c"),
		"/init": func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			return patching(`[{"op":"add","path":"/spec/initContainers","value":[{"name":"added","image":"clusterd.local/none:1"}]}]`)
		},
		"/field": func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			return patching(`[{"op":"add","path":"/data/hooked","value":"yes"}]`)
		},
		"/label": func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			return patching(`[{"op":"add","path":"/metadata/labels/hooked","value":"yes"}]`)
		},
	} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			var review admissionv1.AdmissionReview
			if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
				http.Error(w, "no review", http.StatusBadRequest)
				return
			}
			review.Response = answer(review.Request)
			review.Response.UID, review.Request = review.Request.UID, nil
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(review)
		})
	}
	mux.HandleFunc("/convert", convert)
	srv := httptest.NewUnstartedServer(mux)
	_ = srv.Listener.Close()
	srv.Listener = l
	srv.Config.ErrorLog = log.New(io.Discard, "", 0) // one test wants a refused handshake
	srv.StartTLS()
	k.Cleanup(srv.Close)
	return &hooks{"https://" + l.Addr().String(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})}
}

// convert serves versions of a kind that differ in where the size is: at spec.size
// in v1, at size in v2.
func convert(w http.ResponseWriter, r *http.Request) {
	var review apiextensionsv1.ConversionReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
		http.Error(w, "no review", http.StatusBadRequest)
		return
	}
	review.Response = &apiextensionsv1.ConversionResponse{UID: review.Request.UID, Result: metav1.Status{Status: metav1.StatusSuccess}}
	for _, raw := range review.Request.Objects {
		var o unstructured.Unstructured
		if err := json.Unmarshal(raw.Raw, &o.Object); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		from, to := []string{"size"}, []string{"spec", "size"}
		if strings.HasSuffix(review.Request.DesiredAPIVersion, "/v2") {
			from, to = to, from
		}
		if size, ok, _ := unstructured.NestedString(o.Object, from...); ok {
			unstructured.RemoveNestedField(o.Object, from[0])
			_ = unstructured.SetNestedField(o.Object, size, to...)
		}
		o.SetAPIVersion(review.Request.DesiredAPIVersion)
		review.Response.ConvertedObjects = append(review.Response.ConvertedObjects, runtime.RawExtension{Object: &o})
	}
	review.Request = nil
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(review)
}

func denial(message string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Result: &metav1.Status{Message: message, Code: http.StatusForbidden}}
}

// denyMarked refuses objects with the label bad, and the deletion of any.
func denyMarked(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	if strings.Contains(string(r.Object.Raw), `"bad":"yes"`) || r.Operation == admissionv1.Delete && strings.Contains(string(r.OldObject.Raw), `"keep":"yes"`) {
		return denial("this one is bad")
	}
	return &admissionv1.AdmissionResponse{Allowed: true}
}

func patching(patch string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Allowed: true, Patch: []byte(patch), PatchType: ptr.To(admissionv1.PatchTypeJSONPatch)}
}

// second adds its key where the first webhook's is.
func second(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	if !strings.Contains(string(r.Object.Raw), `"first":"yes"`) {
		return &admissionv1.AdmissionResponse{Allowed: true}
	}
	return patching(`[{"op":"add","path":"/data/second","value":"yes"}]`)
}

// visited adds a name to the list of those that have seen the object.
func visited(name string) func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	return func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		var cm corev1.ConfigMap
		if err := json.Unmarshal(r.Object.Raw, &cm); err != nil {
			return denial(err.Error())
		}
		return patching(fmt.Sprintf(`[{"op":"add","path":"/data/visited","value":%q}]`, strings.TrimSpace(cm.Data["visited"]+" "+name)))
	}
}

// rule is what a webhook looks at: "create,update configmaps", "connect pods/attach",
// of the core group or, after a slash at the front, of another: "create /apps/v1/deployments".
func rule(text string) registrationv1.RuleWithOperations {
	operations, resource, _ := strings.Cut(text, " ")
	group, version := "", "v1"
	if parts := strings.Split(resource, "/"); parts[0] == "" {
		group, version, resource = parts[1], parts[2], strings.Join(parts[3:], "/")
	}
	out := registrationv1.RuleWithOperations{Rule: registrationv1.Rule{APIGroups: []string{group}, APIVersions: []string{version}, Resources: []string{resource}}}
	for op := range strings.SplitSeq(operations, ",") {
		out.Operations = append(out.Operations, registrationv1.OperationType(strings.ToUpper(op)))
	}
	return out
}

// validating is a webhook for the test's namespace; change may be nil.
func (h *hooks) validating(k *kit, name, path, what string, change func(*registrationv1.ValidatingWebhook)) *registrationv1.ValidatingWebhookConfiguration {
	w := registrationv1.ValidatingWebhook{
		Name: name + ".example.com", ClientConfig: registrationv1.WebhookClientConfig{URL: ptr.To(h.url + path), CABundle: h.ca},
		Rules: []registrationv1.RuleWithOperations{rule(what)}, SideEffects: ptr.To(registrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: k.ns}},
	}
	if change != nil {
		change(&w)
	}
	return &registrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"hooks": k.ns}}, Webhooks: []registrationv1.ValidatingWebhook{w}}
}

func (h *hooks) mutating(k *kit, name, path, what string, change func(*registrationv1.MutatingWebhook)) *registrationv1.MutatingWebhookConfiguration {
	w := registrationv1.MutatingWebhook{
		Name: name + ".example.com", ClientConfig: registrationv1.WebhookClientConfig{URL: ptr.To(h.url + path), CABundle: h.ca},
		Rules: []registrationv1.RuleWithOperations{rule(what)}, SideEffects: ptr.To(registrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: k.ns}},
	}
	if change != nil {
		change(&w)
	}
	return &registrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"hooks": k.ns}}, Webhooks: []registrationv1.MutatingWebhook{w}}
}

// validates writes a configuration, and takes it away at the end of the subtest.
func (k *kit) validates(c *registrationv1.ValidatingWebhookConfiguration) *registrationv1.ValidatingWebhookConfiguration {
	k.Helper()
	api := k.api.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	c, err := api.Create(k.Context(), c, metav1.CreateOptions{})
	k.must(err)
	k.Cleanup(func() { k.in("", "delete", "validatingwebhookconfiguration", c.Name, "--ignore-not-found") })
	return c
}

func (k *kit) mutates(c *registrationv1.MutatingWebhookConfiguration) *registrationv1.MutatingWebhookConfiguration {
	k.Helper()
	api := k.api.AdmissionregistrationV1().MutatingWebhookConfigurations()
	c, err := api.Create(k.Context(), c, metav1.CreateOptions{})
	k.must(err)
	k.Cleanup(func() { k.in("", "delete", "mutatingwebhookconfiguration", c.Name, "--ignore-not-found") })
	return c
}

// tries creates an object without storing it, until the outcome is as wanted: a
// configuration takes effect a moment after it was written.
func (k *kit) tries(object string, want func(out, errs string, code int) bool) {
	k.Helper()
	k.eventually("a dry run ends as wanted", func(context.Context) error {
		out, errs, code := k.in(object, "create", "--dry-run=server", "-o", "json", "-f", "-")
		if !want(out, errs, code) {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		return nil
	})
}

func refusedFor(words string) func(string, string, int) bool {
	return func(_, errs string, code int) bool { return code != 0 && strings.Contains(errs, words) }
}

func madeWith(words ...string) func(string, string, int) bool {
	return func(out, _ string, code int) bool {
		for _, w := range words {
			if !strings.Contains(out, w) {
				return false
			}
		}
		return code == 0
	}
}

func madeWithout(words string) func(string, string, int) bool {
	return func(out, _ string, code int) bool { return code == 0 && !strings.Contains(out, words) }
}

func hookedMap(name, labels string) string {
	return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + name + ", labels: {of: hooks" + labels + "}}\ndata: {a: b}\n"
}

// TestE2EXWebhooks asks webhooks of the test about what is written.
func TestE2EXWebhooks(t *testing.T) {
	t.Parallel()
	k := start(t, "webhooks")
	h := k.hooks()
	const hooked = `"hooked": "yes"`
	k.sub("discovery", func(k *kit) {
		features.Conforms(k, 14)
		for path, words := range map[string][]string{
			"/apis":                                 {`"name":"admissionregistration.k8s.io"`},
			"/apis/admissionregistration.k8s.io":    {`"groupVersion":"admissionregistration.k8s.io/v1"`},
			"/apis/admissionregistration.k8s.io/v1": {`"name":"mutatingwebhookconfigurations"`, `"name":"validatingwebhookconfigurations"`},
		} {
			_, body := k.ask(http.MethodGet, path, "", "Accept", "application/json")
			k.has(body, words...)
		}
	})
	k.sub("conditions", func(k *kit) {
		features.Conforms(k, 7, 8, 22)
		conditions := []registrationv1.MatchCondition{{Name: "named", Expression: "object.metadata.name == 'none'"}}
		more := append(conditions, registrationv1.MatchCondition{Name: "more", Expression: "true"})
		v := k.validates(h.validating(k, "hooks-conditions", "/deny-all", "create configmaps", func(w *registrationv1.ValidatingWebhook) { w.MatchConditions = conditions }))
		m := k.mutates(h.mutating(k, "hooks-conditions", "/field", "create configmaps", func(w *registrationv1.MutatingWebhook) { w.MatchConditions = conditions }))
		v.Webhooks[0].MatchConditions, m.Webhooks[0].MatchConditions = more, more
		vs, ms := k.api.AdmissionregistrationV1().ValidatingWebhookConfigurations(), k.api.AdmissionregistrationV1().MutatingWebhookConfigurations()
		_, err := vs.Update(k.Context(), v, metav1.UpdateOptions{})
		k.must(err)
		_, err = ms.Update(k.Context(), m, metav1.UpdateOptions{})
		k.must(err)
		for _, kind := range []string{"validating", "mutating"} {
			k.is(kind, k.field(kind+"webhookconfiguration/hooks-conditions", "{.webhooks[0].matchConditions[*].name} {.webhooks[0].matchConditions[0].expression}"), "named more object.metadata.name == 'none'")
		}
		bad := h.mutating(k, "hooks-bad", "/field", "create configmaps", func(w *registrationv1.MutatingWebhook) {
			w.MatchConditions = []registrationv1.MatchCondition{{Name: "bad", Expression: "object.metadata.name =="}}
		})
		if _, err := ms.Create(k.Context(), bad, metav1.CreateOptions{}); err == nil || !strings.Contains(err.Error(), "compilation failed") {
			k.Errorf("a condition that is none: %v", err)
		}
	})
	k.sub("but one name", func(k *kit) {
		features.Conforms(k, 19)
		k.mutates(h.mutating(k, "hooks-but-one", "/field", "create configmaps", func(w *registrationv1.MutatingWebhook) {
			w.MatchConditions = []registrationv1.MatchCondition{{Name: "but-one", Expression: "object.metadata.name != 'skip-me'"}}
		}))
		k.tries(hookedMap("take-me", ""), madeWith(hooked))
		k.tries(hookedMap("skip-me", ""), madeWithout(hooked))
	})
	k.sub("one that cannot be asked", func(k *kit) {
		features.Conforms(k, 24)
		k.validates(h.validating(k, "hooks-closed", "/deny", "create configmaps", func(w *registrationv1.ValidatingWebhook) {
			w.ClientConfig.CABundle, w.FailurePolicy = nil, ptr.To(registrationv1.Fail)
		}))
		k.tries(hookedMap("closed", ""), refusedFor(`failed calling webhook "hooks-closed.example.com"`))
	})
	k.sub("pods and ConfigMaps", func(k *kit) {
		features.Conforms(k, 11)
		k.validates(h.validating(k, "hooks-pods", "/deny", "create pods", nil))
		k.validates(h.validating(k, "hooks-maps", "/deny", "create,update configmaps", nil))
		const says = "denied the request: this one is bad"
		k.tries(strings.Replace(gated("bad", "", ""), "{name: bad}", "{name: bad, labels: {bad: 'yes'}}", 1), refusedFor(says))
		k.tries(hookedMap("bad", ", bad: 'yes'"), refusedFor(says))
		k.apply(hookedMap("good", ""))
		k.has(k.fails("label", "configmap", "good", "bad=yes"), says)
		k.has(k.fails("patch", "configmap", "good", "--type=merge", "-p", `{"metadata":{"labels":{"bad":"yes"}}}`), says)
		k.has(k.failsIn(hookedMap("good", ", bad: 'yes'"), "replace", "-f", "-"), says)
		k.ok("create", "namespace", "webhooks-exempt")
		k.ok("label", "configmap", "good", "fine=yes")
		k.okIn(hookedMap("bad", ", bad: 'yes'"), "create", "-n", "webhooks-exempt", "-f", "-")
		k.ok("delete", "namespace", "webhooks-exempt", "--wait=false")
		k.validates(h.validating(k, "hooks-hang", "/slow", "create secrets", func(w *registrationv1.ValidatingWebhook) { w.TimeoutSeconds = ptr.To[int32](1) }))
		k.tries("apiVersion: v1\nkind: Secret\nmetadata: {name: waits}\n", refusedFor("context deadline exceeded"))
	})
	k.sub("a slow one", func(k *kit) {
		features.Conforms(k, 13)
		for _, s := range []struct {
			name    string
			seconds int32
			policy  registrationv1.FailurePolicyType
			ok      bool
		}{{"short-fail", 1, registrationv1.Fail, false}, {"short-ignore", 1, registrationv1.Ignore, true}, {"long", 30, registrationv1.Fail, true}} {
			c := k.validates(h.validating(k, "hooks-"+s.name, "/slow", "create configmaps", func(w *registrationv1.ValidatingWebhook) {
				w.TimeoutSeconds, w.FailurePolicy = ptr.To(s.seconds), ptr.To(s.policy)
				w.ObjectSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"slow": s.name}}
			}))
			// A second one says when configurations written so far are in force.
			marker := k.validates(h.validating(k, "hooks-"+s.name+"-marker", "/deny-all", "create configmaps", func(w *registrationv1.ValidatingWebhook) {
				w.ObjectSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"marker": s.name}}
			}))
			k.tries(hookedMap("marker", ", marker: "+s.name), refusedFor("denied by the webhook"))
			began := time.Now()
			out, errs, code := k.in(hookedMap("slow", ", slow: "+s.name), "create", "--dry-run=server", "-f", "-")
			if (code == 0) != s.ok || !s.ok && !strings.Contains(errs, "context deadline exceeded") {
				k.Errorf("%s: exit %d after %s: %s%s", s.name, code, time.Since(began), out, errs)
			}
			k.ok("delete", "validatingwebhookconfiguration", c.Name, marker.Name)
		}
	})
	k.sub("one after the other", func(k *kit) {
		features.Conforms(k, 15)
		k.mutates(h.mutating(k, "hooks-order-1", "/first", "create configmaps", nil))
		k.mutates(h.mutating(k, "hooks-order-2", "/second", "create configmaps", nil))
		k.tries(hookedMap("order", ""), madeWith(`"first": "yes"`, `"second": "yes"`))
	})
	k.sub("in the order of names, and again", func(k *kit) {
		features.Shows(k, 84)
		labelled := func(w *registrationv1.MutatingWebhook, label string) *registrationv1.MutatingWebhook {
			w.ObjectSelector = &metav1.LabelSelector{MatchLabels: map[string]string{label: "yes"}}
			return w
		}
		// The second by name is made first; of one configuration the list counts.
		last := h.mutating(k, "hooks-named-2", "/c", "create configmaps", func(w *registrationv1.MutatingWebhook) { labelled(w, "all") })
		first := h.mutating(k, "hooks-named-1", "/b", "create configmaps", func(w *registrationv1.MutatingWebhook) { labelled(w, "some") })
		after := h.mutating(k, "hooks-named-0", "/a", "create configmaps", func(w *registrationv1.MutatingWebhook) { labelled(w, "all") }).Webhooks[0]
		first.Webhooks = append(first.Webhooks, after)
		k.mutates(last)
		first = k.mutates(first)
		all, alone := hookedMap("named", ", all: 'yes', some: 'yes'"), hookedMap("named", ", some: 'yes'")
		k.tries(all, madeWith(`"visited": "b a c"`))
		k.tries(alone, madeWith(`"visited": "b"`))
		// One that is to see what later ones have changed is asked once more, and no
		// other is; nor is it if nothing was changed.
		first.Webhooks[0].ReinvocationPolicy = ptr.To(registrationv1.IfNeededReinvocationPolicy)
		_, err := k.api.AdmissionregistrationV1().MutatingWebhookConfigurations().Update(k.Context(), first, metav1.UpdateOptions{})
		k.must(err)
		k.tries(all, madeWith(`"visited": "b a c b"`))
		k.tries(alone, madeWith(`"visited": "b"`))
		k.okIn(all, "create", "-f", "-")
		k.is("what is stored", k.field("configmap/named", "{.data.visited}"), "b a c b")
		// What the server itself completes is completed once.
		init := h.mutating(k, "hooks-pod-1", "/init", "create pods", nil)
		init.Webhooks[0].ReinvocationPolicy = ptr.To(registrationv1.IfNeededReinvocationPolicy)
		k.mutates(init)
		k.mutates(h.mutating(k, "hooks-pod-2", "/label", "create pods", nil))
		k.tries(strings.Replace(gated("twice", "", ""), "{name: twice}", "{name: twice, labels: {of: hooks}}", 1), func(out, _ string, code int) bool {
			var p corev1.Pod
			return code == 0 && json.Unmarshal([]byte(out), &p) == nil && p.Labels["hooked"] == "yes" && len(p.Spec.InitContainers) == 1 &&
				len(p.Spec.Volumes) == 1 && len(p.Spec.Containers[0].VolumeMounts) == 1 && len(p.Spec.Tolerations) == 2
		})
	})
	k.sub("defaults of what was added", func(k *kit) {
		features.Conforms(k, 20)
		k.mutates(h.mutating(k, "hooks-init", "/init", "create pods", nil))
		k.tries(gated("added", "", ""), func(out, _ string, code int) bool {
			var p corev1.Pod
			if code != 0 || json.Unmarshal([]byte(out), &p) != nil || len(p.Spec.InitContainers) != 1 {
				return false
			}
			c := p.Spec.InitContainers[0]
			return c.Name == "added" && c.TerminationMessagePolicy == corev1.TerminationMessageReadFile && c.TerminationMessagePath == corev1.TerminationMessagePathDefault && c.ImagePullPolicy == corev1.PullIfNotPresent
		})
	})
	k.sub("not themselves", func(k *kit) {
		features.Conforms(k, 21)
		all := &metav1.LabelSelector{MatchLabels: map[string]string{"himself": "yes"}}
		for _, kind := range []string{"mutatingwebhookconfigurations", "validatingwebhookconfigurations"} {
			k.validates(h.validating(k, "hooks-deny-"+kind, "/deny-all", "*"+" /admissionregistration.k8s.io/v1/"+kind, func(w *registrationv1.ValidatingWebhook) { w.NamespaceSelector, w.ObjectSelector = nil, all }))
			k.mutates(h.mutating(k, "hooks-label-"+kind, "/label", "create /admissionregistration.k8s.io/v1/"+kind, func(w *registrationv1.MutatingWebhook) { w.NamespaceSelector, w.ObjectSelector = nil, all }))
		}
		// What is written after them is in force: so are they.
		k.validates(h.validating(k, "hooks-himself-marker", "/deny-all", "create configmaps", nil))
		k.tries(hookedMap("marker", ""), refusedFor("denied by the webhook"))
		v, m := h.validating(k, "hooks-himself", "/deny", "create none", nil), h.mutating(k, "hooks-himself", "/deny", "create none", nil)
		v.Labels["himself"], m.Labels["himself"] = "yes", "yes"
		v, m = k.validates(v), k.mutates(m)
		if v.Labels["hooked"] != "" || m.Labels["hooked"] != "" {
			k.Errorf("they were changed: %v %v", v.Labels, m.Labels)
		}
		k.ok("delete", "validatingwebhookconfiguration/hooks-himself", "mutatingwebhookconfiguration/hooks-himself")
	})
	k.sub("many", func(k *kit) {
		features.Conforms(k, 3, 4)
		many := metav1.ListOptions{LabelSelector: "many=" + k.ns}
		for i := range 10 {
			v, m := h.validating(k, fmt.Sprintf("hooks-many-%d", i), "/deny", "create configmaps", nil), h.mutating(k, fmt.Sprintf("hooks-many-%d", i), "/field", "create configmaps", nil)
			v.Labels["many"], m.Labels["many"] = k.ns, k.ns
			k.validates(v)
			k.mutates(m)
		}
		vs, ms := k.api.AdmissionregistrationV1().ValidatingWebhookConfigurations(), k.api.AdmissionregistrationV1().MutatingWebhookConfigurations()
		v, err := vs.List(k.Context(), many)
		k.must(err)
		m, err := ms.List(k.Context(), many)
		k.must(err)
		if len(v.Items) != 10 || len(m.Items) != 10 {
			k.Errorf("%d and %d are listed, want 10", len(v.Items), len(m.Items))
		}
		k.tries(hookedMap("many", ", bad: 'yes'"), refusedFor("this one is bad"))
		k.tries(hookedMap("many", ""), madeWith(hooked))
		k.must(vs.DeleteCollection(k.Context(), metav1.DeleteOptions{}, many))
		k.must(ms.DeleteCollection(k.Context(), metav1.DeleteOptions{}, many))
		k.tries(hookedMap("many", ", bad: 'yes'"), madeWithout(hooked))
	})
	k.sub("other rules", func(k *kit) {
		features.Conforms(k, 5, 6)
		v := k.validates(h.validating(k, "hooks-rules", "/deny", "create configmaps", nil))
		m := k.mutates(h.mutating(k, "hooks-rules", "/field", "create configmaps", nil))
		bad := hookedMap("rules", ", bad: 'yes'")
		k.tries(bad, refusedFor("this one is bad"))
		k.tries(hookedMap("rules", ""), madeWith(hooked))
		v.Webhooks[0].Rules[0].Operations = []registrationv1.OperationType{registrationv1.Update}
		m.Webhooks[0].Rules[0].Operations = []registrationv1.OperationType{registrationv1.Update}
		vs, ms := k.api.AdmissionregistrationV1().ValidatingWebhookConfigurations(), k.api.AdmissionregistrationV1().MutatingWebhookConfigurations()
		_, err := vs.Update(k.Context(), v, metav1.UpdateOptions{})
		k.must(err)
		_, err = ms.Update(k.Context(), m, metav1.UpdateOptions{})
		k.must(err)
		k.tries(bad, madeWithout(hooked))
		patch := []byte(`[{"op":"replace","path":"/webhooks/0/rules/0/operations","value":["CREATE"]}]`)
		_, err = vs.Patch(k.Context(), v.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
		k.must(err)
		_, err = ms.Patch(k.Context(), m.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
		k.must(err)
		k.tries(bad, refusedFor("this one is bad"))
		k.tries(hookedMap("rules", ""), madeWith(hooked))
	})
	k.sub("attach", func(k *kit) {
		features.Conforms(k, 9)
		k.apply(simple("attached", "sleep"))
		k.ready("attached")
		k.validates(h.validating(k, "hooks-attach", "/deny-all", "connect pods/attach", nil))
		k.eventually("attach is refused", func(context.Context) error {
			ctx, cancel := context.WithTimeout(k.Context(), 20*time.Second)
			defer cancel()
			_, errs, code := k.finish(k.command(ctx, "attach", "attached"), "")
			if code == 0 || !strings.Contains(errs, "denied by the webhook") {
				return errors.New(errs)
			}
			return nil
		})
		k.ok("delete", "pod", "attached", "--wait=false")
	})
	k.sub("kinds", func(k *kit) {
		features.Conforms(k, 12)
		k.validates(h.validating(k, "hooks-crds", "/deny-all", "create /apiextensions.k8s.io/v1/customresourcedefinitions", func(w *registrationv1.ValidatingWebhook) {
			w.NamespaceSelector, w.ObjectSelector = nil, &metav1.LabelSelector{MatchLabels: map[string]string{"refused": "here"}}
		}))
		k.tries(customKind("refusals", "refused: here", anything), refusedFor("denied by the webhook"))
	})
	k.sub("versions", func(k *kit) { versions(k, h) })
	k.sub("objects of one's own kind", func(k *kit) {
		features.Conforms(k, 10, 16, 18)
		k.defines("mugs", `{type: object, properties: {data: {type: object, properties: {a: {type: string}}}}}`)
		k.defines("pans", `{type: object, properties: {data: {type: object, properties: {a: {type: string}, hooked: {type: string}}}}}`)
		for _, plural := range []string{"mugs", "pans"} {
			k.mutates(h.mutating(k, "hooks-"+plural, "/field", "create /machinery.example.com/v1/"+plural, nil))
			k.validates(h.validating(k, "hooks-"+plural, "/deny", "create,update,delete /machinery.example.com/v1/"+plural, nil))
		}
		object := func(kind, labels string) string {
			return "apiVersion: machinery.example.com/v1\nkind: " + kind + "\nmetadata: {name: x, labels: {of: hooks" + labels + "}}\ndata: {a: b}\n"
		}
		k.tries(object("Pan", ", bad: 'yes'"), refusedFor("this one is bad"))
		k.tries(object("Pan", ""), madeWith(hooked))
		// What the schema does not name is taken off again.
		k.tries(object("Mug", ", bad: 'yes'"), refusedFor("this one is bad"))
		k.tries(object("Mug", ""), madeWithout(hooked))
		k.okIn(object("Pan", ", keep: 'yes'"), "create", "-f", "-")
		const name = "pans.machinery.example.com"
		k.is("what is stored", k.field(name+"/x", "{.data.hooked}"), "yes")
		k.has(k.fails("label", name, "x", "bad=yes"), "this one is bad")
		k.has(k.fails("delete", name, "x"), "this one is bad")
		k.ok("label", name, "x", "keep-")
		k.ok("delete", name, "x")
	})
}

// versions are of one kind, and a webhook makes one of the other.
func versions(k *kit, h *hooks) {
	features.Conforms(k, 17, 30, 31)
	crd := func(stored string) string {
		version := func(name, schema string) string {
			return fmt.Sprintf("  - {name: %s, served: true, storage: %t, schema: {openAPIV3Schema: %s}}\n", name, name == stored, schema)
		}
		return `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: cans.machinery.example.com}
spec:
  group: machinery.example.com
  scope: Namespaced
  names: {plural: cans, singular: can, kind: Can}
  conversion:
    strategy: Webhook
    webhook:
      conversionReviewVersions: [v1]
      clientConfig: {url: "` + h.url + `/convert", caBundle: ` + base64.StdEncoding.EncodeToString(h.ca) + `}
  versions:
` + version("v1", `{type: object, properties: {data: {type: object, x-kubernetes-preserve-unknown-fields: true}, spec: {type: object, properties: {size: {type: string}}}}}`) +
			version("v2", `{type: object, properties: {data: {type: object, x-kubernetes-preserve-unknown-fields: true}, size: {type: string}}}`)
	}
	k.apply(crd("v1"))
	can := func(version, name, size string) string {
		return "apiVersion: machinery.example.com/" + version + "\nkind: Can\nmetadata: {name: " + name + ", labels: {of: hooks}}\ndata: {a: b}\n" + size + "\n"
	}
	k.eventually("both versions are served", func(context.Context) error {
		for version, size := range map[string]string{"v1": "spec: {size: s}", "v2": "size: s"} {
			if _, errs, code := k.in(can(version, "try", size), "create", "--dry-run=server", "-f", "-"); code != 0 {
				return errors.New(errs)
			}
		}
		return nil
	})
	k.okIn(can("v1", "one", "spec: {size: large}"), "create", "-f", "-")
	k.is("one at v2", k.field("cans.v2.machinery.example.com/one", "{.apiVersion} {.size}{.spec}"), "machinery.example.com/v2 large")
	k.apply(crd("v2"))
	k.eventually("v2 is stored", func(context.Context) error {
		if got := k.field("crd/cans.machinery.example.com", "{.status.storedVersions}"); got != `["v1","v2"]` {
			return errors.New(got)
		}
		return nil
	})
	k.okIn(can("v2", "two", "size: small"), "create", "-f", "-")
	k.is("both at v2", k.ok("get", "cans.v2.machinery.example.com", "-o", "jsonpath={range .items[*]}{.apiVersion} {.metadata.name} {.size}{\"\\n\"}{end}"),
		"machinery.example.com/v2 one large\nmachinery.example.com/v2 two small\n")
	k.is("both at v1", k.ok("get", "cans.v1.machinery.example.com", "-o", "jsonpath={range .items[*]}{.apiVersion} {.metadata.name} {.spec.size}{\"\\n\"}{end}"),
		"machinery.example.com/v1 one large\nmachinery.example.com/v1 two small\n")
	// What was stored as v1 is changed by a webhook while v2 is stored.
	k.mutates(h.mutating(k, "hooks-cans", "/field", "update /machinery.example.com/v2/cans", nil))
	k.eventually("a patch goes through the webhook", func(context.Context) error {
		k.ok("patch", "cans.v2.machinery.example.com", "one", "--type=merge", "-p", fmt.Sprintf(`{"data":{"at":%q}}`, time.Now()))
		if got := k.field("cans.v2.machinery.example.com/one", "{.data.hooked} {.size}"); got != "yes large" {
			return errors.New(got)
		}
		return nil
	})
}
