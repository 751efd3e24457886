package join

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Joining by approval: a machine without a token makes one itself, asks a server to
// take it, and shows a code. Once a person has repeated the code to the cluster, the
// token is recorded, for this machine's key alone, and it joins as any other.
const (
	// AskPath is where a machine posts an Ask; Asked answers.
	AskPath = "/v1/ask"
	// RevealPath is where it then posts its Reveal, to the same server.
	RevealPath = "/v1/ask/reveal"
	// AskStatePath is where it posts an AskID until it is approved.
	AskStatePath = "/v1/ask/state"
)

// Ask begins the exchange that leads to a code.
type Ask struct {
	ID         string `json:"id"`         // of the token that the machine made
	Commitment []byte `json:"commitment"` // to the Reveal that follows
}

// Asked is the server's part of the code. The machine has committed itself before it
// sees it, and the server sends it before it sees what the machine reveals: neither
// they nor who sits between them can choose the code.
type Asked struct {
	Nonce []byte `json:"nonce"`
}

// Reveal is who asks.
type Reveal struct {
	ID         string         `json:"id"`
	Nonce      []byte         `json:"nonce"`
	Name       string         `json:"name"`
	Addr       netip.AddrPort `json:"addr"`
	CSR        []byte         `json:"csr"`        // proves the key that it will join with
	SecretHash string         `json:"secretHash"` // pki.HashSecret of the token's
	Version    string         `json:"version"`
}

// AskID names who asked.
type AskID struct {
	ID string `json:"id"`
}

// AskState is what became of it.
type AskState struct {
	Approved bool `json:"approved"`
}

func (Ask) who() string      { return "" }
func (r Reveal) who() string { return r.Name }
func (AskID) who() string    { return "" }

const (
	// askLife is how long a machine waits for its approval.
	askLife = 15 * time.Minute
	// approvedLife is how long an approved one may take to join.
	approvedLife = 15 * time.Minute
	// maxAsking is how many machines may wait; strangers cannot fill the store.
	maxAsking = 64
	// maxAskingOfOne is how many of them may have come from one address: it cannot
	// keep others from asking. A machine that asks again takes the place of its own
	// oldest question.
	maxAskingOfOne = 4
	// maxOpenOfOne is how many exchanges of one address may be under way.
	maxOpenOfOne = 8
	// revealTime is what the exchange may take.
	revealTime = time.Minute
	nonceBytes = 32
)

// Asking is a machine that waits for its approval. Its code is not shown: who
// approves reads it from the machine.
type Asking struct {
	ID      string         `json:"id"`
	Name    string         `json:"name"`
	Addr    netip.AddrPort `json:"addr"` // where it says that it will listen
	Peer    string         `json:"peer"` // where its question came from
	Version string         `json:"version"`
	Since   time.Time      `json:"since"`
}

type askRecord struct {
	Asking
	// Codes by the id of the authority: while it is exchanged for another, the machine
	// may have been shown either.
	Codes map[string]string `json:"codes"`
	Key   string            `json:"key"`  // the id of the key that it will join with
	Hash  string            `json:"hash"` // pki.HashSecret
}

// asks are exchanges between Ask and Reveal. Their zero value is ready.
type asks struct {
	mu   sync.Mutex
	open map[string]openAsk
}

type openAsk struct {
	commitment, nonce []byte
	until             time.Time
	from              asker
}

func (a *asks) begin(ask Ask, from asker, now time.Time) (nonce []byte, err error) {
	nonce = make([]byte, nonceBytes)
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	same := 0
	for id, o := range a.open {
		if now.After(o.until) {
			delete(a.open, id)
		} else if o.from == from {
			same++
		}
	}
	switch _, taken := a.open[ask.ID]; {
	case taken:
		return nil, &Refusal{CodeRequest, fmt.Sprintf("a machine that calls itself %q asks already: try again", ask.ID)}
	case len(a.open) >= maxAsking || same >= maxOpenOfOne:
		return nil, errors.New("too many machines ask at once")
	case a.open == nil:
		a.open = map[string]openAsk{}
	}
	a.open[ask.ID] = openAsk{commitment: ask.Commitment, nonce: nonce, until: now.Add(revealTime), from: from}
	return nonce, nil
}

