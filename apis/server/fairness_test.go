package server_test

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// comesTrue fails the test if ok does not.
func comesTrue(t *testing.T, what string, ok func(context.Context) bool) {
	t.Helper()
	if err := wait.PollUntilContextCancel(waitContext(t), 10*time.Millisecond, true, func(ctx context.Context) (bool, error) { return ok(ctx), nil }); err != nil {
		t.Fatalf("waited for %s: %v", what, err)
	}
}

// newLevel is a priority level of a share, and a schema that leads a user to it.
func newLevel(name, user string, shares int32, response flowcontrolv1.LimitResponse) (*flowcontrolv1.PriorityLevelConfiguration, *flowcontrolv1.FlowSchema) {
	level := &flowcontrolv1.PriorityLevelConfiguration{ObjectMeta: meta(name), Spec: flowcontrolv1.PriorityLevelConfigurationSpec{
		Type: flowcontrolv1.PriorityLevelEnablementLimited,
		Limited: &flowcontrolv1.LimitedPriorityLevelConfiguration{
			NominalConcurrencyShares: ptr.To(shares), BorrowingLimitPercent: ptr.To(int32(0)), LimitResponse: response,
		},
	}}
	schema := &flowcontrolv1.FlowSchema{ObjectMeta: meta(name), Spec: flowcontrolv1.FlowSchemaSpec{
		PriorityLevelConfiguration: flowcontrolv1.PriorityLevelConfigurationReference{Name: name},
		MatchingPrecedence:         10,
		Rules: []flowcontrolv1.PolicyRulesWithSubjects{{
			Subjects: []flowcontrolv1.Subject{{Kind: flowcontrolv1.SubjectKindUser, User: &flowcontrolv1.UserSubject{Name: user}}},
			ResourceRules: []flowcontrolv1.ResourcePolicyRule{{
				Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"}, ClusterScope: true, Namespaces: []string{"*"},
			}},
		}},
	}}
	return level, schema
}

// ask returns the code of an answer, and which level the request was counted to.
func ask(t *testing.T, ctx context.Context, config *rest.Config, path string) (code int, after, level string) {
	t.Helper()
	client := must[*http.Client](t)(rest.HTTPClientFor(config))
	req := must[*http.Request](t)(http.NewRequestWithContext(ctx, "GET", config.Host+path, nil))
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", ""
	}
	_ = resp.Body.Close()
	return resp.StatusCode, resp.Header.Get("Retry-After"), resp.Header.Get(flowcontrolv1.ResponseHeaderMatchedPriorityLevelConfigurationUID)
}

// holding is a storage that creates the object of a key only when until is closed;
// it says in began that it was asked to.
func holding(next generic.StorageDecorator, key string, began chan<- struct{}, until <-chan struct{}) generic.StorageDecorator {
	return func(config *storagebackend.ConfigForResource, prefix string, keyOf func(runtime.Object) (string, error), newOne, newList func() runtime.Object,
		attributes storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		made, destroy, err := next(config, prefix, keyOf, newOne, newList, attributes, triggers, indexers)
		return &holdingStorage{made, key, began, until}, destroy, err
	}
}

type holdingStorage struct {
	storage.Interface
	key   string
	began chan<- struct{}
	until <-chan struct{}
}

// Create implements storage.Interface.
func (s *holdingStorage) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	if key == s.key {
		select {
		case s.began <- struct{}{}:
		default:
		}
		select {
		case <-s.until:
		case <-ctx.Done():
		}
	}
	return s.Interface.Create(ctx, key, obj, out, ttl)
}

// inJail is a line of the library's dump of requests that wait.
var inJail = regexp.MustCompile(`(?m)^jail, +jail, +\d+, +\d+,`)

