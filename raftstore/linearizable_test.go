package raftstore_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
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

// What clients of all members see while members are killed and cut off is what
// one copy would have shown them.
func TestMultiLinearizable(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	c := raftstoretest.New(t, 3, nil)
	begin := time.Now()
	stop := make(chan struct{})
	var (
		mu      sync.Mutex
		history []porcupine.Operation
		wg      sync.WaitGroup
	)
	const clients = 12
	for client := range clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := rand.New(rand.NewPCG(seed, uint64(client)))
			known := map[string]int64{}
			id := client
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(time.Duration(r.IntN(20)) * time.Millisecond): // spread over the faults
				}
				s := c.Store(c.IDs()[r.IntN(3)])
				if s == nil {
					continue
				}
				in := registerInput{key: fmt.Sprintf("/r/%d", r.IntN(4)), op: []string{"get", "put", "cas"}[r.IntN(3)]}
				in.value = fmt.Sprintf("%d.%d", client, n)
				in.rev = known[in.key]
				start := time.Since(begin).Nanoseconds()
				out, happened := do(s, in)
				end := time.Since(begin).Nanoseconds()
				if !happened {
					continue
				}
				if out.unknown {
					end = int64(time.Hour) // it may happen at any later time
				} else {
					known[in.key] = out.rev
				}
				mu.Lock()
				history = append(history, porcupine.Operation{ClientId: id, Input: in, Call: start, Output: out, Return: end})
				mu.Unlock()
				if out.unknown {
					id += clients // one that never returned is not followed by another
				}
			}
		}()
	}
	r := rand.New(rand.NewPCG(seed, 1000))
	calm := func() {
		mu.Lock()
		target := len(history) + 150
		mu.Unlock()
		c.Wait("clients to go on", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(history) >= target
		})
	}
	for range 3 {
		calm()
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
	calm()
	close(stop)
	wg.Wait()
	c.Agree()
	res, info := porcupine.CheckOperationsVerbose(register.ToModel(), history, raftstoretest.Patience)
	unknown := 0
	for _, o := range history {
		if o.Output.(registerOutput).unknown {
			unknown++
		}
	}
	t.Logf("%d operations, %d of unknown outcome: %v", len(history), unknown, res)
	if res != porcupine.Ok {
		path := filepath.Join(os.TempDir(), fmt.Sprintf("raftstore-history-%d.html", seed))
		_ = porcupine.VisualizePath(register.ToModel(), info, path)
		t.Errorf("seed %d: the history is not linearizable, see %s", seed, path)
	}
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
