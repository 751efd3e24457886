package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A Fault befalls one node and is over when it is healed.
type Fault struct {
	Name string
	// Role of the victim: "leader", "follower", or "" for any node.
	Role string
	// Available says whether it can befall that node now; nil: always.
	Available func(r *run, node string) bool
	Inject    func(ctx context.Context, r *run, node string) error
	// Heal mends it; nil: there is nothing to mend. It must do so from
	// whatever state Inject left, also when Inject failed half way.
	Heal func(ctx context.Context, r *run, node string) error
	// Holds bounds how long the fault lasts.
	Holds [2]time.Duration
}

// faults is all that can befall one of the nodes. The others go on meanwhile:
// never is more than a minority of the voters away.
var faults = []Fault{
	{Name: "kill -9 of the leader", Role: "leader", Inject: kill, Heal: start, Holds: short},
	{Name: "kill -9 of a follower", Role: "follower", Inject: kill, Heal: start, Holds: short},
	{Name: "restart in order", Inject: stop, Heal: start, Holds: instant},
	{Name: "leader frozen", Role: "leader", Inject: pause, Heal: resume, Holds: long},
	{Name: "follower frozen", Role: "follower", Inject: pause, Heal: resume, Holds: long},
	{Name: "leader cut off", Role: "leader", Inject: cut, Heal: mend, Holds: long},
	{Name: "follower cut off", Role: "follower", Inject: cut, Heal: mend, Holds: long},
	{Name: "cut off and killed", Inject: both(cut, kill), Heal: both(mend, start), Holds: long},
	{Name: "cut off and killed, started before it is mended", Inject: both(cut, kill, start), Heal: mend, Holds: long},
	{Name: "power off", Inject: powerOff, Heal: start, Holds: long},
	{Name: "kill -9 of podmon", Available: has("podmon"), Inject: killAll("podmon"), Holds: instant},
	{Name: "kill -9 of podmon's keeper", Available: has("podmon-keeper"), Inject: killAll("podmon-keeper"), Holds: instant},
	{Name: "kill -9 of podmon, its keeper and clusterd", Available: has("podmon"), Inject: both(killAll("podmon-keeper"), killAll("podmon"), kill), Heal: start, Holds: short},
	{Name: "kill -9 of podmon and clusterd", Available: has("podmon"), Inject: both(killAll("podmon"), kill), Heal: start, Holds: short},
	{Name: "kill -9 of a container", Available: has("hello"), Inject: killOne("hello"), Holds: instant},
	{Name: "kill -9 of a pause", Available: has("pause"), Inject: killOne("pause"), Holds: instant},
	{Name: "clusterd killed, then a container", Available: has("hello"), Inject: both(kill, killOne("hello")), Heal: start, Holds: short},
}

var (
	instant = [2]time.Duration{0, time.Second}
	short   = [2]time.Duration{0, 4 * time.Second}
	long    = [2]time.Duration{3 * time.Second, 10 * time.Second}
)

func kill(_ context.Context, r *run, node string) error     { return r.c.Kill(node) }
func stop(ctx context.Context, r *run, node string) error   { return r.c.Stop(ctx, node) }
func start(ctx context.Context, r *run, node string) error  { return r.c.Start(ctx, node) }
func pause(_ context.Context, r *run, node string) error    { return r.c.Pause(node) }
func resume(_ context.Context, r *run, node string) error   { return r.c.Resume(node) }
func cut(_ context.Context, r *run, node string) error      { return r.c.Partition(node) }
func mend(_ context.Context, r *run, node string) error     { return r.c.Heal(node) }
func powerOff(_ context.Context, r *run, node string) error { return r.c.PowerOff(node) }
func has(comm string) func(r *run, node string) bool {
	return func(r *run, node string) bool {
		pids, err := r.pids(node, comm)
		return err == nil && len(pids) > 0
	}
}

// both does several things one after the other.
func both(steps ...func(context.Context, *run, string) error) func(context.Context, *run, string) error {
	return func(ctx context.Context, r *run, node string) error {
		for _, step := range steps {
			if err := step(ctx, r, node); err != nil {
				return err
			}
		}
		return nil
	}
}

// killAll kills all of the node's processes of that name.
func killAll(comm string) func(context.Context, *run, string) error {
	return func(_ context.Context, r *run, node string) error {
		pids, err := r.pids(node, comm)
		for _, pid := range pids {
			err = errors.Join(err, sigkill(pid))
		}
		return err
	}
}

// killOne kills one of the node's processes of that name.
func killOne(comm string) func(context.Context, *run, string) error {
	return func(_ context.Context, r *run, node string) error {
		pids, err := r.pids(node, comm)
		if err != nil || len(pids) == 0 {
			return err
		}
		return sigkill(pids[r.rand.IntN(len(pids))])
	}
}

func sigkill(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
		return fmt.Errorf("kill %d: %w", pid, err)
	}
	return nil
}

// pids lists the node's processes of that name.
func (r *run) pids(node, comm string) ([]int, error) {
	all, err := r.c.Processes(node)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, pid := range all {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err == nil && strings.TrimSpace(string(b)) == comm {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// between draws a duration.
func between(rnd *rand.Rand, bounds [2]time.Duration) time.Duration {
	return bounds[0] + time.Duration(rnd.Int64N(int64(bounds[1]-bounds[0])))
}
