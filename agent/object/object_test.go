package object

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

const ns = "default"

func configMap(name, value string) *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Data: map[string]string{"k": value}}
}

// news is one call of a Cache's changed.
type news struct {
	pod types.UID
	ref Ref
}

func newCache(t *testing.T, objects ...runtime.Object) (*Cache, *fake.Clientset, chan news) {
	t.Helper()
	client := fake.NewClientset(objects...)
	changed := make(chan news, 100)
	c := New(client, func(pod types.UID, ref Ref) { changed <- news{pod, ref} })
	t.Cleanup(c.Close)
	return c, client, changed
}

// reported waits until each of the pods was told of the object.
func reported(t *testing.T, changed chan news, ref Ref, pods ...types.UID) {
	t.Helper()
	deadline := time.After(time.Minute)
	for len(pods) > 0 {
		select {
		case n := <-changed:
			if i := slices.Index(pods, n.pod); n.ref == ref && i >= 0 {
				pods = slices.Delete(pods, i, i+1)
			}
		case <-deadline:
			t.Fatalf("%v were not told of %v", pods, ref)
		}
	}
}

// watched says which watches of the resource have been asked for: namespace and field selector.
func watched(client *fake.Clientset, resource string) []string {
	var out []string
	for _, a := range client.Actions() {
		if w, ok := a.(clienttesting.WatchAction); ok && w.GetResource().Resource == resource {
			out = append(out, w.GetNamespace()+" "+w.GetWatchRestrictions().Fields.String())
		}
	}
	return out
}

