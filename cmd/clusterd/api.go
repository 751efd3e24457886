package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/apis/server/budget"
	"github.com/clusterd/clusterd/apis/server/tokens"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/recovery"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/backup"
)

// clusterAPI answers /clusterd/v1/…: what clusterctl asks beside Kubernetes'
// own API. The API server has authenticated and authorized the caller.
type clusterAPI struct {
	name    string // of this node
	store   *raftstore.Store
	budget  *budget.Budget // nil: writers are not bounded
	peers   *peers
	members *gossip.Members
	trust   *pki.LiveTrust
	clock   *clock.Clock
	// rotation starts CA rotations.
	rotation *authority.Server
	// secrets are what a snapshot needs beside the state.
	secrets func() (backup.Secrets, error)
	// sealing is how this server seals at rest.
	sealing func() *encryptionView
	self    netip.AddrPort
	// schedule is when this server takes snapshots while it leads.
	schedule SnapshotConfig
	// seen are the other members as this node last saw them.
	seen func() []nodedir.SeenPeer
	// restart writes a recovery down and ends this process, to be started
	// again.
	restart func(recovery.Order) error
	// deleteNode removes the Node object of a removed member.
	deleteNode func(ctx context.Context, name string) error
	// tokenKeys are those of service accounts' tokens; rotateTokenKey makes another.
	tokenKeys      func(ctx context.Context) ([]tokens.State, error)
	rotateTokenKey func(ctx context.Context) error
	// release answers for this node's own program.
	release http.Handler
	log     *slog.Logger
	// removing is held by removals of members that are being answered.
	removing sync.RWMutex
}

// storePath answers with the node's own raftstore.Status, to people through
// the API and to other nodes over the node protocol.
const storePath = v1.Store

func (a *clusterAPI) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+v1.Members, a.getMembers)
	mux.HandleFunc("DELETE "+v1.Members+"/{name}", a.deleteMember)
	mux.HandleFunc("PUT "+v1.Members+"/{name}/role", a.putRole)
	mux.HandleFunc("PUT "+v1.Voters, a.putVoters)
	mux.HandleFunc("GET "+storePath, a.getStore)
	mux.HandleFunc("GET "+v1.Snapshot, a.getSnapshot)
	mux.HandleFunc("GET "+recoveryPath, a.getRecovery)
	mux.HandleFunc("POST "+recoveryPath, a.postRecovery)
	mux.HandleFunc("GET "+v1.Store+"/top", a.getStoreTop)
	mux.HandleFunc("GET "+v1.Tokens, a.getTokens)
	mux.HandleFunc("POST "+v1.Tokens, a.postToken)
	mux.HandleFunc("DELETE "+v1.Tokens+"/{id}", a.deleteToken)
	mux.HandleFunc("GET "+v1.Asking, a.getAsking)
	mux.HandleFunc("POST "+v1.Asking, a.postApproval)
	mux.HandleFunc("DELETE "+v1.Asking+"/{id}", a.deleteAsking)
	mux.HandleFunc("GET "+v1.Revocations, a.getRevocations)
	mux.HandleFunc("POST "+v1.Revocations, a.postRevocation)
	mux.HandleFunc("GET "+v1.GossipKey, a.getGossipKey)
	mux.HandleFunc("POST "+v1.GossipKey, a.postGossipKey)
	mux.HandleFunc("GET "+v1.TokenKeys, a.getTokenKeys)
	mux.HandleFunc("POST "+v1.TokenKeys, a.postTokenKeys)
	mux.HandleFunc("GET "+v1.Authority, a.getAuthority)
	mux.HandleFunc("POST "+v1.Authority, a.postAuthority)
	mux.HandleFunc("POST "+v1.Authority+"/split", a.postAuthoritySplit)
	mux.HandleFunc("POST "+v1.Authority+"/finish", a.postAuthorityFinish)
	a.registerUpgrade(mux)
	return mux
}

// roll is who the members are, as far as this node knows. Without a leader it
// may have applied little of its log or nothing; raft's configuration, which
// it has read, names those whose records are still to come.
func (a *clusterAPI) roll(ctx context.Context, status raftstore.Status) ([]join.Record, error) {
	records, err := join.Records(ctx, a.store, true)
	if err != nil || status.Leader != "" {
		return records, err
	}
	seen := a.seen()
	for _, m := range status.Members {
		if slices.ContainsFunc(records, func(r join.Record) bool { return r.ID == m.ID }) {
			continue
		}
		r := join.Record{ID: m.ID, Name: m.ID}
		if i := slices.IndexFunc(seen, func(p nodedir.SeenPeer) bool { return p.ID == m.ID }); i >= 0 {
			r.Name, r.Addr = seen[i].Name, seen[i].Addr
		}
		if g, ok := a.members.Get(m.ID); ok {
			r.Name, r.Addr = g.Name, g.Addr
		}
		records = append(records, r)
	}
	return records, nil
}

