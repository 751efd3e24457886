package raftstore_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

var kills = flag.Int("kills", 5, "how often TestProcessKilled kills a member (make fault-store: 200)")

// memberEnv makes this test program a member: its value is the directory of all
// sockets and data, and the member's ID.
const memberEnv = "RAFTSTORE_TEST_MEMBER"

// processes are three members in processes of their own, which can be killed
// and frozen as the kernel does it. They speak over unix sockets.
type processes struct {
	t    *testing.T
	dir  string
	ids  []string
	cmds map[string]*exec.Cmd
	http map[string]*http.Client
}

func socket(dir, id, of string) string { return filepath.Join(dir, id+"."+of) }

// member is what the child process does.
func member(dir, id string) error {
	listen := func(of string) (net.Listener, error) {
		_ = os.Remove(socket(dir, id, of)) // of a process that was killed
		return net.Listen("unix", socket(dir, id, of))
	}
	raftL, err := listen("raft")
	if err != nil {
		return err
	}
	s, err := raftstore.Open(raftstore.Config{
		ID: id, Dir: filepath.Join(dir, id), Listener: raftL, LogEngine: raftstoretest.LogEngine(id),
		Dial: func(ctx context.Context, to string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket(dir, to, "raft"))
		},
		Logger:          slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("node", id),
		SnapshotEntries: 400, SnapshotBytes: 256 << 10, // often
	})
	if err != nil {
		return err
	}
	httpL, err := listen("http")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	reply := func(w http.ResponseWriter, v any) { _ = json.NewEncoder(w).Encode(v) }
	mux.HandleFunc("/do", func(w http.ResponseWriter, r *http.Request) {
		var in wireOp
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		out, happened := do(s, registerInput{in.Key, in.Op, in.Value, in.Rev})
		reply(w, wireResult{out.value, out.rev, out.ok, out.unknown, happened})
	})
	mux.HandleFunc("/status", func(w http.ResponseWriter, _ *http.Request) { reply(w, s.Status()) })
	mux.HandleFunc("/add", func(w http.ResponseWriter, r *http.Request) {
		if err := s.AddVoter(r.Context(), r.URL.Query().Get("id")); err != nil {
			http.Error(w, err.Error(), http.StatusConflict)
		}
	})
	mux.HandleFunc("/bootstrap", func(w http.ResponseWriter, _ *http.Request) {
		if err := s.Bootstrap(); err != nil {
			http.Error(w, err.Error(), http.StatusConflict)
		}
	})
	go func() { _ = http.Serve(httpL, mux) }()
	<-s.Failed()
	return s.Err()
}

type wireOp struct {
	Key, Op, Value string
	Rev            int64
}

type wireResult struct {
	Value                 string
	Rev                   int64
	OK, Unknown, Happened bool
}

func startProcesses(t *testing.T) *processes {
	dir, err := os.MkdirTemp("", "raftstore") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	p := &processes{t: t, dir: dir, ids: []string{"n0", "n1", "n2"}, cmds: map[string]*exec.Cmd{}, http: map[string]*http.Client{}}
	t.Cleanup(func() {
		for id, cmd := range p.cmds {
			p.http[id].CloseIdleConnections()
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for _, id := range p.ids {
		p.http[id] = &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", socket(dir, id, "http"))
			},
		}}
		p.start(id)
	}
	if err := p.post("n0", "/bootstrap"); err != nil {
		t.Fatal(err)
	}
	for _, id := range p.ids[1:] {
		raftstoretest.Wait(t, id+" to be added", func() bool { return p.post("n0", "/add?id="+id) == nil })
	}
	return p
}

func (p *processes) start(id string) {
	p.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), memberEnv+"="+p.dir+":"+id)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.cmds[id] = cmd
	raftstoretest.Wait(p.t, id+" to answer", func() bool { _, err := p.status(id); return err == nil })
}

func (p *processes) kill(id string) {
	p.t.Helper()
	if err := p.cmds[id].Process.Kill(); err != nil {
		p.t.Fatal(err)
	}
	_ = p.cmds[id].Wait()
}

func (p *processes) signal(id string, s os.Signal) {
	p.t.Helper()
	if err := p.cmds[id].Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

func (p *processes) post(id, path string) error {
	resp, err := p.http[id].Post("http://"+id+path, "", nil)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s", id, path, b)
	}
	return err
}

