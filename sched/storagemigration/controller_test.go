package storagemigration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/clusterd/clusterd/sched/loop"
)

// server serves pans, which can be migrated, and questions, which cannot.
type server struct {
	*fake.Clientset
	broken error
}

func (s *server) Discovery() discovery.DiscoveryInterfaces { return kinds{s.Clientset.Discovery(), s} }

type kinds struct {
	discovery.DiscoveryInterfaces
	server *server
}

func (k kinds) ServerPreferredResourcesWithContext(context.Context) ([]*metav1.APIResourceList, error) {
	return []*metav1.APIResourceList{{GroupVersion: pans.Group + "/v2", APIResources: []metav1.APIResource{
		{Name: "pans", Kind: "Pan", Namespaced: true, Verbs: metav1.Verbs{"list", "patch"}},
		{Name: "questions", Kind: "Question", Verbs: metav1.Verbs{"create"}},
	}}}, k.server.broken
}

func pan(name, version string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: pans.Group + "/v2", Kind: "Pan"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "kitchen", Name: name, ResourceVersion: version},
	}
}

// kitchen is a controller over fakes.
type kitchen struct {
	*controller
	server   *server
	metadata *metadatafake.FakeMetadataClient
	clock    *clocktesting.FakeClock
	store    func(obj any) error
	// waits are after what times it wants to be called again.
	waits []time.Duration
}

func newKitchen(t *testing.T, m *storagemigrationv1.StorageVersionMigration, objects ...runtime.Object) *kitchen {
	t.Helper()
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	k := &kitchen{server: &server{Clientset: fake.NewClientset(m)}, metadata: metadatafake.NewSimpleMetadataClient(scheme, objects...), clock: clocktesting.NewFakeClock(begin)}
	factory := informers.NewSharedInformerFactory(k.server, 0)
	migrations := factory.Storagemigration().V1().StorageVersionMigrations()
	k.store = migrations.Informer().GetIndexer().Update
	custom := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme(), definition(3))
	k.controller = &controller{client: k.server, metadata: k.metadata, custom: custom, migrations: migrations.Lister(), clock: k.clock}
	k.again = func(_ loop.Key, in time.Duration) { k.waits = append(k.waits, in) }
	return k
}

