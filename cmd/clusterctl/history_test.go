package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"github.com/clusterd/clusterd/apis/past"
	apiserver "github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/cmd/clusterd/storepast"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// ctl runs clusterctl against an API server over a real store, as one user.
type ctl struct {
	t          *testing.T
	kubeconfig string
	client     kubernetes.Interface
}

func startAPI(t *testing.T) (*servertest.Server, *rest.Config) {
	t.Helper()
	store := raftstoretest.New(t, 1, nil).Leader()
	s := servertest.Start(t, func(c *apiserver.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: apiserver.Caller})
		c.Past = storepast.New(store)
	})
	return s, s.Listen(t)
}

func newCtl(t *testing.T, config *rest.Config) *ctl {
	t.Helper()
	file := t.TempDir() + "/config"
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u", Namespace: "default"}},
		CurrentContext: "x",
	}, file)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return &ctl{t, file, client}
}

func (c *ctl) try(args ...string) (stdout, stderr string, err error) {
	c.t.Helper()
	var out, errOut bytes.Buffer
	root := newRoot(genericiooptions.IOStreams{In: &bytes.Buffer{}, Out: &out, ErrOut: &errOut}, kubeconfigSearch{})
	root.SetArgs(append(args, "--kubeconfig", c.kubeconfig, "--cache-dir", c.t.TempDir()))
	err = execute(root)
	return out.String(), errOut.String(), err
}

// execute runs a command; kubectl's end the process with their error.
func execute(root *cobra.Command) (err error) {
	cmdutil.BehaviorOnFatal(func(message string, _ int) { panic(fatal(message)) })
	defer cmdutil.DefaultBehaviorOnFatal()
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case fatal:
			err = errors.New(string(fault))
		default:
			panic(fault)
		}
	}()
	return root.Execute()
}

type fatal string

func (c *ctl) run(args ...string) string {
	c.t.Helper()
	out, errOut, err := c.try(args...)
	if err != nil {
		c.t.Fatalf("clusterctl %s: %v\n%s", strings.Join(args, " "), err, errOut)
	}
	return out
}

// refused runs a command that has to fail and say so.
func (c *ctl) refused(say string, args ...string) {
	c.t.Helper()
	out, _, err := c.try(args...)
	if err == nil || !strings.Contains(err.Error(), say) {
		c.t.Errorf("clusterctl %s: %v, want it to say %q\n%s", strings.Join(args, " "), err, say, out)
	}
}

func matches(t *testing.T, text string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile(`(?m)` + p).MatchString(text) {
			t.Errorf("%q does not occur in:\n%s", p, text)
		}
	}
}

func deployment(image string, replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": "web"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: image}}},
			},
		},
	}
}

