package main

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/agent/shutdown"
)

func TestShutdownPeriods(t *testing.T) {
	c := defaultShutdown()
	runsAsService(t, "")
	if got, err := c.shutdownPeriods(); got != nil || err != nil {
		t.Errorf("in the foreground: %v, %v", got, err)
	}
	runsAsService(t, "/run/systemd/notify")
	const critical = 2_000_000_000
	want := []shutdown.Period{{Grace: 20 * time.Second}, {Priority: critical, Grace: 10 * time.Second}}
	if got, err := c.shutdownPeriods(); err != nil || !cmp.Equal(got, want) {
		t.Errorf("as a service: %v, %v", got, err)
	}
	c.ShutdownGracePeriodByPodPriority = "100=1m,0=5s"
	want = []shutdown.Period{{Grace: 5 * time.Second}, {Priority: 100, Grace: time.Minute}}
	if got, err := c.shutdownPeriods(); err != nil || !cmp.Equal(got, want) {
		t.Errorf("by priority: %v, %v", got, err)
	}
	c = defaultShutdown()
	c.ShutdownGracePeriod.Duration = 0
	if got, err := c.shutdownPeriods(); got != nil || err != nil || c.check() != nil {
		t.Errorf("switched off: %v, %v", got, err)
	}
	for change, want := range map[*ShutdownConfig]string{
		{ShutdownGracePeriod: Duration{-1}}:             "--shutdown-grace-period -1ns",
		{ShutdownGracePeriodCriticalPods: Duration{-1}}: "--shutdown-grace-period-critical-pods -1ns",
		{ShutdownGracePeriod: Duration{time.Second}, ShutdownGracePeriodCriticalPods: Duration{2 * time.Second}}: "it is a part of --shutdown-grace-period, 1s",
		{LeaveOnShutdown: true}: "--leave-on-shutdown: nothing holds up a shutdown",
		{LeaveOnShutdown: true, ShutdownGracePeriod: Duration{time.Minute}, ShutdownGracePeriodCriticalPods: Duration{time.Minute}}: "no time to be evicted in",
		{LeaveOnShutdown: true, ShutdownGracePeriodByPodPriority: "0=1m"}:                                                           "no time to be evicted in",
		{ShutdownGracePeriodByPodPriority: "high=1m"}:                                                                               `--shutdown-grace-period-by-pod-priority: "high=1m"`,
		{ShutdownGracePeriodByPodPriority: "0=20h,1=20h"}:                                                                           "it is 40h0m0s together",
	} {
		if err := change.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", *change, err, want)
		}
	}
}
