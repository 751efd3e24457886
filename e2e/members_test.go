package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
)

// member is one line of `clusterctl members -o json`.
type member struct {
	Name, Role, Gossip string
	Leader             bool
}

// members asks the cluster who its members are.
func (e *env) members() (list struct {
	Members []member
	Leader  string
}, err error) {
	out, errs, code := e.run("clusterctl", "", "members", "-o", "json")
	if code != 0 {
		return list, fmt.Errorf("exit %d: %s", code, errs)
	}
	return list, json.Unmarshal([]byte(out), &list)
}

// votersAre waits until exactly these have a vote.
func (e *env) votersAre(want ...string) {
	e.t.Helper()
	slices.Sort(want)
	e.eventually(fmt.Sprintf("the voters are %v", want), func(context.Context) error {
		got := e.voters()
		if !slices.Equal(got, want) {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

func (e *env) voters() (names []string) {
	list, err := e.members()
	if err != nil {
		return []string{err.Error()}
	}
	for _, m := range list.Members {
		if m.Role == "voter" {
			names = append(names, m.Name)
		}
	}
	slices.Sort(names)
	return names
}

// TestE2EVoters loses a voter of a cluster that has a member to spare: that
// one votes in its place, and the lost one comes back without a vote. What
// would then leave no majority is refused.
//
// The pods' ranges of new nodes are reachable, that of the node that left is not.
func TestE2EVoters(t *testing.T) {
	features.Shows(t, 290)
	e := startBare(t, 4)
	var before []string
	e.eventually("three of four vote", func(context.Context) error {
		before = e.voters()
		list, err := e.members()
		if err != nil || len(before) != 3 || len(list.Members) != 4 || list.Leader == "" {
			return fmt.Errorf("voters %v, members %+v, %v", before, list, err)
		}
		return nil
	})
	spare := e.other(before...)
	leader := e.leader()
	lost := e.other(leader, spare)
	if err := e.Kill(lost); err != nil {
		t.Fatal(err)
	}
	after := slices.DeleteFunc(append(before, spare), func(n string) bool { return n == lost })
	e.votersAre(after...)

	// With a second voter lost, the third and last living one cannot go.
	second := e.other(leader, lost, spare)
	if err := e.Kill(second); err != nil {
		t.Fatal(err)
	}
	said := e.refusedBy(spare, "removing "+spare+" would stop the cluster", second+" does not answer", "clusterctl members rm "+second)
	if strings.Count(strings.TrimSpace(said), "\n") > 0 {
		t.Errorf("not one line:\n%s", said)
	}
	e.votersAre(after...)

	for _, n := range []string{lost, second} {
		if err := e.Start(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	var voters []string
	e.eventually("all four are alive, and three vote", func(context.Context) error {
		list, err := e.members()
		if err != nil {
			return err
		}
		alive := 0
		for _, m := range list.Members {
			if m.Gossip == "alive" {
				alive++
			}
		}
		if voters = e.voters(); alive != 4 || len(voters) != 3 {
			return fmt.Errorf("%d alive, voters %v", alive, voters)
		}
		return nil
	})
	// A member that is asked to remove itself answers, and its Node goes too.
	self := e.other(voters...)
	e.use(voters[0])
	leaves := e.podRange(self)
	e.routed(voters[0], leaves, true)
	e.eventually(leaves.String()+" is reachable from "+voters[0], func(context.Context) error { return e.arrives(voters[0], leaves) })
	i := slices.IndexFunc(e.Nodes(), func(n cluster.Node) bool { return n.Name == self })
	e.ctl("members", "rm", "--yes", self, "--kubeconfig="+e.Nodes()[i].Kubeconfig())
	e.eventually("who removed itself has ended, and its Node is gone", func(ctx context.Context) error {
		if pid, err := e.Pid(self); err == nil {
			return fmt.Errorf("it runs, process %d", pid)
		}
		_, err := e.api.CoreV1().Nodes().Get(ctx, self, metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %v", err)
		}
		return nil
	})
	e.routed(voters[0], leaves, false)
	e.routed(voters[0], e.podRange(voters[1]), true)
	e.gossipKeyChanged(t, e.gossipRing(self).Keys[0], voters...)
	e.refusedOnlyVoter()
}

// refusedBy has the removal of a member refused in these words: what a cluster that elects
// a leader says, or has not noticed yet, is asked again.
func (e *env) refusedBy(member string, words ...string) (said string) {
	e.t.Helper()
	e.eventually("the removal of "+member+" is refused", func(context.Context) error {
		said = e.refused("", "members", "rm", "--yes", member)
		for _, w := range words {
			if !strings.Contains(said, w) {
				return fmt.Errorf("%q is not in: %s", w, said)
			}
		}
		return nil
	})
	return said
}

// podRange waits for the range of a node's pods.
func (e *env) podRange(node string) (cidr netip.Prefix) {
	e.t.Helper()
	e.eventually(node+" has a range for its pods", func(ctx context.Context) error {
		n, err := e.api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err == nil {
			cidr, err = netip.ParsePrefix(n.Spec.PodCIDR)
		}
		return err
	})
	return cidr
}

// routed waits until a node has a route to a range, or has none.
func (e *env) routed(node string, to netip.Prefix, want bool) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s has a route to %s: %t", node, to, want), func(context.Context) error {
		var routes []netlink.Route
		err := e.Do(node, func() (err error) {
			routes, err = netlink.RouteList(nil, netlink.FAMILY_V4)
			return err
		})
		if err != nil {
			return err
		}
		if slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst != nil && r.Dst.String() == to.String() }) != want {
			return fmt.Errorf("its routes are %v", routes)
		}
		return nil
	})
}

// arrives sends something to the first address of a node's range, which is its
// bridge's: it accepts a connection or refuses it.
func (e *env) arrives(node string, to netip.Prefix) error {
	return e.Do(node, func() error {
		conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(to.Addr().Next(), 10250).String(), 2*time.Second)
		if err == nil {
			return conn.Close()
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			return nil
		}
		return err
	})
}

// refusedOnlyVoter makes the leader the only voter and tries to remove it.
func (e *env) refusedOnlyVoter() {
	e.t.Helper()
	e.ctl("members", "voters", "1")
	leader := ""
	e.eventually("one votes", func(context.Context) error {
		v := e.voters()
		if len(v) != 1 {
			return fmt.Errorf("%v", v)
		}
		leader = v[0]
		return nil
	})
	e.refusedBy(leader, "alone holds the cluster's state")
}
