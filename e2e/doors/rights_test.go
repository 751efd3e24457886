package doors

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/member/pki"
)

// denied is what a role lacks, as the API words it.
func denied(who, verb, resource, group, namespace string) string {
	where := "at the cluster scope"
	if namespace != "" {
		where = fmt.Sprintf("in the namespace %q", namespace)
	}
	return fmt.Sprintf("User %q cannot %s resource %q in API group %q %s", who, verb, resource, group, where)
}

const core = "/api/v1/namespaces/"

// otherNamespace is an account that edits one namespace, at another.
func otherNamespace(s *suite) []door {
	not := func(verb, resource string) string { return denied(robotName, verb, resource, "", others) }
	configMap := `{"metadata":{"name":"made"},"data":{"a":"b"}}`
	return []door{
		get("its own Secret", s.robot, core+ns+"/secrets/own", ok, ""),
		inGo("its own Secret", s.robot, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(ns).Get(ctx, "own", metav1.GetOptions{})
			return err
		}, ok, ""),
		ctl("its own Secret", s.robot, "get secrets/own", "", ok, "", "get", "secret", "own", "-n", ns, "-o", "name"),
		call("its own ConfigMap", s.robot, http.MethodPost, core+ns+"/configmaps", configMap, http.StatusCreated, ""),

		get("reads a Secret", s.robot, core+others+"/secrets/gold", 403, `secrets "gold" is forbidden: `+not("get", "secrets")),
		get("lists Secrets", s.robot, core+others+"/secrets", 403, not("list", "secrets")),
		get("watches Secrets", s.robot, core+others+"/secrets?watch=true", 403, not("watch", "secrets")),
		get("watches a Secret by the old path", s.robot, "/api/v1/watch/namespaces/"+others+"/secrets/gold", 403, not("watch", "secrets")),
		get("lists Secrets of all namespaces", s.robot, "/api/v1/secrets", 403, denied(robotName, "list", "secrets", "", "")),
		get("reads what a Secret was", s.robot, core+others+"/secrets/gold?history=3", 403, not("get", "secrets")),
		get("reads a Secret of the past", s.robot, core+others+"/secrets/gold?at=-1s", 403, not("get", "secrets")),
		get("reads a log", s.robot, core+others+"/pods/some/log", 403, not("get", "pods/log")),
		call("writes a ConfigMap", s.robot, http.MethodPost, core+others+"/configmaps", configMap, 403, not("create", "configmaps")),
		call("changes a ConfigMap", s.robot, http.MethodPatch, core+others+"/configmaps/gold", `{"data":{"key":"lead"}}`, 403, not("patch", "configmaps")),
		call("replaces a ConfigMap", s.robot, http.MethodPut, core+others+"/configmaps/gold", `{"metadata":{"name":"gold"}}`, 403, not("update", "configmaps")),
		call("deletes a Secret", s.robot, http.MethodDelete, core+others+"/secrets/gold", "", 403, not("delete", "secrets")),
		call("deletes all Secrets", s.robot, http.MethodDelete, core+others+"/secrets", "", 403, not("deletecollection", "secrets")),
		call("runs a program", s.robot, http.MethodPost, core+others+"/pods/some/exec?command=id&container=main&stdout=true", "", 403, not("create", "pods/exec")),
		call("opens a port", s.robot, http.MethodPost, core+others+"/pods/some/portforward", "", 403, not("create", "pods/portforward")),
		call("takes an account's token", s.robot, http.MethodPost, core+others+"/serviceaccounts/default/token", `{"spec":{}}`, 403, not("create", "serviceaccounts/token")),
		call("names another namespace in the object", s.robot, http.MethodPost, core+ns+"/configmaps", `{"metadata":{"name":"made-2","namespace":"`+others+`"}}`, 400, "the namespace of the provided object does not match the namespace sent on the request"),
		inGo("reads a Secret", s.robot, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(others).Get(ctx, "gold", metav1.GetOptions{})
			return err
		}, 403, not("get", "secrets")),
		inGo("lists pods", s.robot, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Pods(others).List(ctx, metav1.ListOptions{})
			return err
		}, 403, not("list", "pods")),
		inGo("watches pods", s.robot, func(ctx context.Context, c kubernetes.Interface) error {
			w, err := c.CoreV1().Pods(others).Watch(ctx, metav1.ListOptions{})
			if err == nil {
				w.Stop()
			}
			return err
		}, 403, not("watch", "pods")),
		ctl("reads a Secret", s.robot, "get secrets/gold", "", 403, not("get", "secrets"), "get", "secret", "gold", "-n", others),
		ctl("deletes a Secret", s.robot, "delete secrets/gold", "", 403, not("delete", "secrets"), "delete", "secret", "gold", "-n", others),
		ctl("lists nodes", s.robot, "list nodes/", "", 403, denied(robotName, "list", "nodes", "", ""), "get", "nodes"),
	}
}

