package main

import (
	"os"
	"time"
)

// certLifeEnv shortens the lives of nodes' certificates, for tests that want to
// see them renewed: CLUSTERD_DEBUG_CERT_LIFETIME=30s.
const certLifeEnv = "CLUSTERD_DEBUG_CERT_LIFETIME"

// debugCertLife is its value; 0: nothing sensible was given.
func debugCertLife() time.Duration {
	d, err := time.ParseDuration(os.Getenv(certLifeEnv))
	if err != nil || d < time.Second {
		return 0
	}
	return d
}
