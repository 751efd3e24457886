package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"

	"k8s.io/apiserver/pkg/endpoints/request"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/member/tunnel"
)

// peers reaches other nodes' agents by node name, at the address gossip knows
// today, and makes gossip's hints into something the controllers can ask.
type peers struct {
	id      transport.Identity
	members *gossip.Members
	// agents are those that keep a connection to this server.
	agents *tunnel.Hub
	// record is the cluster's word on who has a node name.
	record func(name string) (join.Record, error)
	// kept are the connections to other servers over which they are asked for nodes.
	kept keptConns
}

// find says which key a node has and where it is now. The record names the
// key; gossip says where a server lives. A member that is behind may lack the
// record, and then trusts gossip: the certificate at that address settles it.
func (p *peers) find(node string) (id string, addr netip.AddrPort, err error) {
	rec, err := p.record(node)
	switch {
	case err == nil && !rec.IsServer():
		return rec.ID, rec.Addr, nil
	case err == nil:
		if m, ok := p.members.Get(rec.ID); ok {
			return m.ID, m.Addr, nil
		}
	case errors.Is(err, join.ErrNotMember):
		if m, ok := p.members.ByName(node); ok {
			return m.ID, m.Addr, nil
		}
	default:
		return "", netip.AddrPort{}, err
	}
	return "", netip.AddrPort{}, fmt.Errorf("node %s was never seen by this node", node)
}

// transportTo returns a round tripper to the agent of the node of that name,
// and the URL to use with it. The scheme is http, because what DialContext
// returns is the finished TLS connection. Each call over it is a connection
// of its own: exec and logs hold theirs for long, and a dead node's must not
// be reused.
//
// The calls are for the user of ctx, whose name the node gets; for none: for this
// server itself.
func (p *peers) transportTo(ctx context.Context, node string) (http.RoundTripper, *url.URL, error) {
	var who *transport.Caller
	if u, ok := request.UserFrom(ctx); ok && u != nil {
		who = &transport.Caller{User: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups(), Extra: u.GetExtra()}
	}
	return p.transportFor(who, node)
}

// transportFor is transportTo for that user; nil: for this server itself.
func (p *peers) transportFor(who *transport.Caller, node string) (http.RoundTripper, *url.URL, error) {
	if _, _, err := p.find(node); err != nil {
		return nil, nil, err
	}
	return p.newTransport(who, node), &url.URL{Scheme: "http", Host: node}, nil
}

// newTransport makes a round tripper to the agent of the node, see transportTo.
func (p *peers) newTransport(who *transport.Caller, node string) *http.Transport {
	return &http.Transport{
		DisableKeepAlives: true,
		// Of requests that ask whether their body is wanted, see passOn.
		ExpectContinueTimeout: nodeAnswerTimeout,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			id, addr, err := p.find(node)
			if err != nil {
				return nil, err
			}
			c, err := p.dial(ctx, id, addr)
			if err != nil {
				return nil, err
			}
			// What gossip calls it is its own word; its certificate is the cluster's.
			if _, name := transport.PeerOf(c); name != node {
				c.Close()
				return nil, fmt.Errorf("at %s, where node %s is said to be, there is node %s", addr, node, name)
			}
			// An older node does not ask back, and does not understand it.
			if spoken := transport.Spoken(c); who != nil && (spoken == transport.Node || spoken == transport.Tunnel) {
				if err := transport.Announce(c, *who); err != nil {
					c.Close()
					return nil, err
				}
			}
			return c, nil
		},
	}
}

// dial connects to a node's calls: over the connection that the agent keeps to
// this server, or else at its address.
func (p *peers) dial(ctx context.Context, id string, addr netip.AddrPort) (net.Conn, error) {
	c, err := p.agents.Dial(ctx, id)
	if err == nil {
		return c, nil
	}
	return p.id.Dial(ctx, addr, id, transport.Node)
}

// errNoSuchCall is returned by call when the node knows none of that path.
var errNoSuchCall = errors.New("the node does not know this call: it runs another version or in another role")

// errCallRefused is returned by call when the node refuses it: older agents do for calls that they do not know.
var errCallRefused = errors.New("the node refused the call")

// call makes a request of this server's own to the node's agent port, with in as its JSON body
// unless that is nil. The answer is decoded into into, which may be nil.
func (p *peers) call(ctx context.Context, node, method, path string, in, into any) error {
	tr, base, err := p.transportFor(nil, node)
	if err != nil {
		return err
	}
	return callOver(ctx, tr, base, method, path, in, into)
}

func callOver(ctx context.Context, tr http.RoundTripper, base *url.URL, method, path string, in, into any) error {
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
	if res.StatusCode == http.StatusNotFound {
		return errNoSuchCall
	}
	if res.StatusCode/100 != 2 {
		err := fmt.Errorf("node %s answered %s", base.Host, res.Status)
		var no struct{ Message string }
		if json.Unmarshal(answer, &no) == nil && no.Message != "" {
			err = errors.New(no.Message)
		}
		if res.StatusCode == http.StatusForbidden {
			err = fmt.Errorf("%w: %w", errCallRefused, err)
		}
		return err
	}
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(answer, into)
}

// confirm returns nil when the agent of the node answers this server.
func (p *peers) confirm(ctx context.Context, node string) error {
	return p.call(ctx, node, http.MethodGet, "healthz", nil, nil)
}

// askAgent says how the member is that is an agent by its record: answers, silent,
// or changing while it was demoted and still runs as a server, which does not know
// the call.
func (p *peers) askAgent(ctx context.Context, node string) string {
	switch err := p.call(ctx, node, http.MethodGet, v1.Members, nil, nil); {
	case err == nil:
		return "answers"
	case errors.Is(err, errNoSuchCall):
		return "changing"
	}
	return "silent"
}
