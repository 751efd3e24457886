package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/clusterd/clusterd/apis/server/components"
	"github.com/clusterd/clusterd/member/join"
)

// components are what `kubectl get componentstatuses` tells of: under the names
// of upstream's programs, whose work clusterd does itself.
func (m *Main) components() []components.Component {
	loops := func(ctx context.Context) (string, error) {
		leader := m.store.Leader()
		return loopsHealth(leader, m.nameOf(ctx, leader), leader == m.id.NodeID(), m.parts.loops.Load())
	}
	return []components.Component{
		{Name: "controller-manager", Check: loops},
		{Name: "scheduler", Check: loops},
		{Name: "etcd-0", Check: func(ctx context.Context) (string, error) {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
			if err == nil {
				err = m.storeReady(r)
			}
			if err != nil {
				return "", fmt.Errorf("the store, as %s sees it: %w", m.cfg.Name, err)
			}
			return "ok", nil
		}},
	}
}

// loopsHealth is what one server knows about the leader's loops: of its own, whether
// they run; of another's, that it is heard, for it restarts them whenever they end.
func loopsHealth(leader, name string, here, running bool) (string, error) {
	switch {
	case leader == "":
		return "", errors.New("the cluster has no leader, whose work it is")
	case here && !running:
		return "", fmt.Errorf("%s leads the cluster, and has not begun this work yet: its log may say why", name)
	case here:
		return "ok", nil
	}
	return fmt.Sprintf("ok: the leader, %s, is heard", name), nil
}

// nameOf is the name of a member, or its ID if it is not known here.
func (m *Main) nameOf(ctx context.Context, id string) string {
	records, err := join.Records(ctx, m.store, true)
	if err == nil {
		for _, r := range records {
			if r.ID == id {
				return r.Name
			}
		}
	}
	return id
}
