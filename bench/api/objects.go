package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Namespaces, each of which has one more of what a pod has to pass.
const (
	plainNamespace    = "plain"
	auditedNamespace  = "audited"
	securedNamespace  = "secured"
	policiedNamespace = "policied"
	limitedNamespace  = "limited"
	quotaNamespace    = "quota"
	fullNamespace     = "full"
)

const (
	userName = "maker"
	roles    = 200
	bindings = 500
	policies = 20
	matching = 8 // policies of which a binding matches pods
	groups   = 5 // of the user
)

func userGroups() (all []string) {
	for i := range groups {
		all = append(all, fmt.Sprint("team-", i))
	}
	return all
}

// pod is one as a Deployment's might be, that keeps to the standard "restricted".
func pod(name string) *corev1.Pod {
	quantities := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "shop", "tier": "front", "owner": "team-1"}},
		Spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](1000), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{
				Name: "shop", Image: "registry.example.com/shop:1.2.3", Args: []string{"serve", "--port=8080"},
				Env:             []corev1.EnvVar{{Name: "MODE", Value: "production"}, {Name: "CACHE", Value: "redis.cache:6379"}},
				Ports:           []corev1.ContainerPort{{ContainerPort: 8080}},
				Resources:       corev1.ResourceRequirements{Requests: quantities("100m", "64Mi"), Limits: quantities("200m", "128Mi")},
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
			}},
		},
	}
}

// fill makes the namespaces and all that requests to them meet.
func fill(ctx context.Context, c *child) error {
	if err := makeNamespaces(ctx, c.admin); err != nil || c.kind == bare {
		return err
	}
	if err := errors.Join(makeRoles(ctx, c.admin), makePolicies(ctx, c.admin), makeLimits(ctx, c.admin)); err != nil {
		return err
	}
	return settled(ctx, c)
}

func makeNamespaces(ctx context.Context, client kubernetes.Interface) error {
	for _, name := range []string{plainNamespace, auditedNamespace, securedNamespace, policiedNamespace, limitedNamespace, quotaNamespace, fullNamespace} {
		n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
		if name == securedNamespace || name == fullNamespace {
			for _, mode := range []string{"enforce", "warn", "audit"} {
				n.Labels["pod-security.kubernetes.io/"+mode] = "restricted"
			}
		}
		if name == policiedNamespace || name == fullNamespace {
			n.Labels["policies"] = "yes"
		}
		if _, err := client.CoreV1().Namespaces().Create(ctx, n, metav1.CreateOptions{}); err != nil {
			return err
		}
		// A loop makes it elsewhere. Without it each pod would be looked up for again.
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
		if _, err := client.CoreV1().ServiceAccounts(name).Create(ctx, account, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func roleName(i int) string { return fmt.Sprintf("bench-%03d", i) }

// makeRoles makes roles and bindings: most are others', some are the user's and of
// his groups, and one of these, the last, lets him make pods.
func makeRoles(ctx context.Context, client kubernetes.Interface) error {
	rules := func(i int) []rbacv1.PolicyRule {
		if i == roles-1 {
			return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods", "configmaps"}, Verbs: []string{"create", "get", "list", "delete", "deletecollection"}}}
		}
		return []rbacv1.PolicyRule{
			{APIGroups: []string{"apps"}, Resources: []string{"deployments", "statefulsets"}, Verbs: []string{"get", "list", "watch", "create"}},
			{APIGroups: []string{""}, Resources: []string{"services", "configmaps"}, Verbs: []string{"get", "list"}, ResourceNames: []string{fmt.Sprint("of-", i)}},
		}
	}
	for i := range roles {
		var err error
		if i%4 == 0 {
			_, err = client.RbacV1().Roles(fullNamespace).Create(ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: roleName(i)}, Rules: rules(i)}, metav1.CreateOptions{})
		} else {
			_, err = client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: roleName(i)}, Rules: rules(i)}, metav1.CreateOptions{})
		}
		if err != nil {
			return err
		}
	}
	for i := range bindings {
		role := i % roles
		if i == bindings-1 {
			role = roles - 1
		} else if role == roles-1 {
			role--
		}
		subject := rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: fmt.Sprint("other-", i)}
		switch {
		case i == bindings-1 || i%50 == 7:
			subject.Name = userName
		case i%50 == 9:
			subject.Kind, subject.Name = rbacv1.GroupKind, fmt.Sprint("team-", i/50%groups)
		}
		var err error
		if role%4 == 0 {
			_, err = client.RbacV1().RoleBindings(fullNamespace).Create(ctx, &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: roleName(i)}, Subjects: []rbacv1.Subject{subject},
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: roleName(role)},
			}, metav1.CreateOptions{})
		} else {
			_, err = client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: roleName(i)}, Subjects: []rbacv1.Subject{subject},
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: roleName(role)},
			}, metav1.CreateOptions{})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// refused is the name of a pod that the policy i lets nobody make: by it a policy is
