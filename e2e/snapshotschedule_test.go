package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2ESnapshotSchedule: three servers take snapshots into a directory that they share,
// each time of the schedule once, over the loss of the leader; and where it cannot be
// written to, that is seen.
func TestE2ESnapshotSchedule(t *testing.T) {
	dir := t.TempDir()
	folder, identity := filepath.Join(dir, "snapshots"), filepath.Join(dir, "key")
	key, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(identity, []byte(key.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	e := startBare(t, 3, func(c *cluster.Config) {
		c.Args = append(c.Args, "--snapshot-schedule", "@every 1m", "--snapshot-folder", folder, "--snapshot-recipients", key.Recipient().String())
	})
	const limit = 5 * time.Minute // a minute, and a machine that has much else to do
	slots := func() (out []time.Time) {
		files, err := os.ReadDir(folder)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for _, f := range files {
			name, whole := strings.CutSuffix(f.Name(), "Z.backup")
			if !whole {
				continue // under way
			}
			at, err := time.Parse("20060102T150405", name[strings.LastIndex(name, "-")+1:])
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, at)
		}
		return out
	}
	last := func() string { // the node that took the last one, as clusterctl shows it
		for line := range strings.Lines(e.ctl("store", "status")) {
			if node, ok := strings.CutPrefix(line, "Snapshots last node:"); ok {
				return strings.TrimSpace(node)
			}
		}
		return ""
	}
	more := func(what string, than int) {
		t.Helper()
		e.within(limit, what, func(context.Context) error {
			if n := len(slots()); n <= than {
				return fmt.Errorf("%d files", n)
			}
			return nil
		})
	}
	more("there is a snapshot", 0)
	var leader string
	e.within(limit, "the leader took it", func(context.Context) error { // who leads may have changed since: then the next one
		leader = e.leader()
		if got := last(); got != leader {
			return fmt.Errorf("clusterctl store status names %q, and %s leads", got, leader)
		}
		return nil
	})
	files, err := filepath.Glob(filepath.Join(folder, "*.backup"))
	if err != nil {
		t.Fatal(err)
	}
	mustContain(t, "verify", e.ctl("snapshot", "verify", files[0], "--identity", identity), "/registry/core/nodes", "is whole")

	if err := e.Kill(leader); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"n1", "n2", "n3"} {
		if n != leader {
			if e.api, e.config, err = e.Client(n); err != nil {
				t.Fatal(err)
			}
		}
	}
	before := len(slots())
	more("another leader takes the next", before)
	e.eventually("clusterctl says so", func(context.Context) error {
		if got := last(); got == "" || got == leader {
			return fmt.Errorf("clusterctl store status names %q, and %s is dead", got, leader)
		}
		return nil
	})
	got := slots()
	for i := 1; i < len(got); i++ {
		if apart := got[i].Sub(got[i-1]); apart < time.Minute || apart%time.Minute != 0 {
			t.Errorf("snapshots of %v: %s apart", got, apart)
		}
	}

	// A directory that is none: what a disk that is not mounted may look like.
	e.eventually("the directory is none", func(context.Context) error { // a snapshot under way may make it again
		return errors.Join(os.RemoveAll(folder), os.WriteFile(folder, nil, 0o600))
	})
	e.within(limit, "that it fails is seen", func(ctx context.Context) error {
		out := e.ctl("store", "status")
		if !strings.Contains(out, "Snapshots failure error:") || !strings.Contains(out, "was not taken by") {
			return fmt.Errorf("clusterctl store status: %s", out)
		}
		events, err := e.api.CoreV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "reason=SnapshotFailed"})
		if err == nil && !slices.ContainsFunc(events.Items, func(ev corev1.Event) bool { return strings.Contains(ev.Message, folder) }) {
			err = fmt.Errorf("no event of it among %d", len(events.Items))
		}
		return err
	})
}
