package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/features"
)

const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// configMap is a ConfigMap of one key, with labels such as "a: b, c: d".
func configMap(name, labels, value string) string {
	if labels != "" {
		labels = ", labels: {" + labels + "}"
	}
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s%s}\ndata: {key: %s}\n", name, labels, value)
}

func TestE2EXApply(t *testing.T) {
	t.Parallel()
	k := start(t, "apply")
	k.sub("from file, standard input and kustomization", func(k *kit) {
		features.Shows(k, 1, 8, 300)
		k.has(k.ok("apply", "-f", k.file("pod.yaml", simple("hello", "sleep"))), "pod/hello created")
		k.has(k.apply(simple("stdin", "sleep")), "pod/stdin created")
		k.file("cm.yaml", configMap("from-k", "", "v"))
		k.file("kustomization.yaml", "resources: [cm.yaml]\nnamePrefix: my-\n")
		k.has(k.ok("apply", "-k", k.dir), "configmap/my-from-k created")
		k.has(k.apply(strings.Replace(simple("hello", "sleep"), "app: hello", "app: other", 1)), "pod/hello configured")
		k.has(k.ok("wait", "pod/hello", "--for=condition=Ready", timeoutFlag), "condition met") // by a watch
		k.has(k.ok("get", "pods"), "hello", "stdin")
		k.ok("delete", "pod", "stdin")
		k.lacks(k.ok("get", "pods"), "stdin")
	})
	k.sub("the least of a manifest", func(k *kit) {
		features.Shows(k, 301)
		// The node has an image of that name already, of the hello program: what is
		// shown is the manifest and what a name without a registry stands for.
		k.load("nginx:1.15")
		k.has(k.apply("apiVersion: v1\nkind: Pod\nmetadata:\n  name: nginx\nspec:\n  containers:\n  - name: nginx\n    image: nginx:1.15\n"), "pod/nginx created")
		p := k.ready("nginx")
		k.is("phase", string(p.Status.Phase), "Running")
		k.is("image", p.Spec.Containers[0].Image, "nginx:1.15")
		k.eventuallyHas([]string{"get", "node", node, "-o", "jsonpath={.status.images[*].names}"}, "docker.io/library/nginx:1.15")
		k.ok("delete", "pod", "nginx", "--grace-period=1", "--wait=false")
	})
	k.sub("a GET, then POST or PATCH", func(k *kit) {
		features.Shows(k, 3)
		path := "/api/v1/namespaces/" + k.ns + "/configmaps"
		writes := func(manifest string) []string {
			_, log, code := k.in(manifest, "apply", "-f", "-", "-v=6")
			if code != 0 {
				k.Fatal(log)
			}
			return slices.DeleteFunc(requests(log), func(r string) bool { return !strings.Contains(r, path) })
		}
		for _, tt := range []struct {
			value string
			want  []string
		}{
			{"one", []string{"GET " + path + "/three 404", "POST " + path + " 201"}},
			{"two", []string{"GET " + path + "/three 200", "PATCH " + path + "/three 200"}},
			{"two", []string{"GET " + path + "/three 200"}},
		} {
			if got := writes(configMap("three", "", tt.value)); !slices.Equal(got, tt.want) {
				k.Errorf("%s: %q, want %q", tt.value, got, tt.want)
			}
		}
	})
	k.sub("last applied, and the merge of three", func(k *kit) {
		features.Shows(k, 4, 5, 7)
		manifest := strings.Replace(configMap("merge", "keep: a, drop: b", "v"), "{name", "{annotations: {}, namespace: "+k.ns+", name", 1)
		k.apply(manifest)
		var want, got any
		if err := yaml.Unmarshal([]byte(manifest), &want); err != nil {
			k.Fatal(err)
		}
		text := k.field("configmap/merge", `{.metadata.annotations.kubectl\.kubernetes\.io/last-applied-configuration}`)
		if err := json.Unmarshal([]byte(text), &got); err != nil {
			k.Fatalf("%v: %q", err, text)
		}
		if !reflect.DeepEqual(got, want) {
			k.Errorf("last applied is %v, want %v", got, want)
		}
		k.ok("label", "configmap", "merge", "by-hand=yes")
		changed := strings.Replace(manifest, ", drop: b", "", 1)
		k.has(k.apply(changed), "configured")
		k.is("labels", k.field("cm/merge", "{.metadata.labels}"), `{"by-hand":"yes","keep":"a"}`)
		before := k.field("cm/merge", "{.metadata.resourceVersion}")
		k.has(k.apply(changed), "configmap/merge unchanged")
		k.is("resourceVersion", k.field("cm/merge", "{.metadata.resourceVersion}"), before)
	})
	k.sub("what create made lacks the annotation", func(k *kit) {
		features.Shows(k, 6)
		f := k.file("c.yaml", configMap("created", "", "v"))
		k.ok("create", "-f", f)
		_, errs, code := k.in("", "apply", "-f", f)
		if code != 0 {
			k.Errorf("exit %d", code)
		}
		k.has(errs, "Warning: resource configmaps/created is missing the "+lastApplied+" annotation")
		k.has(k.ok("apply", "-f", f), "unchanged")
	})
	k.sub("dry run", func(k *kit) {
		features.Shows(k, 9)
		f := k.file("dry.yaml", simple("dry", "sleep"))
		_, log, _ := k.in("", "apply", "-f", f, "--dry-run=client", "-v=6")
		for _, r := range requests(log) {
			if !strings.HasPrefix(r, "GET ") {
				k.Errorf("a dry run of the client sent %s", r)
			}
		}
		// The server's adds what admission and defaulting add.
		k.has(k.ok("apply", "-f", f, "--dry-run=server", "-o", "yaml"), "uid:", "node.kubernetes.io/not-ready", "restartPolicy: Always")
		k.has(k.fails("get", "pod", "dry"), `pods "dry" not found`)
	})
	k.sub("prune", func(k *kit) {
		features.Shows(k, 11)
		one, two := configMap("one", "set: s", "v"), configMap("two", "set: s", "v")
		k.has(k.failsIn(one, "apply", "--prune", "-f", "-"), "without explicitly passing --all")
		k.apply(one + "---\n" + two)
		prune := []string{"apply", "-f", "-", "--prune", "-l", "set=s", "--prune-allowlist=core/v1/ConfigMap"}
		// What was in the input is spared, although it is selected too.
		k.lacks(k.okIn(one+"---\n"+two, prune...), "pruned")
		k.has(k.okIn(one, prune...), "configmap/one unchanged", "configmap/two pruned")
		k.has(k.fails("get", "cm", "two"), "not found")
	})
	k.sub("printers", func(k *kit) {
		features.Shows(k, 12, 22)
		k.is("-o name", k.okIn(configMap("p1", "", "v"), "apply", "-f", "-", "-o", "name"), "configmap/p1\n")
		k.has(k.okIn(configMap("p2", "", "v"), "apply", "-f", "-", "-o", "yaml"), "kind: ConfigMap", "uid: ", "resourceVersion: ")
		var cm struct{ Metadata metav1.ObjectMeta }
		if err := json.Unmarshal([]byte(k.okIn(configMap("p3", "", "v"), "create", "-f", "-", "-o", "json")), &cm); err != nil {
			k.Fatal(err)
		}
		k.is("uid", string(cm.Metadata.UID), k.field("cm/p3", "{.metadata.uid}"))
		k.has(k.okIn(configMap("p4", "", "v"), "apply", "-f", "-", "-o", "json"), `"kind": "ConfigMap"`, `"uid": "`)
		k.is("create", k.okIn(configMap("p5", "", "v"), "create", "-f", "-"), "configmap/p5 created\n")
	})
	k.sub("the step and the source of an error", func(k *kit) {
		features.Shows(k, 13)
		f := k.file("twice.yaml", configMap("twice", "", "v"))
		k.ok("create", "-f", f)
		k.has(k.fails("create", "-f", f), `error when creating "`+f+`"`, `configmaps "twice" already exists`, "AlreadyExists")
	})
	k.sub("server-side, and its conflicts", func(k *kit) {
		const ssa = "--server-side"
		k.has(k.okIn(configMap("ssa", "", "mine"), "apply", ssa, "--field-manager=me", "-f", "-"), "configmap/ssa serverside-applied")
		k.has(k.failsIn(configMap("ssa", "", "yours"), "apply", ssa, "--field-manager=you", "-f", "-"), `conflict with "me"`, ".data.key", "--force-conflicts")
		k.is("value", k.field("cm/ssa", "{.data.key}"), "mine")
		k.okIn(configMap("ssa", "", "yours"), "apply", ssa, "--field-manager=you", "--force-conflicts", "-f", "-")
		k.is("value", k.field("cm/ssa", "{.data.key}"), "yours")
		k.has(k.ok("get", "cm", "ssa", "--show-managed-fields", "-o", `jsonpath={.metadata.managedFields[?(@.operation=="Apply")].manager}`), "you")
	})
	k.sub("diff", func(k *kit) {
		f := k.file("diff.yaml", configMap("diff", "", "old"))
		k.ok("apply", "-f", f)
		if out, errs, code := k.in("", "diff", "-f", f); code != 0 || out != "" {
			k.Errorf("without a difference: exit %d: %s%s", code, out, errs)
		}
		out, errs, code := k.in(configMap("diff", "", "new"), "diff", "-f", "-")
		if code != 1 {
			k.Errorf("with a difference: exit %d: %s", code, errs)
		}
		k.has(out, "-  key: old", "+  key: new")
		k.is("value", k.field("cm/diff", "{.data.key}"), "old")
	})
}

