package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// asker is a machine without a token.
func (w *world) asker(t *testing.T, name string) Options {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return Options{Server: w.addr, Name: name, Addr: netip.MustParseAddrPort("127.0.0.1:7000"), Key: key, Version: "v1"}
}

func refusedFor(t *testing.T, err error, code, words string) {
	t.Helper()
	var no *Refusal
	if !errors.As(err, &no) || no.Code != code || !strings.Contains(no.Message, words) {
		t.Errorf("%v, want a refusal for %s: %s", err, code, words)
	}
}

func TestJoinByApproval(t *testing.T) {
	w := newWorld(t)
	wish := w.asker(t, "n2")
	token, code, err := AskToJoin(t.Context(), wish)
	if err != nil {
		t.Fatal(err)
	}
	waiting, err := AskingMachines(t.Context(), w.store)
	if err != nil || len(waiting) != 1 || waiting[0].Name != "n2" || waiting[0].Addr != wish.Addr || !strings.HasPrefix(waiting[0].Peer, "127.0.0.1:") {
		t.Fatalf("waiting: %+v %v", waiting, err)
	}
	if list, err := json.Marshal(waiting); err != nil || strings.Contains(string(list), code) {
		t.Errorf("the list %s %v has the code", list, err)
	}
	wish.Token = token
	_, err = Join(t.Context(), wish)
	refusedFor(t, err, CodeToken, "does not know")
	for _, wrong := range []string{"", "0000-0000", code[:8], code + "0"} {
		if _, err := Approve(t.Context(), w.store, wrong, pki.Agent, time.Now()); !errors.Is(err, ErrNotAsking) {
			t.Errorf("code %q: %v", wrong, err)
		}
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := AwaitApproval(short, w.addr, token); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("not approved: %v", err)
	}

	typed := strings.ToLower(strings.ReplaceAll(strings.ReplaceAll(code, "-", " "), "0", "o"))
	if m, err := Approve(t.Context(), w.store, typed, pki.Agent, time.Now()); err != nil || m.Name != "n2" {
		t.Fatalf("approve %q: %+v %v", typed, m, err)
	}
	if err := AwaitApproval(t.Context(), w.addr, token); err != nil {
		t.Fatal(err)
	}
	other := w.asker(t, "n2")
	other.Token = token
	_, err = Join(t.Context(), other)
	refusedFor(t, err, CodeToken, "approved for another machine")
	renamed := wish
	renamed.Name = "n3"
	_, err = Join(t.Context(), renamed)
	refusedFor(t, err, CodeToken, "approved for another machine, n2")
	res, err := Join(t.Context(), wish)
	if err != nil || res.Role != pki.Agent {
		t.Fatalf("join: %+v %v", res, err)
	}
	if _, err := Approve(t.Context(), w.store, code, pki.Server, time.Now()); !errors.Is(err, ErrNotAsking) {
		t.Errorf("approved twice: %v", err)
	}
}

func TestDenied(t *testing.T) {
	w := newWorld(t)
	token, code, err := AskToJoin(t.Context(), w.asker(t, "n2"))
	if err != nil {
		t.Fatal(err)
	}
	if err := Deny(t.Context(), w.store, token.ID); err != nil {
		t.Fatal(err)
	}
	refusedFor(t, AwaitApproval(t.Context(), w.addr, token), CodeToken, "denied")
	if _, err := Approve(t.Context(), w.store, code, pki.Agent, time.Now()); !errors.Is(err, ErrNotAsking) {
		t.Errorf("approved: %v", err)
	}
	if err := Deny(t.Context(), w.store, token.ID); !errors.Is(err, ErrNotAsking) {
		t.Errorf("denied twice: %v", err)
	}
}

// While the authority is exchanged, a machine may be shown the old one or the new.
func TestApprovalDuringExchange(t *testing.T) {
	w := newWorld(t)
	next, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	w.trust.Store(pki.NewTrust(2, next, w.ca))
	wish := w.asker(t, "n2")
	token, code, err := AskToJoin(t.Context(), wish)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Approve(t.Context(), w.store, code, pki.Agent, time.Now()); err != nil {
		t.Fatal(err)
	}
	wish.Token = token
	if _, err := Join(t.Context(), wish); err != nil {
		t.Error(err)
	}
}

