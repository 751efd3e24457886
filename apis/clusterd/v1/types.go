// Package v1 holds the messages of /clusterd/v1/…, which clusterd serves and
// clusterctl asks beside Kubernetes' own API. Fields are only ever added. It
// holds values and nothing else.
package v1

import "time"

// Paths.
const (
	Members = "/clusterd/v1/members" // GET; DELETE …/NAME; PUT …/NAME/role RoleRequest
	Voters  = "/clusterd/v1/voters"  // PUT VotersRequest
	Tokens  = "/clusterd/v1/tokens"  // GET, POST TokenRequest; DELETE …/ID
	// Asking are machines that wait to be approved: GET AskingList; POST Approval, which
	// answers with the AskingMachine; DELETE …/ID denies one.
	Asking   = "/clusterd/v1/asking"
	Store    = "/clusterd/v1/store" // GET
	Snapshot = "/clusterd/v1/snapshot"
	Recovery = "/clusterd/v1/recovery" // GET Survey, POST RecoveryRequest
	// Authority is the cluster's certificate authority: GET AuthorityStatus, POST
	// AuthorityRequest begins its rotation; POST …/finish ends the grace; POST …/split
	// AuthorityRequest gives each purpose an authority of its own.
	Authority = "/clusterd/v1/authority"
	// GossipKey is the key that servers encrypt gossip with: GET GossipKeyStatus, POST
	// asks for another.
	GossipKey = "/clusterd/v1/gossip-key"
	// TokenKeys are the keys that sign service accounts' tokens: GET TokenKeyList, POST
	// makes another.
	TokenKeys = "/clusterd/v1/token-keys"
	// Revocations are client certificates that were taken away: GET RevocationList,
	// POST RevocationRequest.
	Revocations = "/clusterd/v1/revocations"
	// Upgrade is the last roll-out of a release: GET Rollout, PUT Rollout. Below it are
	// …/keys: GET ReleaseKeyList, POST ReleaseKey, DELETE …/keys/ID; POST …/handover,
	// after which another server leads; and …/nodes/NAME with what NodeRelease has.
	Upgrade = "/clusterd/v1/upgrade"
	// NodeReleasePath is a node's program: GET NodeRelease; PUT …/file takes a release's
	// file, its signature in the header ReleaseSignature; POST …/switch SwitchRequest,
	// …/confirm and …/back TrialRequest. Servers ask nodes for it, and pass on below
	// Upgrade what users ask.
	NodeReleasePath = "/clusterd/v1/release"
)

// Roles of a Member.
const (
	RoleVoter    = "voter"    // a server that votes
	RoleNonvoter = "nonvoter" // a server that follows
	RoleJoining  = "joining"  // admitted, and not here yet
	RoleAgent    = "agent"    // runs pods and holds no state
)

// MemberList is the answer of GET Members.
type MemberList struct {
	Members []Member `json:"members"`
	Term    uint64   `json:"term"`
	Leader  string   `json:"leader"` // its name; "": there is none
	// WantedVoters is the number that was asked for; 0: the cluster chooses.
	WantedVoters int      `json:"wantedVoters,omitempty"`
	Warnings     []string `json:"warnings,omitempty"`
}

// Member is one machine of the cluster.
type Member struct {
	Name    string `json:"name"`
	ID      string `json:"id"` // of its key
	Address string `json:"address"`
	Role    string `json:"role"`
	Leader  bool   `json:"leader"`
	// Gossip is alive, dead, left or unseen; of an agent, which does not gossip,
	// whether it answered the server that was asked: answers, silent, or changing
	// while it was demoted and still runs as a server.
	Gossip  string `json:"gossip"`
	Version string `json:"version,omitempty"`
	// Applied is the last log index a server has applied, and Lag how far that is
	// behind the furthest one; nil: it did not answer in time.
	Applied *uint64 `json:"applied,omitempty"`
	Lag     *uint64 `json:"lag,omitempty"`
}

// RoleRequest makes a member a server or an agent.
type RoleRequest struct {
	Role string `json:"role"` // server or agent
}

// VotersRequest asks for a number of voters; 0: the cluster chooses.
type VotersRequest struct {
	Voters int `json:"voters"`
}

// Roles that a token gives.
const (
	TokenServer = "server"
	TokenAgent  = "agent"
)

// TokenRequest asks for a join token.
type TokenRequest struct {
	TTL string `json:"ttl,omitempty"` // such as 24h, the default
	// Role is what machines become by it: server, the default, or agent.
	Role string `json:"role,omitempty"`
	// Uses is how many machines it admits; nil: one; 0: any number.
	Uses *int `json:"uses,omitempty"`
	// Name is that of the one machine that may join by it; "": any.
	Name string `json:"name,omitempty"`
	// From are addresses, or ranges of them, that machines may join from; none: any.
	From []string `json:"from,omitempty"`
}

// NewToken is the answer to a TokenRequest: the one time a secret is shown.
type NewToken struct {
	Token       string    `json:"token"`
	ID          string    `json:"id,omitempty"`
	Role        string    `json:"role,omitempty"`
	Uses        int       `json:"uses,omitempty"` // 0: any number
	Expires     time.Time `json:"expires,omitzero"`
	JoinCommand string    `json:"joinCommand"`
}

// TokenList is the answer of GET Tokens. It holds no secrets.
type TokenList struct {
	Tokens []Token `json:"tokens"`
}

