package join

import (
	"net/netip"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
)

// Paths over the join protocol of a server's port, which strangers speak.
const (
	// Path is where a joiner posts its Request.
	Path = "/v1/join"
	// RenewPath is where an agent posts a Renewal. It is here, and not among the
	// members' questions, since a certificate that has ended opens nothing: the
	// request itself proves the key.
	RenewPath = "/v1/certificate"
)

// Request asks to join the cluster.
type Request struct {
	TokenID     string         `json:"tokenID"`
	TokenSecret string         `json:"tokenSecret"`
	Name        string         `json:"name"`
	Addr        netip.AddrPort `json:"addr"` // where it will listen
	CSR         []byte         `json:"csr"`  // PKCS #10, DER; proves the key
	Version     string         `json:"version"`
	// Separate: it knows that purposes may have authorities of their own.
	Separate bool `json:"separate,omitempty"`
}

// Response makes the machine a member. It holds no private key: what a server
// needs beside, it asks for as a member (KeysPath).
type Response struct {
	Role    pki.Role `json:"role"`
	Cluster Cluster  `json:"cluster"`
	// CACert is the CA in PEM; during its rotation both, the one that signs
	// first, and Trust says which state of the rotation that is.
	CACert []byte `json:"caCert"`
	Trust  uint64 `json:"trust,omitempty"`
	// Own are those of purposes that have authorities of their own.
	Own      map[pki.Purpose][]byte `json:"own,omitempty"`
	NodeCert []byte                 `json:"nodeCert"`
	Epoch    raftstore.Epoch        `json:"epoch"` // the life of the store to take part in
	Servers  []ServerAddr           `json:"servers"`
}

// Renewal asks for a member's next certificate: an agent's, or the one with which
// an agent that was promoted becomes a server, or the other way round.
type Renewal struct {
	CSR      []byte `json:"csr"`                // with the key that joined
	Separate bool   `json:"separate,omitempty"` // as in Request
}

// Certificate answers it.
type Certificate struct {
	NodeCert []byte `json:"nodeCert"` // PEM; it names the member's role
	// For who becomes another: the life of the store, and where the servers are.
	Epoch   raftstore.Epoch `json:"epoch"`
	Servers []ServerAddr    `json:"servers"`
	// Trust is the CAs to trust; nil from servers that are older than CA rotation.
	Trust *TrustBundle `json:"trust,omitempty"`
}

// TrustBundle is the bundle of CAs that a member must trust.
type TrustBundle struct {
	Number      uint64 `json:"number"`
	Authorities []byte `json:"authorities"` // PEM, the one that signs first
	// Own are those of purposes that have authorities of their own.
	Own map[pki.Purpose][]byte `json:"own,omitempty"`
}

// trustBundle is the bundle for a member that supports separate CAs or not. One that does
// not would misread it, so it gets none.
func trustBundle(t *pki.Trust, knows bool) *TrustBundle {
	if t.Separated() && !knows {
		return nil
	}
	return &TrustBundle{Number: t.Number, Authorities: t.Bundle(), Own: t.OwnBundles()}
}

// Trust converts the bundle to a verifier without keys.
func (w TrustBundle) Trust() (*pki.Trust, error) {
	t, err := pki.ParseTrust(w.Number, w.Authorities, nil)
	if err != nil {
		return nil, err
	}
	return t.WithOwn(w.Own, nil)
}

// Paths over the members' protocol: what a node asks a server.
const (
	// ServersPath tells where the servers are (GET; addr is where the one who
	// asks listens, trust which state it has), and records that the member has
	// arrived.
	ServersPath = "/v1/servers"
	// KeysPath tells a server what only servers know (GET).
	KeysPath = "/v1/keys"
	// ReleaseKeysPath tells a node which keys releases may be signed with (GET).
	ReleaseKeysPath = "/v1/release-keys"
	// MemberPath says whether the cluster can do without the member that asks (GET), and
	// takes it out (DELETE).
	MemberPath = "/v1/member"
)

// ServerAddr is where a server is now.
type ServerAddr struct {
	ID   string         `json:"id"`
	Name string         `json:"name"`
	Addr netip.AddrPort `json:"addr"`
}

// ServerList answers ServersPath.
type ServerList struct {
	Servers []ServerAddr `json:"servers"`
	// Role is that of the one who asks, as the cluster has it recorded; empty from
	// servers that are older than changes of role.
	Role pki.Role `json:"role,omitempty"`
	// Removed are the ids of servers that were removed while a certificate of
	// theirs may still be good: agents refuse them.
	Removed []string `json:"removed,omitempty"`
	// Trust is which authorities to trust now.
	Trust *TrustBundle `json:"trust,omitempty"`
}

// Keys are the secrets that all servers share. They travel between two servers
// of the record alone, each of which has proved its key.
type Keys struct {
	CAKey     []byte `json:"caKey"` // PEM; of all authorities, as in Trust
	GossipKey []byte `json:"gossipKey"`
	// Gossip are all keys of gossip while the key is being changed, GossipKey first,
	// and the number of the state that they are from. nil from servers that are older
	// than such changes.
	Gossip *GossipKeys `json:"gossip,omitempty"`
	// Trust is nil from servers that are older than CA rotations.
	Trust *TrustBundle `json:"trust,omitempty"`
	// OwnKeys are the keys of Trust.Own.
	OwnKeys map[pki.Purpose][]byte `json:"ownKeys,omitempty"`
	// SealKeys is a list of keys that secrets at rest may be sealed with.
	SealKeys []byte `json:"sealKeys,omitempty"`
	// OwnSeals is a list of those that administrators made, newest first; empty from
	// servers that did not send them yet.
	OwnSeals []byte `json:"ownSeals,omitempty"`
}

// Whole are the authorities in it, with their keys. public is what the asking member
// trusts, for servers that say nothing of it.
func (k *Keys) Whole(public *pki.Trust) (*pki.Trust, error) {
	number, bundle, own := public.Number, public.Bundle(), public.OwnBundles()
	if k.Trust != nil {
		number, bundle, own = k.Trust.Number, k.Trust.Authorities, k.Trust.Own
	}
	t, err := pki.ParseTrust(number, bundle, k.CAKey)
	if err != nil {
		return nil, err
	}
	return t.WithOwn(own, k.OwnKeys)
}

// GossipKeys is a ring of gossip's keys: see member/gossipkey.
type GossipKeys struct {
	Number uint64   `json:"number"`
	Keys   [][]byte `json:"keys"`
}

// Codes of a Refusal.
const (
	CodeToken   = "token"
	CodeName    = "name"
	CodeRequest = "request"
	CodeMember  = "member" // no record, or one of another role
	CodeNeeded  = "needed" // the cluster cannot do without the member
	CodeBusy    = "busy"   // no leader just now, or too many wrong requests: try again
)

// Refusal is a permanent rejection. Message is shown to the user of `clusterd join`.
type Refusal struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (r *Refusal) Error() string { return r.Message }

// ReleaseKeys are the keys that releases may be signed with, each on a line.
type ReleaseKeys struct {
	Keys []string `json:"keys"`
}
