package rbac

import rbacv1 "k8s.io/api/rbac/v1"

// Parts of what people work with, as each role of theirs sees it.
const (
	scaled     = "deployments/scale replicasets/scale statefulsets/scale"
	oldScaled  = "deployments/scale replicasets/scale replicationcontrollers/scale"
	terminals  = "pods/attach pods/exec pods/portforward pods/proxy"
	configured = "configmaps persistentvolumeclaims replicationcontrollers replicationcontrollers/scale secrets serviceaccounts services services/proxy"
)

// userRoles are the roles for people: cluster-admin may do everything; admin,
// edit and view are for one namespace and grow with what is aggregated into
// them.
func userRoles() []rbacv1.ClusterRole {
	return []rbacv1.ClusterRole{
		clusterRole("cluster-admin", on("*", "*", all), paths("*", all)),

		sum("admin"),
		into("admin", clusterRole("system:aggregate-to-admin",
			on("authorization.k8s.io", "localsubjectaccessreviews", do("create")),
			on("rbac.authorization.k8s.io", "rolebindings roles", readWrite),
		)),

		into("admin", sum("edit")),
		into("edit", clusterRole("system:aggregate-to-edit",
			on("core", terminals+" secrets services/proxy", read),
			on("core", "serviceaccounts", do("impersonate")),
			on("core", "pods "+terminals, write),
			on("core", "pods/eviction serviceaccounts/token", do("create")),
			on("core", configured, write),
			on("core events.k8s.io", "events", write),
			on("apps", "daemonsets deployments deployments/rollback replicasets statefulsets "+scaled, write),
			on("autoscaling", "horizontalpodautoscalers", write),
			on("batch", "cronjobs jobs", write),
			on("extensions", "daemonsets deployments deployments/rollback ingresses networkpolicies replicasets "+oldScaled, write),
			on("policy", "poddisruptionbudgets", write),
			on("networking.k8s.io", "ingresses networkpolicies", write),
			on("resource.k8s.io", "resourceclaims resourceclaimtemplates", write),
			on("scheduling.k8s.io", "podgroups workloads", write),
			on("coordination.k8s.io", "leases", readWrite),
		)),

		into("edit", sum("view")),
		into("view", clusterRole("system:aggregate-to-view",
			on("core", "configmaps endpoints persistentvolumeclaims persistentvolumeclaims/status pods replicationcontrollers replicationcontrollers/scale serviceaccounts services services/status", read),
			on("core", "bindings limitranges namespaces/status pods/log pods/status replicationcontrollers/status resourcequotas resourcequotas/status", read),
			on("core", "namespaces", read),
			on("core events.k8s.io", "events", read),
			on("discovery.k8s.io", "endpointslices", read),
			on("apps", "controllerrevisions daemonsets daemonsets/status deployments deployments/status replicasets replicasets/status statefulsets statefulsets/status "+scaled, read),
			on("autoscaling", "horizontalpodautoscalers horizontalpodautoscalers/status", read),
			on("batch", "cronjobs cronjobs/status jobs jobs/status", read),
			on("extensions", "daemonsets daemonsets/status deployments deployments/status ingresses ingresses/status networkpolicies replicasets replicasets/status "+oldScaled, read),
			on("policy", "poddisruptionbudgets poddisruptionbudgets/status", read),
			on("networking.k8s.io", "ingresses ingresses/status networkpolicies", read),
			on("resource.k8s.io", "resourceclaims resourceclaims/status resourceclaimtemplates", read),
			on("scheduling.k8s.io", "podgroups podgroups/status workloads", read),
		)),
		// Usage comes with this server, not with an add-on that would bring its
		// own role.
		into("view", into("edit", into("admin", clusterRole("system:aggregated-metrics-reader",
			on("metrics.k8s.io", "nodes pods", read),
		)))),
	}
}
