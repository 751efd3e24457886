package fault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

const (
	// starvedQuota is what a starved server gets of each starvedPeriod on a CPU: 3 %, less
	// than an idle server of a small cluster uses.
	starvedQuota  = 3 * time.Millisecond
	starvedPeriod = 100 * time.Millisecond
	// starvedWindow is how long the leader is to be kept, in one of starvedTries.
	starvedWindow = 30 * time.Second
	starvedTries  = 3
	// starvedElection is how long the election of another leader may take.
	starvedElection = 90 * time.Second
)

// TestFaultStarved: servers that get 3 % of a CPU each keep their leader; when it is
// killed, the two that are left elect another one.
func TestFaultStarved(t *testing.T) {
	groups := newQuotas(t)
	r := newRun(t, nil)
	ctx := t.Context()
	r.eventually(ctx, "every node is Ready", r.nodesReady)
	leader := r.leader(ctx)
	var kept bool
	for try := 0; try < starvedTries && !kept; try++ {
		before := r.term(ctx)
		for _, n := range r.c.Nodes() {
			pid, err := r.c.Pid(n.Name)
			if err != nil {
				t.Fatal(err)
			}
			groups.limit(n.Name, pid, starvedQuota, starvedPeriod)
		}
		select {
		case <-time.After(starvedWindow):
		case <-ctx.Done():
		}
		groups.free()
		elections := r.term(ctx) - before
		kept = elections == 0
		t.Logf("%d elections in %s at %s of %s of a CPU", elections, starvedWindow, starvedQuota, starvedPeriod)
	}
	if !kept {
		t.Fatalf("the leader was deposed in each of %d times %s", starvedTries, starvedWindow)
	}

	leader = r.leader(ctx)
	victim := r.c.Nodes()[leader].Name
	for _, n := range r.c.Nodes() {
		pid, err := r.c.Pid(n.Name)
		if err != nil {
			t.Fatal(err)
		}
		groups.limit(n.Name, pid, starvedQuota, starvedPeriod)
	}
	if err := r.c.Kill(victim); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	waiting, cancel := context.WithTimeout(ctx, starvedElection)
	defer cancel()
	err := clustertest.Poll(waiting, func(ctx context.Context) error {
		for i := range r.apis {
			if i == leader {
				continue
			}
			ask, stop := context.WithTimeout(ctx, 20*time.Second)
			s, err := r.status(ask, i)
			stop()
			if err == nil && s.Ready {
				return nil
			}
		}
		return errors.New("neither of the others leads")
	})
	t.Logf("another leader answered %s after n%d was killed", time.Since(began).Round(time.Millisecond), leader+1)
	groups.free()
	if err != nil {
		t.Errorf("within %s of the leader's end: %v", starvedElection, err)
	}
	if err := r.c.Start(ctx, victim); err != nil {
		t.Fatal(err)
	}
	r.eventually(ctx, "every node is Ready", r.nodesReady)
	r.eventually(ctx, "all have the same", r.sameHash)
}

// term is the latest that any server knows.
func (r *run) term(ctx context.Context) (term uint64) {
	for i := range r.apis {
		r.eventually(ctx, fmt.Sprintf("n%d answers", i+1), func(ctx context.Context) error {
			s, err := r.status(ctx, i)
			if err == nil {
				term = max(term, s.Term)
			}
			return err
		})
	}
	return term
}

// quotas are cgroups of processes that get little of the CPUs.
type quotas struct {
	t    *testing.T
	base string // of all of them
	v1   bool
	dirs map[string]string
}

// newQuotas removes its cgroups at the end of the test, after what is cleaned up later.
func newQuotas(t *testing.T) *quotas {
	q := &quotas{t: t, base: "/sys/fs/cgroup", dirs: map[string]string{}}
	if v1 := q.base + "/cpu"; unix.Access(v1+"/cgroup.procs", unix.W_OK) == nil {
		q.base, q.v1 = v1, true
	}
	t.Cleanup(func() {
		for _, dir := range q.dirs {
			if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Error(err)
			}
		}
	})
	return q
}

// limit lets the process have no more than quota of each period.
func (q *quotas) limit(name string, pid int, quota, period time.Duration) {
	q.t.Helper()
	dir := filepath.Join(q.base, "clusterd-starved-"+name)
	q.dirs[name] = dir
	micros := func(d time.Duration) string { return strconv.FormatInt(d.Microseconds(), 10) }
	if !q.v1 {
		q.write(filepath.Join(q.base, "cgroup.subtree_control"), "+cpu")
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		q.t.Fatal(err)
	}
	if q.v1 {
		q.write(filepath.Join(dir, "cpu.cfs_period_us"), micros(period))
		q.write(filepath.Join(dir, "cpu.cfs_quota_us"), micros(quota))
	} else {
		q.write(filepath.Join(dir, "cpu.max"), micros(quota)+" "+micros(period))
	}
	q.write(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid))
}

// free ends all limits.
func (q *quotas) free() {
	q.t.Helper()
	for _, dir := range q.dirs {
		if q.v1 {
			q.write(filepath.Join(dir, "cpu.cfs_quota_us"), "-1")
		} else {
			q.write(filepath.Join(dir, "cpu.max"), "max")
		}
	}
}

func (q *quotas) write(file, value string) {
	q.t.Helper()
	if err := os.WriteFile(file, []byte(value), 0o644); err != nil {
		q.t.Fatal(err)
	}
}
