package upgrade

import (
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

// One command runs a roll-out at a time. It is taken over from one that has ended, or
// is not heard any more.
func TestRollout(t *testing.T) {
	s, now := jointest.New(), time.Now()
	if _, err := Get(t.Context(), s); !errors.Is(err, ErrNone) {
		t.Fatalf("%v", err)
	}
	put := func(id, state string, at time.Time) error {
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
