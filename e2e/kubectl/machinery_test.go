package kubectl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXMachinery asks the API for what every client rests on, whatever the
// kind.
func TestE2EXMachinery(t *testing.T) {
	t.Parallel()
	k := start(t, "machinery")
	k.sub("discovery", discovered)
	k.sub("the kind of kinds", kindOfKinds)
	k.sub("defaults", defaultsOfStored)
	k.sub("strict fields", strictFields)
	k.sub("quotas", podQuotas)
	k.sub("watches", watches)
	k.sub("one order", oneOrder)
	k.sub("pages", pages)
	k.sub("owners", owners)
	k.sub("a namespace that goes", podsFirst)
}

// ours tells groups of the program itself from those of CRDs that tests make.
func ours(group string) bool { return !strings.HasSuffix(group, ".example.com") }

func discovered(k *kit) {
	features.Conforms(k, 25, 27, 37, 48, 49)
	client, err := discovery.NewDiscoveryClientForConfig(k.config)
	k.must(err)
	named := func(lists []*metav1.APIResourceList) (names []string) {
		for _, l := range lists {
			group, _, _ := strings.Cut(l.GroupVersion, "/")
			for _, r := range l.APIResources {
				if ours(group) && !strings.Contains(r.Name, "/") {
					names = append(names, l.GroupVersion+" "+r.Name)
				}
			}
		}
		slices.Sort(names)
		return names
	}
	// Groups of CRDs come and go beside this test.
	whole := func(failed map[schema.GroupVersion]error) {
		k.Helper()
		for gv, err := range failed {
			if ours(gv.Group) {
				k.Errorf("%s: %v", gv, err)
			}
		}
	}
	_, byVersion, failed, err := client.GroupsAndMaybeResources()
	if err != nil || byVersion == nil {
		k.Fatalf("the aggregated form: %d, %v", len(byVersion), err)
	}
	whole(failed)
	var at []*metav1.APIResourceList
	for _, l := range byVersion {
		at = append(at, l)
	}
	client.UseLegacyDiscovery = true
	groups, lists, err := client.ServerGroupsAndResources()
	if failed, ok := discovery.GroupDiscoveryFailedErrorGroups(err); ok {
		whole(failed)
	} else {
		k.must(err)
	}
	if got, want := named(at), named(lists); !slices.Equal(got, want) || len(want) < 60 {
		k.Errorf("one document has %q, the single ones %q", got, want)
	}
	for _, g := range groups {
		if !slices.ContainsFunc(g.Versions, func(v metav1.GroupVersionForDiscovery) bool { return v == g.PreferredVersion }) {
			k.Errorf("group %s prefers %s of %v", g.Name, g.PreferredVersion.GroupVersion, g.Versions)
		}
		for _, v := range g.Versions {
			list, err := client.ServerResourcesForGroupVersion(v.GroupVersion)
			if err != nil || list.GroupVersion != v.GroupVersion || !slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return len(r.Verbs) > 0 }) {
				if ours(g.Name) { // others may be going
					k.Errorf("%s: %+v %v", v.GroupVersion, list, err)
				}
			}
		}
	}
	const accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	for path, holds := range map[string][]string{"/api": {`"resource":"pods"`}, "/apis": {`"name":"apps"`, `"resource":"deployments"`}} {
		code, body := k.ask(http.MethodGet, path, "", "Accept", accept)
		if code != http.StatusOK {
			k.Errorf("%s: %d %s", path, code, body)
		}
		k.has(body, append(holds, `"kind":"APIGroupDiscoveryList"`, `"apiVersion":"apidiscovery.k8s.io/v2"`)...)
	}
	for path, holds := range map[string]string{
		"/apis": `"name":"apiextensions.k8s.io"`, "/apis/apiextensions.k8s.io": `"groupVersion":"apiextensions.k8s.io/v1"`,
		"/apis/apiextensions.k8s.io/v1": `"name":"customresourcedefinitions"`,
	} {
		_, body := k.ask(http.MethodGet, path, "", "Accept", "application/json")
		k.has(body, holds)
	}
}

