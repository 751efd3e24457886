package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// down removes the demo and looks whether anything of it is left.
func down(ctx context.Context, o options, out *screen) error {
	if os.Geteuid() != 0 {
		return &hint{errors.New("what root made only root can remove"), "sudo make demo-down"}
	}
	c, err := cluster.Open(o.dir)
	if errors.Is(err, cluster.ErrNone) {
		out.println("No demo is up: nothing to remove.")
		return nil
	}
	if err != nil {
		return &hint{err, "remove what you know of it by hand, then: rm -rf " + o.dir}
	}
	marks := append(c.Marks(), o.dir)
	out.println()
	err = out.step("ending the nodes and containers", func(say func(string)) error {
		c.Progress(say)
		err := c.Down(ctx)
		if err == nil {
			say("")
		}
		return err
	})
	if err != nil {
		return &hint{err, "sudo make demo-down, again"}
	}
	return out.step("looking for anything left", func(say func(string)) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		err := poll(ctx, func() (bool, error) {
			left, err := cluster.Remains(marks...)
			if err != nil {
				return false, err
			}
			return len(left) == 0, fmt.Errorf("left behind: %s", strings.Join(left, "; "))
		})
		if err == nil {
			say("no process, mount, cgroup, interface, namespace or rule")
		}
		return err
	})
}