// end gives an exchange back once, however its end is.
func (a *asks) end(id string, now time.Time) (openAsk, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o, ok := a.open[id]
	delete(a.open, id)
	return o, ok && now.Before(o.until)
}

func (s *Server) ask(ask Ask, peer string, now time.Time) (*Asked, error) {
	if err := checkAskID(ask.ID); err != nil {
		return nil, err
	}
	nonce, err := s.asks.begin(ask, strangerAt(peer), now)
	return &Asked{Nonce: nonce}, err
}

// checkAskID bounds what a stranger makes a key of the store.
func checkAskID(id string) error {
	if len(id) == 0 || len(id) > 16 || len(validation.IsDNS1123Label(id)) > 0 {
		return &Refusal{CodeRequest, fmt.Sprintf("%.20q is no id of a token", id)}
	}
	return nil
}

// reveal records who asks, for a person to approve.
func (s *Server) reveal(ctx context.Context, r Reveal, peer string, now time.Time) (*AskState, error) {
	if err := checkAskID(r.ID); err != nil {
		return nil, err
	}
	open, ok := s.asks.end(r.ID, now)
	if !ok || len(r.Nonce) != nonceBytes || !bytes.Equal(open.commitment, r.commitment()) {
		return nil, &Refusal{CodeRequest, "this does not belong to a question that was asked here within the last minute: ask again"}
	}
	if len(r.SecretHash) != len(pki.HashSecret("")) {
		return nil, &Refusal{CodeRequest, "the hash of the token's secret has the wrong length"}
	}
	if err := checkJoiner(r.Name, r.Addr); err != nil {
		return nil, err
	}
	csr, err := parseCSR(r.CSR)
	if err != nil {
		return nil, err
	}
	waiting, err := AskingMachines(ctx, s.Store)
	if err != nil {
		return nil, err
	}
	from, same := strangerAt(peer), 0
	var before *Asking // the oldest question of this machine, which it has given up, as it asks again
	for i, w := range waiting {
		if strangerAt(w.Peer) != from {
			continue
		}
		same++
		if w.Name == r.Name && w.Addr == r.Addr && (before == nil || w.Since.Before(before.Since)) {
			before = &waiting[i]
		}
	}
	replaces := same >= maxAskingOfOne
	if replaces && before == nil {
		return nil, &Refusal{CodeRequest, fmt.Sprintf("%d machines of this address wait for an approval already: approve or deny them first (`clusterctl members pending`)", same)}
	}
	if len(waiting) >= maxAsking && !replaces {
		return nil, errors.New("as many machines as may wait for an approval, do: see `clusterctl members pending`")
	}
	rec := askRecord{
		Asking: Asking{ID: r.ID, Name: r.Name, Addr: r.Addr, Peer: peer, Version: cut(r.Version), Since: now.UTC()},
		Codes:  map[string]string{},
		Key:    pki.Fingerprint(csr.PublicKey), Hash: r.SecretHash,
	}
	for _, ca := range s.Trust().All() {
		rec.Codes[ca.ID()] = r.code(ca.ID(), open.nonce)
	}
	op := put(askPrefix+r.ID, rec)
	op.TTL = int64(askLife / time.Second)
	ops := []mvcc.Op{op}
	if replaces {
		ops = append(ops, mvcc.Op{Type: mvcc.OpDelete, Key: askPrefix + before.ID})
	}
	res, err := s.Store.Txn(ctx, mvcc.Txn{Origin: origin, Compares: []mvcc.Compare{{Key: op.Key}, {Key: tokenPrefix + r.ID}}, Ops: ops})
	if err != nil {
		return nil, err
	}
	if !res.Succeeded {
		return nil, &Refusal{CodeRequest, fmt.Sprintf("the id %s is in use: ask again", r.ID)}
	}
	return &AskState{}, nil
}

