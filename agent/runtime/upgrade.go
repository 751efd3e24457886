package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
)

// Upgrade is what Start did about a podmon that was another program than the
// one it would have started. The zero value: they were the same.
type Upgrade struct {
	// From and To name the programs by their content (sealed.Digest); From is
	// empty if podmon is too old to tell.
	From, To string
	// Err says why the former podmon goes on; nil: To runs.
	Err error
}

// Needed tells whether the programs differed.
func (u Upgrade) Needed() bool { return u.To != "" }

const (
	defaultUpgradeTimeout = 10 * time.Second
	// upgradeTime is for all of it: starts under way end within 50 s, and the
	// next podmon serves within startTime.
	upgradeTime = 3 * time.Minute
)

// upgrade replaces the running podmon if it is another program than ours. An
// error leaves the one that was there, which this Client can speak to: the
// protocol only grows.
func (c *Client) upgrade(ctx context.Context) (u Upgrade) {
	ctx, cancel := context.WithTimeout(ctx, upgradeTime)
	defer cancel()
	program, err := c.program()
	if err != nil {
		c.cfg.Logger.Warn("podmon's program cannot be compared with the running one", "err", err)
		return Upgrade{}
	}
	defer program.Close()
	want, err := sealed.Digest(program)
	if err != nil {
		return Upgrade{To: "unknown", Err: err}
	}
	fc, was, err := hello(ctx, c.cfg.Dir)
	if err != nil {
		return Upgrade{To: want, Err: err}
	}
	defer fc.Close()
	if was.Build == want {
		return Upgrade{}
	}
	u = Upgrade{From: was.Build, To: want}
	log := c.cfg.Logger.With("from", cmp.Or(u.From, "one that does not tell"), "to", u.To)
	log.Info("the running podmon is another program: it is replaced")
	timeout := cmp.Or(c.cfg.UpgradeTimeout, defaultUpgradeTimeout)
	req := api.Request{ID: 1, Op: api.OpUpgrade, Upgrade: &api.Upgrade{PatienceMillis: timeout.Milliseconds()}}
	stop := context.AfterFunc(ctx, func() { fc.Close() })
	_, _, u.Err = exchange(fc, req, []*os.File{program})
	stop()
	if u.Err == nil {
		u.Err = c.awaitUpgrade(ctx, was, want)
	}
	if u.Err != nil {
		log.Warn("podmon goes on with the former program until it ends", "err", u.Err)
	} else {
		log.Info("podmon was replaced")
	}
	return u
}

// awaitUpgrade waits until podmon is the program that was asked for.
func (c *Client) awaitUpgrade(ctx context.Context, was api.Response, want string) error {
	for {
		fc, is, err := hello(ctx, c.cfg.Dir)
		if err == nil {
			fc.Close()
			switch {
			case is.Build == want:
				return nil
			case is.Pid != was.Pid:
				return fmt.Errorf("the former program was started again (see %s/podmon.log)", c.cfg.Dir)
			}
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the next podmon does not serve (see %s/podmon.log)", c.cfg.Dir), err)
		}
	}
}