func (p *processes) status(id string) (st raftstore.Status, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+id+"/status", nil)
	if err != nil {
		return st, err
	}
	resp, err := p.http[id].Do(req)
	if err != nil {
		return st, err
	}
	defer func() { _ = resp.Body.Close() }()
	return st, json.NewDecoder(resp.Body).Decode(&st)
}

// leader waits for a member that leads, other than the given one.
func (p *processes) leader(notThis string) (leader string) {
	p.t.Helper()
	raftstoretest.Wait(p.t, "a leader", func() bool {
		for _, id := range p.ids {
			if id == notThis {
				continue
			}
			if st, err := p.status(id); err == nil && st.Ready {
				leader = id
				return true
			}
		}
		return false
	})
	return leader
}

// try runs an operation through a member drawn at random.
func (p *processes) try(r *rand.Rand, in registerInput) (out registerOutput, happened bool) {
	id := p.ids[r.IntN(len(p.ids))]
	body, err := json.Marshal(wireOp{in.key, in.op, in.value, in.rev})
	if err != nil {
		return out, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+id+"/do", bytes.NewReader(body))
	if err != nil {
		return out, false
	}
	resp, err := p.http[id].Do(req)
	if err == nil {
		defer func() { _ = resp.Body.Close() }()
		var res wireResult
		if err = json.NewDecoder(resp.Body).Decode(&res); err == nil {
			return registerOutput{res.Value, res.Rev, res.OK, res.Unknown}, res.Happened
		}
	}
	dial := new(net.OpError)
	if in.op == "get" || errors.As(err, &dial) && dial.Op == "dial" {
		return out, false
	}
	return registerOutput{unknown: true}, true // it was killed in the middle
}

// agree waits until all have applied the same and compares their keyspaces.
func (p *processes) agree() {
	p.t.Helper()
	var keyspaces []mvcc.Digest
	raftstoretest.Wait(p.t, "members to have applied the same", func() bool {
		keyspaces = keyspaces[:0]
		for _, id := range p.ids {
			st, err := p.status(id)
			if err != nil {
				return false
			}
			keyspaces = append(keyspaces, st.Keyspace)
		}
		return keyspaces[0].Index == keyspaces[1].Index && keyspaces[0].Index == keyspaces[2].Index
	})
	for i, k := range keyspaces {
		if k != keyspaces[0] {
			p.t.Errorf("%s and %s have applied the same log and differ:\n%+v\n%+v", p.ids[0], p.ids[i], keyspaces[0], k)
		}
	}
}

// Members are killed -9 one after another while clients work: nothing that was
// acknowledged is lost, nothing is done twice or seen out of order.
func TestProcessKilled(t *testing.T) {
	t.Parallel()
	p := startProcesses(t)
	h := startHistoryOf(t, uint64(time.Now().UnixNano()), "/r/", p.try)
	r := rand.New(rand.NewPCG(h.seed, 1000))
	for range *kills {
		h.more(20 + r.IntN(60))
		victim := p.leader("")
		if r.IntN(3) == 0 {
			victim = p.ids[r.IntN(len(p.ids))]
		}
		p.kill(victim)
		if r.IntN(2) == 0 {
			p.leader(victim)
			h.more(r.IntN(40))
		}
		p.start(victim)
	}
	h.more(50)
	h.check()
	p.agree()
}

// A leader frozen for ten seconds considers itself the leader when it wakes up. It
// gives no client a wrong answer.
func TestProcessFrozenLeader(t *testing.T) {
	t.Parallel()
	p := startProcesses(t)
	h := startHistoryOf(t, uint64(time.Now().UnixNano()), "/r/", p.try)
	h.more(50)
	frozen := p.leader("")
	p.signal(frozen, syscall.SIGSTOP)
	thaw := time.After(10 * time.Second)
	p.leader(frozen)
	h.more(50)
	<-thaw
	p.signal(frozen, syscall.SIGCONT)
	h.more(100)
	h.check()
	p.agree()
}

// runMember is TestMain's: it is not a test when the environment says so.
func runMember() {
	dir, id, ok := splitMember(os.Getenv(memberEnv))
	if !ok {
		return
	}
	if err := member(dir, id); err != nil {
		fmt.Fprintln(os.Stderr, id, err)
	}
	os.Exit(1)
}

func splitMember(s string) (dir, id string, ok bool) {
	i := len(s) - 3 // ":n0"
	if i < 0 || s[i] != ':' {
		return "", "", false
	}
	return s[:i], s[i+1:], true
}