// askState tells a machine whether it may join now.
func (s *Server) askState(ctx context.Context, ask AskID, _ time.Time) (*AskState, error) {
	if err := checkAskID(ask.ID); err != nil {
		return nil, err
	}
	for _, key := range []string{askPrefix, tokenPrefix} { // approval moves it from one to the other
		kv, _, err := s.Store.Get(ctx, key+ask.ID, raftstore.ReadOptions{})
		if err != nil || kv != nil {
			return &AskState{Approved: key == tokenPrefix}, err
		}
	}
	return nil, &Refusal{CodeToken, fmt.Sprintf("this machine was not approved within %s, or it was denied: ask again", askLife)}
}

// AskingMachines lists the machines that wait for their approval.
func AskingMachines(ctx context.Context, s Store) ([]Asking, error) {
	records, _, err := asking(ctx, s)
	machines := make([]Asking, len(records))
	for i, r := range records {
		machines[i] = r.Asking
	}
	return machines, err
}

func asking(ctx context.Context, s Store) ([]askRecord, []mvcc.KeyValue, error) {
	res, err := s.List(ctx, askPrefix, raftstore.ListOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("list the machines that ask to join: %w", err)
	}
	records := make([]askRecord, len(res.KVs))
	for i, kv := range res.KVs {
		if err := json.Unmarshal(kv.Value, &records[i]); err != nil {
			return nil, nil, fmt.Errorf("record %s: %w", kv.Key, err)
		}
	}
	return records, res.KVs, nil
}

// ErrNotAsking is returned when no machine with that code or id waits.
var ErrNotAsking = errors.New("no machine waits for its approval with this code")

// Approve lets the machine that shows the code join once, in the given role. It
// returns ErrNotAsking.
func Approve(ctx context.Context, s Store, code string, role pki.Role, now time.Time) (Asking, error) {
	records, kvs, err := asking(ctx, s)
	if err != nil {
		return Asking{}, err
	}
	code = readCode(code)
	for i, r := range records {
		authority, ok := r.authorityOf(code)
		if !ok {
			continue
		}
		token := tokenRecord{Hash: r.Hash, Key: r.Key, TokenInfo: TokenInfo{
			ID: r.ID, Role: role, Uses: 1, Created: now.UTC(), Expires: now.Add(approvedLife).UTC(), Authority: authority, For: r.Name,
		}}
		op := token.put(now)
		res, err := s.Txn(ctx, mvcc.Txn{
			Origin:   origin,
			Compares: []mvcc.Compare{{Key: kvs[i].Key, ModRevision: kvs[i].ModRevision}, {Key: op.Key}},
			Ops:      []mvcc.Op{{Type: mvcc.OpDelete, Key: kvs[i].Key}, op},
		})
		if err != nil {
			return Asking{}, fmt.Errorf("approve %s: %w", r.Name, err)
		}
		if res.Succeeded {
			return r.Asking, nil
		}
	}
	return Asking{}, ErrNotAsking
}

// authorityOf is the id of the authority that the machine was shown, by its code.
func (r askRecord) authorityOf(code string) (id string, ok bool) {
	for id, c := range r.Codes {
		if c == code {
			return id, true
		}
	}
	return "", false
}

// Deny forgets the machine with that id. It returns ErrNotAsking.
func Deny(ctx context.Context, s Store, id string) error {
	kv, _, err := s.Get(ctx, askPrefix+id, raftstore.ReadOptions{})
	if err != nil {
		return err
	}
	if kv == nil {
		return ErrNotAsking
	}
	_, err = s.Txn(ctx, mvcc.Txn{Origin: origin, Ops: []mvcc.Op{{Type: mvcc.OpDelete, Key: kv.Key}}})
	return err
}
