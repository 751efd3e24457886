package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/sched/nodelifecycle"
)

// Cluster is the cluster as a member's API shows it.
type Cluster struct {
	// Err: the API did not answer, or not all of it; what there is of the answer is judged.
	Err     error
	Members v1.MemberList
	Store   Store
	Nodes   []corev1.Node
	// Expires is the end of this node's certificate; zero: not known.
	Expires time.Time
	Now     time.Time
}

// Store is what is judged of v1.Store's answer.
type Store struct {
	Quota    int64 `json:"quotaBytes"`
	Reserve  int64 `json:"reserveBytes"` // part of Quota; 0 from servers that do not say
	Keyspace struct {
		Bytes int64 `json:"bytes"`
	} `json:"keyspace"`
	DiskShort bool     `json:"diskShort"`
	DiskFree  int64    `json:"diskFreeBytes"`
	Warnings  []string `json:"warnings"`
}

// mostLag is how many log entries a healthy member may be behind for a moment.
const mostLag = 10000

// JudgeCluster reports the problems of a cluster.
func JudgeCluster(c Cluster) []Finding {
	var f findings
	if c.Err != nil {
		f.problem("API", "see that clusterd runs: systemctl status clusterd, journalctl -u clusterd -n 50", "%v", c.Err)
	}
	if len(c.Members.Members) > 0 {
		c.members(&f)
	}
	if c.Store.Quota > 0 {
		c.store(&f)
	}
	c.nodes(&f)
	if left := c.Expires.Sub(c.Now); !c.Expires.IsZero() {
		switch {
		case left <= 0:
			f.problem("cert", "set the clock if it is wrong; else start clusterd, which renews its certificate, or join again", "this node's certificate ended %s", c.Expires.UTC().Format(time.RFC3339))
		case left < 5*time.Hour: // it lives a day, and is renewed after 17½ hours of it at the latest
			f.warn("cert", "see why clusterd does not renew it: journalctl -u clusterd | grep certificate", "this node's certificate ends in %s", left.Round(time.Minute))
		default:
			f.ok("cert", "this node's certificate is good for %s", left.Round(time.Hour))
		}
	}
	return f
}

func (c Cluster) members(f *findings) {
	var voters, alive int
	var away, behind []string
	for _, m := range c.Members.Members {
		here := m.Gossip == "alive" || m.Gossip == "answers"
		if m.Role == v1.RoleVoter {
			voters++
			if here {
				alive++
			}
		}
		if !here {
			away = append(away, fmt.Sprintf("%s (%s)", m.Name, m.Gossip))
		}
		if m.Lag != nil && *m.Lag > mostLag {
			behind = append(behind, fmt.Sprintf("%s by %d entries", m.Name, *m.Lag))
		}
	}
	slices.Sort(away)
	need := voters/2 + 1
	switch {
	case alive < need:
		f.problem("quorum", "start clusterd on the others; if they are permanently lost: clusterctl recover", "%d of %d voters are alive and %d are needed: nothing can be changed", alive, voters, need)
	case c.Members.Leader == "":
		f.problem("quorum", "wait some seconds; if it stays so, look at the logs of clusterd on the voters", "%d of %d voters are alive, but there is no leader", alive, voters)
	case alive == need && voters > 1:
		f.warn("quorum", "bring the others back, or add a server", "%d of %d voters are alive: one more lost stops the cluster", alive, voters)
	case voters == 1 && len(c.Members.Members) > 1:
		f.warn("quorum", "join servers until three vote, or ask for three: clusterctl members voters 3", "one voter holds the cluster's state: if it is lost, so is the cluster")
	default:
		f.ok("quorum", "%d of %d voters are alive, led by %s", alive, voters, c.Members.Leader)
	}
	if len(away) > 0 {
		f.warn("members", "start clusterd there, or remove them: clusterctl members rm NAME", "not here: %s", strings.Join(away, ", "))
	}
	if len(behind) > 0 {
		f.warn("members", "look at their disks and network: clusterd doctor there", "behind: %s", strings.Join(behind, ", "))
	}
	for _, w := range c.Members.Warnings {
		f.warn("members", "do what it says", "%s", w)
	}
}

func (c Cluster) store(f *findings) {
	s := c.Store
	used := 100 * float64(s.Keyspace.Bytes) / float64(s.Quota-s.Reserve) // new objects end where the reserve begins
	switch {
	case used >= 100:
		f.problem("store", "clusterctl store top names who fills it; delete objects, or raise storeQuota on every server", "%.0f %% of what its quota leaves for new objects are used: they are refused", used)
	case used >= 95:
		f.problem("store", "clusterctl store top names who fills it; delete objects, or raise storeQuota on every server", "%.0f %% of its quota are used: new objects will soon be refused", used)
	case used >= 80:
		f.warn("store", "clusterctl store top names who fills it", "%.0f %% of its quota are used", used)
	default:
		f.ok("store", "%.1f %% of its quota are used", used)
	}
	if s.DiskShort {
		f.problem("store", "free room on the disk of the data folder", "only %d MiB are free on its disk: this server takes little more than deletes", s.DiskFree>>20)
	}
	for _, w := range s.Warnings {
		if !slices.Contains(c.Members.Warnings, w) {
			f.problem("store", "do what it says", "%s", w)
		}
	}
}

func (c Cluster) nodes(f *findings) {
	ready := 0
	for _, n := range c.Nodes {
		is := map[corev1.NodeConditionType]corev1.NodeCondition{}
		for _, cond := range n.Status.Conditions {
			is[cond.Type] = cond
		}
		if is[corev1.NodeReady].Status == corev1.ConditionTrue {
			ready++
		} else {
			f.problem("nodes", "on that machine: clusterd doctor", "%s is not Ready: %s", n.Name, orUnsaid(is[corev1.NodeReady].Message))
		}
		for _, pressure := range []corev1.NodeConditionType{corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure} {
			if is[pressure].Status == corev1.ConditionTrue {
				f.warn("nodes", "free some, or move pods away: clusterctl top pods -A, clusterctl drain "+n.Name, "%s has %s: %s", n.Name, pressure, orUnsaid(is[pressure].Message))
			}
		}
	}
	nodes := make([]*corev1.Node, len(c.Nodes))
	for i := range c.Nodes {
		nodes[i] = &c.Nodes[i]
	}
	for _, zone := range nodelifecycle.Suspended(nodes) {
		f.problem("nodes", "bring them back; delete Nodes of machines that will not come back: clusterctl delete node NAME", "%s, more than half: their pods are not evicted and not replaced", zone)
	}
	if ready > 0 {
		f.ok("nodes", "%d of %d are Ready", ready, len(c.Nodes))
	}
}

func orUnsaid(message string) string {
	if message == "" {
		return "it does not say why"
	}
	return message
}
