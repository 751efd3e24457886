package main

import (
	"fmt"
	"os"

	"github.com/clusterd/clusterd/sched"
)

// scheduler reads the scheduler's configuration, if there is a file.
func (c *Config) scheduler() (sched.SchedulerConfig, error) {
	if c.SchedulerConfig == "" {
		return sched.SchedulerConfig{}, nil
	}
	data, err := os.ReadFile(c.SchedulerConfig)
	if err != nil {
		return sched.SchedulerConfig{}, fmt.Errorf("--scheduler-config: %w", err)
	}
	cfg, err := sched.ReadSchedulerConfig(data)
	if err != nil {
		return sched.SchedulerConfig{}, fmt.Errorf("--scheduler-config %s: %w", c.SchedulerConfig, err)
	}
	return cfg, nil
}
