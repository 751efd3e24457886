package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/cmd/clusterd/atrest"
	"github.com/clusterd/clusterd/raftstore/kubestore"
)

const (
	// resealRate and resealBytes bound what is sealed again, in values and in bytes a second: the
	// store's other writers are not to feel it, and what it takes of the history, of which the
	// store keeps so many bytes, is to last for minutes.
	resealRate  = 100
	resealBytes = 512 << 10
	// resealAgain is after what time the leader looks again whether all is sealed by
	// what the EncryptionConfiguration says: another server may have taken up a change
	// of it, or of a KMS plugin's key, later, and have written by the one before.
	resealAgain = 5 * time.Minute
	// resealRetry is when it tries again what it could not seal.
	resealRetry = time.Minute
	// sealOrigin is who the history of an object names.
	sealOrigin = "clusterd (sealed anew)"
)

// privateKinds are stored, and no API serves them.
func privateKinds(resource schema.GroupResource) bool {
	return resource == server.TokenKeys || resource.Group == "alloc"
}

// openAtRest makes what decides how each resource is sealed.
func (m *Main) openAtRest() (err error) {
	m.atRest, err = atrest.New(atrest.Config{
		File: m.cfg.EncryptionProviderConfig, ID: m.id.NodeID(), Own: m.seal, Sealed: sealedKinds,
		Private: privateKinds, Changed: m.resealSoon, Log: room(m.log, "encryption"),
	})
	if err != nil {
		return err
	}
	m.metrics.encryption.main.Store(m)
	return nil
}

// sealer is the decorator's choice of how a resource is sealed.
func (m *Main) sealer(resource schema.GroupResource) value.Transformer {
	return m.atRest.Transformer(resource)
}

// sealChecks are of KMS plugins, if there may be some.
func (m *Main) sealChecks() []healthz.HealthChecker {
	if m.cfg.EncryptionProviderConfig == "" {
		return nil
	}
	return []healthz.HealthChecker{m.atRest.Health()}
}

// resealSoon has the leader look whether all is sealed as it should be.
func (m *Main) resealSoon() {
	m.resealed.Store(nil) // what was counted is of the keys before
	select {
	case m.resealNow <- struct{}{}:
	default:
	}
}

// resealState is how far this server, as the leader, has come.
type resealState struct {
	kubestore.ResealProgress
	at time.Time
	of string // by what was to be sealed when the round began
}

// reseal seals again, as the leader, what is not sealed by the newest key, or not as the
// EncryptionConfiguration says: at the beginning of each term, when keys changed here, and
// now and then while there is an EncryptionConfiguration.
func (m *Main) reseal(ctx context.Context) error {
	defer m.resealed.Store(nil)
	for first := true; ; first = false {
		progress, err := m.resealRound(ctx)
		again, level := resealAgain, slog.LevelDebug
		if first || progress.Resealed > 0 {
			level = slog.LevelInfo
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			again = resealRetry
			m.log.Warn("not all that is to be sealed at rest is sealed with the newest key yet", "values", progress.Values, "left", progress.Stale, "unopened", progress.Unopened, "err", err)
		default:
			m.log.Log(ctx, level, "all that is to be sealed at rest is sealed with the newest key", "values", progress.Values, "resealed", progress.Resealed)
			if !m.atRest.Named() {
				again = 0
			}
		}
		select {
		case <-m.resealNow:
		case <-timer(again):
		case <-ctx.Done():
			return nil
		}
	}
}

// timer fires after a while; 0: never.
func timer(after time.Duration) <-chan time.Time {
	if after == 0 {
		return nil
	}
	return time.After(after)
}

func (m *Main) resealRound(ctx context.Context) (kubestore.ResealProgress, error) {
	values, bytes := rate.NewLimiter(resealRate, resealRate/10), rate.NewLimiter(resealBytes, resealBytes)
	of := m.sealedOf()
	r := kubestore.Resealer{
		Store:  m.store,
		Origin: sealOrigin,
		Wait: func(ctx context.Context, n int) error {
			for ; n > 0; n -= resealBytes { // the limiter grants no more at once
				if err := bytes.WaitN(ctx, min(n, resealBytes)); err != nil {
					return err
				}
			}
			return values.Wait(ctx)
		},
		Transformer: func(key string) (value.Transformer, bool) {
			resource := server.StoredResource(key)
			return m.atRest.Transformer(resource), m.atRest.Covers(resource)
		},
		Progress: func(p kubestore.ResealProgress) {
			m.resealed.Store(&resealState{ResealProgress: p, at: time.Now(), of: of})
		},
	}
	if !m.atRest.Named() {
		r.Folders = []string{server.StoragePrefix(server.TokenKeys.Group, server.TokenKeys.Resource), server.StoragePrefix(corev1.GroupName, "secrets")}
	}
	p, err := r.Run(ctx)
	if err == nil || !errors.Is(err, context.Canceled) {
		m.resealed.Store(&resealState{ResealProgress: p, at: time.Now(), of: of})
	}
	return p, err
}

// sealedOf tells apart by what resources of an EncryptionConfiguration are sealed.
func (m *Main) sealedOf() string {
	of := m.atRest.Hash()
	for _, k := range m.atRest.Keys() {
		of += " " + k.Provider + " " + k.ID
	}
	return of
}

// counted is what this server has counted as the leader, if that is of the keys of now.
func (m *Main) counted() *resealState {
	r := m.resealed.Load()
	if r == nil || r.of != m.sealedOf() {
		return nil
	}
	return r
}
