package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	agentpod "github.com/clusterd/clusterd/agent/pod"
	ournames "github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// coldBootAfter is --start-without-api-after of these tests.
const coldBootAfter = 5 * time.Second

// coldBoot is a node whose machine loses its power, and boots with no API in reach.
type coldBoot struct {
	*env
	ns   string
	node cluster.Node
	uids map[string]string // of pods by name
}

// TestE2EColdBoot: an agent whose power is cut, and which finds no server after its boot,
// starts its last pods from its own records: with ConfigMap, Secret, token, Service names and
// the volume that is its own. It does not start what had ended, and what may run elsewhere by now.
// When the network is back, pods that were deleted meanwhile end, and the others run on in the same containers.
func TestE2EColdBoot(t *testing.T) {
	e := startBare(t, 1, func(c *cluster.Config) {
		c.Agents = 1
		c.Args = []string{"--start-without-api-after=" + coldBootAfter.String()}
	})
	e.ready(2)
	c := &coldBoot{env: e, ns: e.namespace("coldboot"), node: e.node("a1"), uids: map[string]string{}}
	c.workload()
	web := c.podReady(c.ns, "web")
	c.recorded("web", "client", "local", "doomed", "deleted")

	c.cutPower("a1")
	c.must(e.Partition("a1"))
	now := metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}
	c.must(e.api.CoreV1().Pods(c.ns).Delete(t.Context(), "doomed", now)) // it is no more
	c.must(e.api.CoreV1().Pods(c.ns).Delete(t.Context(), "deleted", metav1.DeleteOptions{}))
	boot := time.Now()
	c.must(e.Start(t.Context(), "a1"))
	alone := c.startedAlone("web", "client", "local", "doomed", "deleted")
	t.Logf("pods run %s after the start of clusterd, which waits %s for the API", time.Since(boot).Round(10*time.Millisecond), coldBootAfter)
	c.answers(web)
	c.hasItsObjects()
	for _, name := range []string{"job", "fenced", "shared"} {
		if list := c.containers(name); len(list) > 0 {
			t.Errorf("%s was started without the API: %+v", name, list)
		}
	}
	if out, errs, code := e.run(e.Bin("clusterd"), "", "containers", "--data", c.node.Data); code != 0 || !strings.Contains(out, "Running(unconfirmed)") {
		t.Errorf("clusterd containers: exit %d: %s%s", code, out, errs)
	}

	back := time.Now()
	c.must(e.Heal("a1"))
	e.backSince(back, "a1")
	e.eventually("the deleted pods have ended", func(context.Context) error {
		return errors.Join(c.none("doomed"), c.none("deleted"))
	})
	c.podReady(c.ns, "shared") // nothing is in its way now
	c.confirmed(alone, "web", "client", "local")
	if job, err := e.api.CoreV1().Pods(c.ns).List(t.Context(), metav1.ListOptions{LabelSelector: "job-name=job"}); err != nil || len(job.Items) != 1 || job.Items[0].Status.Phase != corev1.PodSucceeded || job.Items[0].Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("pods of the job that had ended: %v, %v", err, job)
	}
	e.eventuallyHas([]string{"-n", c.ns, "get", "events"}, "StartedWithoutAPI")
}

// TestE2EColdBootWithoutQuorum: the same on a server that is alone of three.
func TestE2EColdBootWithoutQuorum(t *testing.T) {
	e := startBare(t, 3, func(c *cluster.Config) { c.Args = []string{"--start-without-api-after=" + coldBootAfter.String()} })
	e.ready(3)
	c := &coldBoot{env: e, ns: e.namespace("coldboot"), node: e.node("n1"), uids: map[string]string{}}
	c.workload()
	web := c.podReady(c.ns, "web")
	c.recorded("web", "client", "local")
	c.must(errors.Join(e.PowerOff("n2"), e.PowerOff("n3")))
	c.cutPower("n1")
	boot := time.Now()
	c.must(e.Start(t.Context(), "n1"))
	alone := c.startedAlone("web", "client", "local")
	t.Logf("pods run %s after the start of clusterd, which waits %s for the API", time.Since(boot).Round(10*time.Millisecond), coldBootAfter)
	c.answers(web)
	c.hasItsObjects()
	for _, name := range []string{"job", "fenced", "shared"} {
		if list := c.containers(name); len(list) > 0 {
			t.Errorf("%s was started without the API: %+v", name, list)
		}
	}
	c.must(errors.Join(e.Start(t.Context(), "n2"), e.Start(t.Context(), "n3")))
	c.podReady(c.ns, "shared")
	c.confirmed(alone, "web", "client", "local")
}

