package kubectl

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXAccess goes through docs/access.md: how a person, a program and a
// team get their rights, and what keeps them within these.
func TestE2EXAccess(t *testing.T) {
	t.Parallel()
	k := start(t, "access")
	canI := func(k *kit, want string, args ...string) {
		k.Helper()
		k.eventually(strings.Join(args, " ")+": "+want, func(context.Context) error {
			out, _, _ := k.in("", append([]string{"auth", "can-i"}, args...)...)
			if got := strings.TrimSpace(strings.SplitN(out, "\n", 2)[0]); got != want {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
	}

	k.sub("roles", func(k *kit) {
		features.Shows(k, 58, 59)
		canI(k, "no", "list", "pods", "--as=jane")
		k.ok("create", "role", "reader", "--verb=get,list", "--resource=pods")
		k.ok("create", "rolebinding", "readers", "--role=reader", "--user=jane")
		canI(k, "yes", "list", "pods", "--as=jane")
		canI(k, "no", "list", "pods", "--as=jane", "-n", "default")
		k.best("a new binding is in force", time.Second, func(i int) time.Duration { // row 59
			user := fmt.Sprintf("jane-%d", i)
			k.ok("create", "rolebinding", user, "--role=reader", "--user="+user)
			made := time.Now()
			k.soon(user+" may list", func(ctx context.Context) (bool, error) {
				review, err := k.api.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
					User: user, ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: k.ns, Verb: "list", Resource: "pods"},
				}}, metav1.CreateOptions{})
				return err == nil && review.Status.Allowed, err
			})
			return time.Since(made)
		})
		canI(k, "no", "delete", "pods", "--as=jane")
		k.has(k.ok("auth", "can-i", "--list", "--as=jane"), "pods", "[get list]", "selfsubjectaccessreviews.authorization.k8s.io")
		k.has(k.fails("get", "secrets", "--as=jane"), `User "jane" cannot list resource "secrets" in API group "" in the namespace "access"`)
		// admin, edit and view are summed up from their parts.
		k.ok("create", "rolebinding", "editors", "--clusterrole=edit", "--group=team")
		canI(k, "yes", "create", "deployments", "--as=joe", "--as-group=team")
		canI(k, "no", "create", "rolebindings", "--as=joe", "--as-group=team")
		k.has(k.okIn(`apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader, namespace: access}
rules: [{apiGroups: [""], resources: [pods, services], verbs: [get, list]}]
`, "auth", "reconcile", "-f", "-"), "role.rbac.authorization.k8s.io/reader reconciled")
		canI(k, "yes", "list", "services", "--as=jane")
		// Who may write roles grants no more than they hold.
		k.ok("create", "rolebinding", "admins", "--clusterrole=admin", "--user=boss")
		canI(k, "yes", "create", "roles", "--as=boss")
		k.has(k.fails("create", "rolebinding", "mine", "--clusterrole=cluster-admin", "--user=boss", "--as=boss"), "is attempting to grant RBAC permissions not currently held")
	})

	k.sub("people", people)

	k.sub("tokens", func(k *kit) {
		features.Shows(k, 31)
		features.Conforms(k, 172, 174)
		k.ok("create", "serviceaccount", "robot")
		k.ok("create", "rolebinding", "robot", "--clusterrole=view", "--serviceaccount="+k.ns+":robot")
		client, err := rest.HTTPClientFor(rest.AnonymousClientConfig(k.config))
		k.must(err)
		list := func(token string) int {
			code, _ := k.send(client, "GET", "/api/v1/namespaces/"+k.ns+"/pods", "", "Authorization", "Bearer "+token)
			return code
		}
		token := strings.TrimSpace(k.ok("create", "token", "robot"))
		k.eventually("the token's account reads", func(context.Context) error {
			if code := list(token); code != 200 {
				return fmt.Errorf("answered %d", code)
			}
			return nil
		})
		k.is("a spoiled token", fmt.Sprint(list(token[:len(token)-6]+"AAAAAA")), "401")
		k.is("its namespace alone", fmt.Sprint(func() int {
			code, _ := k.send(client, "GET", "/api/v1/namespaces/kube-system/pods", "", "Authorization", "Bearer "+token)
			return code
		}()), "403")

		k.apply(`---
{apiVersion: v1, kind: Pod, metadata: {name: inside}, spec: {serviceAccountName: robot, terminationGracePeriodSeconds: 0, containers: [{name: main, image: "` + image + `"}]}}`)
		k.ready("inside")
		const folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
		own := strings.TrimSpace(k.exec("inside", "main", "cat", folder+"token"))
		k.is("the pod's token", fmt.Sprint(list(own)), "200")
		k.is("the pod's namespace", strings.TrimSpace(k.exec("inside", "main", "cat", folder+"namespace")), k.ns)
		k.has(k.exec("inside", "main", "cat", folder+"ca.crt"), "BEGIN CERTIFICATE")
		k.ok("delete", "pod", "inside", "--now")
		k.eventually("its token ends with it", func(context.Context) error {
			if code := list(own); code != 401 {
				return fmt.Errorf("answered %d", code)
			}
			return nil
		})

		k.apply(`---
{apiVersion: v1, kind: Secret, metadata: {name: lasting, annotations: {kubernetes.io/service-account.name: robot}}, type: kubernetes.io/service-account-token}`)
		k.eventually("the secret has a token", func(context.Context) error {
			if k.ok("get", "secret", "lasting", "-o", "jsonpath={.data.token}") == "" {
				return fmt.Errorf("empty")
			}
			return nil
		})
		k.is("the secret's token", fmt.Sprint(list(k.ok("get", "secret", "lasting", "-o", "go-template={{.data.token | base64decode}}"))), "200")
		k.ok("delete", "serviceaccount", "robot")
		k.eventually("the secret goes with its account", func(context.Context) error {
			if out, _, code := k.in("", "get", "secret", "lasting"); code == 0 {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
	})

	k.sub("pod security", func(k *kit) {
		features.Shows(k, 66)
		k.ok("create", "namespace", "access-tight")
		k.ok("label", "namespace", "access-tight", "pod-security.kubernetes.io/enforce=restricted")
		privileged := `---
{apiVersion: v1, kind: Pod, metadata: {name: bad, namespace: access-tight}, spec: {hostPID: true, containers: [{name: main, image: "` + image + `", securityContext: {privileged: true}}]}}`
		k.eventually("the namespace's label counts", func(context.Context) error {
			if _, said, code := k.in(privileged, "create", "--dry-run=server", "-n", "access-tight", "-f", "-"); code == 0 || !strings.Contains(said, "violates PodSecurity") {
				return fmt.Errorf("exit %d: %s", code, said)
			}
			return nil
		})
		k.has(k.failsIn(privileged, "create", "-n", "access-tight", "-f", "-"), `violates PodSecurity "restricted:latest"`, "hostPID=true", "privileged")
		k.ok("delete", "namespace", "access-tight", "--wait=false")
	})

	k.sub("limits", func(k *kit) {
		features.Shows(k, 69)
		k.apply(`---
{apiVersion: v1, kind: LimitRange, metadata: {name: bounds}, spec: {limits: [{type: Container, max: {memory: 64Mi}, default: {memory: 32Mi}}]}}`)
		pod := func(name, limit string) string {
			return `---
{apiVersion: v1, kind: Pod, metadata: {name: ` + name + `}, spec: {containers: [{name: main, image: "` + image + `", resources: {limits: {` + limit + `}}}]}}`
		}
		k.eventually("the bound counts", func(context.Context) error {
			if _, said, code := k.in(pod("big", "memory: 1Gi"), "create", "--dry-run=server", "-f", "-"); code == 0 || !strings.Contains(said, "maximum memory usage per Container is 64Mi, but limit is 1Gi") {
				return fmt.Errorf("%s", said)
			}
			return nil
		})
		k.is("the default", k.okIn(pod("plain", ""), "create", "--dry-run=server", "-f", "-", "-o", "jsonpath={.spec.containers[0].resources.limits.memory}"), "32Mi")
		k.ok("delete", "limitrange", "bounds")
	})

	k.sub("sealed", func(k *kit) {
		const known = "a-password-that-lies-nowhere-in-clear"
		k.ok("create", "secret", "generic", "known", "--from-literal=password="+known)
		k.ok("create", "configmap", "known", "--from-literal=plain=found-"+known[:10]+"-in-clear")
		k.is("read back", k.ok("get", "secret", "known", "-o", "go-template={{.data.password | base64decode}}"), known)
		var clear []string
		plain := 0
		root := filepath.Join(shared.Dir, "c", node)
		k.must(filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return nil // it went meanwhile, or holds nothing
			}
			content, err := os.ReadFile(path)
			if err != nil {
				return nil
			}
			if bytes.Contains(content, []byte(known)) {
				clear = append(clear, path)
			}
			if bytes.Contains(content, []byte("found-"+known[:10]+"-in-clear")) {
				plain++
			}
			return nil
		}))
		if len(clear) > 0 {
			k.Errorf("the secret lies in clear in %v", clear)
		}
		if plain == 0 {
			k.Errorf("nothing was found below %s, not even what lies there in clear", root)
		}
	})
}
