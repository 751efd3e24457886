package clock

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// watchOf is that of n1 among servers, whose clocks are ahead by what is in ahead; those that
// are not in it do not answer.
func watchOf(ahead map[string]time.Duration, servers ...string) *Watch {
	var others []join.ServerAddr
	for _, name := range servers {
		others = append(others, join.ServerAddr{ID: "id-" + name, Name: name})
	}
	return &Watch{
		Clock: &Clock{}, Log: slog.New(slog.DiscardHandler), Floor: func() (time.Time, string) { return time.Time{}, "" },
		Others: func() []join.ServerAddr { return others }, Servers: func() int { return len(others) + 1 }, Self: true,
		Last: func() time.Time { return time.Time{} }, Period: Period, Changed: func() {},
		Read: func(_ context.Context, s join.ServerAddr) (time.Duration, error) {
			if d, ok := ahead[s.Name]; ok {
				return d, nil
			}
			return 0, errors.New("away")
		},
	}
}

// TestClockStaysWrong: the clock of one of three servers is wrong, and then a right one stops.
func TestClockStaysWrong(t *testing.T) {
	ahead := map[string]time.Duration{"n2": time.Hour, "n3": time.Hour}
	w := watchOf(ahead, "n2", "n3")
	w.Look(t.Context())
	if v := w.Clock.Verdict(); !v.Agreed || v.Ahead != time.Hour || len(v.By) != 2 || !slices.Contains(v.By, "id-n3") {
		t.Fatalf("two agree: %+v", v)
	}
	delete(ahead, "n3")
	w.Look(t.Context())
	if v := w.Clock.Verdict(); !v.Wrong() || !v.Agreed || (v.Ahead-time.Hour).Abs() > time.Second {
		t.Errorf("one stopped: %+v", v)
	}
	ahead["n2"] = 0 // this machine's clock was set
	w.Look(t.Context())
	if v := w.Clock.Verdict(); v.Wrong() {
		t.Errorf("it agrees with n2: %+v", v)
	}
}

// TestClockFloor: a program that was built by a machine whose clock was ahead runs all the same.
func TestClockFloor(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	floor, what := Floor(now.Add(time.Hour).Format(time.RFC3339), nil)
	if v := Judge(now, floor, what, nil, 1, true); v.Wrong() {
		t.Errorf("built by a clock an hour ahead: %s", v.Why)
	}
	if v := Judge(time.Unix(100, 0), floor, what, nil, 1, true); !v.Wrong() {
		t.Error("1970 is not wrong")
	}
	if floor, _ := Floor("", nil); !floor.IsZero() {
		t.Errorf("built without a date: %s", floor)
	}
}

// TestClockFirstLook: a server that got no answer before it began looks at once.
func TestClockFirstLook(t *testing.T) {
	w := watchOf(nil, "n2", "n3")
	w.Look(t.Context())
	if w.heard {
		t.Fatal("heard, without an answer")
	}
	ctx, stop := context.WithTimeout(t.Context(), Period/3)
	defer stop()
	asked := false
	w.Others = func() []join.ServerAddr {
		asked = true
		stop()
		return nil
	}
	if err := w.Run(ctx); err != nil || !asked {
		t.Errorf("asked: %v, %v", asked, err)
	}
}

// TestClockChanged: what goes by how wrong the clock is learns when that changes.
func TestClockChanged(t *testing.T) {
	ahead := map[string]time.Duration{"n2": time.Hour, "n3": time.Hour}
	w := watchOf(ahead, "n2", "n3")
	w.Look(t.Context())
	ahead["n2"], ahead["n3"] = 50*time.Hour, 50*time.Hour
	ctx, stop := context.WithTimeout(t.Context(), Period/2)
	defer stop()
	changed := 0
	w.Changed = func() {
		changed++
		stop()
	}
	if err := w.Run(ctx); err != nil || changed != 1 || w.Clock.Verdict().Ahead != 50*time.Hour {
		t.Errorf("changed %d times, %+v, %v", changed, w.Clock.Verdict(), err)
	}
}

// TestClockFloorOfCluster: a cluster that begins now is not before its own beginning, and 1970 is.
func TestClockFloorOfCluster(t *testing.T) {
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	floor, what := Floor("", pki.NewTrust(0, ca))
	if v := Judge(time.Now(), floor, what, nil, 1, true); v.Wrong() {
		t.Errorf("now: %s", v.Why)
	}
	if v := Judge(time.Unix(0, 0), floor, what, nil, 1, true); !v.Wrong() {
		t.Error("1970 is not wrong")
	}
}
