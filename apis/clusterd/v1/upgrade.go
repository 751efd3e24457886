package v1

import "time"

// ReleaseSignature is the header that bears the signature of a release, in base64.
const ReleaseSignature = "Clusterd-Release-Signature"

// ReleaseKeyList is the answer of GET Upgrade/keys.
type ReleaseKeyList struct {
	Keys []ReleaseKey `json:"keys"`
}

// ReleaseKey is a key that releases may be signed with.
type ReleaseKey struct {
	ID    string    `json:"id,omitempty"`
	Key   string    `json:"key"` // one line, as minisign writes it
	Since time.Time `json:"since,omitzero"`
}

// NodeRelease is which program a node runs.
type NodeRelease struct {
	Name    string    `json:"name"`
	Version string    `json:"version"`
	Arch    string    `json:"arch"`
	Started time.Time `json:"started"`
	// AgentRuns: its pods are looked after. StoreReady: it reads the store as of now;
	// an agent, which has none, is always.
	AgentRuns  bool `json:"agentRuns"`
	StoreReady bool `json:"storeReady"`
	// Keys are the ids of the keys that the node trusts, and KeysFrom says whose word
	// that is: cluster, or node for its own configuration.
	Keys     []string `json:"keys"`
	KeysFrom string   `json:"keysFrom"`
	// Obstacle says why this node cannot be upgraded by itself; "": it can.
	Obstacle string          `json:"obstacle,omitempty"`
	Staged   *StagedRelease  `json:"staged,omitempty"`
	Trial    *ReleaseTrial   `json:"trial,omitempty"`
	Failure  *ReleaseFailure `json:"failure,omitempty"`
}

// Values of NodeRelease.KeysFrom.
const (
	KeysFromCluster = "cluster"
	KeysFromNode    = "node"
)

// StagedRelease is a release that a node has checked and can switch to.
type StagedRelease struct {
	Version string `json:"version"`
	Digest  string `json:"digest"` // SHA-256 of the file
	Key     string `json:"key"`
}

// ReleaseTrial is a program that is not confirmed yet.
type ReleaseTrial struct {
	Version  string    `json:"version"`
	From     string    `json:"from"`
	Deadline time.Time `json:"deadline"`
}

// ReleaseFailure is the last switch that was taken back.
type ReleaseFailure struct {
	Version string    `json:"version"`
	Why     string    `json:"why"`
	At      time.Time `json:"at"`
}

// SwitchRequest makes a node run a release that it has staged.
type SwitchRequest struct {
	Digest string `json:"digest"`
	// Limit is after what time the node goes back by itself unless it was confirmed,
	// such as 5m. StartLimit is the same for its parts to work; the default is 25s.
	Limit      string `json:"limit"`
	StartLimit string `json:"startLimit,omitempty"`
}

// TrialRequest ends the trial of a version: it stays, or it goes for a reason.
type TrialRequest struct {
	Version string `json:"version"`
	Why     string `json:"why,omitempty"`
}

// States of a Rollout and of its nodes.
const (
	RolloutRunning  = "running"
	RolloutStopped  = "stopped" // a node failed, and the rest was left alone
	RolloutDone     = "done"
	RolloutWaiting  = "waiting"
	RolloutTrial    = "on trial"
	RolloutTookBack = "taken back"
	RolloutFailed   = "failed" // and could not be taken back, or not be heard
)

// RolloutSilence is after what time a command that says nothing is taken for dead.
const RolloutSilence = 40 * time.Second

// Rollout is a release on its way over the cluster.
type Rollout struct {
	ID      string    `json:"id"` // of the command that runs it
	Version string    `json:"version"`
	State   string    `json:"state"`
	Why     string    `json:"why,omitempty"` // it stopped
	Began   time.Time `json:"began"`
	Updated time.Time `json:"updated"`
	// Heard is when its command was heard last, in store time. HeardAgo is how long ago
	// that is, in answers alone.
	Heard    time.Time     `json:"heard,omitzero"`
	HeardAgo string        `json:"heardAgo,omitempty"`
	Nodes    []RolloutNode `json:"nodes"`
}

// GoesOn reports whether its command lives, of which nothing was heard for that long.
func (r Rollout) GoesOn(silence time.Duration) bool {
	return r.State == RolloutRunning && silence < RolloutSilence
}

// Silence is for how long nothing was heard of its command, as the server said that
// answered; an older one leaves that to the clocks.
func (r Rollout) Silence(now time.Time) time.Duration {
	if ago, err := time.ParseDuration(r.HeardAgo); err == nil {
		return ago
	}
	return now.Sub(r.Updated)
}

// RolloutNode is one node of a Rollout, in its order.
type RolloutNode struct {
	Name  string `json:"name"`
	Role  string `json:"role"`
	From  string `json:"from"` // the version before
	State string `json:"state"`
	Why   string `json:"why,omitempty"`
}
