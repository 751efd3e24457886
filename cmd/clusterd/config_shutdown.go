package main

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/clusterd/clusterd/agent/shutdown"
)

// ShutdownConfig is how long a shutdown of the machine waits for its pods.
type ShutdownConfig struct {
	// ShutdownGracePeriod is how long a shutdown or reboot of the machine waits
	// for its pods to end, where systemd runs clusterd as a service (0 = off). systemd-logind is told to
	// wait as long.
	ShutdownGracePeriod Duration `json:"shutdownGracePeriod"`
	// ShutdownGracePeriodCriticalPods is the part of ShutdownGracePeriod, its last,
	// in which critical pods end (priority 2000000000 and above).
	ShutdownGracePeriodCriticalPods Duration `json:"shutdownGracePeriodCriticalPods"`
	// ShutdownGracePeriodByPodPriority stands in the place of both: PRIORITY=DURATION,
	// separated by commas. Pods of that priority and above have that time, up to the
	// next; the lowest end first, and each group waits for the one before.
	ShutdownGracePeriodByPodPriority string `json:"shutdownGracePeriodByPodPriority,omitempty"`
	// LeaveOnShutdown has the machine leave the cluster when it is shut down and not
	// rebooted, after its pods were evicted. It stays a member where systemd is older than
	// 255, which does not report which of both it is, and where the cluster cannot do
	// without it.
	LeaveOnShutdown bool `json:"leaveOnShutdown,omitempty"`
}

func defaultShutdown() ShutdownConfig {
	return ShutdownConfig{ShutdownGracePeriod: Duration{30 * time.Second}, ShutdownGracePeriodCriticalPods: Duration{10 * time.Second}}
}

func (c *ShutdownConfig) addFlags(f *pflag.FlagSet) {
	f.DurationVar(&c.ShutdownGracePeriod.Duration, "shutdown-grace-period", c.ShutdownGracePeriod.Duration, "how long a shutdown of the machine waits for pods to end, where systemd runs clusterd as a service (0 = off)")
	f.DurationVar(&c.ShutdownGracePeriodCriticalPods.Duration, "shutdown-grace-period-critical-pods", c.ShutdownGracePeriodCriticalPods.Duration, "the last part of it, in which critical pods end")
	f.StringVar(&c.ShutdownGracePeriodByPodPriority, "shutdown-grace-period-by-pod-priority", c.ShutdownGracePeriodByPodPriority, "replaces both: grace period for pods of each priority and above, lowest first, such as 0=20s,100000=30s,2000000000=10s")
	f.BoolVar(&c.LeaveOnShutdown, "leave-on-shutdown", c.LeaveOnShutdown, "evict the node's pods and leave the cluster when the machine is shut down and not rebooted; needs systemd 255 or later, and does not happen where the cluster cannot do without the node")
}

// check holds what can be held against nothing but itself.
func (c *ShutdownConfig) check() error {
	total, critical := c.ShutdownGracePeriod.Duration, c.ShutdownGracePeriodCriticalPods.Duration
	switch {
	case total < 0 || total > maxShutdown:
		return fmt.Errorf("--shutdown-grace-period %s: give 0 or a time up to %s", total, maxShutdown)
	case critical < 0:
		return fmt.Errorf("--shutdown-grace-period-critical-pods %s: it cannot be negative", critical)
	case total > 0 && critical > total:
		return fmt.Errorf("--shutdown-grace-period-critical-pods %s: it is a part of --shutdown-grace-period, %s: give less of it, or a longer one", critical, total)
	}
	periods, err := c.byPriority()
	if err != nil {
		return err
	}
	if c.LeaveOnShutdown && total == 0 && periods == nil {
		return fmt.Errorf("--leave-on-shutdown: nothing holds up a shutdown for it with --shutdown-grace-period 0: give a time, such as 30s")
	}
	drain := total - critical
	if periods != nil {
		total = 0
		for _, p := range periods {
			total += p.Grace
		}
		drain = total - periods[len(periods)-1].Grace
	}
	if c.LeaveOnShutdown && drain <= 0 {
		return fmt.Errorf("--leave-on-shutdown: pods have no time to be evicted in before the last part of the grace period: give more --shutdown-grace-period than --shutdown-grace-period-critical-pods, or two priorities with --shutdown-grace-period-by-pod-priority")
	}
	if total > maxShutdown {
		return fmt.Errorf("--shutdown-grace-period-by-pod-priority %s: it is %s together: give no more than %s", c.ShutdownGracePeriodByPodPriority, total, maxShutdown)
	}
	return nil
}

// maxShutdown is the longest that a machine is held up.
const maxShutdown = 24 * time.Hour

func (c *ShutdownConfig) byPriority() ([]shutdown.Period, error) {
	if c.ShutdownGracePeriodByPodPriority == "" {
		return nil, nil
	}
	periods, err := shutdown.Parse(c.ShutdownGracePeriodByPodPriority)
	if err != nil {
		return nil, fmt.Errorf("--shutdown-grace-period-by-pod-priority: %w", err)
	}
	return periods, nil
}

// shutdownPeriods are how long pods have to end at a shutdown; nil: it is not held
// up. A clusterd that somebody runs in the foreground does not meddle with the
// machine's shutdowns.
func (c *ShutdownConfig) shutdownPeriods() ([]shutdown.Period, error) {
	if notifySocket == "" {
		return nil, nil
	}
	periods, err := c.byPriority()
	if periods != nil || err != nil {
		return periods, err
	}
	return shutdown.Periods(c.ShutdownGracePeriod.Duration, c.ShutdownGracePeriodCriticalPods.Duration), nil
}