// customKind is a CRD of the group machinery.example.com; schema is that of the
// whole object.
func customKind(plural, labels, schema string) string {
	kind := strings.ToUpper(plural[:1]) + strings.TrimSuffix(plural[1:], "s")
	return fmt.Sprintf(`apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[1]s.machinery.example.com, labels: {%[3]s}}
spec:
  group: machinery.example.com
  scope: Namespaced
  names: {plural: %[1]s, singular: %[2]s, kind: %[4]s}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: %[5]s}}]
---
`, plural, strings.TrimSuffix(plural, "s"), labels, kind, schema)
}

// defines makes a CRD and waits until its objects can be asked for. It stays: a
// group that goes disturbs whoever asks for all groups meanwhile.
func (k *kit) defines(plural, schema string) {
	k.Helper()
	k.apply(customKind(plural, "", schema))
	k.eventually(plural+" are served", func(context.Context) error {
		code, body := k.ask(http.MethodGet, k.custom(plural), "")
		if code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	k.discovered("machinery.example.com", "v1", plural)
}

func (k *kit) custom(plural string) string {
	return "/apis/machinery.example.com/v1/namespaces/" + k.ns + "/" + plural
}

const anything = `{type: object, x-kubernetes-preserve-unknown-fields: true}`

func kindOfKinds(k *kit) {
	k.sub("in the aggregated form", func(k *kit) {
		features.Conforms(k, 28)
		k.defines("kilns", anything)
		k.eventually("the document lists it", func(context.Context) error {
			_, body := k.ask(http.MethodGet, "/apis", "", "Accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
			if !strings.Contains(body, `"resource":"kilns"`) || !strings.Contains(body, `"machinery.example.com"`) {
				return errors.New("it does not")
			}
			return nil
		})
	})
	k.sub("a watch", func(k *kit) {
		features.Conforms(k, 32)
		client, err := dynamic.NewForConfig(k.config)
		k.must(err)
		k.defines("urns", anything)
		urns := client.Resource(schema.GroupVersionResource{Group: "machinery.example.com", Version: "v1", Resource: "urns"}).Namespace(k.ns)
		w, err := urns.Watch(k.Context(), metav1.ListOptions{})
		k.must(err)
		defer w.Stop()
		k.okIn("apiVersion: machinery.example.com/v1\nkind: Urn\nmetadata: {name: hot}\n", "create", "-f", "-")
		k.seen(w, watch.Added, "hot")
		k.ok("patch", "urns.machinery.example.com", "hot", "--type=merge", "-p", `{"heat":900}`)
		k.seen(w, watch.Modified, "hot")
		k.ok("delete", "urns.machinery.example.com", "hot")
		k.seen(w, watch.Deleted, "hot")
	})
	k.sub("its status", func(k *kit) {
		features.Conforms(k, 34)
		k.defines("pots", anything)
		const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pots.machinery.example.com/status"
		condition := func(name string) string {
			return fmt.Sprintf(`{"type":%q,"status":"True","reason":"Test","message":"by a test","lastTransitionTime":"2026-01-01T00:00:00Z"}`, name)
		}
		// Its own loops write the status, too: an update may lose the race.
		k.eventually("an update of the status", func(context.Context) error {
			_, body := k.ask(http.MethodGet, path, "")
			code, said := k.ask(http.MethodPut, path, strings.Replace(body, `"conditions":[`, `"conditions":[`+condition("Updated")+`,`, 1))
			if code == http.StatusConflict {
				return errors.New(said)
			}
			if code != http.StatusOK {
				k.Fatalf("%d %s", code, said)
			}
			return nil
		})
		code, said := k.ask(http.MethodPatch, path, `[{"op":"add","path":"/status/conditions/-","value":`+condition("Patched")+`}]`, "Content-Type", "application/json-patch+json")
		if code != http.StatusOK {
			k.Errorf("%d %s", code, said)
		}
		_, body := k.ask(http.MethodGet, path, "")
		k.has(body, `"type":"Updated"`, `"type":"Patched"`, `"type":"Established"`)
	})
	k.sub("many at once", func(k *kit) {
		features.Conforms(k, 35)
		var all strings.Builder
		for i := range 10 {
			all.WriteString(customKind(fmt.Sprintf("cup%ds", i), "many: yes-of-machinery", anything))
		}
		all.WriteString(customKind("saucers", "many: not-of-machinery", anything))
		k.apply(all.String())
		const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
		const selected = path + "?labelSelector=many%3Dyes-of-machinery"
		_, body := k.ask(http.MethodGet, selected, "")
		if n := strings.Count(body, `"many":"yes-of-machinery"},`) + strings.Count(body, `"many":"yes-of-machinery"}}`); n < 10 {
			k.Errorf("%d are listed, want 10", n)
		}
		k.lacks(body, "saucers")
		if code, said := k.ask(http.MethodDelete, selected, ""); code != http.StatusOK {
			k.Errorf("%d %s", code, said)
		}
		k.eventually("they are gone", func(context.Context) error {
			if _, body := k.ask(http.MethodGet, selected, ""); strings.Contains(body, "cup") {
				return errors.New(body[:min(len(body), 300)])
			}
			return nil
		})
		k.ok("delete", "crd", "saucers.machinery.example.com")
	})
}

func defaultsOfStored(k *kit) {
	features.Conforms(k, 36)
	schema := func(def string) string {
		return `{type: object, properties: {a: {type: string` + def + `}, b: {type: string}}}`
	}
	k.defines("bowls", schema(""))
	bowl := func(name string) string {
		return "apiVersion: machinery.example.com/v1\nkind: Bowl\nmetadata: {name: " + name + "}\nb: x\n"
	}
	k.apply(bowl("old"))
	k.apply(customKind("bowls", "", schema(", default: given")))
	k.eventually("a new one has the default", func(context.Context) error {
		out, errs, code := k.in(bowl("new"), "create", "-f", "-", "--dry-run=server", "-o", "jsonpath={.a}")
		if code != 0 || out != "given" {
			return fmt.Errorf("%q %s", out, errs)
		}
		return nil
	})
	k.apply(bowl("new"))
	for _, name := range []string{"old", "new"} {
		k.is(name, k.field("bowls.machinery.example.com/"+name, "{.a} {.b}"), "given x")
	}
	// What is said is not replaced.
	k.apply(bowl("said") + "a: own\n")
	k.is("said", k.field("bowls.machinery.example.com/said", "{.a}"), "own")
}

func strictFields(k *kit) {
	const embedded = `{type: object, x-kubernetes-embedded-resource: true, x-kubernetes-preserve-unknown-fields: true}`
	k.defines("jars", anything)
	k.defines("tins", `{type: object, properties: {spec: {type: object, properties: {size: {type: integer}, inner: `+embedded+`}}}}`)
	// send writes an object strictly, by a POST and by server-side apply; refused is
	// how its field is named when it is to be refused.
	send := func(k *kit, path, body, refused string) {
		k.Helper()
		code, said := k.ask(http.MethodPost, path+"?fieldValidation=Strict&dryRun=All", body)
		if refused == "" && code != http.StatusCreated || refused != "" && (code != http.StatusBadRequest || !strings.Contains(said, `unknown field \"`+refused)) {
			k.Errorf("POST %s: %d %s", body, code, said)
		}
		code, said = k.ask(http.MethodPatch, path+"/x?fieldValidation=Strict&fieldManager=test&dryRun=All", body, "Content-Type", "application/apply-patch+yaml")
		if refused == "" && code != http.StatusCreated || refused != "" && (code < 400 || !strings.Contains(said, "."+refused+": field not declared in schema")) {
			k.Errorf("apply %s: %d %s", body, code, said)
		}
	}
	object := func(apiVersion, kind, meta, rest string) string {
		return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":"x"%s}%s}`, apiVersion, kind, meta, rest)
	}
	custom := func(kind, meta, rest string) string { return object("machinery.example.com/v1", kind, meta, rest) }
	const bad = http.StatusBadRequest
	k.sub("a kind without a schema", func(k *kit) {
		features.Conforms(k, 50)
		send(k, k.custom("jars"), custom("Jar", "", `,"spec":{"none":"knows"},"more":1`), "")
	})
	k.sub("a valid one", func(k *kit) {
		features.Conforms(k, 51)
		send(k, k.custom("tins"), custom("Tin", "", `,"spec":{"size":3}`), "")
	})
	k.sub("an unknown field", func(k *kit) {
		features.Conforms(k, 52)
		send(k, k.custom("tins"), custom("Tin", "", `,"spec":{"size":3,"colour":"red"}`), "spec.colour")
	})
	k.sub("a field twice", func(k *kit) {
		features.Conforms(k, 53)
		code, said := k.ask(http.MethodPost, k.custom("jars")+"?fieldValidation=Strict&dryRun=All", custom("Jar", "", `,"spec":{"a":1,"a":2}`))
		if code != bad {
			k.Errorf("%d %s", code, said)
		}
		k.has(said, `duplicate field \"spec.a\"`)
	})
	k.sub("metadata", func(k *kit) {
		features.Conforms(k, 55)
		send(k, k.custom("tins"), custom("Tin", `,"nick":"n"`, `,"spec":{"size":3}`), "metadata.nick")
		code, said := k.ask(http.MethodPost, k.custom("tins")+"?fieldValidation=Strict&dryRun=All",
			custom("Tin", "", `,"spec":{"inner":{"apiVersion":"v1","kind":"Pod","metadata":{"name":"y","nick":"n"}}}`))
		if code != bad {
			k.Errorf("%d %s", code, said)
		}
		k.has(said, `unknown field \"spec.inner.metadata.nick\"`)
	})
	maps := "/api/v1/namespaces/" + k.ns + "/configmaps"
	deployments := "/apis/apps/v1/namespaces/" + k.ns + "/deployments"
	k.sub("a kind of ours", func(k *kit) {
		features.Conforms(k, 54)
		spec := `"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"clusterd.local/none:1"}]}}`
		code, said := k.ask(http.MethodPost, deployments+"?fieldValidation=Strict&dryRun=All", object("apps/v1", "Deployment", "", `,"spec":{"replicas":1,"replicas":2,"colour":"red",`+spec+`}`))
		if code != bad {
			k.Errorf("%d %s", code, said)
		}
		k.has(said, `unknown field \"spec.colour\"`, `duplicate field \"spec.replicas\"`)
		send(k, deployments, object("apps/v1", "Deployment", "", `,"spec":{"replicas":1,`+spec+`}`), "")
	})
	k.sub("its metadata", func(k *kit) {
		features.Conforms(k, 56)
		code, said := k.ask(http.MethodPost, maps+"?fieldValidation=Strict&dryRun=All", object("v1", "ConfigMap", `,"nick":"n"`, `,"data":{"a":"b"}`))
		if code != bad {
			k.Errorf("%d %s", code, said)
		}
		k.has(said, `unknown field \"metadata.nick\"`)
	})
}

// gated is a pod that no scheduler takes; rest goes into its spec, resources into
// its container.
func gated(name, rest, resources string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec:\n  schedulingGates: [{name: example.com/never}]\n  containers: [{name: c, image: clusterd.local/none:1, resources: {%s}}]\n%s---\n", name, resources, rest)
}

func podQuotas(k *kit) {
	k.ns = "machinery-quotas"
	k.ok("create", "namespace", k.ns)
	k.Cleanup(func() { k.in("", "delete", "namespace", k.ns, "--wait=false") })
	hard := func(quota, want string) {
		k.Helper()
		k.eventually(quota+" allows "+want, func(context.Context) error {
			if got := k.field("quota/"+quota, "{.status.hard}"); got != want {
				return errors.New(got)
			}
			return nil
		})
	}
	k.sub("what it says", func(k *kit) {
		features.Conforms(k, 75, 76)
		k.ok("create", "quota", "q", "--hard=cpu=1,memory=500Mi")
		hard("q", `{"cpu":"1","memory":"500Mi"}`)
		k.ok("patch", "quota", "q", "--type=merge", "-p", `{"spec":{"hard":{"cpu":"2","memory":"1Gi"}}}`)
		hard("q", `{"cpu":"2","memory":"1Gi"}`)
		k.ok("patch", "quota", "q", "--subresource=status", "--type=merge", "-p", `{"spec":{"hard":{"cpu":"7"}},"status":{"hard":{"cpu":"8"}}}`)
		k.is("the spec", k.field("quota/q", "{.spec.hard}"), `{"cpu":"2","memory":"1Gi"}`)
		hard("q", `{"cpu":"2","memory":"1Gi"}`) // the loop sets it right
		path := "/api/v1/namespaces/" + k.ns + "/resourcequotas/q"
		k.eventually("the status is updated", func(context.Context) error {
			_, body := k.ask(http.MethodGet, path, "")
			code, said := k.ask(http.MethodPut, path+"/status", strings.Replace(body, `"spec":{"hard":{"cpu":"2"`, `"spec":{"hard":{"cpu":"9"`, 1))
			if code != http.StatusOK {
				return fmt.Errorf("%d %s", code, said)
			}
			return nil
		})
		k.is("the spec after an update of the status", k.field("quota/q", "{.spec.hard}"), `{"cpu":"2","memory":"1Gi"}`)
		k.ok("delete", "quota", "q")
		k.has(k.fails("get", "quota", "q"), "not found")
	})
	used := func(quota, want string) {
		k.Helper()
		k.eventually(quota+" counts "+want, func(context.Context) error {
			if got := k.field("quota/"+quota, "{.status.used}"); got != want {
				return errors.New(got)
			}
			return nil
		})
	}
	k.sub("what a pod asks for", func(k *kit) {
		features.Conforms(k, 78)
		k.ok("create", "quota", "sum", "--hard=cpu=1,memory=500Mi,ephemeral-storage=50Gi,requests.example.com/dongle=3,pods=5")
		const none = `{"cpu":"0","ephemeral-storage":"0","memory":"0","pods":"0","requests.example.com/dongle":"0"}`
		used("sum", none)
		k.apply(gated("one", "", "requests: {cpu: 500m, memory: 252Mi, ephemeral-storage: 30Gi, example.com/dongle: 2}, limits: {example.com/dongle: 2}"))
		used("sum", `{"cpu":"500m","ephemeral-storage":"30Gi","memory":"252Mi","pods":"1","requests.example.com/dongle":"2"}`)
		for what, resources := range map[string]string{
			"requested: cpu=600m, used: cpu=500m, limited: cpu=1":                "requests: {cpu: 600m, memory: 1Mi, ephemeral-storage: 1Gi}",
			"requests.example.com/dongle=2":                                      "requests: {cpu: 1m, memory: 1Mi, ephemeral-storage: 1Gi, example.com/dongle: 2}, limits: {example.com/dongle: 2}",
			"ephemeral-storage=30Gi":                                             "requests: {cpu: 1m, memory: 1Mi, ephemeral-storage: 30Gi}",
			"requested: memory=300Mi, used: memory=252Mi, limited: memory=500Mi": "requests: {cpu: 1m, memory: 300Mi, ephemeral-storage: 1Gi}",
		} {
			k.has(k.failsIn(gated("two", "", resources), "create", "-f", "-"), "exceeded quota: sum", what)
		}
		k.ok("delete", "pod", "one")
		used("sum", none)
		k.ok("delete", "quota", "sum")
	})
	scoped := func(k *kit, first, second, pod, other string) {
		k.Helper()
		for _, scope := range []string{first, second} {
			k.ok("create", "quota", strings.ToLower(scope), "--hard=pods=5", "--scopes="+scope)
			used(strings.ToLower(scope), `{"pods":"0"}`)
		}
		first, second = strings.ToLower(first), strings.ToLower(second)
		k.apply(pod)
		used(first, `{"pods":"1"}`)
		used(second, `{"pods":"0"}`)
		k.apply(other)
		used(second, `{"pods":"1"}`)
		used(first, `{"pods":"1"}`)
		k.ok("delete", "pod", "--all")
		used(first, `{"pods":"0"}`)
		used(second, `{"pods":"0"}`)
		k.ok("delete", "quota", first, second)
	}
	k.sub("by class", func(k *kit) {
		features.Conforms(k, 85)
		scoped(k, "BestEffort", "NotBestEffort", gated("best", "", ""), gated("burst", "", "requests: {cpu: 1m}"))
	})
	k.sub("by end", func(k *kit) {
		features.Conforms(k, 86)
		scoped(k, "Terminating", "NotTerminating", gated("ends", "  activeDeadlineSeconds: 3600\n", ""), gated("stays", "", ""))
	})
}

func owners(k *kit) {
	owned := func(pod, kind, apiVersion, owner, uid string) {
		k.Helper()
		k.ok("patch", "pod", pod, "--type=merge", "-p", fmt.Sprintf(`{"metadata":{"ownerReferences":[{"apiVersion":%q,"kind":%q,"name":%q,"uid":%q,"controller":true,"blockOwnerDeletion":true}]}}`, apiVersion, kind, owner, uid))
	}
	k.sub("in a ring", func(k *kit) {
		features.Conforms(k, 60)
		names := []string{"ring-0", "ring-1", "ring-2"}
		for _, name := range names {
			k.apply(gated(name, "", ""))
		}
		for i, name := range names {
			owner := names[(i+1)%3]
			owned(name, "Pod", "v1", owner, k.field("pod/"+owner, "{.metadata.uid}"))
		}
		k.ok("delete", "pod", "ring-0", "--cascade=foreground", "--wait=false")
		for _, name := range names {
			k.gone(name)
		}
	})
	k.sub("of two", func(k *kit) {
		features.Conforms(k, 61)
		for _, owner := range []string{"leaves", "stays"} {
			k.ok("create", "configmap", owner)
		}
		leaves, stays := k.field("configmap/leaves", "{.metadata.uid}"), k.field("configmap/stays", "{.metadata.uid}")
		ref := func(name, uid string) string {
			return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","name":%q,"uid":%q,"blockOwnerDeletion":true}`, name, uid)
		}
		for i := range 4 {
			refs := ref("leaves", leaves)
			if i%2 == 1 {
				refs += "," + ref("stays", stays)
			}
			name := fmt.Sprintf("two-%d", i)
			k.apply(gated(name, "", ""))
			k.ok("patch", "pod", name, "--type=merge", "-p", `{"metadata":{"ownerReferences":[`+refs+`]}}`)
		}
		k.ok("delete", "configmap", "leaves", "--cascade=foreground")
		for i := range 4 {
			name := fmt.Sprintf("two-%d", i)
			if i%2 == 0 {
				k.gone(name)
				continue
			}
			k.eventually("the owners of "+name, func(context.Context) error {
				if got := k.field("pod/"+name, "{.metadata.ownerReferences[*].name} {.metadata.deletionTimestamp}"); got != "stays " {
					return errors.New(got)
				}
				return nil
			})
		}
		k.ok("delete", "configmap", "stays")
		k.gone("two-1")
		k.gone("two-3")
	})
}

// podsFirst deletes a namespace with a pod that somebody holds.
func podsFirst(k *kit) {
	features.Conforms(k, 74)
	k.ns = "machinery-goes"
	k.ok("create", "namespace", k.ns)
	k.ok("create", "configmap", "last")
	k.apply(strings.Replace(gated("first", "", ""), "{name: first}", "{name: first, finalizers: [example.com/held]}", 1))
	k.ok("delete", "namespace", k.ns, "--wait=false")
	k.eventually("the pod is what is left", func(context.Context) error {
		got := k.field("namespace/"+k.ns, `{.status.conditions[?(@.type=="NamespaceContentRemaining")].message}`)
		if got != "Some resources are remaining: pods has 1 resource instances" {
			return errors.New(got)
		}
		return nil
	})
	if k.field("pod/first", "{.metadata.deletionTimestamp}") == "" {
		k.Error("the pod is not being deleted")
	}
	k.is("the ConfigMap's end", k.field("configmap/last", "{.metadata.deletionTimestamp}"), "")
	k.ok("patch", "pod", "first", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	k.eventually("the namespace is gone", func(context.Context) error {
		if _, _, code := k.in("", "get", "namespace", k.ns); code == 0 {
			return errors.New("it is there")
		}
		return nil
	})
}
