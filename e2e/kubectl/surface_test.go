package kubectl

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

func complaint(code int, errs string) error {
	if code == 0 {
		return nil
	}
	return errors.New(errs)
}

func TestE2EXSurface(t *testing.T) {
	t.Parallel()
	k := start(t, "surface")
	path := "/api/v1/namespaces/" + k.ns
	pod := func(name string) string {
		return `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"` + name + `"},"spec":{"containers":[{"name":"c","image":"` + image + `"}]}}`
	}
	k.sub("groups and versions", func(k *kit) {
		features.Shows(k, 35, 36)
		k.has(k.ok("api-versions"), "v1\n", "apps/v1\n", "batch/v1\n", "rbac.authorization.k8s.io/v1\n", "coordination.k8s.io/v1\n")
		for _, p := range []string{"/api/v1", "/apis/apps/v1"} {
			if code, body := k.ask("GET", p, ""); code != 200 || !strings.Contains(body, `"kind":"APIResourceList"`) {
				k.Errorf("%s: %d %s", p, code, body)
			}
		}
		if code, _ := k.ask("GET", "/apis/extensions/v1beta1", ""); code != 404 {
			k.Errorf("extensions/v1beta1: %d", code)
		}
	})
	k.sub("what is described", func(k *kit) {
		features.Shows(k, 38)
		for _, p := range []string{"/openapi/v2", "/openapi/v3"} {
			if code, body := k.ask("GET", p, ""); code != 200 || !strings.Contains(body, "paths") {
				k.Errorf("%s: %d", p, code)
			}
		}
		k.has(k.ok("explain", "deployment.spec"), "KIND:       Deployment", "replicas\t<integer>", "selector\t<LabelSelector> -required-")
		k.has(k.ok("explain", "pod.spec.containers.image"), "FIELD: image <string>")
		k.has(k.fails("explain", "pod.spec.nonsense"), `field "nonsense" does not exist`)
		k.has(k.ok("api-resources"), "deployments", "deploy", "apps/v1", "true", "Deployment")
		k.has(k.ok("api-resources", "--namespaced=false", "-o", "name"), "nodes", "namespaces")
	})
	k.sub("every resource answers its verbs", func(k *kit) {
		features.Shows(k, 40, 77)
		lists, err := k.api.Discovery().ServerPreferredResources()
		if err != nil && !discovery.IsGroupDiscoveryFailedError(err) {
			k.Fatal(err)
		}
		n := 0
		for _, list := range lists {
			if group, _, _ := strings.Cut(list.GroupVersion, "/"); !ours(group) {
				continue // kinds of other tests come and go
			}
			root := "/apis/" + list.GroupVersion
			if list.GroupVersion == "v1" {
				root = "/api/v1"
			}
			for _, r := range list.APIResources {
				at := root
				if r.Namespaced {
					at += "/namespaces/" + k.ns
				}
				for _, verb := range r.Verbs {
					n++
					k.verb(verb, at+"/"+r.Name, `{"apiVersion":"`+list.GroupVersion+`","kind":"`+r.Kind+`"`)
				}
			}
		}
		if n < 100 {
			k.Errorf("only %d verbs", n)
		}
	})
	k.sub("wrong version, wrong path", func(k *kit) {
		features.Shows(k, 39, 42)
		if code, body := k.ask("POST", path+"/pods", strings.Replace(pod("v2"), `"v1"`, `"v2"`, 1)); code != 400 {
			k.Errorf("apiVersion v2: %d %s", code, body)
		}
		if code, _ := k.ask("GET", "/apis", ""); code != 200 {
			k.Errorf("/apis: %d", code)
		}
		// Where no API is, the answer is nevertheless one that clients understand.
		code, body := k.ask("GET", "/nosuch", "")
		if code != 404 {
			k.Errorf("/nosuch: %d", code)
		}
		k.has(body, `"kind":"Status"`, `"reason":"NotFound"`)
	})
	k.sub("health, version, metrics", func(k *kit) {
		features.Shows(k, 44)
		for p, word := range map[string]string{"/healthz": "ok", "/livez": "ok", "/readyz": "ok", "/version": `"gitVersion": "v1.`, "/metrics": "apiserver_request_total"} {
			if code, body := k.ask("GET", p, ""); code != 200 || !strings.Contains(body, word) {
				k.Errorf("%s: %d %.200s", p, code, body)
			}
		}
		k.has(k.ok("version"), "Server Version: v1.")
		k.has(k.ok("get", "--raw", "/metrics"), `apiserver_admission_controller_admission_duration_seconds_count{name="NamespaceLifecycle"`)
	})
	k.sub("watch", func(k *kit) {
		features.Shows(k, 45)
		ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
		defer cancel()
		cmd := k.command(ctx, "get", "pods", "-w", "--output-watch-events", "-l", "watched=yes")
		out, err := cmd.StdoutPipe()
		if err != nil {
			k.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			k.Fatal(err)
		}
		k.apply(simple("w0", "sleep", "schedulerName: nobody"))
		k.ok("label", "pod", "w0", "watched=yes")
		s := bufio.NewScanner(out)
		next := func(want, name string) {
			k.Helper()
			for s.Scan() {
				if f := strings.Fields(s.Text()); len(f) > 1 && f[0] == want && f[1] == name {
					return
				} else if len(f) > 0 && f[0] != "EVENT" && f[0] != "MODIFIED" {
					k.Errorf("%q came before %s %s", s.Text(), want, name)
				}
			}
			k.Fatalf("the watch ended before %s %s: %v", want, name, s.Err())
		}
		next("ADDED", "w0")
		k.ok("annotate", "pod", "w0", "a=b")
		next("MODIFIED", "w0")
		k.ok("delete", "pod", "w0")
		next("DELETED", "w0")
		cancel()
		_ = cmd.Wait() // it was killed
	})
	k.sub("what the server fills in and refuses", func(k *kit) {
		features.Shows(k, 70, 72, 73)
		if code, body := k.ask("POST", path+"/pods", strings.Replace(pod("x"), `"name":"x"`, `"name":"x","namespace":"default"`, 1)); code != 400 {
			k.Errorf("another namespace: %d %s", code, body)
		}
		code, body := k.ask("POST", path+"/configmaps", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"x-"}}`)
		if code != 201 {
			k.Fatalf("generateName: %d %s", code, body)
		}
		var cm corev1.ConfigMap
		k.decode(body, &cm)
		if len(cm.Name) != len("x-")+5 || !strings.HasPrefix(cm.Name, "x-") {
			k.Errorf("the name is %q", cm.Name)
		}
		for what, from := range map[string]string{"name": `"name":"x"`, "spec.containers": `{"name":"c","image":"` + image + `"}`} {
			code, body = k.ask("POST", path+"/pods", strings.Replace(pod("x"), from, "", 1))
			if code != 422 || !strings.Contains(body, what) {
				k.Errorf("without %s: %d %s", from, code, body)
			}
		}
	})
	k.sub("spec and status have separate writers", func(k *kit) {
		features.Shows(k, 302)
		made := strings.Replace(pod("parts"), `"spec":{`, `"status":{"phase":"Succeeded"},"spec":{"schedulerName":"nobody",`, 1)
		code, body := k.ask("POST", path+"/pods", made)
		if code != 201 {
			k.Fatalf("%d: %s", code, body)
		}
		k.has(body, `"phase":"Pending"`)
		k.ok("patch", "pod", "parts", "-p", `{"status":{"message":"said"},"metadata":{"labels":{"a":"b"}}}`)
		k.is("after a write of the pod", k.field("pod/parts", "{.status.message}{.metadata.labels.a}"), "b")
		k.ok("patch", "pod", "parts", "--subresource=status", "-p", `{"status":{"message":"said"},"spec":{"activeDeadlineSeconds":9}}`)
		k.is("after a write of its status", k.field("pod/parts", "{.status.message}{.spec.activeDeadlineSeconds}"), "said")
		k.ok("delete", "pod", "parts")
	})
	k.sub("the same object in every encoding", func(k *kit) {
		features.Shows(k, 75, 185)
		// The volume of a token would have a name of its own in each.
		config := rest.CopyConfig(k.config)
		config.ContentType = runtime.ContentTypeProtobuf
		proto, err := kubernetes.NewForConfig(config)
		if err != nil {
			k.Fatal(err)
		}
		if _, err := proto.CoreV1().Pods(k.ns).Create(k.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "proto"}, Spec: corev1.PodSpec{NodeName: "nowhere", AutomountServiceAccountToken: ptr.To(false), Containers: []corev1.Container{{Name: "c", Image: image}}},
		}, metav1.CreateOptions{}); err != nil {
			k.Fatal(err)
		}
		k.okIn(strings.Replace(pod("json"), `"spec":{`, `"spec":{"nodeName":"nowhere","automountServiceAccountToken":false,`, 1), "create", "-f", "-")
		k.okIn("apiVersion: v1\nkind: Pod\nmetadata: {name: yaml}\nspec: {nodeName: nowhere, automountServiceAccountToken: false, containers: [{name: c, image: \""+image+"\"}]}\n", "create", "-f", "-")
		want := k.field("pod/proto", "{.spec}")
		for _, name := range []string{"json", "yaml"} {
			k.is(name, k.field("pod/"+name, "{.spec}"), want)
		}
		k.ok("delete", "pod", "--force", "--ignore-not-found", "proto", "json", "yaml")
	})
	k.sub("names", func(k *kit) {
		features.Shows(k, 76)
		k.ok("create", "namespace", "surface-2")
		k.ok("create", "configmap", "same")
		k.ok("create", "configmap", "same", "-n", "surface-2")
		k.has(k.ok("get", "cm", "-A", "--field-selector", "metadata.name=same"), "surface ", "surface-2 ")
		k.has(k.fails("create", "configmap", "same"), `configmaps "same" already exists`)
		k.ok("delete", "namespace", "surface-2", "--wait=false")
		// Pages of one.
		for i := range 3 {
			k.ok("create", "secret", "generic", fmt.Sprintf("page-%d", i))
		}
		_, first := k.ask("GET", path+"/secrets?limit=1", "")
		var page struct{ Metadata metav1.ListMeta }
		k.decode(first, &page)
		if page.Metadata.Continue == "" || page.Metadata.RemainingItemCount == nil || *page.Metadata.RemainingItemCount != 2 {
			k.Errorf("the first page: %s", first)
		}
		k.is("all pages", k.ok("get", "secrets", "--chunk-size=1", "-o", "name"), "secret/page-0\nsecret/page-1\nsecret/page-2\n")
	})
}

// verb sends a request of a discovered verb; whatever comes back, it may not
// be that there is no such path or method.
func (k *kit) verb(verb, path, kind string) {
	k.Helper()
	const nobody = "/nobody-has-this-name"
	var code int
	var body string
	dry := "?dryRun=All"
	switch verb {
	case "list":
		code, body = k.ask("GET", path+"?limit=1", "") // the first page
	case "get":
		code, body = k.ask("GET", path+nobody, "")
	case "watch":
		code, body = k.ask("GET", path+"?watch=true&timeoutSeconds=1", "")
	case "create":
		code, body = k.ask("POST", path+dry, kind+"}")
	case "update":
		code, body = k.ask("PUT", path+nobody+dry, kind+`,"metadata":{"name":"nobody-has-this-name"}}`)
	case "patch":
		code, body = k.ask("PATCH", path+nobody+dry, "{}", "Content-Type", "application/merge-patch+json")
	case "delete":
		code, body = k.ask("DELETE", path+nobody+dry, "")
	case "deletecollection":
		k.eventually("a dry run of the deletion of all", func(context.Context) error { // of which others may write one meanwhile
			if code, body = k.ask("DELETE", path+dry, ""); code == http.StatusConflict {
				return errors.New(body)
			}
			return nil
		})
	default:
		k.Errorf("%s has the verb %q", path, verb)
	}
	if code == http.StatusMethodNotAllowed || code >= 500 || strings.Contains(body, "the server could not find the requested resource") {
		k.Errorf("%s %s: %d %.300s", verb, path, code, body)
	}
	if slices.Contains([]string{"list", "watch", "deletecollection"}, verb) && code != 200 {
		k.Errorf("%s %s: %d %.300s", verb, path, code, body)
	}
}