// TestFairness: a client without a seat is rejected or waits, and no other client is.
func TestFairness(t *testing.T) {
	// So few that a share is one.
	began, end := make(chan struct{}, 1), make(chan struct{})
	s := servertest.Start(t, func(c *server.Config) {
		c.Seats, c.Storage = 100, holding(c.Storage, "/core/configmaps/default/held", began, end)
	})
	api := s.Client.FlowcontrolV1()
	level, schema := newLevel("jail", "flood", 1, flowcontrolv1.LimitResponse{Type: flowcontrolv1.LimitResponseTypeReject})
	schema = must[*flowcontrolv1.FlowSchema](t)(api.FlowSchemas().Create(t.Context(), schema, metav1.CreateOptions{}))
	dangling := func(ctx context.Context) flowcontrolv1.ConditionStatus {
		got, err := api.FlowSchemas().Get(ctx, schema.Name, metav1.GetOptions{})
		if err != nil || len(got.Status.Conditions) != 1 {
			return ""
		}
		return got.Status.Conditions[0].Status
	}
	comesTrue(t, "the missing level to be reported", func(ctx context.Context) bool { return dangling(ctx) == flowcontrolv1.ConditionTrue })
	level = must[*flowcontrolv1.PriorityLevelConfiguration](t)(api.PriorityLevelConfigurations().Create(t.Context(), level, metav1.CreateOptions{}))
	comesTrue(t, "the level to be found", func(ctx context.Context) bool { return dangling(ctx) == flowcontrolv1.ConditionFalse })

	const maps = "/api/v1/namespaces/default/configmaps"
	flood, other := s.ClientConfigFor("flood"), s.ClientConfigFor("other")
	must[*rbacv1.ClusterRoleBinding](t)(s.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta("flood"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "flood"}},
	}, metav1.CreateOptions{}))
	comesTrue(t, "the user's rights", func(ctx context.Context) bool {
		code, _, of := ask(t, ctx, flood, maps)
		return code == http.StatusOK && of == string(level.UID)
	})
	// A request that does not end: the storage does not answer.
	client := must[*http.Client](t)(rest.HTTPClientFor(flood))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for code := 0; code != http.StatusCreated && t.Context().Err() == nil; {
			req, err := http.NewRequestWithContext(t.Context(), "POST", flood.Host+maps, strings.NewReader(`{"metadata":{"name":"held"}}`))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/json")
			resp, err := client.Do(req)
			if err != nil {
				t.Errorf("the request that does not end: %v", err)
				return
			}
			code = resp.StatusCode
			_ = resp.Body.Close()
		}
	}()

	select {
	case <-began:
	case <-waitContext(t).Done():
		t.Fatal("the request that does not end has not begun")
	}
	var after, of string
	comesTrue(t, "a refusal", func(ctx context.Context) bool {
		var code int
		code, after, of = ask(t, ctx, flood, maps)
		return code == http.StatusTooManyRequests
	})
	if after == "" || of != string(level.UID) {
		t.Errorf("refused with Retry-After %q for level %q, want that of %q", after, of, level.UID)
	}
	if code, _, of := ask(t, t.Context(), other, maps); code != http.StatusForbidden || of == string(level.UID) {
		t.Errorf("another user: %d at level %q", code, of)
	}
	if code, _, _ := ask(t, t.Context(), flood, "/healthz"); code != http.StatusOK {
		t.Errorf("a health check: %d, want 200: it is exempt", code)
	}
	if code, _, _ := ask(t, t.Context(), s.ClientConfigFor("flood", user.SystemPrivilegedGroup), maps); code != http.StatusOK {
		t.Errorf("an administrator: %d, want 200: he is exempt", code)
	}

	// With a queue it waits, and goes on when there is a seat.
	level.Spec.Limited.LimitResponse = flowcontrolv1.LimitResponse{
		Type: flowcontrolv1.LimitResponseTypeQueue, Queuing: &flowcontrolv1.QueuingConfiguration{Queues: 1, HandSize: 1, QueueLengthLimit: 1},
	}
	must[*flowcontrolv1.PriorityLevelConfiguration](t)(api.PriorityLevelConfigurations().Update(t.Context(), level, metav1.UpdateOptions{}))
	answered := make(chan int, 1)
	go func() {
		for t.Context().Err() == nil { // a busy machine may give it up before it waits
			if code, _, _ := ask(t, t.Context(), flood, maps); code == http.StatusOK {
				answered <- code
				return
			}
		}
	}()
	comesTrue(t, "a request in the queue", func(ctx context.Context) bool {
		dump, err := s.Client.Discovery().RESTClient().Get().AbsPath("/debug/api_priority_and_fairness/dump_requests").DoRaw(ctx)
		return err == nil && inJail.Match(dump)
	})
	select {
	case code := <-answered:
		t.Fatalf("answered %d without a seat", code)
	default:
	}
	close(end)
	<-ended
	select {
	case <-answered:
	case <-waitContext(t).Done():
		t.Error("not answered with a seat free")
	}
}

// TestFairnessVerbs: both kinds answer every verb, and what a server needs of
// them comes back when it is deleted.
func TestFairnessVerbs(t *testing.T) {
	features.Conforms(t, 1, 2)
	s := servertest.Start(t, nil)
	defaults := map[string][]string{}
	for _, o := range slices.Concat(bootstrap.MandatoryFlowSchemas, bootstrap.SuggestedFlowSchemas) {
		defaults["flowschemas"] = append(defaults["flowschemas"], o.Name)
	}
	for _, o := range slices.Concat(bootstrap.MandatoryPriorityLevelConfigurations, bootstrap.SuggestedPriorityLevelConfigurations) {
		defaults["prioritylevelconfigurations"] = append(defaults["prioritylevelconfigurations"], o.Name)
	}
	level, schema := newLevel("mine", "u", 1, flowcontrolv1.LimitResponse{Type: flowcontrolv1.LimitResponseTypeReject})
	found := must[*metav1.APIResourceList](t)(s.Client.Discovery().ServerResourcesForGroupVersion("flowcontrol.apiserver.k8s.io/v1"))
	for resource, obj := range map[string]any{"flowschemas": schema, "prioritylevelconfigurations": level} {
		t.Run(resource, func(t *testing.T) {
			for _, name := range []string{resource, resource + "/status"} {
				if !slices.ContainsFunc(found.APIResources, func(r metav1.APIResource) bool { return r.Name == name }) {
					t.Errorf("%s is not discovered", name)
				}
			}
			everyVerb(t, s, resource, obj, defaults[resource])
		})
	}
}

