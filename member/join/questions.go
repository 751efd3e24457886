package join

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// separateKey is the parameter by which a member says that it knows of separate
// authorities.
const separateKey = "separate"

// Questions answers what members ask a server. The connection has proved the
// member's key; who has no record is refused, whatever its certificate says.
func (s *Server) Questions() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+ServersPath, s.asMember(s.getServers))
	mux.HandleFunc("GET "+KeysPath, s.asMember(s.getKeys))
	mux.HandleFunc("GET "+ReleaseKeysPath, s.asMember(s.getReleaseKeys))
	mux.HandleFunc("GET "+MemberPath, s.asMember(s.leave))
	mux.HandleFunc("DELETE "+MemberPath, s.asMember(s.leave))
	return mux
}

// leave says whether the caller may leave the cluster, or takes it out.
func (s *Server) leave(ctx context.Context, who Record, r *http.Request) (any, error) {
	if s.Leave == nil {
		return nil, errors.New("this server does not remove members")
	}
	return struct{}{}, s.Leave(ctx, who.Name, r.Method == http.MethodDelete)
}

func (s *Server) asMember(do func(context.Context, Record, *http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		id, name := transport.PeerFrom(ctx)
		rec, err := MemberNow(ctx, s.Store, id)
		var out any
		switch {
		case errors.Is(err, ErrNotMember) || err == nil && rec.Name != name:
			err = &Refusal{CodeMember, "node " + name + " has no record in this cluster"}
		case err == nil:
			out, err = do(ctx, rec, r)
		}
		var no *Refusal
		switch {
		case errors.As(err, &no):
			s.Log.Warn("a member's question was refused", "node", name, "path", r.URL.Path, "err", err)
			refuse(w, http.StatusForbidden, no)
		case err != nil:
			refuse(w, http.StatusServiceUnavailable, &Refusal{CodeBusy, "the cluster cannot answer right now: " + err.Error()})
		default:
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(out)
		}
	}
}

func (s *Server) getServers(ctx context.Context, who Record, r *http.Request) (any, error) {
	may := func() bool { return s.notes.allow(who.ID, time.Now()) }
	// Without a leader nothing can be noted, and the answer is worth no less.
	if addr, err := netip.ParseAddrPort(r.URL.Query().Get("addr")); err == nil && !addr.Addr().IsUnspecified() && !who.IsServer() && (!who.Confirmed || who.Addr != addr) {
		if may() {
			if err := arrived(ctx, s.Store, who.ID, addr); err != nil {
				s.Log.Warn("an agent's arrival could not be noted", "node", who.Name, "err", err)
			}
		}
	}
	trust, knows := s.Trust(), r.URL.Query().Get(separateKey) != ""
	if knows && !trust.Separated() && s.NoteSeparate != nil {
		if err := s.NoteSeparate(ctx, who.ID, may); err != nil {
			s.Log.Warn("that a member knows of separate authorities could not be recorded", "node", who.Name, "err", err)
		}
	}
	// A number that this server has not heard of yet is noted when the member asks again.
	if has, err := strconv.ParseUint(r.URL.Query().Get("trust"), 10, 64); err == nil && s.NoteTrust != nil && has <= trust.Number {
		if err := s.NoteTrust(ctx, who.ID, has, may); err != nil {
			s.Log.Warn("the authorities that a member trusts could not be recorded", "node", who.Name, "err", err)
		}
	}
	role := pki.Agent
	if who.IsServer() {
		role = pki.Server
	}
	list := ServerList{Servers: s.Servers(), Role: role, Trust: trustBundle(trust, knows)}
	if s.Removed != nil {
		list.Removed = s.Removed()
	}
	return list, nil
}

// getKeys asks the leader who it is that asks: this member may not have heard of a
// removal yet, and the keys open the whole cluster.
func (s *Server) getKeys(ctx context.Context, who Record, r *http.Request) (any, error) {
	name := who.Name
	who, _, err := getRecord(ctx, s.Store, who.ID)
	if errors.Is(err, ErrNotMember) || err == nil && who.Name != name {
		return nil, &Refusal{CodeMember, "node " + name + " has no record in this cluster"}
	}
	if err != nil {
		return nil, err
	}
	if !who.IsServer() {
		return nil, &Refusal{CodeMember, "node " + who.Name + " is an agent: only servers hold the cluster's keys"}
	}
	trust := s.Trust()
	if trust.Separated() && r.URL.Query().Get(separateKey) == "" {
		return nil, &Refusal{CodeRequest, "this cluster has an authority for each purpose, which the clusterd of node " + who.Name + " does not know: install the version that the cluster has"}
	}
	key, err := trust.Keys()
	if err != nil {
		return nil, err
	}
	own, err := trust.OwnKeys()
	if err != nil {
		return nil, err
	}
	gossip, err := s.GossipKeys(ctx)
	if err != nil {
		return nil, err
	}
	keys := Keys{CAKey: key, GossipKey: gossip.Keys[0], Gossip: &gossip, Trust: trustBundle(trust, true), OwnKeys: own}
	if s.SealKeys != nil {
		keys.SealKeys = s.SealKeys()
	}
	if s.OwnSeals != nil {
		if keys.OwnSeals, err = s.OwnSeals(); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

func (s *Server) getReleaseKeys(ctx context.Context, _ Record, _ *http.Request) (any, error) {
	if s.ReleaseKeys == nil {
		return ReleaseKeys{}, nil
	}
	keys, err := s.ReleaseKeys(ctx)
	return ReleaseKeys{Keys: keys}, err
}