// seen to be in force.
func refused(i int) string { return fmt.Sprint("refused-", i) }

// expressions are what policies say of pods.
var expressions = []string{
	"object.spec.containers.all(c, has(c.resources) && has(c.resources.limits) && 'memory' in c.resources.limits)",
	"object.spec.containers.all(c, c.image.startsWith('registry.example.com/'))",
	"!has(object.spec.hostNetwork) || !object.spec.hostNetwork",
	"has(object.metadata.labels) && 'owner' in object.metadata.labels && object.metadata.labels['owner'].startsWith('team-')",
	"object.spec.containers.all(c, !has(c.image) || !c.image.endsWith(':latest'))",
	"!has(object.spec.volumes) || object.spec.volumes.all(v, !has(v.hostPath))",
	"request.userInfo.username != 'nobody'",
	"object.spec.containers.size() <= 10",
}

func makePolicies(ctx context.Context, client kubernetes.Interface) error {
	for i := range policies {
		group, version, kind := "", "v1", "pods"
		if i >= matching {
			group, kind = "apps", []string{"deployments", "statefulsets", "daemonsets"}[i%3]
		}
		name := fmt.Sprintf("bench-%02d", i)
		p := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update},
				Rule:       admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{version}, Resources: []string{kind}},
			}}}},
			Validations: []admissionv1.Validation{{Expression: fmt.Sprintf("object.metadata.name != '%s'", refused(i))}},
		}}
		if i < matching {
			p.Spec.Validations = append(p.Spec.Validations, admissionv1.Validation{Expression: expressions[i%len(expressions)]})
		}
		switch i {
		case 1:
			p.Spec.MatchConditions = []admissionv1.MatchCondition{{Name: "people", Expression: "!request.userInfo.username.startsWith('system:')"}}
		case 4:
			p.Spec.Variables = []admissionv1.Variable{{Name: "images", Expression: "object.spec.containers.map(c, c.image)"}}
			p.Spec.Validations = append(p.Spec.Validations, admissionv1.Validation{Expression: "variables.images.all(i, i.contains(':'))"})
		}
		if _, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Create(ctx, p, metav1.CreateOptions{}); err != nil {
			return err
		}
		b := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			MatchResources: &admissionv1.MatchResources{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"policies": "yes"}}},
		}}
		if _, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Create(ctx, b, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// makeLimits makes a LimitRange and a quota with more room than the pods take. The
// loop that adds up what quotas hold is not there: its first sums are written here.
func makeLimits(ctx context.Context, client kubernetes.Interface) error {
	for _, ns := range []string{limitedNamespace, fullNamespace} {
		_, err := client.CoreV1().LimitRanges(ns).Create(ctx, &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{{
			Type:    corev1.LimitTypeContainer,
			Max:     corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("4Gi")},
			Default: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1"), corev1.ResourceMemory: resource.MustParse("1Gi")},
		}}}}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
	}
	for _, ns := range []string{quotaNamespace, fullNamespace} {
		hard, used := corev1.ResourceList{}, corev1.ResourceList{}
		for _, name := range []corev1.ResourceName{corev1.ResourcePods, corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory, corev1.ResourceLimitsMemory} {
			hard[name], used[name] = resource.MustParse("1P"), resource.MustParse("0")
		}
		q, err := client.CoreV1().ResourceQuotas(ns).Create(ctx, &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		q.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: used}
		if _, err := client.CoreV1().ResourceQuotas(ns).UpdateStatus(ctx, q, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// settled waits until all that was made is in force.
func settled(ctx context.Context, c *child) error {
	try := func(ns, name string) error {
		_, err := c.user.CoreV1().Pods(ns).Create(ctx, pod(name), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	for _, ns := range []string{plainNamespace, securedNamespace, policiedNamespace, limitedNamespace, quotaNamespace, fullNamespace} {
		if err := poll(ctx, func() error { return try(ns, "first") }); err != nil {
			return fmt.Errorf("a pod in the namespace %s: %w", ns, err)
		}
	}
	for i := range matching {
		for _, ns := range []string{policiedNamespace, fullNamespace} {
			err := poll(ctx, func() error {
				err := try(ns, refused(i))
				if err == nil {
					return errors.New("it is let through")
				}
				if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
					return err
				}
				return nil
			})
			if err != nil {
				return fmt.Errorf("policy %d in the namespace %s: %w", i, ns, err)
			}
		}
	}
	return nil
}
