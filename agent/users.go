package agent

import (
	"os"

	"github.com/clusterd/clusterd/agent/users"
)

// podUsers are the ids of pods with a user namespace; nil: there are no such
// pods. What subuid(5) gives to others is left to them.
func podUsers(cfg Config, podDir string) (*users.Ranges, error) {
	if cfg.UserIDs == (users.Range{}) {
		return nil, nil
	}
	granted, err := users.Granted("/etc/subuid", "/etc/subgid")
	if err != nil {
		return nil, err
	}
	return users.New(users.Config{Area: cfg.UserIDs, Granted: granted, Probe: func() error {
		if err := os.MkdirAll(podDir, 0o755); err != nil {
			return err
		}
		return users.Probe(podDir, cfg.Images.TryMapped)
	}}), nil
}