// cutPower leaves of the machine what a boot would find: its disk. Processes end, and what
// is mounted below its data directory, podmon's records in memory among it, is gone.
func (c *coldBoot) cutPower(node string) {
	c.t.Helper()
	c.must(c.PowerOff(node))
	b, err := os.ReadFile("/proc/self/mountinfo")
	c.must(err)
	var points []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], c.node.Data+"/") {
			points = append(points, f[4])
		}
	}
	for _, p := range slices.Backward(points) {
		c.must(unix.Unmount(p, unix.MNT_DETACH))
	}
	if len(points) == 0 {
		c.t.Fatal("nothing was mounted")
	}
}

// workload puts pods of all sorts on the node, and waits until they are as they should be.
func (c *coldBoot) workload() {
	c.t.Helper()
	ctx := c.t.Context()
	core := c.api.CoreV1()
	_, err := core.ConfigMaps(c.ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "config"}, Data: map[string]string{"COLD_WORD": "from-the-configmap"}}, metav1.CreateOptions{})
	c.must(err)
	_, err = core.Secrets(c.ns).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "secret"}, StringData: map[string]string{"word": hidden["the Secret"]}}, metav1.CreateOptions{})
	c.must(err)
	_, err = core.Services(c.ns).Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{})
	c.must(err)
	c.volume("local", &corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: c.t.TempDir()}})
	c.volume("shared", &corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: c.t.TempDir()}})
	c.volume("fenced", &corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: c.t.TempDir()}})

	web := pod("web")
	web.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}}
	web.Spec.Volumes = []corev1.Volume{
		{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "secret"}}},
		{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
	}
	web.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "secret", MountPath: "/secret"}, {Name: "data", MountPath: "/data"}}
	client := pod("client", "sleep")
	client.Spec.InitContainers = []corev1.Container{
		{Name: "env", Image: image, Args: []string{"env"}, EnvFrom: web.Spec.Containers[0].EnvFrom},
		{Name: "fetch", Image: image, Args: []string{"fetch", "http://web." + c.ns + ".svc.cluster.local/"}},
	}
	withClaim := func(p *corev1.Pod) *corev1.Pod {
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: p.Name}}}}
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
		return p
	}
	fenced := withClaim(pod("fenced", "sleep"))
	fenced.Annotations = map[string]string{ournames.SelfFencing: "true"}
	pods := []*corev1.Pod{web, client, withClaim(pod("local", "sleep")), withClaim(pod("shared", "sleep")), fenced, pod("doomed", "sleep"), pod("deleted", "sleep")}
	for _, p := range pods {
		// A busy machine boots slowly: the leader is not to evict them meanwhile.
		p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}
		c.create(c.ns, on(c.node.Name, p))
	}
	job := on(c.node.Name, pod("job", "exit", "0"))
	job.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	_, err = c.api.BatchV1().Jobs(c.ns).Create(ctx, &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "job"}, Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: job.Spec}}}, metav1.CreateOptions{})
	c.must(err)
	for _, p := range pods {
		c.uids[p.Name] = string(c.podReady(c.ns, p.Name).UID)
	}
	c.podIs(c.ns, "fenced", "said to end with its node's lease", func(p *corev1.Pod) error {
		if cond := podCondition(p, ournames.SelfFencingCondition); cond == nil || cond.Status != corev1.ConditionTrue {
			return errors.New("it is not")
		}
		return nil
	})
	c.eventually("the job is done", func(ctx context.Context) error {
		j, err := c.api.BatchV1().Jobs(c.ns).Get(ctx, "job", metav1.GetOptions{})
		if err == nil && j.Status.Succeeded != 1 {
			err = fmt.Errorf("%+v", j.Status)
		}
		return err
	})
	c.must(os.WriteFile(c.volumePath("web", "empty-dir", "data", "word"), []byte("of the first life"), 0o644))
}