// An object's life, seen and taken back with the commands that users have.
func TestHistoryCommands(t *testing.T) {
	s, config := startAPI(t)
	c := newCtl(t, config)
	ctx := t.Context()
	deploys := c.client.AppsV1().Deployments("default")
	first, err := deploys.Create(ctx, deployment("app:1", 2), metav1.CreateOptions{FieldManager: "ci"})
	if err != nil {
		t.Fatal(err)
	}
	patch := func(sub, body string) {
		t.Helper()
		var subs []string
		if sub != "" {
			subs = []string{sub}
		}
		if _, err := deploys.Patch(ctx, "web", types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{}, subs...); err != nil {
			t.Fatal(err)
		}
	}
	patch("", `{"spec":{"replicas":3,"template":{"spec":{"containers":[{"name":"web","image":"app:2"}]}}}}`)
	patch("status", `{"status":{"replicas":3,"observedGeneration":2}}`)
	patch("", `{"metadata":{"annotations":{"deployment.kubernetes.io/revision":"2"}}}`)

	out := c.run("history", "deploy/web")
	matches(t, out,
		`^REVISION +TIME +CHANGE +USER +SERVER +FIELDS$`,
		`^`+first.ResourceVersion+` +20\S+Z +added +admin via \S+ \(ci\) +- *$`,
		`^\d+ +20\S+Z +modified +admin via \S+ +- +spec.replicas: 2 → 3; spec.template.spec.containers\[web\].image: app:1 → app:2$`,
		`^\d+ +20\S+Z +status +admin via \S+ +- +status.observedGeneration: 2 added; status.replicas: 3 added$`,
	)
	var h past.History
	if err := json.Unmarshal([]byte(c.run("history", "deployments.apps", "web", "-o", "json", "--limit", "2")), &h); err != nil || len(h.Changes) != 2 || !h.More {
		t.Errorf("history as JSON: %v %+v", err, h)
	}

	// The past is shown as the present is.
	matches(t, c.run("get", "deploy/web", "--at", first.ResourceVersion, "-o", "jsonpath={.spec.replicas} {.metadata.resourceVersion}"), `^2 `+first.ResourceVersion+`$`)
	matches(t, c.run("get", "deploy,cm", "--at", first.ResourceVersion), `^deployment.apps/web +0/2`)
	matches(t, c.run("get", "deploy", "-A", "-o", "wide", "--at", first.ResourceVersion), `^default +web .* app:1 `)
	matches(t, c.run("get", "deploy", "web"), `^web +0/3`)
	matches(t, c.run("describe", "deploy", "web", "--at", first.ResourceVersion), `Image: +app:1`, `Replicas: +2 desired`)
	c.refused("the oldest revision is", "get", "deploy/web", "--at=-999h")
	c.refused("did you mean -10m?", "get", "deploy/web", "--at=10m")
	c.refused("cannot be combined with --watch", "get", "deploy/web", "--at=5", "--watch")

	diff := c.run("history", "diff", "deploy/web", "--from", first.ResourceVersion)
	matches(t, diff, `^--- deployments.apps/web at `+first.ResourceVersion+`$`, `^\+\+\+ deployments.apps/web at now$`, `^-  replicas: 2$`, `^\+  replicas: 3$`, `^\+.*image: app:2$`)
	if strings.Contains(diff, "managedFields") {
		t.Errorf("managed fields are in the diff:\n%s", diff)
	}
	// The last change of what was asked for is the one of the replicas; what came
	// after it is shown too.
	matches(t, c.run("history", "diff", "deploy/web"), `^-  replicas: 2$`, `^\+    deployment.kubernetes.io/revision: "2"$`)

	// Undoing ignores what controllers wrote, and leaves it.
	matches(t, c.run("undo", "deploy/web", "--dry-run=server"), `is as it was at revision `+first.ResourceVersion+` again.*server dry run`)
	if d, err := deploys.Get(ctx, "web", metav1.GetOptions{}); err != nil || *d.Spec.Replicas != 3 {
		t.Errorf("after a dry run: %v, %v", d.Spec.Replicas, err)
	}
	matches(t, c.run("undo", "deploy/web"), `^deployments.apps/web is as it was at revision `+first.ResourceVersion+` again, now as revision \d+$`)
	d, err := deploys.Get(ctx, "web", metav1.GetOptions{})
	if err != nil || *d.Spec.Replicas != 2 || d.Spec.Template.Spec.Containers[0].Image != "app:1" ||
		d.Annotations["deployment.kubernetes.io/revision"] != "2" || d.Status.Replicas != 3 || d.UID != first.UID {
		t.Errorf("undone: %+v, %v", d, err)
	}
	c.refused("is as it was at revision "+first.ResourceVersion+" already", "undo", "deploy/web", "--to", first.ResourceVersion)
	c.run("undo", "deploy/web") // and back
	if d, err := deploys.Get(ctx, "web", metav1.GetOptions{}); err != nil || *d.Spec.Replicas != 3 {
		t.Errorf("undone twice: %+v, %v", d, err)
	}

	// A deleted object.
	if err := deploys.Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	out = c.run("history", "deploy/web")
	matches(t, out, `^\d+ +20\S+Z +deleted +admin via \S+ +- *$`, `clusterctl-undo`)
	matches(t, c.run("history", "diff", "deploy/web"), `^-  replicas: 3$`)
	matches(t, c.run("undo", "deploy/web"), `^deployments.apps/web was created again as it was at revision \d+, now as revision \d+$`)
	d, err = deploys.Get(ctx, "web", metav1.GetOptions{})
	if err != nil || *d.Spec.Replicas != 3 || d.UID == first.UID || d.Status.Replicas != 0 || d.Annotations["deployment.kubernetes.io/revision"] != "" {
		t.Errorf("created again: %+v, %v", d, err)
	}
	c.refused("did not exist at", "undo", "deploy/web", "--to", "2")

	// Of a deleted Job and a claim what the server made of their identity stays away.
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "once"}, Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "i"}},
	}}}}
	if _, err := c.client.BatchV1().Jobs("default").Create(ctx, job, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data", Annotations: map[string]string{"pv.kubernetes.io/bind-completed": "yes", "own": "kept"}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: "gone",
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
	if _, err := c.client.CoreV1().PersistentVolumeClaims("default").Create(ctx, claim, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	background := metav1.DeletePropagationBackground
	if err := c.client.BatchV1().Jobs("default").Delete(ctx, "once", metav1.DeleteOptions{PropagationPolicy: &background}); err != nil {
		t.Fatal(err)
	}
	if err := c.client.CoreV1().PersistentVolumeClaims("default").Delete(ctx, "data", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.CoreV1().PersistentVolumeClaims("default").Patch(ctx, "data", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	matches(t, c.run("undo", "job/once"), `^jobs.batch/once was created again`)
	matches(t, c.run("undo", "pvc/data"), `^persistentvolumeclaims/data was created again .*; its volume gone is gone, with what was on it: it gets another one$`)
	again, err := c.client.CoreV1().PersistentVolumeClaims("default").Get(ctx, "data", metav1.GetOptions{})
	if err != nil || again.Spec.VolumeName != "" || len(again.Annotations) != 1 || again.Annotations["own"] != "kept" {
		t.Errorf("claim created again: %+v, %v", again, err)
	}

	// What undo cannot do.
	c.refused(`doesn't have a resource type "widgets"`, "history", "widgets/a")
	c.refused("neither now nor in the history", "history", "deploy/other")
	c.refused("neither now nor in the history", "undo", "deploy/other")
	c.refused("give one object", "undo", "deploy")
	c.refused("give one object", "history", "deploy/web", "deploy/other")
	c.refused("is no moment", "undo", "deploy/web", "--to", "monday")
	c.refused("none or server", "undo", "deploy/web", "--dry-run=client")
	c.refused("between 1 and", "history", "deploy/web", "--limit", "0")
	c.refused("json, yaml or wide", "history", "deploy/web", "-o", "table")
	if _, err := c.client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "once"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.refused("no earlier state of configmaps/once is in the history, which begins with revision", "undo", "cm/once")
	yes := true
	owned := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owned", OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "apps/v1", Kind: "Deployment", Name: "web", UID: d.UID, Controller: &yes},
	}}}
	if owned, err = c.client.CoreV1().ConfigMaps("default").Create(ctx, owned, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	owned.Data = map[string]string{"a": "b"}
	if _, err = c.client.CoreV1().ConfigMaps("default").Update(ctx, owned, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.refused("is controlled by Deployment web", "undo", "cm/owned")

	// Secrets: the right to get is needed, and values are not shown.
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "key"}, StringData: map[string]string{"password": "first"}}
	if secret, err = c.client.CoreV1().Secrets("default").Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	secret.Data["password"] = []byte("second")
	if _, err = c.client.CoreV1().Secrets("default").Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	out = c.run("history", "secret/key", "-o", "wide")
	if matches(t, out, `data.password changed`); strings.Contains(out, "c2Vjb25k") || strings.Contains(out, "second") {
		t.Errorf("a Secret's value is shown:\n%s", out)
	}
	eve := newCtl(t, s.CertConfig(t, strings.TrimPrefix(config.Host, "https://"), "eve"))
	for _, args := range [][]string{
		{"history", "secret/key"}, {"history", "diff", "secret/key", "--from", "5"}, {"undo", "secret/key"}, {"get", "secrets", "--at", "5"},
	} {
		eve.refused("forbidden", args...)
	}
}