func TestE2EXRun(t *testing.T) {
	t.Parallel()
	k := start(t, "run")
	k.sub("a bare pod, or a Deployment", func(k *kit) {
		features.Shows(k, 15)
		k.has(k.ok("run", "bare", "--image="+image), "pod/bare created")
		k.is("owners", k.field("pod/bare", "{.metadata.ownerReferences}"), "")
		k.has(k.ok("create", "deployment", "web", "--image="+image, "--replicas=3"), "deployment.apps/web created")
		k.ok("rollout", "status", "deployment/web", timeoutFlag)
		k.is("pods", fmt.Sprint(len(strings.Fields(k.ok("get", "pods", "-l", "app=web", "-o", "name")))), "3")
		k.ready("bare")
	})
	k.sub("create builds objects", func(k *kit) {
		features.Shows(k, 16)
		for kind, args := range map[string][]string{
			"Deployment": {"deployment", "x"}, "Job": {"job", "x"}, "CronJob": {"cronjob", "x", "--schedule=* * * * *"},
		} {
			k.has(k.ok(append(append([]string{"create"}, args...), "--image=a/b:1", "--dry-run=client", "-o", "yaml")...), "kind: "+kind+"\n", "image: a/b:1")
		}
	})
	k.sub("a Pod under every restart policy", func(k *kit) {
		features.Shows(k, 17)
		features.Conforms(k, 198)
		for name, policy := range map[string]string{"never": "Never", "onfailure": "OnFailure"} {
			k.has(k.ok("run", name, "--image="+image, "--restart="+policy, "--", "exit", "0"), "pod/"+name+" created")
			k.is("policy", k.field("pod/"+name, "{.spec.restartPolicy}"), policy)
			k.phase(name, "Succeeded")
		}
	})
	k.sub("the cause of a change", func(k *kit) {
		features.Shows(k, 18)
		k.apply(web("cause", 1))
		k.ok("annotate", "deployment", "cause", "kubernetes.io/change-cause=first try")
		k.ok("rollout", "status", "deployment/cause", timeoutFlag)
		k.eventuallyHas([]string{"rollout", "history", "deployment/cause"}, "REVISION", "1", "first try")
		k.ok("set", "env", "deployment/cause", "A=b")
		k.ok("annotate", "--overwrite", "deployment", "cause", "kubernetes.io/change-cause=second try")
		k.eventuallyHas([]string{"rollout", "history", "deployment/cause"}, "first try", "second try")
	})
	k.sub("wrong before it is sent", func(k *kit) {
		features.Shows(k, 19, 20)
		out := k.failsIn("apiVersion: v1\nkind: Pot\nmetadata: {name: p}\n", "apply", "-f", "-", "-v=6")
		k.has(out, `no matches for kind "Pot" in version "v1"`)
		if slices.ContainsFunc(requests(out), func(r string) bool { return strings.HasPrefix(r, "POST ") }) {
			k.Errorf("a POST was sent:\n%s", out)
		}
		k.has(k.fails("run", "x", "--image=UPPER//bad"), `nvalid image name "UPPER//bad"`)
		k.apply(strings.Replace(simple("bad", "sleep"), image, "UPPER//bad", 1))
		k.eventuallyHas([]string{"get", "pod", "bad"}, "InvalidImageName")
		k.ok("delete", "pod", "bad")
	})
	k.sub("each discovery request is shown", func(k *kit) {
		features.Shows(k, 21, 34, 37)
		cache := k.dir + "/cache"
		discovery := func() []string {
			_, log, _ := k.in("", "get", "pods", "-v=8", "--cache-dir="+cache)
			var got []string
			for line := range strings.Lines(log) {
				for _, p := range []string{"/api?", "/apis?"} {
					if strings.Contains(line, p) && strings.Contains(line, "GET") {
						got = append(got, p)
					}
				}
			}
			return got
		}
		if first := discovery(); len(first) == 0 || !slices.Contains(first, "/api?") || !slices.Contains(first, "/apis?") {
			k.Errorf("without a cache: %q", first)
		}
		if second := discovery(); len(second) != 0 {
			k.Errorf("with a cache: %q", second)
		}
		// A kind is asked for in the version that its group prefers.
		k.apply(dish("negotiation.example.com", "gauges", anything, "v1beta1", "v1"))
		k.established("gauges.negotiation.example.com")
		for _, version := range []string{"v1", "v1beta1"} {
			k.discovered("negotiation.example.com", version, "gauges")
		}
		for group, resource := range map[string]string{"autoscaling": "horizontalpodautoscalers", "negotiation.example.com": "gauges"} {
			var list metav1.APIGroup
			k.eventually(group+" is served in both versions", func(context.Context) error { // which may come one by one
				code, body := k.ask("GET", "/apis/"+group, "")
				if code != 200 {
					return fmt.Errorf("%d %s", code, body)
				}
				list = metav1.APIGroup{}
				k.decode(body, &list)
				if len(list.Versions) != 2 || list.PreferredVersion != list.Versions[0] {
					return fmt.Errorf("it has the versions %+v and prefers %+v", list.Versions, list.PreferredVersion)
				}
				return nil
			})
			_, log, code := k.in("", "get", resource+"."+group, "-v=6", "--cache-dir="+cache+"-"+group)
			if want := "GET /apis/" + list.PreferredVersion.GroupVersion + "/namespaces/" + k.ns + "/" + resource + " 200"; code != 0 || !slices.Contains(requests(log), want) {
				k.Errorf("exit %d, no %s among %q", code, want, requests(log))
			}
			// Any other is had by its name.
			other := list.Versions[1].Version
			_, log, code = k.in("", "get", resource+"."+other+"."+group, "-v=6", "--cache-dir="+cache+"-"+group)
			if want := "GET /apis/" + group + "/" + other + "/namespaces/" + k.ns + "/" + resource + " 200"; code != 0 || !slices.Contains(requests(log), want) {
				k.Errorf("exit %d, no %s among %q", code, want, requests(log))
			}
		}
	})
	k.sub("plain HTTP, and tables", func(k *kit) {
		features.Shows(k, 14, 23, 24, 41, 71, 82)
		path := "/api/v1/namespaces/" + k.ns + "/pods"
		code, body := k.ask("POST", path, `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"curl"},"spec":{"containers":[{"name":"c","image":"`+image+`"}]}}`)
		if code != 201 {
			k.Fatalf("%d: %s", code, body)
		}
		k.has(body, `"uid":"`, `"creationTimestamp":"`, `"resourceVersion":"`, `"restartPolicy":"Always"`, `"dnsPolicy":"ClusterFirst"`, `"phase":"Pending"`)
		k.has(body, k.field("pod/curl", "{.metadata.uid}"))
		k.ready("curl")
		_, table := k.ask("GET", path, "", "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
		k.has(table, `"kind":"Table"`, `"apiVersion":"meta.k8s.io/v1"`, `"name":"Restarts"`)
		head, _, _ := strings.Cut(k.ok("get", "pods"), "\n")
		k.is("columns", strings.Join(strings.Fields(head), " "), "NAME READY STATUS RESTARTS AGE")
		out := k.ok("get", "pod", "curl", "-o", `go-template={{range .status.conditions}}{{.type}}={{.status}} {{end}}`)
		k.has(out, "PodScheduled=True", "Ready=True")
	})
}

// load gives the node the hello program as an image of another name.
func (k *kit) load(ref string) {
	k.Helper()
	tag, err := name.NewTag(ref)
	k.must(err)
	img, err := tarball.ImageFromPath(filepath.Join(filepath.Dir(k.c.Bin("clusterd")), "hello.tar"), nil)
	k.must(err)
	file := filepath.Join(k.dir, "image.tar")
	k.must(tarball.WriteToFile(file, tag, img))
	cmd := k.command(k.Context(), "image", "load", file)
	cmd.Path, cmd.Args[0] = k.c.Bin("clusterctl"), "clusterctl"
	if out, errs, code := k.finish(cmd, ""); code != 0 {
		k.Fatalf("image load: exit %d: %s%s", code, out, errs)
	}
}
