package server_test

import (
	"bufio"
	"bytes"
	"cmp"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// kubectl runs the kubectl that CLUSTERD_KUBECTL names, or this machine's, as the given user would.
type kubectl struct {
	path, dir string
	env       []string
}

// newKubectl skips the test where there is no kubectl.
func newKubectl(t *testing.T, config *rest.Config) *kubectl {
	t.Helper()
	path, err := exec.LookPath(cmp.Or(os.Getenv("CLUSTERD_KUBECTL"), "kubectl"))
	if err != nil {
		t.Skip("no kubectl: make test builds one, or name one in CLUSTERD_KUBECTL")
	}
	dir := t.TempDir()
	kubeconfig := clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}
	file := filepath.Join(dir, "config")
	if err := clientcmd.WriteToFile(kubeconfig, file); err != nil {
		t.Fatal(err)
	}
	return &kubectl{path: path, dir: dir, env: append(os.Environ(),
		"KUBECONFIG="+file, "HOME="+dir, "TMPDIR="+dir, "NO_PROXY=127.0.0.1", "KUBECTL_EXTERNAL_DIFF=diff -u")}
}

// try runs kubectl with args and stdin and returns what it wrote and how it
// ended.
func (k *kubectl) try(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), k.path, args...)
	cmd.Env, cmd.Dir, cmd.Stdin = k.env, k.dir, strings.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = 10 * time.Second
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// step is one command and what it has to say.
type step struct {
	args  string // split at spaces; "|" stands for a space within an argument
	stdin string
	fails bool
	// out and errs are regular expressions on standard output and error.
	out, errs string
	// never is what standard error must not match.
	never string
}

func (k *kubectl) steps(t *testing.T, steps []step) {
	t.Helper()
	for _, s := range steps {
		args := strings.Fields(s.args)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "|", " ")
		}
		out, errs, err := k.try(t, s.stdin, args...)
		if (err != nil) != s.fails {
			t.Errorf("kubectl %s: %v, want failure: %t\n%s%s", s.args, err, s.fails, out, errs)
			continue
		}
		if !regexp.MustCompile(`(?ms)` + s.out).MatchString(out) {
			t.Errorf("kubectl %s: output does not match %q:\n%s%s", s.args, s.out, out, errs)
		}
		if !regexp.MustCompile(`(?ms)` + s.errs).MatchString(errs) {
			t.Errorf("kubectl %s: errors do not match %q:\n%s", s.args, s.errs, errs)
		}
		if s.never != "" && regexp.MustCompile(s.never).MatchString(errs) {
			t.Errorf("kubectl %s: errors match %q:\n%s", s.args, s.never, errs)
		}
	}
}

const manifest = `
apiVersion: v1
kind: ConfigMap
metadata: {name: conf, labels: {app: web}}
data: {greeting: hello}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {app: web}}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: "web:1"}]
`

const podManifest = `
apiVersion: v1
kind: Pod
metadata: {name: solo, labels: {app: solo}}
spec:
  containers: [{name: main, image: "web:1"}]
`

