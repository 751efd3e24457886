package apis

import (
	"github.com/clusterd/clusterd/apis/apps"
	"github.com/clusterd/clusterd/apis/coordination"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/discovery"
	"github.com/clusterd/clusterd/apis/node"
	"github.com/clusterd/clusterd/apis/policy"
	"github.com/clusterd/clusterd/apis/rbac"
	"github.com/clusterd/clusterd/apis/scheduling"
)

// Kinds returns the kinds clusterd serves, each in its storage version. This
// is THE list: scheme, discovery, storage and tests are made from it.
func Kinds() []Kind {
	return []Kind{
		core.Namespace(),
		core.Node(),
		core.Pod(),
		core.ConfigMap(),
		core.Secret(),
		core.ServiceAccount(),
		core.Service(),
		core.Event(),
		apps.ReplicaSet(),
		apps.Deployment(),
		coordination.Lease(),
		discovery.EndpointSlice(),
		node.RuntimeClass(),
		policy.PodDisruptionBudget(),
		rbac.Role(),
		rbac.RoleBinding(),
		rbac.ClusterRole(),
		rbac.ClusterRoleBinding(),
		scheduling.PriorityClass(),
	}
}
