package upgrade

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/releases"
)

func TestKeys(t *testing.T) {
	s, now := jointest.New(), time.Now()
	secret, err := releases.NewSecretKey()
	if err != nil {
		t.Fatal(err)
	}
	key := secret.Public()
	if _, err := Trust(t.Context(), s, "RWQ", now); err == nil {
		t.Error("half a key is trusted")
	}
	for range 2 { // trusted twice is trusted once
		if rec, err := Trust(t.Context(), s, key.String(), now); err != nil || rec.ID != key.Name() {
			t.Fatalf("%+v %v", rec, err)
		}
	}
	keys, err := Keys(t.Context(), s)
	if err != nil || len(keys) != 1 || keys[0].Key != key.String() {
		t.Fatalf("%+v %v", keys, err)
	}
	if parsed, err := Parse([]string{keys[0].Key}); err != nil || parsed[0].Name() != key.Name() {
		t.Errorf("%v %v", parsed, err)
	}
	if err := Distrust(t.Context(), s, "0000000000000000"); !errors.Is(err, ErrNone) {
		t.Errorf("%v", err)
	}
	if err := Distrust(t.Context(), s, key.Name()); err != nil {
		t.Fatal(err)
	}
	if keys, err := Keys(t.Context(), s); err != nil || len(keys) != 0 {
		t.Errorf("%+v %v", keys, err)
	}
}

// An id is chosen by whoever makes a key: another key does not take the place of one
// that is trusted.
func TestOtherKeyOfTheSameID(t *testing.T) {
	s, now := jointest.New(), time.Now()
	ours := releases.Key{ID: [8]byte{1}, Public: make([]byte, 32)}
	theirs := releases.Key{ID: ours.ID, Public: bytes.Repeat([]byte{7}, 32)}
	first, err := Trust(t.Context(), s, ours.String(), now)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Trust(t.Context(), s, theirs.String(), now); !errors.Is(err, ErrOtherKey) || !strings.Contains(err.Error(), "clusterctl upgrade distrust "+ours.Name()) {
		t.Errorf("%v", err)
	}
	if again, err := Trust(t.Context(), s, ours.String(), now.Add(time.Hour)); err != nil || again != first {
		t.Errorf("the same once more: %+v %v", again, err)
	}
	if keys, err := Keys(t.Context(), s); err != nil || len(keys) != 1 || keys[0] != first {
		t.Errorf("%+v %v", keys, err)
	}
	if err := Distrust(t.Context(), s, ours.Name()); err != nil {
		t.Fatal(err)
	}
	if rec, err := Trust(t.Context(), s, theirs.String(), now); err != nil || rec.Key != theirs.String() {
		t.Errorf("after the first was taken away: %+v %v", rec, err)
	}
}

// clocked is a store with a time of its own.
type clocked struct {
	*jointest.Store
	now time.Time
}

func (c *clocked) Time() time.Time { return c.now }

// Whose a roll-out is goes by store time: servers whose clocks differ, or are set, end
// and lengthen nothing.
func TestRolloutAndTheClocks(t *testing.T) {
	s := &clocked{jointest.New(), time.Unix(1e9, 0)}
	wall := time.Now()
	put := func(id string, at time.Time) error {
		_, err := Put(t.Context(), s, v1.Rollout{ID: id, Version: "v2", State: v1.RolloutRunning}, at)
		return err
	}
	if err := put("one", wall); err != nil {
		t.Fatal(err)
	}
	for _, jump := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		if err := put("two", wall.Add(jump)); !errors.Is(err, ErrUnderWay) {
			t.Errorf("clock %s off: %v", jump, err)
		}
	}
	if r, err := Get(t.Context(), s); err != nil || r.Silence(wall.Add(24*time.Hour)) != 0 || r.ID != "one" {
		t.Errorf("%+v %v", r, err)
	}
	s.now = s.now.Add(v1.RolloutSilence)
	if r, err := Get(t.Context(), s); err != nil || r.Silence(wall.Add(-24*time.Hour)) != v1.RolloutSilence || r.GoesOn(r.Silence(wall)) {
		t.Errorf("%+v %v", r, err)
	}
	if err := put("two", wall.Add(-24*time.Hour)); err != nil {
		t.Errorf("after its silence, by a server whose clock is behind: %v", err)
	}
	if err := put("one", wall.Add(24*time.Hour)); !errors.Is(err, ErrUnderWay) {
		t.Errorf("%v", err)
	}
}

// One command runs a roll-out at a time. It is taken over from one that has ended, or
// is not heard any more.
func TestRollout(t *testing.T) {
	now := time.Now()
	s := &clocked{jointest.New(), now}
	if _, err := Get(t.Context(), s); !errors.Is(err, ErrNone) {
		t.Fatalf("%v", err)
	}
	put := func(id, state string, at time.Time) error {
		s.now = at
		_, err := Put(t.Context(), s, v1.Rollout{ID: id, Version: "v2", State: state}, at)
		return err
	}
	later := now.Add(v1.RolloutSilence + time.Second)
	for _, tt := range []struct {
		what, id, state string
		at              time.Time
		refused         bool
	}{
		{"the first", "one", v1.RolloutRunning, now, false},
		{"its next word", "one", v1.RolloutRunning, now.Add(time.Second), false},
		{"another one", "two", v1.RolloutRunning, now.Add(2 * time.Second), true},
		{"another one, later", "two", v1.RolloutRunning, later.Add(time.Second), false},
		{"the first, which was thought dead", "one", v1.RolloutRunning, later.Add(2 * time.Second), true},
		{"the second's end", "two", v1.RolloutStopped, later.Add(3 * time.Second), false},
		{"a third, at once", "three", v1.RolloutRunning, later.Add(3 * time.Second), false},
	} {
		err := put(tt.id, tt.state, tt.at)
		if tt.refused != errors.Is(err, ErrUnderWay) || !tt.refused && err != nil {
			t.Errorf("%s: %v", tt.what, err)
		}
		if tt.refused && !strings.Contains(err.Error(), "clusterctl upgrade status") {
			t.Errorf("%s: no cure is named: %v", tt.what, err)
		}
	}
	if r, err := Get(t.Context(), s); err != nil || r.ID != "three" || r.Updated.IsZero() {
		t.Errorf("%+v %v", r, err)
	}
}