func TestKubectl(t *testing.T) {
	t.Parallel()
	_, config, _ := withAgent(t)
	k := newKubectl(t, config)
	editor := filepath.Join(k.dir, "editor")
	script := "#!/bin/sh\nsed -i 's/^  greeting: .*/  greeting: edited/' \"$1\"\n"
	if err := os.WriteFile(editor, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	k.env = append(k.env, "KUBE_EDITOR="+editor)
	changed := strings.Replace(manifest, "greeting: hello", "greeting: bye", 1)

	k.steps(t, []step{
		{args: "version", out: `Server Version: v1\.37\.\d+`},
		{args: "auth whoami", out: `Username +admin\nGroups +\[system:masters system:authenticated\]`},
		{args: "auth can-i delete nodes", out: `^yes$`},
		{args: "auth can-i delete nodes --as=jane", fails: true, out: `^no$`},
		{args: "auth can-i --list --as=jane", out: `selfsubjectreviews.authentication.k8s.io`},
		{args: "api-versions", out: `^apps/v1\n.*^v1$`},
		{args: "api-resources", out: `^deployments +deploy +apps/v1 +true +Deployment$`},
		{args: "api-resources --categories=all -o name", out: `pods`},
		{args: "explain deployment.spec.replicas", out: `FIELD: replicas <integer>`},
		{args: "explain pods --recursive --output=plaintext-openapiv2", out: `containers`},

		{args: "get ns", out: `^NAME +STATUS +AGE\ndefault +Active`},
		{args: "create ns other", out: `^namespace/other created$`},
		{args: "get deploy", errs: `No resources found in default namespace`},
		{args: "apply -f -", stdin: manifest, out: `^configmap/conf created\ndeployment.apps/web created$`},
		{args: "apply -f -", stdin: manifest, out: `^configmap/conf unchanged\ndeployment.apps/web unchanged$`},
		{args: "diff -f -", stdin: changed, fails: true, out: `^-  greeting: hello\n\+  greeting: bye$`},
		{args: "apply -f - --dry-run=server", stdin: changed, out: `^configmap/conf configured \(server dry run\)$`},
		{args: "apply -f -", stdin: changed, out: `^configmap/conf configured\ndeployment.apps/web unchanged$`},
		{args: "apply --server-side -f -", stdin: podManifest, out: `^pod/solo serverside-applied$`},
		{args: "apply --server-side --field-manager=other -f -", stdin: strings.Replace(podManifest, "web:1", "web:2", 1), fails: true,
			errs: `conflict with "kubectl": \.spec\.containers\[name="main"\]\.image`},

		{args: "get pods", out: `^NAME +READY +STATUS +RESTARTS +AGE\n.*^solo +0/1 +Pending +0 +\d+s$`},
		{args: "get pods -o wide", out: `^NAME +READY +STATUS +RESTARTS +AGE +IP +NODE +NOMINATED NODE +READINESS GATES\n.*^one +0/1 +Pending +0 +\d+s +<none> +n1`},
		{args: "get pods -A", out: `^NAMESPACE +NAME`},
		{args: "get pods -l app=solo -o name", out: `^pod/solo$`},
		{args: "get pods --field-selector spec.nodeName=n2 -o name", out: `^pod/lost\n$`},
		{args: "get pod solo -o yaml", out: `^apiVersion: v1\nkind: Pod`},
		{args: "get pod solo -o json", out: `^\{\n +"apiVersion": "v1",\n +"kind": "Pod"`},
		{args: "get pod solo -o jsonpath={.spec.containers[0].image}", out: `^web:1$`},
		{args: "get pods --chunk-size=2 -o name", out: `pod/lost\npod/one\npod/refused\npod/solo`},
		{args: "get all", out: `deployment.apps/web +0/3`},
		{args: "get deploy web", out: `^NAME +READY +UP-TO-DATE +AVAILABLE +AGE\nweb +0/3 +0 +0`},
		{args: "get node n1", out: `^n1 +`},
		{args: "describe pod solo", out: `^Name: +solo`},
		{args: "describe deploy web", out: `^Selector: +app=web`},
		{args: "get --raw /readyz?verbose", out: `\[\+\]storage ok`},
		{args: "get --raw /metrics", out: `apiserver_admission_controller_admission_duration_seconds_count\{name="NamespaceLifecycle"`},

		{args: "label cm conf tier=front", out: `^configmap/conf labeled$`},
		{args: "annotate cm conf note=x", out: `^configmap/conf annotated$`},
		{args: `patch cm conf -p {"data":{"a":"1"}}`, out: `^configmap/conf patched$`},
		{args: `patch cm conf --type=merge -p {"data":{"b":"2"}}`, out: `^configmap/conf patched$`},
		{args: `patch cm conf --type=json -p [{"op":"add","path":"/data/c","value":"3"}]`, out: `^configmap/conf patched$`},
		{args: "edit cm conf", out: `^configmap/conf edited$`},
		{args: "get cm conf -o jsonpath={.data}{.metadata.labels.tier}", out: `^\{"a":"1","b":"2","c":"3","greeting":"edited"\}front$`},
		{args: "scale deploy web --replicas=5", out: `^deployment.apps/web scaled$`},
		{args: "get deploy web -o jsonpath={.spec.replicas}{.metadata.generation}", out: `^52$`},
		{args: "set image deploy/web web=web:2", out: `^deployment.apps/web image updated$`},
		{args: "cordon n1", out: `^node/n1 cordoned$`},
		{args: "get node n1", out: `SchedulingDisabled`},
		{args: "drain n1 --force --dry-run=server", out: `evicting pod default/one \(server dry run\).*^node/n1 drained \(server dry run\)$`},
		{args: "get pod one -o jsonpath={.metadata.deletionTimestamp}", out: `^$`},
		{args: "uncordon n1", out: `^node/n1 uncordoned$`},
		{args: "taint node n1 k=v:NoSchedule", out: `^node/n1 tainted$`},
		{args: "create cm quick --from-literal=x=y", out: `^configmap/quick created$`},
		{args: "create secret generic s --from-literal=x=y", out: `^secret/s created$`},
		{args: "create cm quick", fails: true, errs: `configmaps "quick" already exists`},
		{args: "run bare --image=web:1", out: `^pod/bare created$`},
		{args: "create deployment made --image=web:1 --replicas=2", out: `^deployment.apps/made created$`},
		{args: "expose deploy made --port=80", out: `^service/made exposed$`},

		{args: "logs one", out: `^one/main $`},
		{args: "logs two", out: `^two/main $`, errs: `Defaulted container "main" out of: main, side`},
		{args: "logs starting", fails: true, errs: `container "main" in pod "starting" is waiting to start: ContainerCreating`},
		{args: "exec one -- echo hi", out: `^one/main echo hi tty=false$`, errs: `oops`},
		{args: "exec one -- false", fails: true, errs: `command terminated with exit code 3`},
		{args: "exec -i two -c side -- cat", stdin: "meow ", out: `^meow two/side cat tty=false$`},

		{args: "apply -f - --validate=strict", stdin: strings.Replace(manifest, "replicas:", "replica:", 1), fails: true,
			errs: `strict decoding error: unknown field "spec.replica"`},
		{args: "apply -f -", stdin: strings.Replace(manifest, "kind: Deployment", "kind: Deploiment", 1), fails: true,
			errs: `no matches for kind "Deploiment" in version "apps/v1"`},
		{args: "delete ns default", fails: true, errs: `namespaces "default" is forbidden: this namespace may not be deleted`},
		{args: "-n ghost create cm x", fails: true, errs: `namespaces "ghost" not found`},
		{args: "get pods --as=jane", fails: true, errs: `pods is forbidden: User "jane" cannot list resource "pods" in API group "" in the namespace "default"`},

		{args: "delete cm quick", out: `^configmap "quick" deleted`},
		{args: "delete pod one --wait=false", out: `^pod "one" deleted`},
		{args: "get pod one", out: `Terminating`},
		{args: "delete pod one --force --grace-period=0", out: `deleted`},
		{args: "delete -f -", stdin: manifest, out: `^configmap "conf" deleted.*^deployment.apps "web" deleted`},
		{args: "delete pods --all --wait=false", out: `pod "two" deleted`},
	})
}

func TestKubectlWatches(t *testing.T) {
	t.Parallel()
	s := servertest.Start(t, nil)
	k := newKubectl(t, s.Listen(t))
	must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("early", nil), metav1.CreateOptions{}))

	features.Shows(t, 45)
	cmd := exec.CommandContext(t.Context(), k.path, "get", "cm", "-w", "--output-watch-events")
	cmd.Env = k.env
	out := must[io.ReadCloser](t)(cmd.StdoutPipe())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := time.AfterFunc(testTimeout, func() { cmd.Process.Kill() })
	defer stop.Stop()
	lines := bufio.NewScanner(out)
	expectLine := func(want string) {
		t.Helper()
		if !lines.Scan() || !regexp.MustCompile(want).MatchString(lines.Text()) {
			t.Fatalf("kubectl -w wrote %q, want %q", lines.Text(), want)
		}
	}
	maps := s.Client.CoreV1().ConfigMaps("default")
	expectLine(`^EVENT +NAME +DATA +AGE`)
	expectLine(`^ADDED +early +0`)
	later := must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("later", nil), metav1.CreateOptions{}))
	expectLine(`^ADDED +later +0`)
	later.Data = map[string]string{"a": "b"}
	must[*corev1.ConfigMap](t)(maps.Update(t.Context(), later, metav1.UpdateOptions{}))
	expectLine(`^MODIFIED +later +1`)
	if err := maps.Delete(t.Context(), "later", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	expectLine(`^DELETED +later +1`)
	cmd.Process.Kill()
	cmd.Wait()
}