// An attacker between the machine and the server with an authority of his own asks in
// his own name, and repeats what he can: the codes differ.
func TestApprovalInBetween(t *testing.T) {
	w, evil := newWorld(t), newWorld(t)
	thief := w.asker(t, "n2")
	thiefToken, seen, err := AskToJoin(t.Context(), thief)
	if err != nil {
		t.Fatal(err)
	}
	victim := evil.asker(t, "n2")
	_, code, err := AskToJoin(t.Context(), victim)
	if err != nil {
		t.Fatal(err)
	}
	if code == seen {
		t.Fatal("one code for two exchanges")
	}
	if _, err := Approve(t.Context(), w.store, code, pki.Agent, time.Now()); !errors.Is(err, ErrNotAsking) {
		t.Errorf("the victim's code admits a machine: %v", err)
	}
	thief.Token = thiefToken
	_, err = Join(t.Context(), thief)
	refusedFor(t, err, CodeToken, "does not know")
}

// The code depends on all that both ends have said and drawn.
func TestCode(t *testing.T) {
	r := Reveal{ID: "abc", Nonce: []byte("1"), Name: "n2", Addr: netip.MustParseAddrPort("10.0.0.1:1"), CSR: []byte("csr"), SecretHash: "h"}
	codes := map[string]string{r.code("a", []byte("s")): "itself"}
	for what, code := range map[string]string{
		"authority": r.code("b", []byte("s")), "server's nonce": r.code("a", []byte("t")),
		"nonce":   func(r Reveal) string { r.Nonce = []byte("2"); return r.code("a", []byte("s")) }(r),
		"name":    func(r Reveal) string { r.Name = "n3"; return r.code("a", []byte("s")) }(r),
		"address": func(r Reveal) string { r.Addr = netip.MustParseAddrPort("10.0.0.1:2"); return r.code("a", []byte("s")) }(r),
		"key":     func(r Reveal) string { r.CSR = []byte("other"); return r.code("a", []byte("s")) }(r),
		"secret":  func(r Reveal) string { r.SecretHash = "i"; return r.code("a", []byte("s")) }(r),
		"id":      func(r Reveal) string { r.ID = "abd"; return r.code("a", []byte("s")) }(r),
		// Where one part ends and the next begins counts, too.
		"parts": func(r Reveal) string { r.ID, r.Nonce = "abc1", nil; return r.code("a", []byte("s")) }(r),
	} {
		if same, ok := codes[code]; ok {
			t.Errorf("%s and %s: one code", what, same)
		}
		codes[code] = what
	}
}

