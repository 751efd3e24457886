package kubestore

import (
	"bytes"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// lease is that of a node as an API server stores it, at a renewal.
func lease(t *testing.T, at time.Time) []byte {
	t.Helper()
	l := &coordinationv1.Lease{
		TypeMeta: metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
		ObjectMeta: metav1.ObjectMeta{
			Name: "worker-0123", Namespace: "kube-node-lease", UID: "6b8a4d0e-1f0f-4b7e-9c3a-5d2e8f7a6b1c",
			CreationTimestamp: metav1.Unix(1_789_000_000, 0),
			Annotations:       map[string]string{"clusterd.io/fencing-promise": at.UTC().Format(metav1.RFC3339Micro)},
			OwnerReferences:   []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "worker-0123", UID: "0d7c5a8e-9a51-4f5e-8a43-1f0b4c2d3e4f"}},
			ManagedFields: []metav1.ManagedFieldsEntry{{
				Manager: "clusterd", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "coordination.k8s.io/v1", Time: ptr.To(metav1.NewTime(at)), FieldsType: "FieldsV1",
				FieldsV1: &metav1.FieldsV1{Raw: []byte(`{"f:metadata":{"f:annotations":{".":{},"f:clusterd.io/fencing-promise":{}},"f:ownerReferences":{".":{},"k:{\"uid\":\"0d7c5a8e-9a51-4f5e-8a43-1f0b4c2d3e4f\"}":{}}},"f:spec":{"f:holderIdentity":{},"f:leaseDurationSeconds":{},"f:renewTime":{}}}`)},
			}},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("worker-0123"), LeaseDurationSeconds: ptr.To(int32(40)), RenewTime: ptr.To(metav1.NewMicroTime(at))},
	}
	var b bytes.Buffer
	if err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(l, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// What a renewal of a node's Lease takes of the log: the figures are in the store's
// DESIGN.md.
func TestRenewalIsShort(t *testing.T) {
	const key = "/coordination.k8s.io/leases/kube-node-lease/worker-0123"
	put := func(rev int64, value []byte, patch *mvcc.Patch) mvcc.Command {
		return mvcc.Command{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 0xfedcba9876543210, Seq: 40_000 + uint64(rev)}, Basis: 1_000_000, Txn: mvcc.Txn{
			Origin: "system:node:worker-0123", Compares: []mvcc.Compare{{Key: key, ModRevision: rev}},
			Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: value, Patch: patch}},
		}}
	}
	first := time.Unix(1_789_100_000, 123_456_000)
	k := mvcc.New()
	k.Apply(2_000_000, mvcc.Batch{Commands: []mvcc.Command{put(0, lease(t, first), nil)}})
	value := lease(t, first.Add(10*time.Second+4567*time.Microsecond))
	patch := k.Patch(key, k.Revision(), value)
	if patch == nil {
		t.Fatal("no patch")
	}
	whole, short := put(k.Revision(), value, nil), put(k.Revision(), nil, patch)
	a, b := len(wire.AppendCommand(nil, &whole)), len(wire.AppendCommand(nil, &short))
	t.Logf("a Lease of %d bytes: a renewal takes %d bytes as a whole, %d as a patch (of %d)", len(value), a, b, len(patch.Bytes))
	if b > a/4 {
		t.Errorf("a renewal takes %d bytes of the log, and %d as a whole", b, a)
	}
	out := k.Apply(2_000_001, mvcc.Batch{Commands: []mvcc.Command{short}})
	if kv, _, _ := k.Get(key, 0); out[0].Err != nil || !bytes.Equal(kv.Value, value) {
		t.Errorf("%v: another value", out[0].Err)
	}
}