// memberView is a Member with its answer about its store.
type memberView struct {
	v1.Member
	store   *raftstore.Status
	sealing *encryptionView // nil: it is older than the question
}

// nodeStore is what a server answers another one of its store.
type nodeStore struct {
	raftstore.Status
	Encryption *encryptionView `json:"encryption,omitempty"`
}

// getMembers answers from this node's own view, and from what the others say
// of themselves: it works without a leader.
func (a *clusterAPI) getMembers(w http.ResponseWriter, r *http.Request) {
	status := a.store.Status()
	records, err := a.roll(r.Context(), status)
	if err != nil {
		fail(w, err)
		return
	}
	answer := v1.MemberList{Members: []v1.Member{}, Term: status.Term}
	answer.Warnings = join.Warnings(records, func(id string) bool { return isVoter(status, id) })
	if answer.WantedVoters, err = join.WantedVoters(r.Context(), a.store, true); err != nil {
		fail(w, err)
		return
	}
	views := a.memberViews(records, status)
	a.addProgress(r.Context(), views)
	answer.Warnings = append(answer.Warnings, sealedOtherwise(views)...)
	for _, v := range views {
		if v.Leader {
			answer.Leader = v.Name
		}
		answer.Members = append(answer.Members, v.Member)
	}
	reply(w, http.StatusOK, answer)
}

// memberViews are the members as this node sees them by itself.
func (a *clusterAPI) memberViews(records []join.Record, status raftstore.Status) []memberView {
	views := []memberView{}
	for _, rec := range records {
		v := memberView{Member: v1.Member{Name: rec.Name, ID: rec.ID, Address: rec.Addr.String(), Role: v1.RoleJoining, Leader: rec.ID == status.Leader, Gossip: "unseen"}}
		switch {
		case !rec.IsServer() && rec.Confirmed:
			v.Role, v.Gossip = v1.RoleAgent, "silent"
		case isVoter(status, rec.ID):
			v.Role = v1.RoleVoter
		case slices.Contains(status.Members, raftstore.Member{ID: rec.ID}):
			v.Role = v1.RoleNonvoter
		}
		if m, ok := a.members.Get(rec.ID); ok && v.Role != v1.RoleAgent { // agents do not gossip
			v.Address, v.Gossip, v.Version = m.Addr.String(), string(m.State), m.Version
		}
		views = append(views, v)
	}
	return views
}

func isVoter(status raftstore.Status, id string) bool {
	return slices.Contains(status.Members, raftstore.Member{ID: id, Voter: true})
}

// progressTimeout bounds what a member that does not answer can cost.
const progressTimeout = time.Second

// addProgress asks the living members, all at once, how far they are.
func (a *clusterAPI) addProgress(ctx context.Context, members []memberView) {
	ctx, cancel := context.WithTimeout(ctx, progressTimeout)
	defer cancel()
	var asking sync.WaitGroup
	for i := range members {
		m := &members[i]
		if m.Role == v1.RoleAgent {
			asking.Go(func() { m.Gossip = a.peers.askAgent(ctx, m.Name) })
			continue
		}
		if m.Gossip != string(gossip.Alive) {
			continue
		}
		asking.Go(func() {
			var answer nodeStore
			if err := a.peers.call(ctx, m.Name, http.MethodGet, storePath, nil, &answer); err == nil {
				m.Applied, m.store, m.sealing = &answer.Keyspace.Index, &answer.Status, answer.Encryption
			}
		})
	}
	asking.Wait()
	var most uint64
	for _, m := range members {
		if m.Applied != nil {
			most = max(most, *m.Applied)
		}
	}
	for i, m := range members {
		if m.Applied != nil {
			lag := most - *m.Applied
			members[i].Lag = &lag
		}
	}
}

// deleteMember takes a machine's membership away: its key opens nothing any
// more. What runs on it is not touched; `clusterd reset` there does that.
func (a *clusterAPI) deleteMember(w http.ResponseWriter, r *http.Request) {
	a.removing.RLock()
	defer a.removing.RUnlock()
	name := r.PathValue("name")
	rec, err := a.remove(r.Context(), name)
	var no *conflict
	switch {
	case errors.As(err, &no):
		refuse(w, http.StatusConflict, no.Error())
	case errors.Is(err, join.ErrNotMember):
		refuse(w, http.StatusNotFound, fmt.Sprintf("no member is called %q; `clusterctl members` lists them", name))
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, rec)
	}
}

