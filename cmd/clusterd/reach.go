package main

import (
	"context"
	"net/http"
	"net/url"
	"sync"
	"time"
)

const (
	// reachPath/NODE is what a leader asks another server: does the node answer you?
	reachPath    = "/clusterd/v1/reach/"
	reachTimeout = 5 * time.Second
	// keptFor is how long a connection is kept over which nothing is asked, keptMost
	// how many of them to one server.
	keptFor  = time.Minute
	keptMost = 8
)

// keptConns are ways to servers whose connections are used again. Its zero value has
// none.
type keptConns struct {
	mu   sync.Mutex
	ways map[string]*http.Transport // by the server's name
}

// to is the way to that server, made by make at first.
func (k *keptConns) to(server string, make func() *http.Transport) *http.Transport {
	k.mu.Lock()
	defer k.mu.Unlock()
	way := k.ways[server]
	if way == nil {
		way = make()
		way.DisableKeepAlives, way.IdleConnTimeout, way.MaxIdleConnsPerHost = false, keptFor, keptMost
		if k.ways == nil {
			k.ways = map[string]*http.Transport{}
		}
		k.ways[server] = way
	}
	return way
}

// askReach asks another server whether the node answers that. Its connections are
// kept: when many nodes are suspected at once, because a server or the network is
// slow, a handshake for each question would make that worse. One that a question was
// given up on is closed.
func (p *peers) askReach(ctx context.Context, server, node string) error {
	way := p.kept.to(server, func() *http.Transport { return p.newTransport(nil, server) })
	return callOver(ctx, way, &url.URL{Scheme: "http", Host: server}, http.MethodGet, reachPath+node, nil, nil)
}

// getReach says to another server whether the agent of the node answers this one.
func (p *peers) getReach(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), reachTimeout)
	defer cancel()
	if err := p.confirm(ctx, r.PathValue("node")); err != nil {
		refuse(w, http.StatusBadGateway, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
