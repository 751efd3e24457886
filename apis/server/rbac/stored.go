package rbac

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	rbaclisters "k8s.io/client-go/listers/rbac/v1"
	"k8s.io/client-go/tools/cache"
)

// bySubject is the index of bindings by those they name.
const bySubject = "subject"

// Stored is the Policy of the roles and bindings in the store, held in memory
// and indexed by subject: a decision costs what its user has, not what the
// cluster has. What was written a moment ago may take a moment to count.
type Stored struct {
	factory         informers.SharedInformerFactory
	synced          []cache.InformerSynced
	clusterRoles    rbaclisters.ClusterRoleLister
	roles           rbaclisters.RoleLister
	clusterBindings cache.Indexer
	bindings        cache.Indexer
}

var _ Policy = &Stored{}

// NewStored makes a Policy that reads through client once Run runs.
func NewStored(client kubernetes.Interface) (*Stored, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(slim))
	v1 := factory.Rbac().V1()
	s := &Stored{
		factory:      factory,
		clusterRoles: v1.ClusterRoles().Lister(),
		roles:        v1.Roles().Lister(),
	}
	clusterBindings, bindings := v1.ClusterRoleBindings().Informer(), v1.RoleBindings().Informer()
	if err := clusterBindings.AddIndexers(cache.Indexers{bySubject: func(obj any) ([]string, error) {
		binding, ok := obj.(*rbacv1.ClusterRoleBinding)
		if !ok {
			return nil, nil
		}
		return subjectKeys(binding.Subjects, ""), nil
	}}); err != nil {
		return nil, fmt.Errorf("index cluster role bindings: %w", err)
	}
	if err := bindings.AddIndexers(cache.Indexers{bySubject: func(obj any) ([]string, error) {
		binding, ok := obj.(*rbacv1.RoleBinding)
		if !ok {
			return nil, nil
		}
		keys := subjectKeys(binding.Subjects, binding.Namespace)
		for i := range keys {
			keys[i] = binding.Namespace + "/" + keys[i]
		}
		return keys, nil
	}}); err != nil {
		return nil, fmt.Errorf("index role bindings: %w", err)
	}
	s.clusterBindings, s.bindings = clusterBindings.GetIndexer(), bindings.GetIndexer()
	s.synced = []cache.InformerSynced{
		v1.ClusterRoles().Informer().HasSynced, v1.Roles().Informer().HasSynced,
		clusterBindings.HasSynced, bindings.HasSynced,
	}
	return s, nil
}

// slim drops what no decision looks at.
func slim(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

// Run keeps the policy current until ctx ends.
func (s *Stored) Run(ctx context.Context) error {
	s.factory.StartWithContext(ctx)
	<-ctx.Done()
	s.factory.Shutdown()
	return nil
}

// Synced reports whether all that was stored when Run began is known.
func (s *Stored) Synced() bool {
	for _, synced := range s.synced {
		if !synced() {
			return false
		}
	}
	return true
}

// ClusterRole implements Policy.
func (s *Stored) ClusterRole(name string) (*rbacv1.ClusterRole, error) {
	return s.clusterRoles.Get(name)
}

// Role implements Policy.
func (s *Stored) Role(namespace, name string) (*rbacv1.Role, error) {
	return s.roles.Roles(namespace).Get(name)
}

// ClusterBindings implements Policy.
func (s *Stored) ClusterBindings(u user.Info) []*rbacv1.ClusterRoleBinding {
	return named[rbacv1.ClusterRoleBinding](s.clusterBindings, u, "")
}

// Bindings implements Policy.
func (s *Stored) Bindings(u user.Info, namespace string) []*rbacv1.RoleBinding {
	return named[rbacv1.RoleBinding](s.bindings, u, namespace+"/")
}

// named are the bindings that name u or one of its groups, each once.
func named[T any](index cache.Indexer, u user.Info, prefix string) []*T {
	var all []*T
	for _, key := range keysOf(u) {
		found, err := index.ByIndex(bySubject, prefix+key)
		if err != nil {
			continue // the index exists: NewStored made it
		}
		first := len(all)
		for _, obj := range found {
			if binding, ok := obj.(*T); ok && !slices.Contains(all, binding) {
				all = append(all, binding)
			}
		}
		// The index knows no order; which binding is named as the reason should
		// not change from one request to the next.
		slices.SortFunc(all[first:], func(a, b *T) int {
			return cmp.Compare(any(a).(metav1.Object).GetName(), any(b).(metav1.Object).GetName())
		})
	}
	return all
}

// keysOf are the index keys of a user: its name and its groups.
func keysOf(u user.Info) []string {
	keys := make([]string, 0, 1+len(u.GetGroups()))
	keys = append(keys, rbacv1.UserKind+":"+u.GetName())
	for _, group := range u.GetGroups() {
		keys = append(keys, rbacv1.GroupKind+":"+group)
	}
	return keys
}

func subjectKeys(subjects []rbacv1.Subject, namespace string) []string {
	keys := make([]string, 0, len(subjects))
	for _, s := range subjects {
		if key := keyOf(s, namespace); key != "" {
			keys = append(keys, key)
		}
	}
	return keys
}

// keyOf is the index key of a subject of a binding in namespace; a service
// account is the user it authenticates as.
func keyOf(s rbacv1.Subject, namespace string) string {
	switch s.Kind {
	case rbacv1.UserKind, rbacv1.GroupKind:
		return s.Kind + ":" + s.Name
	case rbacv1.ServiceAccountKind:
		if in := orElse(s.Namespace, namespace); in != "" && !strings.ContainsAny(in+s.Name, ":") {
			return rbacv1.UserKind + ":" + serviceaccount.MakeUsername(in, s.Name)
		}
	}
	return ""
}

// Has reports whether all of roles and bindings are known, by name.
func (s *Stored) Has(roles []rbacv1.ClusterRole, bindings []rbacv1.ClusterRoleBinding) bool {
	for _, role := range roles {
		if _, err := s.clusterRoles.Get(role.Name); err != nil {
			return false
		}
	}
	for _, binding := range bindings {
		if _, ok, err := s.clusterBindings.GetByKey(binding.Name); !ok || err != nil {
			return false
		}
	}
	return true
}