// remove takes a machine's membership away. It refuses, with a *conflict, what would
// leave no majority. removing is held.
func (a *clusterAPI) remove(ctx context.Context, name string) (join.Record, error) {
	if _, err := a.takeVote(ctx, name); err != nil && !errors.Is(err, join.ErrNotMember) {
		return join.Record{}, err
	}
	rec, err := join.RemoveMember(ctx, a.store, name, a.clock.Now())
	// A node that removed itself cannot write any more: the leader does it.
	if err == nil && name != a.name {
		err = a.deleteNode(ctx, name)
	}
	return rec, err
}

// leave takes out a member that asks for it itself, or says whether it could.
func (a *clusterAPI) leave(ctx context.Context, name string, really bool) error {
	a.removing.RLock()
	defer a.removing.RUnlock()
	var err error
	if really {
		_, err = a.remove(ctx, name)
	} else {
		_, err = a.mayGo(ctx, name)
	}
	var no *conflict
	if errors.As(err, &no) {
		return &join.Refusal{Code: join.CodeNeeded, Message: no.Error()}
	}
	return err
}

// answered returns when no removal of a member is being answered, or after a
// while.
func (a *clusterAPI) answered() {
	done := make(chan struct{})
	go func() {
		a.removing.Lock()
		defer a.removing.Unlock()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(answerTimeout):
	}
}

// answerTimeout is how long a member that was removed may take to say so to
// its caller.
const answerTimeout = 5 * time.Second

// conflict is a wish that the state of the cluster forbids.
type conflict struct{ error }

// takeVote takes the vote of a member that is to be removed, while all members
// still listen to it: were its key refused first, a leader could not hand
// over, and of two voters neither could do without the other. It refuses, with
// a *conflict, what would leave no majority.
func (a *clusterAPI) takeVote(ctx context.Context, name string) (join.Record, error) {
	rec, err := a.mayGo(ctx, name)
	if err != nil || !slices.Contains(a.store.Status().Members, raftstore.Member{ID: rec.ID, Voter: true}) {
		return rec, err
	}
	return rec, a.store.DemoteVoter(ctx, rec.ID)
}

// mayGo returns a *conflict if the cluster cannot do without a member.
func (a *clusterAPI) mayGo(ctx context.Context, name string) (join.Record, error) {
	records, err := join.Records(ctx, a.store, false)
	if err != nil {
		return join.Record{}, err
	}
	i := slices.IndexFunc(records, func(r join.Record) bool { return r.Name == name })
	if i < 0 {
		return join.Record{}, join.ErrNotMember
	}
	rec := records[i]
	if !rec.IsServer() {
		return rec, nil
	}
	err = a.store.CheckRemoval(ctx, rec.ID)
	var few *raftstore.QuorumError
	switch {
	case errors.Is(err, raftstore.ErrLastVoter):
		return rec, &conflict{fmt.Errorf("%s alone holds the cluster's state, which would be lost: join machines until there are three members, or end the cluster with `clusterd reset` on each", name)}
	case errors.As(err, &few):
		return rec, &conflict{fewVoters(name, few, records)}
	}
	return rec, err
}

// fewVoters says why a server cannot go now, and what would help.
func fewVoters(name string, few *raftstore.QuorumError, records []join.Record) error {
	var silent []string
	for _, r := range records {
		if slices.Contains(few.Silent, r.ID) {
			silent = append(silent, r.Name)
		}
	}
	if len(silent) == 0 { // voters without a record, which the leader takes out as soon as it can
		return fmt.Errorf("removing %s would stop the cluster: %w; those that do not answer are no members any more, wait until the leader has taken them out (`clusterctl members`)", name, few)
	}
	return fmt.Errorf("removing %s would stop the cluster: %d voters would be left, and %s does not answer; start clusterd there, or, if it is permanently gone, remove it first with `clusterctl members rm %s`", name, few.Voters, strings.Join(silent, " and "), silent[0])
}

// putRole makes a server of an agent, or an agent of a server, whose vote is taken
// first. The member learns of it within seconds.
func (a *clusterAPI) putRole(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	var req v1.RoleRequest
	if !decode(w, r, smallRequest, &req) {
		return
	}
	role := pki.Role(req.Role)
	if role != pki.Server && role != pki.Agent {
		refuse(w, http.StatusBadRequest, fmt.Sprintf("role %q: give %s or %s", req.Role, pki.Server, pki.Agent))
		return
	}
	var err error
	if role == pki.Agent {
		_, err = a.takeVote(r.Context(), name)
	}
	var rec join.Record
	if err == nil {
		rec, err = join.SetRole(r.Context(), a.store, name, role)
	}
	if err == nil && role == pki.Server {
		// It would ask by itself within half a minute.
		_ = a.peers.call(r.Context(), name, http.MethodPost, v1.Members, nil, nil)
	}
	var no *conflict
	switch {
	case errors.As(err, &no):
		refuse(w, http.StatusConflict, no.Error())
	case errors.Is(err, join.ErrNotMember):
		refuse(w, http.StatusNotFound, fmt.Sprintf("no member is called %q; `clusterctl members` lists them", name))
	case errors.Is(err, join.ErrRole):
		refuse(w, http.StatusConflict, fmt.Sprintf("%s has the role %s already", name, role))
	case errors.Is(err, join.ErrNotArrived):
		refuse(w, http.StatusConflict, fmt.Sprintf("%s has joined and was not seen yet: start clusterd there first", name))
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, rec)
	}
}

