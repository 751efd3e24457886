package main

import (
	"context"
	"fmt"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// What servers include.
const (
	bareServer    = "store of one member, watch cache; no admission plugin, no audit log"
	chainedServer = "store of one member, watch cache, Secrets sealed, all admission plugins that are on by default, no webhook, audit log of two namespaces, 200 roles, 500 bindings, 20 policies"
	openedServer  = "as the other, with Secrets stored as they are"
)

// podCases make pods: on a server without the chain, and through ever more of it.
func podCases(_ context.Context, servers map[string]*child) ([]*load, error) {
	c := servers[chained]
	all := []*load{{name: "without", server: bareServer, includes: "certificate of system:masters, who need no role and never wait", child: servers[bare]}}
	all[0].pods(servers[bare].admin, plainNamespace)
	for _, one := range []struct {
		name, ns, includes string
		client             kubernetes.Interface
	}{
		{"plugins", plainNamespace, "certificate of system:masters; admission plugins, of which none has an object to look at", c.admin},
		{"roles", plainNamespace, "certificate of a user with 5 groups; roles, priority and fairness; plugins", c.user},
		{"audit", auditedNamespace, "as roles; audit log, level Metadata", c.user},
		{"podsecurity", securedNamespace, "as roles; PodSecurity: enforce, warn, audit restricted", c.user},
		{"policies", policiedNamespace, "as roles; 8 of 20 policies match", c.user},
		{"limits", limitedNamespace, "as roles; a LimitRange", c.user},
		{"quota", quotaNamespace, "as roles; a ResourceQuota, whose status is written for each pod", c.user},
		{"full", fullNamespace, "certificate of a user with 5 groups; roles, priority and fairness, audit log, PodSecurity, 8 of 20 policies, LimitRange, ResourceQuota", c.user},
	} {
		l := &load{name: one.name, server: chainedServer, includes: one.includes, beside: "without", child: c}
		l.pods(one.client, one.ns)
		all = append(all, l)
	}
	return all, nil
}

// pods has a case make pods. What it made is removed by an administrator, with the
// same request everywhere.
func (l *load) pods(client kubernetes.Interface, ns string) {
	l.do = func(ctx context.Context, name string) error {
		_, err := client.CoreV1().Pods(ns).Create(ctx, pod(name), metav1.CreateOptions{})
		return err
	}
	l.undo = func(ctx context.Context) error {
		return l.child.admin.CoreV1().Pods(ns).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{})
	}
}

func podGoals(figures map[string]figure) []goal {
	more := figures["full"].Beyond
	apart := more - (figures["quota"].CPU - figures["roles"].CPU)
	return []goal{
		{"api-pods", "the full chain with 200 roles, 500 bindings, 20 policies <= 60 us of processor time for a pod's creation beyond none", more, more <= 60},
		{"api-pods", "the same but for the second write, of the quota <= 60 us", round(apart), apart <= 60},
	}
}

// tokenCases read an object, which lies in the watch cache, as the holder of a
// certificate and of a token. What each of them takes by itself is measured by
// TestFigures of apis/server; a client without either is not to be compared with, since
// the library ends its connection after each request.
func tokenCases(ctx context.Context, servers map[string]*child) ([]*load, error) {
	c := servers[chained]
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "caller"}}
	if _, err := c.admin.CoreV1().ServiceAccounts(plainNamespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	answer, err := c.admin.CoreV1().ServiceAccounts(plainNamespace).CreateToken(ctx, account.Name, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](3600)}}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	if _, err := c.admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "caller"}, Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: plainNamespace, Name: account.Name}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: roleName(roles - 1)},
	}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if _, err := c.admin.CoreV1().ConfigMaps(plainNamespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kept"}}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	withToken := c.config(pair{})
	withToken.BearerToken = answer.Status.Token
	var all []*load
	for _, one := range []struct {
		name, includes, beside string
		config                 *rest.Config
	}{
		{"certificate", "certificate of a user with 5 groups, verified before; roles, priority and fairness; a read from the watch cache", "", c.config(c.User)},
		{"token", fmt.Sprintf("token of a service account of %d bytes, looked at again after 10 s; else the same", len(answer.Status.Token)), "certificate", withToken},
	} {
		client, err := kubernetes.NewForConfig(one.config)
		if err != nil {
			return nil, err
		}
		read := func(ctx context.Context, _ string) error {
			_, err := client.CoreV1().ConfigMaps(plainNamespace).Get(ctx, "kept", metav1.GetOptions{ResourceVersion: "0"})
			return err
		}
		if err := poll(ctx, func() error { return read(ctx, "") }); err != nil {
			return nil, err
		}
		all = append(all, &load{name: one.name, server: chainedServer, includes: one.includes, beside: one.beside, child: c, do: read})
	}
	return all, nil
}

func tokenGoals(figures map[string]figure) []goal {
	more := figures["token"].Beyond
	return []goal{{"api-tokens", "authentication by a cached token <= 30 us beyond one by certificate", more, more <= 30}}
}

// secretCases write Secrets that are sealed and Secrets that are not.
func secretCases(ctx context.Context, servers map[string]*child) ([]*load, error) {
	var all []*load
	for _, one := range []struct{ kind, name, server, beside string }{{opened, "open", openedServer, ""}, {chained, "sealed", chainedServer, "open"}} {
		c := servers[one.kind]
		secrets := c.admin.CoreV1().Secrets(plainNamespace)
		undo := func(ctx context.Context) error {
			return secrets.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		}
		beside := func(verb string) string {
			if one.beside == "" {
				return ""
			}
			return one.beside + " " + verb
		}
		all = append(all, &load{name: one.name + " create", server: one.server, includes: "certificate of system:masters; a Secret of 1 KiB", beside: beside("create"), child: c, undo: undo,
			do: func(ctx context.Context, name string) error {
				_, err := secrets.Create(ctx, secret(name, ""), metav1.CreateOptions{})
				return err
			}})
		kept := c.admin.CoreV1().Secrets(limitedNamespace)
		all = append(all, &load{name: one.name + " update", server: one.server, includes: "as create; the Secret is there, with other contents", beside: beside("update"), child: c,
			do: func(ctx context.Context, name string) error {
				_, err := kept.Update(ctx, secret("kept", name), metav1.UpdateOptions{})
				return err
			}})
		if _, err := kept.Create(ctx, secret("kept", ""), metav1.CreateOptions{}); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func secret(name, content string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{
		"user": []byte("shop"), "password": []byte(content + strings.Repeat("k", 1020-len(content))),
	}}
}

func secretGoals(figures map[string]figure) (all []goal) {
	for _, verb := range []string{"create", "update"} {
		plain, sealed := figures["open "+verb], figures["sealed "+verb]
		if plain.CPU == 0 {
			continue
		}
		percent := round(100 * sealed.Beyond / plain.CPU)
		all = append(all, goal{"api-secrets", "sealing <= 5 % of a Secret's " + verb, percent, percent <= 5})
	}
	return all
}