// Token is what is known of a join token.
type Token struct {
	ID      string    `json:"id"`
	Role    string    `json:"role"`
	Uses    int       `json:"uses"` // 0: any number
	Used    int       `json:"used"`
	Name    string    `json:"name,omitempty"` // of the one machine that it is for
	From    []string  `json:"from,omitempty"` // ranges that machines may join from
	Created time.Time `json:"created,omitzero"`
	Expires time.Time `json:"expires,omitzero"`
}

// AskingList is the answer of GET Asking.
type AskingList struct {
	Machines []AskingMachine `json:"machines"`
}

// AskingMachine is a machine without a token that waits to be approved. Its code is
// not part of it: the administrator who approves it reads it from the machine.
type AskingMachine struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Addr    string    `json:"addr"` // where it will listen
	Peer    string    `json:"peer"` // where its question came from
	Version string    `json:"version"`
	Since   time.Time `json:"since"`
}

// Approval lets the machine with a code join.
type Approval struct {
	Code string `json:"code"`
	Role string `json:"role"` // server or agent
}

// Epoch is one life of the store.
type Epoch struct {
	Number uint64 `json:"number"`
	ID     string `json:"id"`
}

// RecoveryRequest is what a person has decided, looking at a survey.
type RecoveryRequest struct {
	From string   `json:"from"` // the member whose state goes on
	Keep []string `json:"keep"` // the members that answered; all others are left out
}

// AuthorityRequest begins a CA rotation.
type AuthorityRequest struct {
	// Grace is how long the old one is trusted at least once all members show
	// certificates of the new one, such as 24h, the default.
	Grace string `json:"grace,omitempty"`
	// Finish: no longer than the members need.
	Finish bool `json:"finish,omitempty"`
	// Purpose is which authority; empty: those of all purposes that have their own.
	Purpose string `json:"purpose,omitempty"`
	// Of, of a request to finish, are the purposes of the rotation that is meant, in any
	// order: refused with 409 if another one is under way. Empty: whatever is.
	Of []string `json:"of,omitempty"`
}

// AuthorityPurposes are what there may be authorities of: AuthorityInfo.Purposes.
var AuthorityPurposes = []string{"peer", "client", "front", "node", "secrets"}

// Phases of an AuthorityStatus.
const (
	AuthorityStable     = "stable"     // there is one
	AuthorityDistribute = "distribute" // the new one is made known
	AuthorityReissue    = "reissue"    // the new one signs, the old one is still trusted
)

// AuthorityStatus is how far the CA rotation is.
type AuthorityStatus struct {
	Phase  string    `json:"phase"`
	Number uint64    `json:"number"` // grows with each step; 0: it was never rotated
	Since  time.Time `json:"since,omitzero"`
	// Of are the purposes whose authorities are rotated.
	Of []string `json:"of,omitempty"`
	// Ends is when the old authority is given up at the earliest, in reissue.
	Ends        time.Time         `json:"ends,omitzero"`
	Authorities []AuthorityInfo   `json:"authorities"`
	Members     []AuthorityMember `json:"members"`
}

// AuthorityInfo is a certificate authority that is trusted.
type AuthorityInfo struct {
	ID string `json:"id"` // of its key; join tokens begin with the servers', after "cd1."
	// Purposes are what it is for; empty: this clusterd does not know of purposes.
	Purposes []string  `json:"purposes,omitempty"`
	Signs    bool      `json:"signs"`
	Expires  time.Time `json:"expires"`
}

// AuthorityMember is what a member has done of the rotation.
type AuthorityMember struct {
	Name string `json:"name"`
	Role string `json:"role"` // server or agent
	// Ready: it has done all that the phase asks. Waited: the next one waits for it.
	Ready  bool `json:"ready"`
	Waited bool `json:"waited"`
}

// GossipKeyStatus is how far a rotation of the gossip key is.
type GossipKeyStatus struct {
	Phase      string `json:"phase"`      // stable, distribute, use
	Number     uint64 `json:"number"`     // grows with each step
	Generation uint64 `json:"generation"` // grows with each key; 0: the first one
	// Wanted: another key was asked for, and the change has not begun yet.
	Wanted  bool              `json:"wanted,omitempty"`
	Used    time.Time         `json:"used,omitzero"` // since when the key of now is; none for the first one
	Since   time.Time         `json:"since,omitzero"`
	Servers []GossipKeyServer `json:"servers"`
}

// GossipKeyServer is a server, and whether it has done what the phase asks.
type GossipKeyServer struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
}

// TokenKeyList is the answer of GET TokenKeys: the keys with which servers recognise
// service accounts' tokens, oldest first.
type TokenKeyList struct {
	Keys []TokenKey `json:"keys"`
}

// TokenKey is one of them. Its private part is never shown.
type TokenKey struct {
	ID      string    `json:"id"` // the kid of tokens and of /openid/v1/jwks
	Created time.Time `json:"created"`
	Signs   bool      `json:"signs"`          // new tokens are signed with it
	From    time.Time `json:"from"`           // since when, or from when on
	Until   time.Time `json:"until,omitzero"` // how long it verifies; none: no newer key signs
}

// RevocationRequest takes client certificates away: all of a user that were signed
// until now, or the one with the serial number, in hexadecimal.
type RevocationRequest struct {
	User   string `json:"user,omitempty"`
	Serial string `json:"serial,omitempty"`
}

// RevocationList is the answer of GET Revocations.
type RevocationList struct {
	Revocations []Revocation `json:"revocations"`
}

// Revocation is what is revoked. It is kept until the last such certificate has
// ended by itself.
type Revocation struct {
	User    string    `json:"user,omitempty"`
	Serial  string    `json:"serial,omitempty"`
	Revoked time.Time `json:"revoked"`
	Ends    time.Time `json:"ends"`
}
