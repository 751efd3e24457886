package main

import (
	"fmt"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// checkFeatureGates finds gates that do not exist, are locked, or whose value is
// no bool. It switches none.
func (c *Config) checkFeatureGates() error {
	if c.FeatureGates == "" {
		return nil
	}
	if err := utilfeature.DefaultMutableFeatureGate.DeepCopy().Set(c.FeatureGates); err != nil {
		return fmt.Errorf("--feature-gates %q: %w: give gates of the API server of Kubernetes as NAME=true or NAME=false, separated by commas", c.FeatureGates, err)
	}
	return nil
}

// switchFeatures sets the process's gates, before anything asks for them.
func (c *Config) switchFeatures() error {
	return utilfeature.DefaultMutableFeatureGate.Set(c.FeatureGates)
}
