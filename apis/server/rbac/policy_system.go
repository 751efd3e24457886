package rbac

import rbacv1 "k8s.io/api/rbac/v1"

const (
	publicPaths    = "/healthz /livez /readyz /version /version/"
	discoveryPaths = publicPaths + " /api /api/* /apis /apis/* /openapi /openapi/*"
	csr            = "certificates.k8s.io"
	devices        = "resource.k8s.io"
)

// delegates lets a component ask this server who a user is and what they
// may do.
func delegates() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		on("authentication.k8s.io", "tokenreviews", do("create")),
		on("authorization.k8s.io", "subjectaccessreviews", do("create")),
	}
}

// approver may approve certificates of one signer.
func approver(role, signer string) rbacv1.ClusterRole {
	return clusterRole("system:certificates.k8s.io:"+role, called(on(csr, "signers", do("approve")), "kubernetes.io/"+signer))
}

// systemRoles are the roles for everybody and for components.
func systemRoles() []rbacv1.ClusterRole {
	roles := []rbacv1.ClusterRole{
		clusterRole("system:discovery", paths(discoveryPaths, do("get"))),
		clusterRole("system:public-info-viewer", paths(publicPaths, do("get"))),
		clusterRole("system:basic-user",
			on("authorization.k8s.io", "selfsubjectaccessreviews selfsubjectrulesreviews", do("create")),
			on("authentication.k8s.io", "selfsubjectreviews", do("create"))),
		clusterRole("system:monitoring",
			paths("/healthz /healthz/* /livez /livez/* /metrics /metrics/slis /readyz /readyz/* /statusz /flagz", do("get")),
			on("core", "nodes/metrics", do("get"))),
		clusterRole("system:service-account-issuer-discovery", paths("/.well-known/openid-configuration /.well-known/openid-configuration/ /openid/v1/jwks /openid/v1/jwks/", do("get"))),
		clusterRole("system:cluster-trust-bundle-discovery", on(csr, "clustertrustbundles", read)),
		clusterRole("system:auth-delegator", delegates()...),

		clusterRole("system:node", append(delegates(),
			on("authorization.k8s.io", "localsubjectaccessreviews", do("create")),
			on("core", "services", read),
			on("core", "nodes", do("create", "get", "list", "watch", "patch", "update")),
			on("core", "nodes/status pods/status", do("patch", "update")),
			events,
			on("core", "pods", do("get", "list", "watch", "create", "delete")),
			on("core", "pods/eviction serviceaccounts/token", do("create")),
			on("core", "configmaps secrets", read),
			on("core", "persistentvolumeclaims persistentvolumes endpoints serviceaccounts", do("get")),
			on(devices, "resourceclaims", do("get")),
			on(devices, "resourceslices", do("deletecollection")),
			on(csr, "certificatesigningrequests podcertificaterequests", do("create", "get", "list", "watch")),
			on(csr, "clustertrustbundles", read),
			on("coordination.k8s.io", "leases", do("create", "delete", "get", "patch", "update")),
			on("storage.k8s.io", "volumeattachments", do("get")),
			on("core", "persistentvolumeclaims/status", do("get", "patch", "update")),
			on("storage.k8s.io", "csidrivers", read),
			on("storage.k8s.io", "csinodes", do("create", "delete", "get", "patch", "update")),
			on("node.k8s.io", "runtimeclasses", read))...),
		clusterRole("system:node-problem-detector", on("core", "nodes", do("get")), on("core", "nodes/status", do("patch")), events),
		clusterRole("system:node-bootstrapper", on(csr, "certificatesigningrequests", do("create", "get", "list", "watch"))),
		clusterRole("system:node-proxier",
			on("core", "endpoints services", listWatch), on("core", "nodes", read), events,
			on("discovery.k8s.io", "endpointslices", listWatch),
			on("networking.k8s.io", "servicecidrs", listWatch)),
		clusterRole("system:kubelet-api-admin",
			on("core", "nodes", do("get", "list", "watch", "proxy")),
			on("core", "nodes/configz nodes/healthz nodes/log nodes/metrics nodes/pods nodes/proxy nodes/stats", all)),
		// What of a node must know all pods, to name and to guard them.
		clusterRole(NodeNetwork,
			on("core", "pods namespaces services nodes", read), on("discovery.k8s.io", "endpointslices", read),
			on("networking.k8s.io", "networkpolicies servicecidrs", read), called(on("core", "configmaps", read), "kube-dns")),
		clusterRole(nodeNetworkUser, called(on("core", "users", do("impersonate")), NodeNetwork)),
		clusterRole("system:kube-dns", on("core", "endpoints services", listWatch)),
		// The proxy for Ingresses writes nothing. It asks for Secrets of TLS alone,
		// which a rule cannot say.
		clusterRole("system:clusterd-ingress",
			on("core", "services secrets configmaps", listWatch), on("discovery.k8s.io", "endpointslices", listWatch),
			on("networking.k8s.io", "ingresses ingressclasses", listWatch), on("core", "namespaces", listWatch),
			on(gatewayGroup, "gatewayclasses gateways httproutes grpcroutes referencegrants backendtlspolicies", listWatch)),
		clusterRole("system:kube-aggregator", on("core", "endpoints services", read)),

		clusterRole("system:kube-scheduler", append(delegates(), events,
			on("coordination.k8s.io", "leases", do("create")),
			called(on("coordination.k8s.io", "leases", do("get", "list", "update", "watch")), "kube-scheduler"),
			on("coordination.k8s.io", "leasecandidates", readWrite),
			on("core", "nodes namespaces replicationcontrollers services persistentvolumeclaims persistentvolumes", read),
			on("core", "pods", do("delete", "get", "list", "watch")),
			on("core", "bindings pods/binding", do("create")),
			on("core", "pods/status", do("patch", "update")),
			on("apps extensions", "replicasets", read),
			on("apps", "statefulsets", read),
			on("policy", "poddisruptionbudgets", read),
			on("scheduling.k8s.io", "podgroups", read),
			on("scheduling.k8s.io", "podgroups/status", do("patch", "update")),
			on("storage.k8s.io", "csinodes csidrivers csistoragecapacities volumeattachments", read),
			// Ours does not ask for these. They are for schedulers of users', which are
			// bound to this role.
			on("core", "pods/finalizers", do("update")),
			on(devices, "deviceclasses devicetaintrules resourceslices", read),
			on(devices, "resourceclaims", do("create", "delete", "get", "list", "patch", "update", "watch")),
			on(devices, "resourceclaims/status", do("get", "list", "patch", "update", "watch")),
			on(devices, "resourceclaims/binding", do("patch", "update")))...),
		clusterRole("system:volume-scheduler",
			on("core", "persistentvolumes persistentvolumeclaims", do("get", "list", "patch", "update", "watch")),
			on("storage.k8s.io", "storageclasses", read)),
		clusterRole("system:persistent-volume-provisioner",
			on("core", "persistentvolumes", do("create", "delete", "get", "list", "watch")),
			on("core", "persistentvolumeclaims", do("get", "list", "update", "watch")),
			on("storage.k8s.io", "storageclasses", read),
			on("core", "events", do("watch")), events),
		clusterRole("system:kube-controller-manager", managerRules()...),

		clusterRole("system:certificates.k8s.io:certificatesigningrequests:nodeclient", on(csr, "certificatesigningrequests/nodeclient", do("create"))),
		clusterRole("system:certificates.k8s.io:certificatesigningrequests:selfnodeclient", on(csr, "certificatesigningrequests/selfnodeclient", do("create"))),
		approver("kube-apiserver-client-approver", "kube-apiserver-client"),
		approver("kube-apiserver-client-kubelet-approver", "kube-apiserver-client-kubelet"),
		approver("kubelet-serving-approver", "kubelet-serving"),
		approver("legacy-unknown-approver", "legacy-unknown"),
	}
	return roles
}
