package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"k8s.io/apiserver/pkg/endpoints/request"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/upgrade"
)

// registerUpgrade adds what `clusterctl upgrade` asks. Whoever may use these paths
// decides which program all nodes run, as long as somebody whose key is trusted has
// signed it; who may add a key decides that, too. They are administrators' unless a
// ClusterRole names the paths (nonResourceURLs).
func (a *clusterAPI) registerUpgrade(mux *http.ServeMux) {
	mux.HandleFunc("GET "+v1.Upgrade, a.getRollout)
	mux.HandleFunc("PUT "+v1.Upgrade, a.putRollout)
	mux.HandleFunc("GET "+v1.Upgrade+"/keys", a.getReleaseKeys)
	mux.HandleFunc("POST "+v1.Upgrade+"/keys", a.postReleaseKey)
	mux.HandleFunc("DELETE "+v1.Upgrade+"/keys/{id}", a.deleteReleaseKey)
	mux.HandleFunc("POST "+v1.Upgrade+"/handover", a.postHandover)
	mux.HandleFunc("GET "+v1.Upgrade+"/nodes/{name}", a.passRelease(""))
	mux.HandleFunc("PUT "+v1.Upgrade+"/nodes/{name}/file", a.passRelease("/file"))
	for _, what := range []string{"/switch", "/confirm", "/back"} {
		mux.HandleFunc("POST "+v1.Upgrade+"/nodes/{name}"+what, a.passRelease(what))
	}
}

// nodeAnswerTimeout is how long a node may take for an answer, but to a file.
const nodeAnswerTimeout = 90 * time.Second

// passRelease passes a request on to the node that it is about.
func (a *clusterAPI) passRelease(what string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("name")
		if _, err := join.MemberNamed(r.Context(), a.store, name); errors.Is(err, join.ErrNotMember) {
			refuse(w, http.StatusNotFound, fmt.Sprintf("no member is called %q; `clusterctl members` lists them", name))
			return
		}
		if who, ok := request.UserFrom(r.Context()); ok && what != "" {
			a.log.Info("program of a node", "action", strings.TrimPrefix(what, "/"), "node", name, "user", who.GetName())
		}
		ctx := r.Context()
		if what != "/file" {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, nodeAnswerTimeout)
			defer cancel()
		}
		if name == a.name {
			own := r.Clone(ctx)
			own.URL.Path = v1.NodeReleasePath + what
			a.release.ServeHTTP(w, own)
			return
		}
		if err := a.passOn(ctx, w, r, name, v1.NodeReleasePath+what); err != nil {
			refuse(w, http.StatusBadGateway, fmt.Sprintf("node %s cannot be asked: %v", name, err))
		}
	}
}

func (a *clusterAPI) passOn(ctx context.Context, w http.ResponseWriter, r *http.Request, name, path string) error {
	tr, base, err := a.peers.transportFor(nil, name)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, base.JoinPath(path).String(), r.Body)
	if err != nil {
		return err
	}
	req.ContentLength = r.ContentLength
	if sig := r.Header.Get(v1.ReleaseSignature); sig != "" {
		req.Header.Set(v1.ReleaseSignature, sig)
	}
	if r.Method == http.MethodPut { // a file that is refused by its signature is not sent
		req.Header.Set("Expect", "100-continue")
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return err
	}
	switch {
	case res.StatusCode == http.StatusNotFound, res.StatusCode == http.StatusForbidden && !json.Valid(body):
		// The agent of an older version knows no such path, and refuses it.
		refuse(w, http.StatusNotImplemented, fmt.Sprintf("node %s runs a version that cannot be exchanged from here: install a later one there by hand, once", name))
	case !json.Valid(body):
		return fmt.Errorf("it answered %s: %.200s", res.Status, body)
	default:
		reply(w, res.StatusCode, json.RawMessage(body))
	}
	return nil
}

func (a *clusterAPI) getRollout(w http.ResponseWriter, r *http.Request) {
	rollout, err := upgrade.Get(r.Context(), a.store)
	switch {
	case errors.Is(err, upgrade.ErrNone):
		refuse(w, http.StatusNotFound, "no release was rolled out over this cluster yet")
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, rollout)
	}
}

func (a *clusterAPI) putRollout(w http.ResponseWriter, r *http.Request) {
	var rollout v1.Rollout
	if !decode(w, r, 4<<20, &rollout) {
		return
	}
	if rollout.ID == "" || rollout.Version == "" {
		refuse(w, http.StatusBadRequest, "id and version: give both")
		return
	}
	rollout, err := upgrade.Put(r.Context(), a.store, rollout, time.Now())
	switch {
	case errors.Is(err, upgrade.ErrUnderWay):
		refuse(w, http.StatusConflict, err.Error())
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, rollout)
	}
}

func (a *clusterAPI) getReleaseKeys(w http.ResponseWriter, r *http.Request) {
	keys, err := upgrade.Keys(r.Context(), a.store)
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, v1.ReleaseKeyList{Keys: keys})
}

func (a *clusterAPI) postReleaseKey(w http.ResponseWriter, r *http.Request) {
	var req v1.ReleaseKey
	if !decode(w, r, smallRequest, &req) {
		return
	}
	if _, err := upgrade.Parse([]string{req.Key}); err != nil {
		refuse(w, http.StatusBadRequest, "key: "+err.Error())
		return
	}
	key, err := upgrade.Trust(r.Context(), a.store, req.Key, time.Now())
	switch {
	case errors.Is(err, upgrade.ErrOtherKey):
		refuse(w, http.StatusConflict, err.Error())
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusCreated, key)
	}
}

func (a *clusterAPI) deleteReleaseKey(w http.ResponseWriter, r *http.Request) {
	err := upgrade.Distrust(r.Context(), a.store, r.PathValue("id"))
	switch {
	case errors.Is(err, upgrade.ErrNone):
		refuse(w, http.StatusNotFound, fmt.Sprintf("no key %q is trusted; `clusterctl upgrade trust` lists them", r.PathValue("id")))
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, map[string]any{})
	}
}

// postHandover makes another voter lead.
func (a *clusterAPI) postHandover(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), nodeAnswerTimeout)
	defer cancel()
	if err := a.store.TransferLeadership(ctx); err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, map[string]any{})
}

// releaseKeys are the lines of the keys that the cluster trusts.
func (m *Main) releaseKeys(ctx context.Context) ([]string, error) {
	keys, err := upgrade.Keys(ctx, m.store)
	lines := []string{}
	for _, k := range keys {
		lines = append(lines, k.Key)
	}
	return lines, err
}

// newNodeRelease is this server's program, as servers ask for it.
func (m *Main) newNodeRelease(agent *agentKeeper) (*nodeRelease, error) {
	n, err := newNodeRelease(m.cfg, m.log)
	if err != nil {
		return nil, err
	}
	n.clusterKeys, n.agentRuns, n.reexecCh = m.releaseKeys, agent.runs, m.reexecCh
	n.storeReady = func(ctx context.Context) bool {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
		return err == nil && m.storeReady(req) == nil
	}
	own := http.NewServeMux()
	n.register(own)
	m.clusterAPI.release = own
	return n, nil
}