// TestObjectsInUse: an object is watched, by its name alone, while a pod holds it, and
// those who hold it are told of its changes.
func TestObjectsInUse(t *testing.T) {
	c, client, changed := newCache(t, configMap("a", "1"))
	ref := Ref{ConfigMaps, ns, "a"}
	c.Acquire("p1", []Ref{ref})
	c.Acquire("p2", []Ref{ref, {Secrets, ns, "late"}})
	if cm, err := c.ConfigMap(t.Context(), ns, "a"); err != nil || cm.Data["k"] != "1" {
		t.Fatalf("%v, %v", cm, err)
	}
	// The watch begins after the list has been answered, which is what ConfigMap waits for.
	want := []string{"default metadata.name=a"}
	deadline := time.Now().Add(time.Minute)
	for got := watched(client, "configmaps"); !slices.Equal(got, want); got = watched(client, "configmaps") {
		if len(got) > 0 || time.Now().After(deadline) {
			t.Fatalf("watched: %q, want %q", got, want)
		}
		time.Sleep(time.Millisecond)
	}
	reported(t, changed, ref, "p1")
	if _, err := client.CoreV1().ConfigMaps(ns).Update(t.Context(), configMap("a", "2"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	reported(t, changed, ref, "p1", "p2")
	// What the watch shows is what is read.
	for cm, err := c.ConfigMap(t.Context(), ns, "a"); ; cm, err = c.ConfigMap(t.Context(), ns, "a") {
		if err != nil {
			t.Fatal(err)
		}
		if cm.Data["k"] == "2" {
			break
		}
		<-changed
	}
	// One that is not there is missing until it comes.
	if _, err := c.Secret(t.Context(), ns, "late"); !apierrors.IsNotFound(err) || err.Error() != `secret "late" not found` {
		t.Errorf("a Secret that is not there: %v", err)
	}
	if _, err := client.CoreV1().Secrets(ns).Create(t.Context(), &v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "late"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	reported(t, changed, Ref{Secrets, ns, "late"}, "p2")
	if _, err := c.Secret(t.Context(), ns, "late"); err != nil {
		t.Errorf("a Secret that has come: %v", err)
	}

	// The watch ends with the last pod, and not before.
	c.mu.Lock()
	e := c.entries[ref]
	c.mu.Unlock()
	c.Release("p1")
	select {
	case <-e.done:
		t.Error("the watch has ended though a pod holds the object")
	default:
	}
	c.Acquire("p2", []Ref{{Secrets, ns, "late"}})
	<-e.done
	c.mu.Lock()
	if _, held := c.entries[ref]; held || len(c.entries) != 1 || len(c.pods) != 1 {
		t.Errorf("held: %v by %v", c.entries, c.pods)
	}
	c.mu.Unlock()
	// One that nobody holds is asked for.
	if cm, err := c.ConfigMap(t.Context(), ns, "a"); err != nil || cm.Data["k"] != "2" {
		t.Errorf("not held: %v, %v", cm, err)
	}
	c.Close()
	c.Acquire("p3", []Ref{ref})
	if c.pods["p3"] != nil {
		t.Error("a closed cache watches")
	}
}

// TestRefusedIsAskedFor: where a watch may not begin, the error is the API's.
func TestRefusedIsAskedFor(t *testing.T) {
	c, client, _ := newCache(t)
	client.PrependReactor("*", "secrets", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(v1.Resource("secrets"), "s", nil)
	})
	if _, err := c.Secret(t.Context(), ns, "s"); !apierrors.IsForbidden(err) {
		t.Error(err)
	}
}

// TestTrustBundlesOf: the bundles of a signer come in the order of their names, held or
// not.
func TestTrustBundlesOf(t *testing.T) {
	bundle := func(name string) *certificatesv1.ClusterTrustBundle {
		return &certificatesv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certificatesv1.ClusterTrustBundleSpec{SignerName: "example.com/s"}}
	}
	c, _, _ := newCache(t, bundle("b"), bundle("a"))
	for _, held := range []bool{false, true} {
		if held {
			c.Acquire("p", []Ref{{Resource: SignerBundles, Name: "example.com/s"}})
		}
		list, err := c.TrustBundlesOf(t.Context(), "example.com/s")
		if err != nil || len(list) != 2 || list[0].Name != "a" || list[1].Name != "b" {
			t.Errorf("held %t: %v, %v", held, list, err)
		}
	}
	if b, err := c.TrustBundle(t.Context(), "b"); err != nil || b.Name != "b" {
		t.Errorf("%v, %v", b, err)
	}
}

// TestRefsOf: each place in which a pod names an object counts, once.
func TestRefsOf(t *testing.T) {
	local := func(name string) v1.LocalObjectReference { return v1.LocalObjectReference{Name: name} }
	from := func(cm, secret string) []v1.EnvFromSource {
		return []v1.EnvFromSource{{ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: local(cm)}}, {SecretRef: &v1.SecretEnvSource{LocalObjectReference: local(secret)}}}
	}
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns}, Spec: v1.PodSpec{
		Volumes: []v1.Volume{
			{VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: local("c1")}}},
			{VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "s1"}}},
			{VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
				{ConfigMap: &v1.ConfigMapProjection{LocalObjectReference: local("c2")}},
				{Secret: &v1.SecretProjection{LocalObjectReference: local("s2")}},
				{ClusterTrustBundle: &v1.ClusterTrustBundleProjection{Name: ptr.To("b1")}},
				{ClusterTrustBundle: &v1.ClusterTrustBundleProjection{SignerName: ptr.To("example.com/s")}},
				{ConfigMap: &v1.ConfigMapProjection{LocalObjectReference: local("c1")}},
			}}}},
			{VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
		},
		InitContainers: []v1.Container{{EnvFrom: from("c3", "s3")}},
		Containers: []v1.Container{{Env: []v1.EnvVar{
			{Name: "PLAIN", Value: "c9"},
			{Name: "C", ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: local("c4")}}},
			{Name: "S", ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: local("s4")}}},
		}}},
		EphemeralContainers: []v1.EphemeralContainer{{EphemeralContainerCommon: v1.EphemeralContainerCommon{EnvFrom: from("c5", "s1")}}},
		ImagePullSecrets:    []v1.LocalObjectReference{local("s5")},
	}}
	want := []Ref{
		{ConfigMaps, ns, "c1"}, {Secrets, ns, "s1"}, {ConfigMaps, ns, "c2"}, {Secrets, ns, "s2"},
		{TrustBundles, "", "b1"}, {SignerBundles, "", "example.com/s"},
		{ConfigMaps, ns, "c3"}, {Secrets, ns, "s3"}, {ConfigMaps, ns, "c4"}, {Secrets, ns, "s4"}, {ConfigMaps, ns, "c5"}, {Secrets, ns, "s5"},
	}
	if d := cmp.Diff(want, RefsOf(pod)); d != "" {
		t.Error(d)
	}
}

// TestHeld: what a pod holds, and what it holds and the API does not have, is known once the API
// has answered for all of it.
func TestHeld(t *testing.T) {
	c, _, _ := newCache(t, configMap("a", "1"))
	none := Ref{Secrets, ns, "optional"}
	c.Acquire("p", []Ref{{ConfigMaps, ns, "a"}, none})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		objects, absent, complete := c.Held("p")
		if complete {
			if len(objects) != 1 || !slices.Equal(absent, []Ref{none}) {
				t.Errorf("%v, without %v", objects, absent)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the API has not answered")
		}
	}
}
