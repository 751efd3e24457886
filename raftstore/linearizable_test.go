package raftstore_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// registerInput is an operation on one key: read, write, or write if the
// revision still is the one read before.
type registerInput struct {
	key   string
	op    string // "get", "put", "cas"
	value string
	rev   int64 // cas: expected revision
}

type registerOutput struct {
	value   string
	rev     int64
	ok      bool // cas
	unknown bool // may or may not have happened, now or later
}

type registerState struct {
	value string
	rev   int64
}

// register is the model of one key: its value and mod revision.
var register = porcupine.NondeterministicModel{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		byKey := map[string][]porcupine.Operation{}
		for _, o := range history {
			k := o.Input.(registerInput).key
			byKey[k] = append(byKey[k], o)
		}
		var parts [][]porcupine.Operation
		for _, p := range byKey {
			parts = append(parts, p)
		}
		return parts
	},
	Init: func() []any { return []any{registerState{}} },
	Step: func(state, input, output any) []any {
		st, in, out := state.(registerState), input.(registerInput), output.(registerOutput)
		switch {
		case in.op == "get":
			if out.unknown || (st.value == out.value && st.rev == out.rev) {
				return []any{st}
			}
			return nil
		case out.unknown:
			// Its revision is not known: -1 stands for it until a read tells.
			return []any{st, registerState{in.value, -1}}
		case in.op == "cas" && !out.ok:
			if st.rev == in.rev {
				return nil
			}
			return []any{st}
		case in.op == "cas" && st.rev != in.rev && st.rev != -1:
			return nil
		default:
			return []any{registerState{in.value, out.rev}}
		}
	},
	Equal:             func(a, b any) bool { return a == b },
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v → %+v", in, out) },
}

// matches makes reads and comparisons accept a revision that was unknown.
func init() {
	step := register.Step
	register.Step = func(state, input, output any) []any {
		st, in, out := state.(registerState), input.(registerInput), output.(registerOutput)
		if st.rev == -1 && !out.unknown {
			switch {
			case in.op == "get" && out.value == st.value && out.rev > 0:
				return []any{registerState{st.value, out.rev}}
			case in.op == "cas" && !out.ok:
				return []any{st}
			}
		}
		if in.op == "cas" && out.unknown {
			if st.rev != in.rev && st.rev != -1 {
				return []any{st}
			}
			return []any{st, registerState{in.value, -1}}
		}
		return step(state, input, output)
	}
}

// history records what clients of all members see.
type history struct {
	t *testing.T
	// try runs one operation on some member; false: it certainly did not
	// happen.
	try    func(r *rand.Rand, in registerInput) (registerOutput, bool)
	prefix string // of the keys
	seed   uint64
	begin  time.Time
	stop   chan struct{}
	wg     sync.WaitGroup

	mu  sync.Mutex
	ops []porcupine.Operation
}

const clients = 12

// sameEnd ends all values, so that one that takes the place of another comes into the
// log as a patch.
var sameEnd = strings.Repeat(", and so on", 8)

// startHistory starts clients that read, write and compare-and-set four keys
// through all members.
func startHistory(t *testing.T, c *raftstoretest.Cluster) *history {
	return startHistoryOf(t, uint64(time.Now().UnixNano()), "/r/", func(r *rand.Rand, in registerInput) (registerOutput, bool) {
		s := c.Store(c.IDs()[r.IntN(len(c.IDs()))])
		if s == nil {
			return registerOutput{}, false
		}
		return do(s, in)
	})
}

// startHistoryOf starts them on keys below a prefix without earlier writes.
func startHistoryOf(t *testing.T, seed uint64, prefix string, try func(*rand.Rand, registerInput) (registerOutput, bool)) *history {
	h := &history{t: t, try: try, prefix: prefix, seed: seed, begin: time.Now(), stop: make(chan struct{})}
	t.Logf("seed %d", h.seed)
	for client := range clients {
		h.wg.Add(1)
		go func() {
			defer h.wg.Done()
			h.client(client)
		}()
	}
	return h
}