// putVoters sets how many voters the cluster is to have.
func (a *clusterAPI) putVoters(w http.ResponseWriter, r *http.Request) {
	var req v1.VotersRequest
	if !decode(w, r, smallRequest, &req) {
		return
	}
	switch err := join.SetWantedVoters(r.Context(), a.store, req.Voters); {
	case errors.Is(err, join.ErrVoters):
		refuse(w, http.StatusBadRequest, err.Error())
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, map[string]any{})
	}
}

func (a *clusterAPI) getTokens(w http.ResponseWriter, r *http.Request) {
	tokens, err := join.Tokens(r.Context(), a.store)
	if err != nil {
		fail(w, err)
		return
	}
	list := v1.TokenList{Tokens: []v1.Token{}}
	for _, t := range tokens {
		one := v1.Token{ID: t.ID, Role: string(t.Role), Uses: t.Uses, Used: t.Used, Name: t.For, Created: t.Created, Expires: t.Expires}
		for _, p := range t.From {
			one.From = append(one.From, p.String())
		}
		list.Tokens = append(list.Tokens, one)
	}
	reply(w, http.StatusOK, list)
}

func (a *clusterAPI) postToken(w http.ResponseWriter, r *http.Request) {
	var req v1.TokenRequest
	if r.ContentLength != 0 {
		if !decode(w, r, smallRequest, &req) {
			return
		}
	}
	ttl := defaultTokenTTL
	if req.TTL != "" {
		var err error
		if ttl, err = time.ParseDuration(req.TTL); err != nil || ttl <= 0 || ttl > maxTokenTTL {
			refuse(w, http.StatusBadRequest, fmt.Sprintf("ttl %q: give a duration such as 24h, of at most %s", req.TTL, maxTokenTTL))
			return
		}
	}
	wish := join.TokenOptions{Role: pki.Role(cmp.Or(req.Role, v1.TokenServer)), Uses: 1, TTL: ttl, Name: req.Name}
	if wish.Role != pki.Server && wish.Role != pki.Agent {
		refuse(w, http.StatusBadRequest, fmt.Sprintf("role %q: give %s or %s", req.Role, v1.TokenServer, v1.TokenAgent))
		return
	}
	if req.Uses != nil {
		wish.Uses = *req.Uses
	}
	if wish.Uses < 0 || wish.Uses > maxTokenUses {
		refuse(w, http.StatusBadRequest, fmt.Sprintf("uses %d: give how many machines may join by the token, at most %d, or 0 for any number", wish.Uses, maxTokenUses))
		return
	}
	var err error
	if wish.From, err = tokenOrigins(req.From); err == nil {
		err = wish.Validate()
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error())
		return
	}
	token, info, err := join.CreateToken(r.Context(), a.store, a.trust.Load().Signer().Cert, wish, a.clock.Now())
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusCreated, v1.NewToken{
		Token: token.String(), ID: info.ID, Role: string(info.Role), Uses: info.Uses, Expires: info.Expires,
		JoinCommand: joinCommand(a.self, token),
	})
}

func (a *clusterAPI) deleteToken(w http.ResponseWriter, r *http.Request) {
	found, err := join.DeleteToken(r.Context(), a.store, r.PathValue("id"))
	if err != nil {
		fail(w, err)
		return
	}
	if !found {
		refuse(w, http.StatusNotFound, fmt.Sprintf("no join token has the id %q; `clusterctl token ls` lists them", r.PathValue("id")))
		return
	}
	reply(w, http.StatusOK, map[string]any{})
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v)
}

// smallRequest bounds the body of a request in bytes, but for the few that are larger.
const smallRequest = 64 << 10

// decode reads a request of at most limit bytes, or refuses it.
func decode(w http.ResponseWriter, r *http.Request, limit int64, into any) bool {
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, limit)).Decode(into)
	if err != nil {
		refuse(w, http.StatusBadRequest, "the request cannot be read: "+err.Error())
	}
	return err == nil
}

func refuse(w http.ResponseWriter, status int, message string) {
	reply(w, status, map[string]any{"message": message})
}

// fail answers a fault of ours: mostly that there is no leader just now.
func fail(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	if errors.Is(err, raftstore.ErrNoLeader) || errors.Is(err, context.DeadlineExceeded) {
		status = http.StatusServiceUnavailable
		w.Header().Set("Retry-After", "1")
	}
	refuse(w, status, err.Error())
}
