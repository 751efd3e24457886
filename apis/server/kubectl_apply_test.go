package server_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// write puts files into kubectl's directory.
func (k *kubectl) write(t *testing.T, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(k.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func cm(name, data string) string {
	return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + name + ", labels: {app: x}}\ndata: " + data + "\n"
}

// TestKubectlApply walks through `kubectl apply` as its users know it.
func TestKubectlApply(t *testing.T) {
	t.Parallel()
	s := servertest.Start(t, nil)
	k := newKubectl(t, s.Listen(t))
	bad := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: Not_A_Name}\n"
	k.write(t, map[string]string{
		"one.yaml":               cm("one", "{a: b}"),
		"three.yaml":             cm("first", "{}") + "---\n" + bad + "---\n" + cm("third", "{}"),
		"dir/cm.yaml":            cm("kustomized", "{}"),
		"dir/kustomization.yaml": "resources: [cm.yaml]\nnamePrefix: my-\n",
		"merge1.yaml":            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: merged, labels: {keep: a, drop: b}}\n",
		"merge2.yaml":            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: merged, labels: {keep: c}}\n",
		"bare.yaml":              cm("bare", "{a: b}"),
		"prune1.yaml":            cm("p1", "{}") + "---\n" + cm("p2", "{}"),
		"prune2.yaml":            cm("p2", "{x: z}"),
	})
	for _, group := range []struct {
		name  string
		rows  []int
		steps []step
	}{
		{"from a file, standard input and a kustomization", []int{1}, []step{
			{args: "apply -f one.yaml", out: `^configmap/one created$`},
			{args: "apply -f -", stdin: cm("piped", "{}"), out: `^configmap/piped created$`},
			{args: "apply -k dir", out: `^configmap/my-kustomized created$`},
		}},
		{"goes on after a fault", []int{2, 13}, []step{
			{args: "apply -f three.yaml", fails: true, out: `^configmap/first created\nconfigmap/third created$`,
				errs: `^The ConfigMap "Not_A_Name" is invalid: metadata.name: Invalid value`},
			{args: "-n ghost apply -f one.yaml", fails: true, errs: `^Error from server \(NotFound\): error when creating "one.yaml": namespaces "ghost" not found$`},
		}},
		{"remembers what it applied", []int{4}, []step{
			{args: `get cm one -o jsonpath={.metadata.annotations.kubectl\.kubernetes\.io/last-applied-configuration}`,
				out: `^\{"apiVersion":"v1","data":\{"a":"b"\},"kind":"ConfigMap","metadata":\{"annotations":\{\},"labels":\{"app":"x"\},"name":"one","namespace":"default"\}\}$`},
		}},
		{"asks first, then creates or patches", []int{3, 8}, []step{
			{args: "apply -f - -v=8", stdin: cm("asked", "{}"), out: `^configmap/asked created$`, errs: `GET\b[^\n]*/configmaps/asked.*404 Not Found.*POST\b[^\n]*/configmaps\?.*201 Created`},
			{args: "apply -f - -v=8", stdin: cm("asked", "{n: m}"), out: `^configmap/asked configured$`, errs: `GET\b[^\n]*/configmaps/asked.*200 OK.*PATCH\b[^\n]*/configmaps/asked.*200 OK`},
		}},
		{"merges three ways", []int{5}, []step{
			{args: "apply -f merge1.yaml", out: `created`},
			{args: "label cm merged hand=set", out: `labeled`},
			{args: "apply -f merge2.yaml", out: `configured`},
			{args: "get cm merged -o jsonpath={.metadata.labels}", out: `^\{"hand":"set","keep":"c"\}$`},
		}},
		{"warns of what it did not create", []int{6}, []step{
			{args: "create -f bare.yaml", out: `^configmap/bare created$`},
			{args: "apply -f bare.yaml", out: `^configmap/bare configured$`, errs: `Warning: resource configmaps/bare is missing the kubectl.kubernetes.io/last-applied-configuration annotation`},
		}},
		{"runs dry", []int{9}, []step{
			{args: "apply --dry-run=client -v=8 -f -", stdin: cm("dry", "{}"), out: `^configmap/dry created \(dry run\)$`, never: `POST|PATCH`},
			{args: "apply --dry-run=server -o yaml -f -", stdin: cm("dry", "{}"), out: `uid: `},
			{args: "get cm dry", fails: true, errs: `configmaps "dry" not found`},
		}},
		{"prunes", []int{10, 11}, []step{
			{args: "apply --prune -f prune1.yaml", fails: true, errs: `all resources selected for prune without explicitly passing --all|one of \[--all, -l\]`},
			{args: "-n kube-public apply -f prune1.yaml", out: `p1 created.*p2 created`},
			{args: "-n kube-public apply --prune -l app=x --prune-allowlist=core/v1/ConfigMap -f prune2.yaml", out: `^configmap/p2 configured\nconfigmap/p1 pruned$`},
			{args: "-n kube-public get cm p2 -o name", out: `^configmap/p2$`},
		}},
		{"prints as requested", []int{12}, []step{
			{args: "apply -f one.yaml -o yaml", out: `^apiVersion: v1\n`},
			{args: "apply -f one.yaml -o json", out: `^\{\n +"apiVersion": "v1"`},
			{args: "apply -f one.yaml -o name", out: `^configmap/one$`},
			{args: "create cm shown -o json", out: `"uid": `},
			{args: "create cm line", out: `^configmap/line created$`},
		}},
		{"refuses an unknown kind itself", []int{19}, []step{
			{args: "apply -f - -v=8", stdin: "apiVersion: v1\nkind: Konfig\nmetadata: {name: x}\n", fails: true, errs: `no matches for kind "Konfig" in version "v1"`, never: `POST`},
		}},
		{"refuses a malformed image itself", nil, []step{
			{args: "run x --image=UPPER//bad", fails: true, errs: `[Ii]nvalid image name`},
		}},
		{"runs and creates", []int{15, 16, 17}, []step{
			{args: "run web --image=nginx", out: `^pod/web created$`},
			{args: "get pods,deployments -o name", out: `^pod/web\n$`},
			{args: "run never --image=nginx --restart=Never", out: `^pod/never created$`},
			{args: "run fail --image=nginx --restart=OnFailure", out: `^pod/fail created$`},
			{args: "get pod never -o jsonpath={.spec.restartPolicy}", out: `^Never$`},
			{args: "get pod fail -o jsonpath={.spec.restartPolicy}", out: `^OnFailure$`},
			{args: "create deployment web --image=nginx --replicas=3 --dry-run=client -o yaml", out: `^kind: Deployment$`},
			{args: "create job j --image=nginx --dry-run=client -o yaml", out: `^kind: Job$`},
			{args: "create cronjob c --image=nginx --schedule=*/5|*|*|*|* --dry-run=client -o yaml", out: `^kind: CronJob$`},
		}},
		{"shows tables and templates", []int{23}, []step{
			{args: "get pod web", out: `^NAME +READY +STATUS +RESTARTS +AGE\nweb +0/1 +Pending +0 +`},
			{args: "get pod web -v=9", errs: `"kind":"Table","apiVersion":"meta.k8s.io/v1"`},
			{args: `get pod web -o go-template={{.status.phase}}`, out: `^Pending$`},
		}},
		{"describes the API", []int{38}, []step{
			{args: "explain deployment.spec", out: `FIELD: spec <DeploymentSpec>`},
			{args: "get --raw /openapi/v2", out: `"swagger":"2.0"`},
			{args: "get --raw /openapi/v3", out: `"apis/apps/v1"`},
		}},
		{"answers about itself", []int{44}, []step{
			{args: "get --raw /healthz", out: `^ok$`},
			{args: "get --raw /livez", out: `^ok$`},
			{args: "get --raw /readyz", out: `^ok$`},
			{args: "get --raw /version", out: `"gitVersion": "v1\.37\.`},
			{args: "get --raw /metrics", out: `^apiserver_request_total\{`},
		}},
	} {
		t.Run(strings.ReplaceAll(group.name, ",", ""), func(t *testing.T) {
			features.Shows(t, group.rows...)
			k.steps(t, group.steps)
		})
	}
	t.Run("leaves alone what is as it should be", func(t *testing.T) {
		features.Shows(t, 7)
		version := step{args: "get cm one -o jsonpath={.metadata.resourceVersion}"}
		before, _, err := k.try(t, "", strings.Fields(version.args)...)
		if err != nil {
			t.Fatal(err)
		}
		k.steps(t, []step{{args: "apply -f one.yaml", out: `^configmap/one unchanged$`}, {args: version.args, out: "^" + before + "$"}})
	})
	t.Run("knows the API from its cache", func(t *testing.T) {
		features.Shows(t, 21, 34)
		if err := os.RemoveAll(filepath.Join(k.dir, ".kube", "cache")); err != nil {
			t.Fatal(err)
		}
		k.steps(t, []step{{args: "get pods -v=8", errs: `GET\b[^\n]*/api\?.*GET\b[^\n]*/apis\?`}})
		if _, err := os.Stat(filepath.Join(k.dir, ".kube", "cache", "discovery")); err != nil {
			t.Error(err)
		}
		_, errs, err := k.try(t, "", "get", "pods", "-v=8")
		if err != nil || strings.Contains(errs, "/apis?") {
			t.Errorf("the second time: %v\n%s", err, errs)
		}
	})
}

