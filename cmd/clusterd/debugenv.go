package main

import (
	"os"
	"time"
)

// certLifeEnv shortens the lives of nodes' certificates, for tests that want to
// see them renewed: CLUSTERD_DEBUG_CERT_LIFETIME=30s.
const certLifeEnv = "CLUSTERD_DEBUG_CERT_LIFETIME"

// settledEnv shortens the time that pods have to be ready before they may be moved
// to other nodes, for tests of --rebalance-interval: CLUSTERD_DEBUG_REBALANCE_SETTLED=20s.
const settledEnv = "CLUSTERD_DEBUG_REBALANCE_SETTLED"

// oneAuthorityEnv makes clusterd init found a cluster with one authority for all purposes, as
// earlier versions did, for tests of clusterctl ca split: CLUSTERD_DEBUG_ONE_AUTHORITY=1.
const oneAuthorityEnv = "CLUSTERD_DEBUG_ONE_AUTHORITY"

// debugCertLife is the value of certLifeEnv.
func debugCertLife() time.Duration { return debugDuration(certLifeEnv) }

// debugDuration is a variable's value; 0: nothing sensible was given.
func debugDuration(name string) time.Duration {
	d, err := time.ParseDuration(os.Getenv(name))
	if err != nil || d < time.Second {
		return 0
	}
	return d
}
