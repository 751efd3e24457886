package rbac

import (
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
)

// controller is a loop of the leader that acts under a name of its own.
type controller struct {
	// loop is its name among the loops.
	loop string
	// account is its service account in kube-system, whose role is
	// system:controller:ACCOUNT; empty: it is user.
	account string
	user    string
	rules   []rbacv1.PolicyRule
}

const gatewayGroup = "gateway.networking.k8s.io"

// controllers are the loops that hold more, or much less, than
// system:kube-controller-manager does, which is who all others are.
var controllers = []controller{
	{loop: "scheduler", user: user.KubeScheduler},
	{loop: "gc", account: "generic-garbage-collector", rules: []rbacv1.PolicyRule{
		on("*", "*", do("get", "list", "watch", "patch", "update", "delete")), events}},
	{loop: "namespace", account: "namespace-controller", rules: []rbacv1.PolicyRule{
		on("core", "namespaces", do("get", "list", "watch", "delete")),
		on("core", "namespaces/finalize namespaces/status", do("update")),
		on("*", "*", do("get", "list", "delete", "deletecollection"))}},
	{loop: "hpa", account: "horizontal-pod-autoscaler", rules: []rbacv1.PolicyRule{
		on("autoscaling", "horizontalpodautoscalers", listWatch),
		on("autoscaling", "horizontalpodautoscalers/status", do("update")),
		on("*", "*/scale", do("get", "update")),
		on("core", "pods", do("list")),
		on("metrics.k8s.io", "pods", do("list")),
		on("custom.metrics.k8s.io external.metrics.k8s.io", "*", do("get", "list")), events}},
	{loop: "gateway", account: "gateway-controller", rules: []rbacv1.PolicyRule{
		on("apiextensions.k8s.io", "customresourcedefinitions", do("create")),
		called(on("apiextensions.k8s.io", "customresourcedefinitions", do("get", "patch")),
			"gatewayclasses."+gatewayGroup, "gateways."+gatewayGroup, "httproutes."+gatewayGroup, "grpcroutes."+gatewayGroup, "referencegrants."+gatewayGroup, "backendtlspolicies."+gatewayGroup),
		on(gatewayGroup, "gatewayclasses gateways httproutes grpcroutes referencegrants backendtlspolicies", listWatch),
		on(gatewayGroup, "gatewayclasses", do("create")),
		on(gatewayGroup, "gatewayclasses/status gateways/status httproutes/status grpcroutes/status backendtlspolicies/status", do("update")),
		on("core", "configmaps services serviceaccounts", do("create")),
		called(on("core", "configmaps", do("get", "update")), "clusterd-gateway-api"),
		on("core", "services", do("update", "delete")), // a Gateway's own has its name
		on("apps", "daemonsets", do("create"))}},
	{loop: "storagemigration", account: "storage-version-migrator-controller", rules: []rbacv1.PolicyRule{
		on("*", "*", do("list", "patch")),
		on("apiextensions.k8s.io", "customresourcedefinitions", do("get")),
		on("apiextensions.k8s.io", "customresourcedefinitions/status", do("patch")),
		on("storagemigration.k8s.io", "storageversionmigrations/status", do("update"))}},
	{loop: "resourceclaim", account: "resource-claim-controller", rules: []rbacv1.PolicyRule{
		on("core", "pods", read),
		on("core", "pods/finalizers", do("update")),
		on("core", "pods/status", do("patch", "update")),
		on(devices, "resourceclaims", do("create", "delete", "get", "list", "patch", "update", "watch")),
		on(devices, "resourceclaims/binding resourceclaims/status", do("patch", "update")), events}},
	{loop: "clusterroleaggregation", account: "clusterrole-aggregation-controller", rules: []rbacv1.PolicyRule{
		on("rbac.authorization.k8s.io", "clusterroles", do("escalate", "get", "list", "patch", "update", "watch"))}},
}

// LoopIdentity is who a loop of the leader is to the API server.
func LoopIdentity(loop string) (name string, groups []string) {
	for _, c := range controllers {
		if c.loop != loop {
			continue
		}
		if c.account != "" {
			return serviceaccount.MakeUsername(systemNamespace, c.account), serviceaccount.MakeGroupNames(systemNamespace)
		}
		return c.user, nil
	}
	return user.KubeControllerManager, nil
}

// managerRules: the loops that have no identity of their own list everything,
// and read and write what workloads, their networks and their volumes are made of. They
// grant no rights, change no admission and no API, and have no business inside
// containers.
func managerRules() []rbacv1.PolicyRule {
	return append(delegates(), events,
		on("*", "*", listWatch),
		on("core", "namespaces", do("get")),
		on("core", "configmaps endpoints limitranges nodes persistentvolumeclaims persistentvolumes pods replicationcontrollers resourcequotas secrets serviceaccounts services", readWrite),
		on("core", "nodes/status persistentvolumeclaims/status persistentvolumes/status pods/status pods/ephemeralcontainers replicationcontrollers/status resourcequotas/status services/status", do("patch", "update")),
		on("core", "pods/eviction serviceaccounts/token", do("create")),
		on("apps batch autoscaling policy networking.k8s.io discovery.k8s.io storage.k8s.io coordination.k8s.io", "*", readWrite),
		on("apiextensions.k8s.io apiregistration.k8s.io", "customresourcedefinitions/status apiservices/status", do("patch", "update")),
		on("admissionregistration.k8s.io", "validatingadmissionpolicies/status mutatingadmissionpolicies/status", do("patch", "update")),
		on(csr, "certificatesigningrequests podcertificaterequests", do("get", "delete")),
		on("scheduling.k8s.io", "podgroups", do("patch", "update")), // their finalizer
		on(devices, "devicetaintrules/status", do("patch")),
		on(csr, "certificatesigningrequests/status certificatesigningrequests/approval", do("update", "patch")),
		called(on(csr, "signers", do("approve", "sign")), "kubernetes.io/kube-apiserver-client", "kubernetes.io/kube-apiserver-client-kubelet", "kubernetes.io/kubelet-serving"),
		on("*", "*/scale", do("get", "update", "patch")),
		on("flowcontrol.apiserver.k8s.io", "flowschemas/status prioritylevelconfigurations/status", do("patch", "update")),
	)
}