// step reconciles once, with the cache as the server is, and returns the migration.
func (k *kitchen) step(t *testing.T) (*storagemigrationv1.StorageVersionMigration, error) {
	t.Helper()
	api := k.server.StoragemigrationV1().StorageVersionMigrations()
	for range 2 {
		m, err := api.Get(t.Context(), "m", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := k.store(m); err != nil {
			t.Fatal(err)
		}
	}
	failure := k.reconcile(t.Context(), loop.Key{Name: "m"})
	m, err := api.Get(t.Context(), "m", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m, failure
}

// refuse makes writes of an object fail.
func (k *kitchen) refuse(name string, err error) {
	k.metadata.PrependReactor("patch", "pans", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if a.(clienttesting.PatchAction).GetName() == name {
			return true, nil, err
		}
		return false, nil, nil
	})
}

func (k *kitchen) written() (names []string) {
	for _, a := range k.metadata.Actions() {
		if p, ok := a.(clienttesting.PatchAction); ok {
			names = append(names, p.GetName())
		}
	}
	return names
}

// at answers lists as of a revision, which the fake does not.
func (k *kitchen) at(version string, objects ...*metav1.PartialObjectMetadata) {
	k.metadata.PrependReactor("list", "pans", func(clienttesting.Action) (bool, runtime.Object, error) {
		list := &metav1.List{ListMeta: metav1.ListMeta{ResourceVersion: version}}
		for _, o := range objects {
			list.Items = append(list.Items, runtime.RawExtension{Object: o})
		}
		return true, list, nil
	})
}

func says(m *storagemigrationv1.StorageVersionMigration) string {
	var all []string
	for _, c := range m.Status.Conditions {
		if c.Status == metav1.ConditionTrue {
			all = append(all, fmt.Sprintf("%s: %s", c.Type, c.Message))
		}
	}
	return strings.Join(all, "; ")
}

func TestMigration(t *testing.T) {
	objects := []*metav1.PartialObjectMetadata{pan("old", "5"), pan("changed", "6"), pan("gone", "7"), pan("new", "20")}
	k := newKitchen(t, migrationOf(pans.Group, pans.Resource), objects[0].DeepCopy())
	k.at("12", objects...)
	k.refuse("changed", apierrors.NewConflict(pans, "changed", errors.New("it was changed")))
	k.refuse("gone", apierrors.NewNotFound(pans, "gone"))
	busy := true
	k.metadata.PrependReactor("patch", "pans", func(clienttesting.Action) (bool, runtime.Object, error) {
		return busy, nil, apierrors.NewServiceUnavailable("no leader")
	})

	m, err := k.step(t)
	if err != nil || !meta.IsStatusConditionTrue(m.Status.Conditions, "Running") || m.Status.ResourceVersion != "" {
		t.Fatalf("announced: %q, %v", says(m), err)
	}
	if m, err = k.step(t); err != nil || m.Status.ResourceVersion != "" || len(k.metadata.Actions()) > 0 || !slices.Equal(k.waits, []time.Duration{settle}) {
		t.Fatalf("it began at once: %q, %v, waits %v", m.Status.ResourceVersion, err, k.waits)
	}
	k.clock.Step(settle)
	if m, err = k.step(t); err != nil || m.Status.ResourceVersion != "12" {
		t.Fatalf("marked: %q, %v", m.Status.ResourceVersion, err)
	}
	if m, err = k.step(t); !apierrors.IsServiceUnavailable(err) || !strings.Contains(says(m), "transient error: write pans.kitchen.example.com kitchen/old: no leader") {
		t.Fatalf("no leader: %q, %v", says(m), err)
	}
	busy = false
	k.metadata.ClearActions()
	if m, err = k.step(t); err != nil || says(m) != "Succeeded: Migration completed: 1 objects written, the others had been written since it began" {
		t.Fatalf("done: %q, %v", says(m), err)
	}
	if got := k.written(); !slices.Equal(got, []string{"old", "changed", "gone"}) {
		t.Errorf("written: %v", got)
	}
	d, err := k.custom.Resource(definitions).Get(t.Context(), "pans.kitchen.example.com", metav1.GetOptions{})
	if err != nil || fmt.Sprint(d.Object["status"].(map[string]any)["storedVersions"]) != "[v2]" || conditionOf(d)["status"] != "False" {
		t.Errorf("the definition: %v, %v", d.Object["status"], err)
	}
	k.metadata.ClearActions()
	if _, err := k.step(t); err != nil || len(k.metadata.Actions()) > 0 {
		t.Errorf("it goes on when it is done: %v, %v", k.metadata.Actions(), err)
	}
}

func TestFailures(t *testing.T) {
	k := newKitchen(t, migrationOf(pans.Group, pans.Resource), pan("bad", "5"))
	k.at("12", pan("bad", "5"))
	k.refuse("bad", apierrors.NewForbidden(pans, "bad", errors.New("a policy says no")))
	for range 2 {
		if _, err := k.step(t); err != nil {
			t.Fatal(err)
		}
		k.clock.Step(settle)
	}
	m, err := k.step(t)
	if err != nil || !strings.HasPrefix(says(m), "Failed: pans.kitchen.example.com kitchen/bad cannot be written") || !strings.Contains(says(m), "a policy says no") {
		t.Errorf("an object that is refused: %q, %v", says(m), err)
	}
	if d, err := k.custom.Resource(definitions).Get(t.Context(), "pans.kitchen.example.com", metav1.GetOptions{}); err != nil || fmt.Sprint(d.Object["status"].(map[string]any)["storedVersions"]) != "[v1 v2]" {
		t.Errorf("the definition of a migration that failed: %v, %v", d, err)
	}

	for _, test := range []struct {
		resource string
		after    time.Duration
		broken   error
		want     string // what it says; "retry": it fails and is tried again; "wait": neither
	}{
		{"questions", settle, nil, "Failed: spec.resource: questions.kitchen.example.com cannot be listed and patched"},
		{"spoons", settle, nil, "wait"},
		{"spoons", 2 * unknownFor, nil, "Failed: spec.resource: the server knows no spoons.kitchen.example.com"},
		{"spoons", 2 * unknownFor, errors.New("no answer"), "retry"},
	} {
		k := newKitchen(t, migrationOf(pans.Group, test.resource))
		if _, err := k.step(t); err != nil {
			t.Fatal(err)
		}
		k.clock.Step(test.after)
		k.server.broken = test.broken
		m, err := k.step(t)
		switch test.want {
		case "retry":
			if err == nil || ended(m) {
				t.Errorf("%+v: %q, %v", test, says(m), err)
			}
		case "wait":
			if err != nil || ended(m) || !slices.Equal(k.waits, []time.Duration{lookAgain}) {
				t.Errorf("%+v: %q, %v, waits %v", test, says(m), err, k.waits)
			}
		default:
			if err != nil || !strings.HasPrefix(says(m), test.want) {
				t.Errorf("%+v: %q, %v", test, says(m), err)
			}
		}
	}
}
