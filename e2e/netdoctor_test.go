package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/paths"
)

// netDoctor: all ways are measured and work; one that leads in one direction
// alone is found from both its ends, reported by the nodes' conditions, and cleared
// when it is repaired.
func (e *env) netDoctor(t *testing.T, from, to string) {
	names := []string{}
	for _, n := range e.Nodes() {
		names = append(names, n.Name)
	}
	e.eventually("every way measured and well", func(context.Context) error {
		out, errs, code := e.run("clusterctl", "", "net", "doctor", "-o", "json")
		if code != 0 {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		var got struct {
			Nodes []paths.Report
		}
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			return err
		}
		if len(got.Nodes) != len(names) {
			return fmt.Errorf("%d nodes answered", len(got.Nodes))
		}
		for _, r := range got.Nodes {
			if len(r.Paths) != len(names)-1 {
				return fmt.Errorf("%s measures %d ways", r.Node, len(r.Paths))
			}
			for _, p := range r.Paths {
				if paths.Judge(p, paths.HeardWithin(len(names))) != paths.OK || !p.Streamed || p.MTU == 0 {
					return fmt.Errorf("%s: %+v", r.Node, p)
				}
			}
		}
		return nil
	})
	e.eventuallyHas([]string{"net", "doctor"}, "FROM \\ TO", "Nothing is wrong on", " ms")
	for _, name := range names {
		e.pathCondition(name, v1.ConditionFalse, fmt.Sprintf("the ways to %d other nodes work", len(names)-1))
	}

	node, err := e.api.CoreV1().Nodes().Get(t.Context(), from, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	gateway := netip.MustParsePrefix(node.Spec.PodCIDR).Addr().Next()
	hole := &netlink.Route{Dst: netlink.NewIPNet(gateway.AsSlice()), Type: unix.RTN_BLACKHOLE}
	if err := e.Do(to, func() error { return netlink.RouteAdd(hole) }); err != nil {
		t.Fatal(err)
	}
	e.eventually("the fault found from both ends", func(context.Context) error {
		out, errs, code := e.run("clusterctl", "", "net", "doctor")
		if code != 1 {
			return fmt.Errorf("exit %d:\n%s", code, out)
		}
		out += errs
		for _, words := range []string{
			fmt.Sprintf("\n%s → %s: ", from, to), "does not answer",
			fmt.Sprintf("\n%s → %s: ", to, from), "does not answer, but its packets come here",
			fmt.Sprintf("look at the way from %s to %s", to, from), "2 of the ways between nodes have faults",
		} {
			if !strings.Contains(out, words) {
				return fmt.Errorf("%q is not in:\n%s", words, out)
			}
		}
		return nil
	})
	e.pathCondition(from, v1.ConditionTrue, to+": ")
	e.pathCondition(to, v1.ConditionTrue, from+": "+gateway.String()+" does not answer, but its packets come here")
	if err := e.Do(to, func() error { return netlink.RouteDel(hole) }); err != nil {
		t.Fatal(err)
	}
	e.pathCondition(from, v1.ConditionFalse, "work")
	e.pathCondition(to, v1.ConditionFalse, "work")
}

// pathCondition waits for what a node says of its ways to others.
func (e *env) pathCondition(node string, status v1.ConditionStatus, words string) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s of %s %s: %s", paths.Condition, node, status, words), func(ctx context.Context) error {
		n, err := e.api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == paths.Condition && c.Status == status && strings.Contains(c.Message, words) {
				return nil
			}
		}
		return fmt.Errorf("%+v", n.Status.Conditions)
	})
}
