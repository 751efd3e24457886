// Package names is the register of what clusterd calls by names of its own in
// objects: annotations, labels, finalizers and the like. All have one prefix.
// docs/names.md is printed from it; a test holds both together, and finds names
// with the prefix that are written anywhere else.
package names

import "strings"

// Prefix of every name. A domain below .local cannot be registered.
const Prefix = "clusterd.local/"

// The names. All says what each is for.
const (
	ExplainScheduling    = Prefix + "explain-scheduling"
	SingleProcessOOMKill = Prefix + "single-process-oom-kill"
	Rebalance            = Prefix + "rebalance"
	SSLRedirect          = Prefix + "ssl-redirect"
	IngressController    = Prefix + "ingress"
	GatewayController    = Prefix + "gateway"
	SharedAddress        = Prefix + "shared-address"
	LocalPathProvisioner = Prefix + "local-path"
	LocalPathNode        = Prefix + "local-path-node"
	LocalPathFinalizer   = Prefix + "local-path-folder"
	LocalPathMade        = Prefix + "local-path-made"
	LocalPathRoot        = Prefix + "local-path-root"
	AutoscalingV2        = Prefix + "autoscaling-v2"
	TokenKey             = Prefix + "token-key"
	SelfFencing          = Prefix + "self-fencing"
	SelfFencingCondition = Prefix + "SelfFencing"
	FencingPromise       = Prefix + "fencing-promise"
	Fenced               = Prefix + "fenced"
	WireGuard            = Prefix + "wireguard"
	AnnounceNetworks     = Prefix + "announce-networks"
	LoadBalancerAddress  = Prefix + "LoadBalancerAddress"
)

// Name is one row of the register.
type Name struct {
	Name string
	Kind string // "annotation", "label", "finalizer", or the field that holds it
	On   string // kinds of objects
	By   string // who writes it: "users" or a part of clusterd
	For  string // what it does
}

// All are the names, those for users first.
var All = []Name{
	{ExplainScheduling, "annotation", "Pod", "users", "on a pod that waits: its condition PodScheduled and its events say of each node all that is in the way; `false` switches it off"},
	{SingleProcessOOMKill, "annotation", "Pod", "users", "names of containers, separated by commas, of which only one process dies when their memory is used up"},
	{SelfFencing, "annotation", "Pod", "users", "`true`: the pod is ended by its node when that cannot renew its lease, and replaced elsewhere then; `false`: it is not, though the node's `fenceClaims` is on"},
	{Rebalance, "annotation", "Pod", "users", "`false`: the pod is not evicted for the sake of a better node; `true`: it may be, though it has an `emptyDir`, a `hostPath` or an ephemeral volume, whose data go"},
	{SSLRedirect, "annotation", "Ingress", "users", "`false`: plain requests for a host with TLS are answered, not sent to https"},
	{IngressController, "`spec.controller`", "IngressClass", "users", "Ingresses of the class are served by clusterd's proxy"},
	{GatewayController, "`spec.controllerName`", "GatewayClass", "users and the leader", "Gateways of the class are served by clusterd's proxy"},
	{SharedAddress, "annotation", "Gateway", "users", "`true`: the Gateway has no addresses of its own but those of Ingresses and of all Gateways with the annotation"},
	{LocalPathProvisioner, "`provisioner`", "StorageClass", "users", "claims of the class get directories of a node's disk"},
	{LocalPathNode, "label", "PersistentVolume", "leader", "the node that has the volume's directory"},
	{LocalPathFinalizer, "finalizer", "PersistentVolume", "leader", "stays until the node has removed the directory"},
	{LocalPathMade, "annotation", "PersistentVolume", "the node", "when the directory was made: if it is missing after that, data is lost"},
	{LocalPathRoot, "annotation", "Node", "the node", "the directory that holds those of its volumes"},
	{AutoscalingV2, "annotation", "HorizontalPodAutoscaler in autoscaling/v1", "API server", "what that version has no field for, so that nothing is lost when it is written back"},
	{SelfFencingCondition, "condition", "Pod", "the node", "the pod is ended by its node when that cannot renew its lease"},
	{FencingPromise, "annotation", "Lease of a node", "the node", "the `renewTime` for which the node promises to end such pods before the lease has run out"},
	{Fenced, "annotation", "Lease of a node", "leader", "since when such pods of the node are replaced: the node takes the annotation off when it has ended them and said so"},
	{WireGuard, "annotation", "Node", "the node", "the UDP port and the public key of its WireGuard, where pod traffic is encrypted"},
	{AnnounceNetworks, "annotation", "Node", "the node", "the networks of the interface by which it announces addresses of Services: nodes in an address's own network come first"},
	{LoadBalancerAddress, "condition", "Service", "leader", "of type LoadBalancer: whether it has its addresses of the cluster's pool; if not, why not"},
	{TokenKey, "`type`", "Secret", "API server", "the keys that sign service accounts' tokens"},
}

// Table is the register as a table of Markdown.
func Table() string {
	var b strings.Builder
	b.WriteString("| name | what | on | written by | what for |\n|---|---|---|---|---|\n")
	for _, n := range All {
		b.WriteString("| `" + n.Name + "` | " + strings.Join([]string{n.Kind, n.On, n.By, n.For}, " | ") + " |\n")
	}
	return b.String()
}
