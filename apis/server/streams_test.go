package server_test

import (
	"net/http"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestManyWatches: a user has so many watches and no more; nobody else is kept
// from one, and one that ends makes room.
func TestManyWatches(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) {
		c.Streams = 3
		c.RawHandlers = map[string]http.Handler{"/raw/": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })}
	})
	admin := s.Listen(t)
	address := strings.TrimPrefix(admin.Host, "https://")
	must[*rbacv1.ClusterRole](t)(s.Client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: roleMeta("watcher"), Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"watch", "list"}}},
	}, metav1.CreateOptions{}))
	must[*rbacv1.ClusterRoleBinding](t)(s.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: roleMeta("watcher"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "watcher"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "watcher"}},
	}, metav1.CreateOptions{}))
	client := func(name string, groups ...string) kubernetes.Interface {
		return must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(s.CertConfig(t, address, name, groups...)))
	}
	// By itself client-go waits and asks again when it is refused: each of these is one answer.
	follow := func(c kubernetes.Interface) (watch.Interface, error) {
		return c.CoreV1().RESTClient().Get().Namespace("default").Resource("configmaps").VersionedParams(&metav1.ListOptions{Watch: true}, scheme.ParameterCodec).
			MaxRetries(0).Watch(t.Context())
	}
	watcher := client("watcher")
	soon(t, "the right to watch", func() bool {
		w, err := follow(watcher)
		if err == nil {
			w.Stop()
		}
		return err == nil
	})
	// The one above ends when the server has noticed that its client went.
	var open []watch.Interface
	defer func() {
		for _, w := range open {
			w.Stop()
		}
	}()
	var last error
	soon(t, "three watches", func() bool {
		w, err := follow(watcher)
		if last = err; err == nil {
			open = append(open, w)
		}
		return len(open) == 3
	})
	// client-go waits and asks again when it is refused so: the test looks at one answer.
	config := s.CertConfig(t, address, "watcher")
	if code, after, _ := ask(t, t.Context(), config, "/api/v1/namespaces/default/configmaps?watch=true"); code != http.StatusTooManyRequests || after == "" {
		t.Errorf("a fourth watch: %d, Retry-After %q, want 429 (%v)", code, after, last)
	}
	if code, _, _ := ask(t, t.Context(), config, "/api/v1/namespaces/default/configmaps"); code != http.StatusOK {
		t.Errorf("a list: %d", code)
	}
	ofAdmin := client("root", user.SystemPrivilegedGroup)
	for range 30 { // administrators and nodes have ten times as many
		w := must[watch.Interface](t)(follow(ofAdmin))
		open = append(open, w)
	}
	// One that has all that it may have still sees how its server is.
	for path, want := range map[string]int{"/api/v1/namespaces/default/configmaps?watch=true": http.StatusTooManyRequests, "/raw/state": http.StatusNoContent} {
		if code, _, _ := ask(t, t.Context(), s.CertConfig(t, address, "root", user.SystemPrivilegedGroup), path); code != want {
			t.Errorf("%s by who has 30 watches: %d, want %d", path, code, want)
		}
	}
	for range 4 { // parts of this program are not counted
		w := must[watch.Interface](t)(s.ClientFor(t, "watcher").CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{}))
		open = append(open, w)
	}
	open[0].Stop()
	soon(t, "room for another", func() bool {
		w, err := follow(watcher)
		if err != nil && !apierrors.IsTooManyRequests(err) {
			t.Error(err)
		}
		if err == nil {
			open = append(open, w)
		}
		return err == nil
	})
}