// otherNode is a node's key, at what belongs to another node.
func otherNode(s *suite) []door {
	for node, secret := range map[string]string{"a1": "own", "a2": "gold"} {
		p := pod("on-"+node, node)
		p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: secret}}}}
		// On a busy machine there may be no leader for a moment.
		if err := s.within(waitLimit, func(ctx context.Context) error {
			_, err := s.api.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		}); err != nil {
			s.t.Fatal(err)
		}
	}
	a1 := s.nodeOf("a1")
	mine := get("the Secret of its pod", a1, core+ns+"/secrets/own", ok, "")
	s.soon("the node reads the Secret of its pod", mine)
	not := func(verb, resource, group, namespace string) string {
		return denied(a1.name, verb, resource, group, namespace)
	}
	return []door{
		mine,
		inGo("the Secret of its pod", a1, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(ns).Get(ctx, "own", metav1.GetOptions{})
			return err
		}, ok, ""),
		get("reads the Secret of another node's pod", a1, core+ns+"/secrets/gold", 403, not("get", "secrets", "", ns)),
		get("reads a Secret that no pod uses", a1, core+others+"/secrets/gold", 403, not("get", "secrets", "", others)),
		get("lists Secrets", a1, core+ns+"/secrets", 403, not("list", "secrets", "", ns)),
		get("lists all pods", a1, "/api/v1/pods", 403, not("list", "pods", "", "")),
		get("lists the pods of another node", a1, "/api/v1/pods?fieldSelector=spec.nodeName%3Da2", 403, not("list", "pods", "", "")),
		call("takes a token for another node's pod", a1, http.MethodPost, core+ns+"/serviceaccounts/default/token", `{"spec":{"boundObjectRef":{"kind":"Pod","apiVersion":"v1","name":"on-a2"}}}`, 403, "node requested token with a pod binding without a uid"),
		call("writes another node's pod", a1, http.MethodPatch, core+ns+"/pods/on-a2/status", `{"status":{"message":"x"}}`, 403, `node "a1" can only update pod status for pods with spec.nodeName set to itself`),
		call("deletes another node's pod", a1, http.MethodDelete, core+ns+"/pods/on-a2", "", 403, `node "a1" can only delete pods with spec.nodeName set to itself`),
		call("writes another node", a1, http.MethodPatch, "/api/v1/nodes/a2", `{"metadata":{"annotations":{"x":"y"}}}`, 403, "a2"),
		call("renews another node's lease", a1, http.MethodPatch, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/a2", `{"spec":{"leaseDurationSeconds":1}}`, 403, "a2"),
		call("gives itself a reserved label", a1, http.MethodPatch, "/api/v1/nodes/a1", `{"metadata":{"labels":{"node-restriction.kubernetes.io/vault":"yes"}}}`, 403, "node-restriction.kubernetes.io/vault"),
		call("takes its taints", a1, http.MethodPatch, "/api/v1/nodes/a1", `{"spec":{"taints":[{"key":"a","effect":"NoSchedule"}]}}`, 403, "taints"),
		call("makes a pod that is no mirror", a1, http.MethodPost, core+ns+"/pods", `{"metadata":{"name":"made"},"spec":{"nodeName":"a1","containers":[{"name":"c","image":"x"}]}}`, 403, "mirror"),
		inGo("reads the Secret of another node's pod", a1, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(ns).Get(ctx, "gold", metav1.GetOptions{})
			return err
		}, 403, not("get", "secrets", "", ns)),
		inGo("evicts another node's pod", a1, func(ctx context.Context, c kubernetes.Interface) error {
			return c.CoreV1().Pods(ns).Delete(ctx, "on-a2", metav1.DeleteOptions{})
		}, 403, `node "a1" can only delete pods with spec.nodeName set to itself`),
	}
}

const rbac = "/apis/rbac.authorization.k8s.io/v1"

// climber is an account that edits a namespace and may write roles and bindings there.
func (s *suite) climber() identity {
	s.apply(fmt.Sprintf(`apiVersion: v1
kind: ServiceAccount
metadata: {name: climber, namespace: %[1]s}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: climber-edits, namespace: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: climber, namespace: %[1]s}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: climber, namespace: %[1]s}
rules: [{apiGroups: [rbac.authorization.k8s.io], resources: [roles, rolebindings], verbs: [get, list, create, update, patch, delete]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: climber, namespace: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: climber}
subjects: [{kind: ServiceAccount, name: climber, namespace: %[1]s}]
`, ns))
	climber := s.bearer("system:serviceaccount:"+ns+":climber", s.token("climber", authenticationv1.TokenRequestSpec{}))
	s.soon("the climber's role counts", get("", climber, rbac+"/namespaces/"+ns+"/roles", ok, ""))
	return climber
}