// volume makes a claim and the volume that it is bound to.
func (c *coldBoot) volume(name string, source *corev1.PersistentVolumeSource) {
	c.t.Helper()
	spec := corev1.PersistentVolumeSpec{
		Capacity: someSpace, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: *source, StorageClassName: "by-hand", ClaimRef: &corev1.ObjectReference{Namespace: c.ns, Name: name},
	}
	if source.Local != nil {
		spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{c.node.Name}}},
		}}}}
	}
	_, err := c.api.CoreV1().PersistentVolumes().Create(c.t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "coldboot-" + name}, Spec: spec}, metav1.CreateOptions{})
	c.must(err)
	_, err = c.api.CoreV1().PersistentVolumeClaims(c.ns).Create(c.t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: spec.AccessModes, StorageClassName: ptr.To("by-hand"), VolumeName: "coldboot-" + name, Resources: corev1.VolumeResourceRequirements{Requests: someSpace},
	}}, metav1.CreateOptions{})
	c.must(err)
}

// volumePath is a file of a pod's volume, on the node.
func (c *coldBoot) volumePath(pod, kind string, elem ...string) string {
	return filepath.Join(append([]string{c.node.Data, "pods", c.uids[pod], "volumes", "kubernetes.io~" + kind}, elem...)...)
}

// token is the service account token of the pod web, as it is in its volume.
func (c *coldBoot) token() string {
	c.t.Helper()
	files, err := filepath.Glob(c.volumePath("web", "projected", "*", "token"))
	if err != nil || len(files) != 1 {
		c.t.Fatal(files, err)
	}
	b, err := os.ReadFile(files[0])
	c.must(err)
	return string(b)
}

// recorded waits until the node has these pods, the cluster and what they were given on
// disk, and looks that nothing of it is there in clear.
func (c *coldBoot) recorded(pods ...string) {
	c.t.Helper()
	dir := filepath.Join(c.node.Data, "checkpoint")
	c.eventually("the node has its pods on record", func(context.Context) error {
		for _, name := range pods {
			if _, err := os.Stat(filepath.Join(dir, "pods", c.uids[name])); err != nil {
				return err
			}
		}
		if _, err := os.Stat(filepath.Join(dir, "cluster")); err != nil {
			return err
		}
		files, err := os.ReadDir(filepath.Join(dir, "pods"))
		if want := 7; err == nil && len(files) < want {
			err = fmt.Errorf("%d records", len(files))
		}
		return err
	})
	// The cluster's record is written once a minute at most: one that is younger than what
	// is made now has all that was before, the endpoints of web among it.
	began := time.Now()
	_, err := c.api.CoreV1().Services(c.ns).Create(c.t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "late"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
	c.must(err)
	c.within(2*time.Minute, "the record of the cluster is written", func(context.Context) error {
		st, err := os.Stat(filepath.Join(dir, "cluster"))
		if err == nil && !st.ModTime().After(began) {
			err = errors.New("it is older")
		}
		return err
	})
	searchFiles(c.t, filepath.Join(c.node.Data, "checkpoint"), c.token())
	searchFiles(c.t, filepath.Join(c.node.Data, "pods"), c.token())
	searchFiles(c.t, filepath.Join(c.node.Data, "podmon"), c.token())
}

// containers are what the node's podmon holds of a pod, without sandboxes.
func (c *coldBoot) containers(name string) (out []agentpod.RuntimeRecord) {
	text, _, code := c.run(c.Bin("clusterd"), "", "containers", "--data", c.node.Data, "-o", "json")
	if code != 0 {
		return nil // podmon has not been started yet
	}
	var all []agentpod.RuntimeRecord
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		c.t.Fatal(err)
	}
	for _, r := range all {
		if (r.Pod == name || strings.HasPrefix(r.Pod, name+"-")) && r.Type != agentpod.TypeSandbox {
			out = append(out, r)
		}
	}
	return out
}

