package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/clusterd/clusterd/member/gossipkey"
)

// gossipKeyState is what clusterctl members gossip-key says.
type gossipKeyState struct {
	Phase      string
	Generation int
	Wanted     bool
	Servers    []struct {
		Name  string
		Ready bool
	}
}

func (e *env) gossipKey() (s gossipKeyState, err error) {
	out, errs, code := e.run("clusterctl", "", "members", "gossip-key", "-o", "json")
	if code != 0 {
		return s, fmt.Errorf("exit %d: %s", code, errs)
	}
	return s, json.Unmarshal([]byte(out), &s)
}

// gossipRing is what lies on a server's disk.
func (e *env) gossipRing(node string) gossipkey.Ring {
	e.t.Helper()
	ring, err := e.readGossipRing(node)
	e.must(err)
	return ring
}

func (e *env) readGossipRing(node string) (gossipkey.Ring, error) {
	first, err := os.ReadFile(filepath.Join(e.data(node), "pki", "gossip.key"))
	if err != nil {
		return gossipkey.Ring{}, err
	}
	rest, err := os.ReadFile(filepath.Join(e.data(node), "pki", "gossip-ring.json"))
	if err != nil && !os.IsNotExist(err) {
		return gossipkey.Ring{}, err
	}
	return gossipkey.Parse(first, rest)
}

// gossipKeyChanged waits until the servers have another key than the old one, and
// that alone.
func (e *env) gossipKeyChanged(t *testing.T, old []byte, servers ...string) {
	t.Helper()
	e.eventually("the gossip key was changed", func(context.Context) error {
		s, err := e.gossipKey()
		if err != nil || s.Phase != "stable" || s.Wanted || s.Generation == 0 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		var key []byte
		for _, node := range servers {
			ring, err := e.readGossipRing(node) // its two files may be about to change
			if err != nil {
				return err
			}
			if key == nil {
				key = ring.Keys[0]
			}
			if len(ring.Keys) != 1 || bytes.Equal(ring.Keys[0], old) || !bytes.Equal(ring.Keys[0], key) {
				return fmt.Errorf("%s has %d keys, number %d", node, len(ring.Keys), ring.Number)
			}
		}
		return nil
	})
}

// gossipKeyAway changes the key while a server is away, which then comes back with the
// old one, and while the leader dies in the middle.
func gossipKeyAway(t *testing.T, e *env, asked, away, leader string) {
	old := e.gossipRing(away).Keys[0]
	if err := e.Kill(away); err != nil {
		t.Fatal(err)
	}
	mustContain(t, "rotate", e.ctl("members", "gossip-key", "rotate", "--wait"), "was rotated")
	e.gossipKeyChanged(t, old, asked, leader)
	mustContain(t, "gossip-key", e.ctl("members", "gossip-key"), "Phase: stable", "in use for", away)
	if !bytes.Equal(e.gossipRing(away).Keys[0], old) {
		t.Error("who was away has the new key")
	}
	if err := e.Start(t.Context(), away); err != nil {
		t.Fatal(err)
	}
	e.gossipKeyChanged(t, old, asked, leader, away)
	e.allAlive()

	old = e.gossipRing(asked).Keys[0]
	e.ctl("members", "gossip-key", "rotate")
	e.eventually("the change is under way", func(context.Context) error {
		if s, err := e.gossipKey(); err != nil || s.Phase == "stable" && s.Wanted {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	if err := e.Kill(leader); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), leader); err != nil {
		t.Fatal(err)
	}
	e.gossipKeyChanged(t, old, asked, leader, away)
	e.allAlive()
}

func (e *env) allAlive() {
	e.t.Helper()
	e.eventually("all hear each other", func(context.Context) error {
		list, err := e.members()
		for _, m := range list.Members {
			if m.Gossip != "alive" && m.Role != "agent" {
				return fmt.Errorf("%+v", list)
			}
		}
		return err
	})
}