// role is one with one rule.
func role(name, group, resource, verb string) string {
	return fmt.Sprintf(`{"metadata":{"name":%q},"rules":[{"apiGroups":[%q],"resources":[%q],"verbs":[%q]}]}`, name, group, resource, verb)
}

// bound is a binding of the climber.
func bound(kind, role string) string {
	return fmt.Sprintf(`{"metadata":{"name":"made"},"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":%q,"name":%q},"subjects":[{"kind":"ServiceAccount","name":"climber","namespace":%q}]}`, kind, role, ns)
}

// moreRights is an account that writes roles, beyond what it holds.
func moreRights(s *suite) []door {
	climber := s.climber()
	const more = "is attempting to grant RBAC permissions not currently held"
	roles, bindings := rbac+"/namespaces/"+ns+"/roles", rbac+"/namespaces/"+ns+"/rolebindings"
	return []door{
		call("a role of what it has", climber, http.MethodPost, roles, role("fair", "", "pods", "get"), http.StatusCreated, ""),
		ctl("a binding of what it has", climber, "create rolebindings/fair", "", http.StatusCreated, "", "create", "rolebinding", "fair", "-n", ns, "--role=fair", "--serviceaccount="+ns+":robot"),

		call("makes a role of all", climber, http.MethodPost, roles, role("made", "*", "*", "*"), 403, more),
		call("makes a role that execs on nodes", climber, http.MethodPost, roles, role("made", "", "nodes/proxy", "create"), 403, more),
		call("makes a role that may escalate", climber, http.MethodPost, roles, role("made", "rbac.authorization.k8s.io", "roles", "escalate"), 403, more),
		call("widens its role", climber, http.MethodPatch, roles+"/climber", `{"rules":[{"apiGroups":["*"],"resources":["*"],"verbs":["*"]}]}`, 403, more),
		call("makes a cluster role", climber, http.MethodPost, rbac+"/clusterroles", role("made", "", "secrets", "get"), 403, denied(climber.name, "create", "clusterroles", "rbac.authorization.k8s.io", "")),
		call("binds itself to cluster-admin", climber, http.MethodPost, rbac+"/clusterrolebindings", bound("ClusterRole", "cluster-admin"), 403, denied(climber.name, "create", "clusterrolebindings", "rbac.authorization.k8s.io", "")),
		call("binds itself to cluster-admin in its namespace", climber, http.MethodPost, bindings, bound("ClusterRole", "cluster-admin"), 403, more),
		call("binds itself to admin in its namespace", climber, http.MethodPost, bindings, bound("ClusterRole", "admin"), 403, more),
		call("binds itself in another namespace", climber, http.MethodPost, rbac+"/namespaces/"+others+"/rolebindings", bound("ClusterRole", "view"), 403, denied(climber.name, "create", "rolebindings", "rbac.authorization.k8s.io", others)),
		call("adds itself to the administrators", climber, http.MethodPatch, rbac+"/clusterrolebindings/cluster-admin", `{"subjects":[]}`, 403, denied(climber.name, "patch", "clusterrolebindings", "rbac.authorization.k8s.io", "")),
		inGo("makes a role of all", climber, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.RbacV1().Roles(ns).Create(ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "go"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}}}, metav1.CreateOptions{})
			return err
		}, 403, more),
		inGo("applies a role of all", climber, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.RbacV1().Roles(ns).Patch(ctx, "go", types.ApplyPatchType, []byte(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"go"},"rules":[{"apiGroups":["*"],"resources":["*"],"verbs":["*"]}]}`), metav1.PatchOptions{FieldManager: "doors"})
			return err
		}, 403, more),
		ctl("makes a role of all", climber, "create roles/wide", "", 403, more, "create", "role", "wide", "-n", ns, "--verb=*", "--resource=secrets,pods/exec,nodes"),
		ctl("binds itself to cluster-admin", climber, "create rolebindings/crown", "", 403, more, "create", "rolebinding", "crown", "-n", ns, "--clusterrole=cluster-admin", "--serviceaccount="+ns+":climber"),
	}
}

// somebodyElse is an account that asks in others' names.
func somebodyElse(s *suite) []door {
	s.apply(`apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: speaks-for-ann}