func (c *coldBoot) none(name string) error {
	if list := c.containers(name); len(list) > 0 {
		return fmt.Errorf("%s has containers: %+v", name, list)
	}
	return nil
}

// main is the running container "main" of a pod.
func (c *coldBoot) main(name string) (r agentpod.RuntimeRecord, err error) {
	list := slices.DeleteFunc(c.containers(name), func(r agentpod.RuntimeRecord) bool { return r.Name != "main" || !r.Running })
	if len(list) != 1 {
		return r, fmt.Errorf("%s: %d running containers", name, len(list))
	}
	return list[0], nil
}

// startedAlone waits until these pods run, unconfirmed, and returns their containers.
func (c *coldBoot) startedAlone(pods ...string) map[string]string {
	c.t.Helper()
	ids := map[string]string{}
	c.within(2*time.Minute, "the pods run without the API", func(context.Context) error {
		for _, name := range pods {
			r, err := c.main(name)
			if err != nil {
				return err
			}
			if !r.Unconfirmed {
				c.t.Fatalf("%s runs and is not unconfirmed", name)
			}
			ids[name] = r.ID
		}
		return nil
	})
	return ids
}

// answers looks that the web server answers over the pod network, at its former address.
func (c *coldBoot) answers(web *corev1.Pod) {
	c.t.Helper()
	c.eventually("web answers on its node", func(context.Context) error {
		text, err := c.page(c.node.Name, web.Status.PodIP)
		if err == nil && !strings.Contains(text, "web") {
			err = errors.New(text)
		}
		return err
	})
}

// hasItsObjects looks for what the pods were given of the API's.
func (c *coldBoot) hasItsObjects() {
	c.t.Helper()
	for file, want := range map[string]string{
		c.volumePath("web", "secret", "secret", "word"):  hidden["the Secret"],
		c.volumePath("web", "empty-dir", "data", "word"): "of the first life",
	} {
		if b, err := os.ReadFile(file); err != nil || string(b) != want {
			c.t.Errorf("%s: %q, %v", file, b, err)
		}
	}
	if parts := strings.Split(c.token(), "."); len(parts) != 3 {
		c.t.Errorf("the token of web has %d parts", len(parts))
	}
	for _, r := range c.containers("client") {
		b, err := os.ReadFile(r.LogPath)
		c.must(err)
		switch r.Name {
		case "env":
			mustContain(c.t, "the environment", string(b), "COLD_WORD=from-the-configmap", "WEB_SERVICE_HOST=")
		case "fetch":
			mustContain(c.t, "the answer of the Service", string(b), "web")
		}
	}
}

// confirmed waits until these pods are known to the API as they are, in the containers
// that they were started in.
func (c *coldBoot) confirmed(ids map[string]string, pods ...string) {
	c.t.Helper()
	for _, name := range pods {
		c.podIs(c.ns, name, "confirmed", func(p *corev1.Pod) error {
			if len(p.Status.ContainerStatuses) != 1 || string(p.UID) != c.uids[name] {
				return fmt.Errorf("it is another: %s", p.UID)
			}
			if id := p.Status.ContainerStatuses[0].ContainerID; !podReady(p) || !strings.HasSuffix(id, ids[name]) {
				return fmt.Errorf("container %s, was started in %s", id, ids[name])
			}
			return nil
		})
		r, err := c.main(name)
		c.must(err)
		if r.ID != ids[name] {
			c.t.Errorf("%s runs in %s, and was started in %s", name, r.ID, ids[name])
		}
	}
	c.eventually("nothing is unconfirmed", func(context.Context) error {
		for name := range maps.Keys(ids) {
			for _, r := range c.containers(name) {
				if r.Unconfirmed {
					return fmt.Errorf("%s is", name)
				}
			}
		}
		return nil
	})
}
