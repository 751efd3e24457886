package service

import (
	"net/netip"
	"slices"

	"github.com/clusterd/clusterd/netsetup/lb"
)

// tidy makes the kernel forget the connections and clients of endpoints that are
// gone. The rules are in force by then: what goes wrong is reported and tried again
// with a later change or tick, or every Service would wait for it. It does not end
// by itself: who goes on sending renews both.
func (p *Proxy) tidy(flows []lb.Flow) {
	var n uint
	var err error
	switch {
	case p.sweep:
		n, err = p.cfg.Flows.DeleteOthers(p.serving(), p.at.ranges)
	case len(flows) > 0:
		n, err = p.cfg.Flows.Delete(flows)
	}
	if p.sweep = err != nil; p.sweep && p.once(err) {
		p.cfg.Logger.Warn("connections to endpoints that are gone are still tracked, will retry", "err", err)
	} else if !p.sweep && n > 0 {
		p.cfg.Logger.Debug("tracked connections to endpoints that are gone were dropped", "count", n)
	}
	// While no Service has an affinity there is nothing to ask; what is there then
	// is looked at once one has.
	if p.forget && p.cfg.Balancer.Remembers() {
		err := p.cfg.Balancer.Forget()
		if p.forget = err != nil; p.forget && p.once(err) {
			p.cfg.Logger.Warn("clients of endpoints that are gone are still remembered, will retry", "err", err)
		}
	}
}

// once reports whether an error of tidy is another than the last one: it is tried
// every few seconds, on some kernels in vain.
func (p *Proxy) once(err error) bool {
	text := err.Error()
	news := p.untidy != text
	p.untidy = text
	return news
}

// serving are the endpoints to which connections of each frontend may go on: see
// moved.
func (p *Proxy) serving() map[lb.Frontend][]netip.AddrPort {
	out := make(map[lb.Frontend][]netip.AddrPort, len(p.current))
	for f, c := range p.current {
		if !datagrams(f) {
			out[f] = c.known
			continue
		}
		out[f] = []netip.AddrPort{}
		for _, e := range slices.Concat(c.backend.Endpoints, c.backend.Near) {
			out[f] = append(out[f], e.Addr)
		}
	}
	return out
}

// moved says which endpoints of a frontend are gone, and which tracked
// connections must not go on as they are. Connections of TCP end by themselves
// when their endpoint does; until there is no such endpoint they are left alone,
// those of a datagram protocol follow the rules at once. Pure.
func moved(f lb.Frontend, was claim, had bool, now *claim) (gone []netip.AddrPort, flows []lb.Flow) {
	if now != nil && datagrams(f) && (!had || len(was.backend.Endpoints) == 0) && len(now.backend.Endpoints) > 0 {
		flows = append(flows, lb.Flow{Frontend: f}) // they were sent nowhere
	}
	if !had {
		return nil, flows
	}
	serves, known := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
	if now != nil {
		for _, e := range slices.Concat(now.backend.Endpoints, now.backend.Near) {
			serves[e.Addr] = true
		}
		for _, a := range now.known {
			known[a] = true
		}
	}
	for _, e := range slices.Concat(was.backend.Endpoints, was.backend.Near) {
		if !serves[e.Addr] {
			serves[e.Addr] = true // once
			gone = append(gone, e.Addr)
			if datagrams(f) {
				flows = append(flows, lb.Flow{Frontend: f, Endpoint: e.Addr})
			}
		}
	}
	if !datagrams(f) && now != nil {
		for _, a := range was.known {
			if !known[a] {
				flows = append(flows, lb.Flow{Frontend: f, Endpoint: a})
			}
		}
	}
	return gone, flows
}

// datagrams: its protocol has no end of a connection that both sides know.
func datagrams(f lb.Frontend) bool { return f.Proto.String() != "tcp" }