// What a stranger may not do, and how much.
func TestAskRefused(t *testing.T) {
	w := newWorld(t)
	dial := func(ctx context.Context) (net.Conn, error) {
		conn, _, err := dialUnknown(ctx, w.addr)
		return conn, err
	}
	post := func(path string, in any) error {
		return ask(t.Context(), dial, w.addr, http.MethodPost, path, in, new(Asked))
	}
	csr, err := newCSR("n2", w.asker(t, "n2").Key)
	if err != nil {
		t.Fatal(err)
	}
	good := Reveal{ID: "abc", Nonce: make([]byte, nonceBytes), Name: "n2", Addr: netip.MustParseAddrPort("10.0.0.1:1"), CSR: csr, SecretHash: pki.HashSecret("h")}
	for name, c := range map[string]struct {
		change      func(*Reveal) // before the commitment
		after       func(*Reveal)
		code, words string
	}{
		"other than committed": {nil, func(r *Reveal) { r.Name = "n3" }, CodeRequest, "ask again"},
		"bad name":             {func(r *Reveal) { r.Name = "N 2" }, nil, CodeName, "cannot be used"},
		"no address":           {func(r *Reveal) { r.Addr = netip.AddrPort{} }, nil, CodeRequest, "--advertise"},
		"no request":           {func(r *Reveal) { r.CSR = []byte("x") }, nil, CodeRequest, "certificate request"},
		"long hash":            {func(r *Reveal) { r.SecretHash += strings.Repeat("a", 4096) }, nil, CodeRequest, "wrong length"},
		"short nonce":          {func(r *Reveal) { r.Nonce = r.Nonce[:4] }, nil, CodeRequest, "ask again"},
	} {
		w.server.failures = failureLimiter{}
		r := good
		if c.change != nil {
			c.change(&r)
		}
		if err := post(AskPath, Ask{ID: r.ID, Commitment: r.commitment()}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if c.after != nil {
			c.after(&r)
		}
		t.Log(name)
		refusedFor(t, post(RevealPath, r), c.code, c.words)
		refusedFor(t, post(RevealPath, r), CodeRequest, "ask again") // an exchange ends once
	}
	for _, id := range []string{"", "../tokens/x", strings.Repeat("a", 17)} {
		w.server.failures = failureLimiter{}
		refusedFor(t, post(AskPath, Ask{ID: id}), CodeRequest, "is no id")
		refusedFor(t, post(AskStatePath, AskID{ID: id}), CodeRequest, "is no id")
	}
	if waiting, err := AskingMachines(t.Context(), w.store); err != nil || len(waiting) > 0 {
		t.Errorf("refused, and recorded: %+v %v", waiting, err)
	}

	// Each question costs its address a strike, a right one, too.
	w.server.failures = failureLimiter{}
	for i, began := 0, time.Now(); ; i++ {
		err := post(AskPath, Ask{ID: fmt.Sprint("id", i)})
		most := failuresOfOne + int(failuresRateOne*time.Since(began).Seconds()) // the machine may be slow
		if err != nil && i >= failuresOfOne-1 && strings.Contains(err.Error(), "too many wrong requests") {
			break
		}
		if err != nil && i < failuresOfOne-1 || i >= most {
			t.Fatalf("question %d, at most %d are looked at: %v", i, most, err)
		}
	}

	// No more of one address wait than maxAskingOfOne, and in all than maxAsking.
	w.server.asks = asks{}
	var mine []string
	for i := range maxAskingOfOne {
		w.server.failures = failureLimiter{}
		token, _, err := AskToJoin(t.Context(), w.asker(t, "m"))
		if err != nil {
			t.Fatalf("machine %d: %v", i, err)
		}
		mine = append(mine, token.ID)
	}
	w.server.failures = failureLimiter{}
	_, _, err = AskToJoin(t.Context(), w.asker(t, "other"))
	refusedFor(t, err, CodeRequest, "machines of this address wait")
	// A machine that gave up and asks again is not in its own way.
	w.server.failures = failureLimiter{}
	token, _, err := AskToJoin(t.Context(), w.asker(t, "m"))
	if err != nil {
		t.Fatal(err)
	}
	mine = append(mine[1:], token.ID)
	waiting, err := AskingMachines(t.Context(), w.store)
	var ids []string
	for _, a := range waiting {
		ids = append(ids, a.ID)
	}
	slices.Sort(ids)
	if want := slices.Sorted(slices.Values(mine)); err != nil || !slices.Equal(ids, want) {
		t.Errorf("waiting: %q, want %q, %v", ids, want, err)
	}
	for i := range maxAsking {
		if i < len(mine) {
			if err := Deny(t.Context(), w.store, mine[i]); err != nil {
				t.Fatal(err)
			}
		}
		rec := askRecord{Asking: Asking{ID: fmt.Sprintf("other%d", i), Peer: fmt.Sprintf("192.0.2.%d:1", i)}}
		if _, err := w.store.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{put(askPrefix+rec.ID, rec)}}); err != nil {
			t.Fatal(err)
		}
	}
	w.server.failures = failureLimiter{}
	if _, _, err := AskToJoin(t.Context(), w.asker(t, "m")); err == nil || !strings.Contains(err.Error(), "as many machines as may wait") {
		t.Errorf("one more than may wait: %v", err)
	}
}