// What a server that is not clusterd answers must not be taken for the past.
func TestLookingBackNeedsAServerThatCan(t *testing.T) {
	s := newServer(t)
	s.answers("GET /api", 200, `{"kind":"APIVersions","versions":["v1"]}`)
	s.answers("GET /apis", 200, `{"kind":"APIGroupList","apiVersion":"v1","groups":[]}`)
	s.answers("GET /api/v1", 200, `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"configmaps","singularName":"configmap","namespaced":true,"kind":"ConfigMap","verbs":["get","list"]}]}`)
	s.answers("GET /api/v1/namespaces/default/configmaps/a", 200, `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a"}}`)
	for _, args := range [][]string{{"get", "configmaps/a", "--at", "5"}, {"history", "configmaps/a"}, {"undo", "configmaps/a"}} {
		if out, _, err := s.run(t, nil, args...); err == nil || !strings.Contains(err.Error(), "not a clusterd server") {
			t.Errorf("%v: %q, %v", args, out, err)
		}
	}
}

// An update that comes between is not overwritten.
func TestUndoMeetsAnotherChange(t *testing.T) {
	s := newServer(t)
	s.answers("GET /api", 200, `{"kind":"APIVersions","versions":["v1"]}`)
	s.answers("GET /apis", 200, `{"kind":"APIGroupList","apiVersion":"v1","groups":[]}`)
	s.answers("GET /api/v1", 200, `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"configmaps","singularName":"configmap","namespaced":true,"kind":"ConfigMap","verbs":["get","list","update"]}]}`)
	s.answers("GET /api/v1/namespaces/default/configmaps/a", 200, `{"changes":[
		{"type":"ADDED","revision":"5","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a","uid":"u","resourceVersion":"5"},"data":{"k":"1"}}},
		{"type":"MODIFIED","revision":"6","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a","uid":"u","resourceVersion":"6","managedFields":[{"manager":"m"}]},"data":{"k":"2"}}}],
		"oldestRevision":"1","newestRevision":"7"}`)
	s.answers("PUT /api/v1/namespaces/default/configmaps/a", 409, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Conflict","code":409,"message":"the object has been modified"}`)
	_, _, err := s.run(t, nil, "undo", "configmaps/a")
	if err == nil || !strings.Contains(err.Error(), "changed meanwhile, nothing was undone") {
		t.Errorf("%v", err)
	}
	sent := s.seen[len(s.seen)-1]
	if want := `PUT /api/v1/namespaces/default/configmaps/a {"apiVersion":"v1","data":{"k":"1"},"kind":"ConfigMap","metadata":{"name":"a","resourceVersion":"6","uid":"u"}}`; sent != want {
		t.Errorf("sent %s\nwant %s", sent, want)
	}
}
