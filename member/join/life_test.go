package join

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// TestLifeOfNamesake: a machine that begins from a copy and is called like an agent of
// before is the only member of that name; other agents stay.
func TestLifeOfNamesake(t *testing.T) {
	k := mvcc.New()
	apply := func(ops []mvcc.Op) {
		t.Helper()
		out := k.Apply(k.Index()+1, mvcc.Batch{Commands: []mvcc.Command{{Type: mvcc.CmdTxn, Txn: mvcc.Txn{Ops: ops}, ID: mvcc.CommandID{Session: 1, Seq: k.Index() + 1}}}})
		if out[0].Err != nil {
			t.Fatal(out[0].Err)
		}
	}
	for _, r := range []Record{{ID: "a1", Name: "n1", Role: pki.Agent}, {ID: "a2", Name: "n2", Role: pki.Agent}, {ID: "s3", Name: "n3", Role: pki.Server}} {
		apply(recordOps(r))
	}
	for _, key := range []string{AuthorityProgress + "a1", GossipKeyProgress + "a1", AuthorityProgress + "a2"} {
		apply([]mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte("{}")}})
	}
	t2, err := RestorePlan{Epoch: 2, Why: Restored, First: &Record{ID: "new", Name: "n1"}, Now: time.Now()}.Apply(k)
	if err != nil {
		t.Fatal(err)
	}
	apply(t2.Ops)
	members, err := k.List(mvcc.Range{Prefix: memberPrefix})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, kv := range members.KVs {
		var r Record
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			t.Fatal(err)
		}
		got[r.Name] += r.ID
	}
	if len(got) != 2 || got["n1"] != "new" || got["n2"] != "a2" {
		t.Errorf("members by name: %v", got)
	}
	if name, _, err := k.Get(namePrefix+"n1", 0); err != nil || string(name.Value) != "new" {
		t.Errorf("the name n1: %v, %v", name, err)
	}
	for key, there := range map[string]bool{AuthorityProgress + "a1": false, GossipKeyProgress + "a1": false, AuthorityProgress + "a2": true} {
		if kv, _, err := k.Get(key, 0); err != nil || (kv != nil) != there {
			t.Errorf("%s: %v, %v", key, kv, err)
		}
	}
	if gone, _, err := k.Get(removed+"a1", 0); err != nil || gone == nil {
		t.Errorf("no record says that a1 was removed: %v", err)
	}
}
