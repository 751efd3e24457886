package raftside

import (
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// TestFuturesEnd asks a follower, which refuses them, for every kind of future
// that is used: ErrorOf can end them all.
func TestFuturesEnd(t *testing.T) {
	conf := raft.DefaultConfig()
	conf.LocalID, conf.Logger = "x", hclog.NewNullLogger()
	store := raft.NewInmemStore()
	_, transport := raft.NewInmemTransport("x")
	r, err := raft.NewRaft(conf, &raft.MockFSM{}, store, store, raft.NewInmemSnapshotStore(), transport)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Shutdown().Error() }()
	for kind, ask := range map[string]func() raft.Future{
		"apply":    func() raft.Future { return r.Apply(nil, 0) },
		"add":      func() raft.Future { return r.AddNonvoter("x", "x", 0, 0) },
		"remove":   func() raft.Future { return r.RemoveServer("x", 0, 0) },
		"demote":   func() raft.Future { return r.DemoteVoter("x", 0, 0) },
		"transfer": func() raft.Future { return r.LeadershipTransfer() },
		"to":       func() raft.Future { return r.LeadershipTransferToServer("x", "x") },
		"snapshot": func() raft.Future { return r.Snapshot() },
	} {
		f := ask()
		if _, ok := shutdownField(f); !ok {
			t.Errorf("raft's futures of this kind may never end: %s", kind)
		}
		_ = ErrorOf(f, nil) // raft takes one transfer at a time
	}
}

// TestErrorOfEnds: a future that raft has forgotten ends with raft.
func TestErrorOfEnds(t *testing.T) {
	conf := raft.DefaultConfig()
	conf.LocalID, conf.Logger = "x", hclog.NewNullLogger()
	conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout = 50*time.Millisecond, 50*time.Millisecond, 50*time.Millisecond
	store := raft.NewInmemStore()
	_, transport := raft.NewInmemTransport("x")
	fsm := &heldFSM{hold: make(chan struct{})}
	r, err := raft.NewRaft(conf, fsm, store, store, raft.NewInmemSnapshotStore(), transport)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.BootstrapCluster(raft.Configuration{Servers: []raft.Server{{ID: "x", Address: "x"}}}).Error(); err != nil {
		t.Fatal(err)
	}
	if !<-r.LeaderCh() {
		t.Fatal("not elected")
	}
	ended, got := make(chan struct{}), make(chan error)
	for range 3 {
		f := r.Apply([]byte("x"), 0)
		go func() { got <- ErrorOf(f, ended) }()
	}
	shutdown := r.Shutdown()
	close(fsm.hold)
	_ = shutdown.Error()
	close(ended)
	for range 3 {
		select {
		case <-got: // applied, or raft.ErrRaftShutdown: whichever came first
		case <-time.After(30 * time.Second):
			t.Fatal("a future does not end")
		}
	}
}

type heldFSM struct {
	raft.MockFSM
	hold chan struct{}
}

func (f *heldFSM) Apply(l *raft.Log) any {
	<-f.hold
	return f.MockFSM.Apply(l)
}