func (h *history) client(client int) {
	r := rand.New(rand.NewPCG(h.seed, uint64(client)))
	known := map[string]int64{}
	id := client
	for n := 0; ; n++ {
		select {
		case <-h.stop:
			return
		case <-time.After(time.Duration(r.IntN(20)) * time.Millisecond): // spread over the faults
		}
		in := registerInput{key: fmt.Sprint(h.prefix, r.IntN(4)), op: []string{"get", "put", "cas"}[r.IntN(3)]}
		in.value = fmt.Sprintf("%d.%d%s", client, n, sameEnd)
		in.rev = known[in.key]
		start := time.Since(h.begin).Nanoseconds()
		out, happened := h.try(r, in)
		end := time.Since(h.begin).Nanoseconds()
		if !happened {
			continue
		}
		if out.unknown {
			end = int64(time.Hour) // it may happen at any later time
		} else {
			known[in.key] = out.rev
		}
		h.mu.Lock()
		h.ops = append(h.ops, porcupine.Operation{ClientId: id, Input: in, Call: start, Output: out, Return: end})
		h.mu.Unlock()
		if out.unknown {
			id += clients // one that never returned is not followed by another
		}
	}
}

// more waits until n more operations were answered.
func (h *history) more(n int) {
	h.t.Helper()
	count := func() int {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.ops)
	}
	target := count() + n
	raftstoretest.Wait(h.t, "clients to go on", func() bool { return count() >= target })
}

// check stops the clients and looks whether one copy could have shown them
// what they saw.
func (h *history) check() {
	h.t.Helper()
	close(h.stop)
	h.wg.Wait()
	// What was acknowledged last is there.
	r := rand.New(rand.NewPCG(h.seed, clients))
	for i := range 12 {
		in := registerInput{key: fmt.Sprint(h.prefix, i%4), op: "get"}
		raftstoretest.Wait(h.t, "a read to be answered", func() bool {
			start := time.Since(h.begin).Nanoseconds()
			out, answered := h.try(r, in)
			if answered {
				h.ops = append(h.ops, porcupine.Operation{ClientId: -1, Input: in, Call: start, Output: out, Return: time.Since(h.begin).Nanoseconds()})
			}
			return answered
		})
	}
	res, info := porcupine.CheckOperationsVerbose(register.ToModel(), h.ops, 5*raftstoretest.Timeout)
	unknown := 0
	for _, o := range h.ops {
		if o.Output.(registerOutput).unknown {
			unknown++
		}
	}
	h.t.Logf("%d operations, %d of unknown outcome: %v", len(h.ops), unknown, res)
	if res != porcupine.Ok {
		path := filepath.Join(os.TempDir(), fmt.Sprintf("raftstore-history-%d.html", h.seed))
		_ = porcupine.VisualizePath(register.ToModel(), info, path)
		h.t.Errorf("seed %d: the history is not linearizable, see %s", h.seed, path)
	}
}

// What clients of all members see while members are killed and cut off is what
// one copy would have shown them.
func TestMultiLinearizable(t *testing.T) {
	t.Parallel()
	var patches atomic.Int64
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.Inject(raftstore.Faults{Mangle: func(b *mvcc.Batch) { eachPatch(b, func(*mvcc.Patch) { patches.Add(1) }) }})
	})
	h := startHistory(t, c)
	r := rand.New(rand.NewPCG(h.seed, 1000))
	for range 3 {
		h.more(150)
		victim := c.LeaderID()
		if r.IntN(3) == 0 {
			victim = c.IDs()[r.IntN(3)]
		}
		if r.IntN(2) == 0 {
			c.Kill(victim)
			time.Sleep(300 * time.Millisecond) // how long the fault lasts
			c.Start(victim)
		} else {
			c.Isolate(victim)
			time.Sleep(900 * time.Millisecond) // how long the fault lasts
			c.Rejoin(victim)
		}
		c.Leader()
	}
	h.more(150)
	h.check()
	c.Agree()
	if patches.Load() == 0 {
		t.Error("no value came into the log as a patch")
	}
	t.Logf("%d times a patch was applied", patches.Load())
}

// do runs one operation; false: it certainly did not happen.
func do(s *raftstore.Store, in registerInput) (registerOutput, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if in.op == "get" {
		kv, _, err := s.Get(ctx, in.key, raftstore.ReadOptions{})
		if err != nil {
			return registerOutput{}, false
		}
		if kv == nil {
			return registerOutput{}, true
		}
		return registerOutput{value: string(kv.Value), rev: kv.ModRevision}, true
	}
	txn := put(in.key, in.value)
	if in.op == "cas" {
		txn.Compares = []mvcc.Compare{{Key: in.key, ModRevision: in.rev}}
	}
	res, err := s.Txn(ctx, txn)
	switch {
	case err == nil && res.Succeeded:
		return registerOutput{ok: true, rev: res.Revision}, true
	case err == nil:
		rev := int64(0)
		if res.Current[0] != nil {
			rev = res.Current[0].ModRevision
		}
		return registerOutput{ok: false, rev: rev}, true
	case isUnknown(err):
		return registerOutput{unknown: true}, true
	default:
		return registerOutput{}, false
	}
}
