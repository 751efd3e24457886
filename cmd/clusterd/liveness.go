package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"

	"github.com/clusterd/clusterd/cmd/clusterd/transport"
	"github.com/clusterd/clusterd/gossip"
)

// peers reaches other nodes' agents by node name, at the address gossip knows
// today, and makes gossip's hints into something the controllers can ask.
type peers struct {
	id      transport.Identity
	members *gossip.Members
}

// transportTo returns a round tripper to the agent of the node of that name,
// and the URL to use with it. The scheme is http, because what DialContext
// returns is the finished TLS connection. Each call over it is a connection
// of its own: exec and logs hold theirs for long, and a dead node's must not
// be reused.
func (p *peers) transportTo(_ context.Context, node string) (http.RoundTripper, *url.URL, error) {
	if _, ok := p.members.ByName(node); !ok {
		return nil, nil, fmt.Errorf("node %s was never seen by this node", node)
	}
	tr := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			m, ok := p.members.ByName(node)
			if !ok {
				return nil, fmt.Errorf("node %s is no longer a member", node)
			}
			return p.id.Dial(ctx, m.Addr, m.ID, transport.Node)
		},
	}
	return tr, &url.URL{Scheme: "http", Host: node}, nil
}

// call makes a request to the node's agent port, with in as its JSON body
// unless that is nil. The answer is decoded into into, which may be nil.
func (p *peers) call(ctx context.Context, node, method, path string, in, into any) error {
	tr, base, err := p.transportTo(ctx, node)
	if err != nil {
		return err
	}
	body, err := jsonBody(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, base.JoinPath(path).String(), body)
	if err != nil {
		return err
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if res.StatusCode/100 != 2 {
		var no struct{ Message string }
		if json.Unmarshal(answer, &no) == nil && no.Message != "" {
			return errors.New(no.Message)
		}
		return fmt.Errorf("node %s answered %s", node, res.Status)
	}
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(answer, into)
}

// confirm returns nil when the agent of the node answers.
func (p *peers) confirm(ctx context.Context, node string) error {
	return p.call(ctx, node, http.MethodGet, "healthz", nil, nil)
}

// suspects is the controllers' view of gossip while this node leads.
type suspects struct {
	*peers
	names chan string
}

// Suspects delivers the names of nodes that gossip calls dead, once per
// change, and all that are dead when the leadership begins.
func (s *suspects) Suspects() <-chan string { return s.names }

// Confirm is peers.confirm.
func (s *suspects) Confirm(ctx context.Context, node string) error { return s.confirm(ctx, node) }

// run feeds the channel until ctx ends.
func (s *suspects) run(ctx context.Context) error {
	told := map[string]gossip.State{} // by id
	for {
		changed := s.members.Changed()
		for _, m := range s.members.All() {
			if m.State == told[m.ID] {
				continue
			}
			told[m.ID] = m.State
			if m.State == gossip.Alive {
				continue
			}
			select {
			case s.names <- m.Name:
			case <-ctx.Done():
				return nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}