// unlessConflict repeats a write until it meets no conflict.
func unlessConflict(t *testing.T, write func() error) {
	t.Helper()
	if err := retry.RetryOnConflict(wait.Backoff{Steps: 20, Duration: 5 * time.Millisecond}, write); err != nil {
		t.Fatal(err)
	}
}

func everyVerb(t *testing.T, s *servertest.Server, resource string, obj any, defaults []string) {
	kinds := map[string]string{"flowschemas": "FlowSchema", "prioritylevelconfigurations": "PriorityLevelConfiguration"}
	group := flowcontrolv1.SchemeGroupVersion
	c := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(s.LoopbackConfig())).Resource(group.WithResource(resource))
	has := func(ctx context.Context) bool {
		list, err := c.List(ctx, metav1.ListOptions{})
		if err != nil {
			return false
		}
		for _, name := range defaults {
			if !slices.ContainsFunc(list.Items, func(u unstructured.Unstructured) bool { return u.GetName() == name }) {
				return false
			}
		}
		return true
	}
	comesTrue(t, "the default objects", has)

	content := must[map[string]any](t)(runtime.DefaultUnstructuredConverter.ToUnstructured(obj))
	made := &unstructured.Unstructured{Object: content}
	made.SetAPIVersion(group.String())
	made.SetKind(kinds[resource])
	made.SetLabels(map[string]string{"test": "verbs"})
	seen := must[watch.Interface](t)(c.Watch(t.Context(), metav1.ListOptions{LabelSelector: "test=verbs"}))
	defer seen.Stop()
	expect := func(want watch.EventType) {
		t.Helper()
		for {
			select {
			case event := <-seen.ResultChan():
				if event.Type == want {
					return
				}
				if event.Type != watch.Modified { // conditions are written meanwhile
					t.Fatalf("watched %s, want %s", event.Type, want)
				}
			case <-waitContext(t).Done():
				t.Fatalf("no %s was watched", want)
			}
		}
	}
	name := "mine"
	must[*unstructured.Unstructured](t)(c.Create(t.Context(), made, metav1.CreateOptions{}))
	expect(watch.Added)
	must[*unstructured.Unstructured](t)(c.Patch(t.Context(), name, types.MergePatchType, []byte(`{"metadata":{"annotations":{"patched":"yes"}}}`), metav1.PatchOptions{}))
	expect(watch.Modified)
	unlessConflict(t, func() error {
		read := must[*unstructured.Unstructured](t)(c.Get(t.Context(), name, metav1.GetOptions{}))
		if read.GetAnnotations()["patched"] != "yes" {
			t.Errorf("annotations %v", read.GetAnnotations())
		}
		read.SetAnnotations(map[string]string{"updated": "yes"})
		_, err := c.Update(t.Context(), read, metav1.UpdateOptions{})
		return err
	})
	condition := []any{map[string]any{"type": "Own", "status": "True", "reason": "Test", "message": "by a test"}}
	unlessConflict(t, func() error {
		read := must[*unstructured.Unstructured](t)(c.Get(t.Context(), name, metav1.GetOptions{}, "status"))
		if err := unstructured.SetNestedSlice(read.Object, condition, "status", "conditions"); err != nil {
			return err
		}
		written, err := c.UpdateStatus(t.Context(), read, metav1.UpdateOptions{})
		if err == nil && fmt.Sprint(written.Object["status"]) == "map[]" {
			t.Error("the status was not written")
		}
		return err
	})
	must[*unstructured.Unstructured](t)(c.Patch(t.Context(), name, types.MergePatchType,
		[]byte(`{"status":{"conditions":[{"type":"Own","status":"False","reason":"Patched","message":"by a test"}]}}`), metav1.PatchOptions{}, "status"))
	if list := must[*unstructured.UnstructuredList](t)(c.List(t.Context(), metav1.ListOptions{LabelSelector: "test=verbs"})); len(list.Items) != 1 {
		t.Errorf("%d in the list, want 1", len(list.Items))
	}
	if err := c.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	expect(watch.Deleted)
	if _, err := c.Get(t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("deleted, and read: %v", err)
	}
	must[*unstructured.Unstructured](t)(c.Create(t.Context(), made, metav1.CreateOptions{}))
	if err := c.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	comesTrue(t, "the default objects to come back", has)
	if _, err := c.Get(t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("all were deleted, and one was read: %v", err)
	}
}