// TestKubeconfig is where kubectl takes server and credentials from.
func TestKubeconfig(t *testing.T) {
	t.Parallel()
	s := servertest.Start(t, nil)
	config := s.Listen(t)
	k := newKubectl(t, config)
	t.Run("flag before variable before home", func(t *testing.T) {
		features.Shows(t, 25, 26, 27, 28, 29)
		context := func(name, server string) string {
			return "apiVersion: v1\nkind: Config\ncurrent-context: " + name + "\ncontexts: [{name: " + name + ", context: {cluster: " + name + "}}]\nclusters: [{name: " + name + ", cluster: {server: '" + server + "'}}]\n"
		}
		k.write(t, map[string]string{
			"a.conf": context("a", "https://a"), "b.conf": context("b", "https://b"), ".kube/config": context("home", "https://home"),
		})
		own := k.env
		defer func() { k.env = own }()
		k.env = append(own, "KUBECONFIG=a.conf:b.conf")
		k.steps(t, []step{
			{args: "config get-contexts -o name", out: `^a\nb$`},
			{args: "--kubeconfig b.conf config get-contexts -o name", out: `^b\n$`},
			{args: "config use-context b", out: `b`},
			{args: "config view --minify -o jsonpath={.clusters[0].cluster.server}", out: `^https://b$`},
			{args: "config view --minify --context a -o jsonpath={.clusters[0].cluster.server}", out: `^https://a$`},
		})
		k.env = append(own, "KUBECONFIG=")
		k.steps(t, []step{{args: "config current-context", out: `^home$`}})
		k.env = own
		k.steps(t, []step{
			{args: "--server https://127.0.0.1:1 get --raw /version", fails: true, errs: `127.0.0.1:1`},
			{args: "auth whoami --as=jane", out: `Username +jane`},
		})
	})
	t.Run("a certificate is user and groups", func(t *testing.T) {
		features.Shows(t, 30)
		jane := newKubectl(t, s.CertConfig(t, strings.TrimPrefix(config.Host, "https://"), "jane", "developers", "testers"))
		jane.steps(t, []step{{args: "auth whoami", out: `Username +jane\nGroups +\[(developers testers|testers developers) system:authenticated\]`}})
	})
}
