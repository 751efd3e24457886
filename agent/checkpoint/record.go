package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/clusterd/clusterd/agent/claim"
	"github.com/clusterd/clusterd/agent/fence"
	"github.com/clusterd/clusterd/apis/core"
)

// Pod is the record of a pod: what is needed to start it again.
type Pod struct {
	Pod *v1.Pod `json:"pod"` // with the status as the node last built it
	// Objects are the ConfigMaps, Secrets and ClusterTrustBundles that it names.
	Objects []Object `json:"objects,omitempty"`
	// Absent are those that it names and the API does not have, as they are optional.
	Absent []Absent `json:"absent,omitempty"`
	// Claims are those of its volumes, with the volumes that they are bound to.
	Claims []Claim `json:"claims,omitempty"`
	Tokens []Token `json:"tokens,omitempty"`
}

// Absent is what the API does not have: the object of a name, or any of a signer.
type Absent struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	Signer    string `json:"signer,omitempty"`
}

// Claim is a claim and its volume.
type Claim struct {
	Claim  *v1.PersistentVolumeClaim `json:"claim"`
	Volume *v1.PersistentVolume      `json:"volume"`
}

// Token is a service account token that the pod was given.
type Token struct {
	Audience string    `json:"audience,omitempty"`
	Seconds  int64     `json:"seconds"` // the lifetime that was asked for
	Token    string    `json:"token"`
	RenewAt  time.Time `json:"renewAt"`
	Ends     time.Time `json:"ends"`
}

// Cluster is the record of what the node knows of the cluster beside its pods.
type Cluster struct {
	Node *v1.Node `json:"node"` // its own
	// Lists are all objects of a kind, by the kind. A kind that is missing is not known.
	Lists map[string][]json.RawMessage `json:"lists"`
}

// Object is an object of the API.
type Object struct {
	Kind   string          `json:"kind"`
	Object json.RawMessage `json:"object"`
}

// kinds are those that can be kept, and how requests name them.
var kinds = map[string]schema.GroupVersionResource{
	"ConfigMap":             v1.SchemeGroupVersion.WithResource("configmaps"),
	"Secret":                v1.SchemeGroupVersion.WithResource("secrets"),
	"PersistentVolumeClaim": v1.SchemeGroupVersion.WithResource("persistentvolumeclaims"),
	"PersistentVolume":      v1.SchemeGroupVersion.WithResource("persistentvolumes"),
	"Service":               v1.SchemeGroupVersion.WithResource("services"),
	"Node":                  v1.SchemeGroupVersion.WithResource("nodes"),
	"Pod":                   v1.SchemeGroupVersion.WithResource("pods"),
	"Namespace":             v1.SchemeGroupVersion.WithResource("namespaces"),
	"EndpointSlice":         discoveryv1.SchemeGroupVersion.WithResource("endpointslices"),
	"NetworkPolicy":         networkingv1.SchemeGroupVersion.WithResource("networkpolicies"),
	"ServiceCIDR":           networkingv1.SchemeGroupVersion.WithResource("servicecidrs"),
	"ClusterTrustBundle":    certificatesv1.SchemeGroupVersion.WithResource("clustertrustbundles"),
}

// kindOf is the name of the object's kind; "": it is none that is kept.
func kindOf(obj any) string {
	switch obj.(type) {
	case *v1.ConfigMap:
		return "ConfigMap"
	case *v1.Secret:
		return "Secret"
	case *v1.PersistentVolumeClaim:
		return "PersistentVolumeClaim"
	case *v1.PersistentVolume:
		return "PersistentVolume"
	case *v1.Service:
		return "Service"
	case *v1.Node:
		return "Node"
	case *v1.Pod:
		return "Pod"
	case *v1.Namespace:
		return "Namespace"
	case *discoveryv1.EndpointSlice:
		return "EndpointSlice"
	case *networkingv1.NetworkPolicy:
		return "NetworkPolicy"
	case *networkingv1.ServiceCIDR:
		return "ServiceCIDR"
	case *certificatesv1.ClusterTrustBundle:
		return "ClusterTrustBundle"
	}
	return ""
}

// Encode makes the record of an object, which is not changed.
func Encode(obj runtime.Object) (Object, error) {
	return encode(obj.DeepCopyObject())
}

// encode is Encode of an object of the caller's own, whose kind it sets.
func encode(obj runtime.Object) (Object, error) {
	kind := kindOf(obj)
	if kind == "" {
		return Object{}, fmt.Errorf("objects of type %T are not kept", obj)
	}
	obj.GetObjectKind().SetGroupVersionKind(kinds[kind].GroupVersion().WithKind(kind))
	raw, err := json.Marshal(obj)
	if err != nil {
		return Object{}, fmt.Errorf("encode a %s: %w", kind, err)
	}
	return Object{kind, raw}, nil
}

// Keeps reports whether a pod is to have a record: it runs here, and would be
// started again after a boot.
func Keeps(pod *v1.Pod) bool {
	return pod.DeletionTimestamp == nil && !core.FinalPhase(pod.Status.Phase) && !core.IsMirror(pod)
}

// Startable returns why the pod of a record must not be started on the node without
// the API; nil: it may be. A pod whose volumes other nodes reach may run on one of
// them by now, and nothing here could know.
func (p *Pod) Startable(node string) error {
	pod := p.Pod
	switch {
	case pod.Spec.NodeName != node:
		return fmt.Errorf("it is bound to node %q", pod.Spec.NodeName)
	case !Keeps(pod):
		return errors.New("it was ending")
	case fence.Guarded(pod):
		return errors.New("it is self-fencing: it may run on another node by now")
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.NFS != nil {
			return fmt.Errorf("volume %q is a directory of an NFS server: another node may use it by now", v.Name)
		}
		name := claim.NameOf(pod, v)
		if name == "" {
			continue
		}
		bound := p.volumeOf(name)
		if bound == nil {
			return fmt.Errorf("the volume of claim %q is not on record", name)
		}
		if !fence.NodeBound(bound) {
			return fmt.Errorf("other nodes reach volume %q of claim %q: one may use it by now", bound.Name, name)
		}
	}
	return nil
}

func (p *Pod) volumeOf(name string) *v1.PersistentVolume {
	for _, c := range p.Claims {
		if c.Claim.Name == name {
			return c.Volume
		}
	}
	return nil
}

// check reports what makes a record useless.
func (p *Pod) check(uid string) error {
	if p.Pod == nil || string(p.Pod.UID) != uid {
		return errors.New("it is not of the pod that its name says")
	}
	for _, c := range p.Claims {
		if c.Claim == nil || c.Volume == nil {
			return errors.New("a claim without its volume")
		}
	}
	return nil
}