rules: [{apiGroups: [""], resources: [users], resourceNames: [ann], verbs: [impersonate]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: speaks-for-ann}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: speaks-for-ann}
subjects: [{kind: ServiceAccount, name: robot, namespace: ` + ns + `}]
`)
	const secrets, whoami = "/api/v1/secrets", "/apis/authentication.k8s.io/v1/selfsubjectreviews"
	review := `{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`
	ann := call("in the name that it may use", s.robot, http.MethodPost, whoami, review, http.StatusCreated, `"username":"ann"`, "Impersonate-User", "ann")
	s.soon("the account speaks for ann", ann)
	not := func(resource, group string) string { return denied(robotName, "impersonate", resource, group, "") }
	const authn = "authentication.k8s.io"
	return []door{
		ann,
		get("is admin", s.robot, secrets, 403, `users "admin" is forbidden: `+not("users", ""), "Impersonate-User", "admin"),
		get("is in system:masters", s.robot, secrets, 403, `groups "system:masters" is forbidden: `+not("groups", ""), "Impersonate-User", "ann", "Impersonate-Group", "system:masters"),
		get("is in system:masters, in other letters", s.robot, secrets, 403, not("groups", ""), "impersonate-user", "ann", "IMPERSONATE-GROUP", "system:masters"),
		get("has a uid of its choice", s.robot, secrets, 403, not("uids", authn), "Impersonate-User", "ann", "Impersonate-Uid", "0"),
		get("has extra of its choice", s.robot, secrets, 403, not("userextras/scopes", authn), "Impersonate-User", "ann", "Impersonate-Extra-Scopes", "all"),
		get("is a node", s.robot, secrets, 403, "system:node:a1", "Impersonate-User", "system:node:a1", "Impersonate-Group", "system:nodes"),
		get("is an account of kube-system", s.robot, secrets, 403, denied(robotName, "impersonate", "serviceaccounts", "", "kube-system"), "Impersonate-User", "system:serviceaccount:kube-system:default"),
		get("is the scheduler", s.robot, secrets, 403, not("users", ""), "Impersonate-User", "system:kube-scheduler"),
		get("is in a group, and nobody", s.robot, secrets, 400, "without impersonating a user", "Impersonate-Group", "system:masters"),
		inGo("is admin", identity{robotName, as(s.robot.config, "admin")}, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
			return err
		}, 403, not("users", "")),
		inGo("reads Secrets as ann", identity{robotName, as(s.robot.config, "ann")}, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
			return err
		}, 403, denied("ann", "list", "secrets", "", "")),
		ctl("is admin", s.robot, "get configmaps/crown", "", 403, not("users", ""), "get", "configmap", "crown", "-n", ns, "--as=admin"),
	}
}

const csrs = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// csr is a request for a certificate.
func (s *suite) csr(name, signer string, subject pkix.Name) string {
	s.t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		s.t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	if err != nil {
		s.t.Fatal(err)
	}
	b, err := json.Marshal(map[string]any{"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": map[string]any{"name": name}, "spec": map[string]any{
		"signerName": signer, "usages": []string{"client auth"}, "username": "admin", "groups": []string{"system:masters"},
		"request": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
	}})
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

// certificateRequests is an account that may make requests and write approvals, as far
// as no signer is concerned.
func certificateRequests(s *suite) []door {
	s.apply(`apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: asks}
rules:
- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests], verbs: [get, list, create]}
- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests/approval, certificatesigningrequests/status], verbs: [update, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: asks}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: asks}
subjects: [{kind: ServiceAccount, name: robot, namespace: ` + ns + `}]
`)
	const client = "kubernetes.io/kube-apiserver-client"
	s.soon("the account asks", get("", s.robot, csrs, ok, ""))
	approval := func(how string) string {
		return fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":"True","reason":"x","message":"x","lastUpdateTime":%q}]}}`, how, time.Now().UTC().Format(time.RFC3339))
	}
	return []door{
		call("asks, and the request bears its own name", s.robot, http.MethodPost, csrs, s.csr("asked", client, pkix.Name{CommonName: "robot"}), http.StatusCreated, `"username":"`+robotName+`"`),
		call("in system:masters", s.robot, http.MethodPost, csrs, s.csr("masters", client, pkix.Name{CommonName: "robot", Organization: []string{"system:masters"}}), 403, "system:masters"),
		call("approves its own", s.robot, http.MethodPatch, csrs+"/asked/approval", approval("Approved"), 403, "user not permitted to approve requests with signerName"),
		call("denies its own", s.robot, http.MethodPatch, csrs+"/asked/approval", approval("Denied"), 403, "user not permitted to approve requests with signerName"),
		call("signs its own", s.robot, http.MethodPatch, csrs+"/asked/status", fmt.Sprintf(`{"status":{"certificate":%q}}`, base64.StdEncoding.EncodeToString(s.admin.config.CAData)), 403, "user not permitted to sign requests with signerName"),
		call("without a word of what for", s.robot, http.MethodPost, csrs, `{"metadata":{"name":"empty"},"spec":{}}`, 422, "spec.request"),
		ctl("approves its own", s.robot, "update certificatesigningrequests/asked", "", 403, "user not permitted to approve requests with signerName", "certificate", "approve", "asked"),
	}
}
