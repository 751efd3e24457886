// Package paths is what nodes say of the ways between them: the answer of a
// node's call /paths, and what is wrong by it. The agent fills it in, the node's
// condition and clusterctl net doctor judge by it. Pure.
package paths

import (
	"fmt"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Port is where nodes answer each other's pings, UDP and TCP, at their first pod
// addresses alone.
const Port = 8474

// Condition is the Node's condition that says whether ways from it fail.
const Condition v1.NodeConditionType = "PodNetworkDegraded"

// Report is what one node measured. Times are relative, as clocks of nodes
// differ.
type Report struct {
	Node  string `json:"node"`
	Paths []Path `json:"paths"`
}

// Path is the way to an address of another node: its first pod address.
type Path struct {
	Peer    string `json:"peer"`
	Address string `json:"address"`
	// Expected is false while the peer is not Ready, when it need not answer.
	Expected bool `json:"expected"`

	// Of the last pings, at most 60: those sent, without an answer, and how many
	// of these were lost on which way, as far as that is known.
	Sent      int `json:"sent"`
	Lost      int `json:"lost"`
	LostThere int `json:"lostThere"`
	LostBack  int `json:"lostBack"`
	// Silent are the last ones in a row without an answer.
	Silent int `json:"silent"`

	// RTT is the median round trip, MaxRTT the longest; milliseconds.
	RTT    float64 `json:"rttMs"`
	MaxRTT float64 `json:"maxRttMs"`

	// Heard says how long ago the peer's own ping came; -1: none came yet.
	Heard float64 `json:"heardSecondsAgo"`

	// MTU is that of the interface which the path begins at, bytes with the IP header;
	// 0: not known. Carries is set where that is less.
	MTU     int `json:"mtu"`
	Carries int `json:"carries,omitempty"`

	// WireGuard is set where packets to the peer go through it, KeyFault where the
	// two cannot encrypt what goes between them: why.
	WireGuard *Tunnel `json:"wireguard,omitempty"`
	KeyFault  string  `json:"keyFault,omitempty"`

	// Damaged are packets of the last ten minutes that came with other bytes than were
	// sent.
	Damaged int `json:"damaged"`
	// Streamed reports whether a stream of bytes was tried, Stream why it did not
	// come through.
	Streamed bool   `json:"streamed"`
	Stream   string `json:"stream,omitempty"`
}

// Tunnel is what WireGuard tells of a peer.
type Tunnel struct {
	Endpoint string `json:"endpoint"` // where its packets come from
	// Handshake says how long ago the last one was; -1: there was none.
	Handshake float64 `json:"handshakeSecondsAgo"`
	Received  int64   `json:"receivedBytes"`
	Sent      int64   `json:"sentBytes"`
}

// State is what a way is like.
type State string

// The states, the worst first.
const (
	Unknown State = "unknown" // too little was measured
	NoKey   State = "no key"  // nothing is sent, for want of a key
	Down    State = "down"    // nothing comes back
	OneWay  State = "one-way" // the peer's packets come, ours are not answered
	Damage  State = "damaged" // bytes are changed on the way
	Short   State = "mtu"     // long packets are lost
	Stream  State = "tcp"     // packets pass, streams do not
	Lossy   State = "lossy"
	OK      State = "ok"
)

// silence is how many pings without an answer make a way dead.
const silence = 3

// lossy is the share of packets that may be lost, of as many at least.
const (
	lossyShare = 0.05
	lossyLeast = 20
)

// Judge says what a way is like. heardWithin is how long ago the peer's last
// ping may have come for it to count as heard.
func Judge(p Path, heardWithin time.Duration) State {
	switch {
	case p.KeyFault != "":
		return NoKey
	case p.Silent >= silence && p.Heard >= 0 && p.Heard <= heardWithin.Seconds():
		return OneWay
	case p.Silent >= silence:
		return Down
	case p.Sent == p.Lost:
		return Unknown
	case p.Damaged > 0:
		return Damage
	case p.Carries > 0:
		return Short
	case p.Stream != "":
		return Stream
	case p.Sent >= lossyLeast && float64(p.Lost) > lossyShare*float64(p.Sent):
		return Lossy
	}
	return OK
}

// Finding is what is wrong between two nodes, with what to do.
type Finding struct {
	From  string `json:"from"`
	To    string `json:"to"`
	State State  `json:"state"`
	What  string `json:"what"`
	Cure  string `json:"cure"`
}

// String is the finding in one sentence.
func (f Finding) String() string { return f.From + " → " + f.To + ": " + f.What }

// HeardWithin is how recent a ping of a peer must be in a cluster of so many
// nodes: each node pings one other each 50 ms, and each other once a second at
// most.
func HeardWithin(nodes int) time.Duration {
	return 5*time.Second + 3*time.Duration(nodes)*50*time.Millisecond
}

// Findings are what is wrong on the ways from one node. Peers that need not
// answer are passed over.
func Findings(r Report) []Finding {
	var out []Finding
	within := HeardWithin(len(r.Paths))
	for _, p := range r.Paths {
		if !p.Expected {
			continue
		}
		f := Finding{From: r.Node, To: p.Peer, State: Judge(p, within)}
		switch f.State {
		case OK, Unknown:
			continue
		case NoKey:
			f.What = "no packets of pods pass: " + p.KeyFault
			f.Cure = fmt.Sprintf("give podEncryption the same value in config.yaml of %s and %s, and start clusterd again where it was changed; `clusterd doctor` on %s says whether its kernel has WireGuard", r.Node, p.Peer, p.Peer)
		case Down:
			f.What = fmt.Sprintf("%s does not answer", p.Address)
			f.Cure = fmt.Sprintf("let UDP and TCP port %d between pod addresses through, and UDP port 8473 between the nodes where a router is between them; look at a firewall of either machine or of the network", Port)
			if p.WireGuard != nil {
				f.What += ", " + p.WireGuard.handshake()
				f.Cure = "let UDP port 8475 between the nodes through; look at a firewall of either machine or of the network"
			}
		case OneWay:
			f.What = fmt.Sprintf("%s does not answer, but its packets come here", p.Address)
			f.Cure = fmt.Sprintf("look at the way from %s to %s: a firewall, a route or a security group of one direction", r.Node, p.Peer)
		case Damage:
			f.What = fmt.Sprintf("%d packets came with changed bytes in the last ten minutes", p.Damaged)
			f.Cure = "a network card, cable or driver is faulty; try its offloads off: ethtool -K DEVICE tx off rx off"
		case Short:
			f.What = fmt.Sprintf("packets of more than %d bytes are lost, the interface takes %d", p.Carries, p.MTU)
			f.Cure = fmt.Sprintf("set the MTU of the interface between the nodes to %d, on both: ip link set DEVICE mtu %d; or repair the network between them", p.Carries, p.Carries)
		case Stream:
			f.What = "packets pass, TCP does not: " + p.Stream
			f.Cure = fmt.Sprintf("let TCP port %d between pod addresses through; if it is, try the offloads of the interface off: ethtool -K DEVICE tx off tso off gso off", Port)
		case Lossy:
			f.What = fmt.Sprintf("%d of %d packets are lost%s", p.Lost, p.Sent, where(p))
			f.Cure = "look at the counters of the interfaces: ip -s link; at the load of both machines, and of the network between them"
		}
		out = append(out, f)
	}
	return out
}

// handshake is when the last one was, in words.
func (t Tunnel) handshake() string {
	if t.Handshake < 0 {
		return "and there was no handshake of WireGuard yet"
	}
	return fmt.Sprintf("the last handshake of WireGuard was %.0f s ago", t.Handshake)
}

// where is on which way packets are lost.
func where(p Path) string {
	switch {
	case p.LostThere > 0 && p.LostBack > 0:
		return fmt.Sprintf(" (%d on the way there, %d back)", p.LostThere, p.LostBack)
	case p.LostThere > 0:
		return " on the way there"
	case p.LostBack > 0:
		return " on the way back"
	}
	return ""
}

// Summary is findings in one sentence, for a condition: the worst of each peer,
// at most five.
func Summary(findings []Finding, peers int) string {
	if len(findings) == 0 {
		return fmt.Sprintf("the ways to %d other nodes work", peers)
	}
	const most = 5
	var words []string
	for _, f := range findings[:min(len(findings), most)] {
		words = append(words, f.To+": "+f.What)
	}
	if more := len(findings) - most; more > 0 {
		words = append(words, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(words, "; ")
}
