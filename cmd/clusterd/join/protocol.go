package join

import (
	"net/netip"

	"github.com/clusterd/clusterd/raftstore"
)

// Path is where a joiner posts its Request, over the join protocol of the
// node's port.
const Path = "/v1/join"

// Request is a machine's wish to become a member.
type Request struct {
	TokenID     string         `json:"tokenID"`
	TokenSecret string         `json:"tokenSecret"`
	Name        string         `json:"name"`
	Addr        netip.AddrPort `json:"addr"` // where it will listen
	CSR         []byte         `json:"csr"`  // PKCS #10, DER; proves the key
	Version     string         `json:"version"`
}

// Response makes the machine a member. It holds the cluster's secrets: it
// travels only to a peer that showed a good token, over a connection whose
// server the token pins.
type Response struct {
	Cluster   Cluster          `json:"cluster"`
	CACert    []byte           `json:"caCert"` // PEM
	CAKey     []byte           `json:"caKey"`  // PEM; every member is a server today
	NodeCert  []byte           `json:"nodeCert"`
	GossipKey []byte           `json:"gossipKey"`
	Epoch     raftstore.Epoch  `json:"epoch"` // the life of the store to take part in
	Peers     []netip.AddrPort `json:"peers"`
}

// Codes of a Refusal.
const (
	CodeToken   = "token"
	CodeName    = "name"
	CodeRequest = "request"
	CodeBusy    = "busy" // no leader just now: try again
)

// Refusal is the cluster's no, in words for the person who typed `clusterd
// join`.
type Refusal struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (r *Refusal) Error() string { return r.Message }
