package quota

import (
	"fmt"
	"math"
	"testing"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestMeter(t *testing.T) {
	m := new(meter)
	near := func(got, want float64) bool { return math.Abs(got-want) < 1e-9 }
	const start = 1_789_000_000_000
	for i := range int64(600) { // ten minutes, two writes of 50 bytes a second
		m.add(start+i*1000, 1, 50)
		m.add(start+i*1000, 1, 50)
	}
	l := m.load(start + 600_000)
	if l.Writes != 1200 || l.Bytes != 60_000 || !near(l.WritesPerSecond1m, 2) || !near(l.BytesPerSecond1m, 100) || !near(l.WritesPerSecond5m, 2) {
		t.Errorf("steady: %+v", l)
	}
	if l = m.load(start + 600_000 + 60_000); l.WritesPerSecond1m != 0 || !near(l.WritesPerSecond5m, 1.6) {
		t.Errorf("a minute later: %+v", l)
	}
	if l = m.load(start + 3_600_000); l.WritesPerSecond5m != 0 || l.Writes != 1200 {
		t.Errorf("an hour later: %+v", l)
	}
	m.add(start, 1, 1) // a clock that is behind
	if l = m.load(start + 3_600_000); l.Writes != 1201 {
		t.Errorf("late: %+v", l)
	}
}

func TestUsageIsBounded(t *testing.T) {
	u := NewUsage()
	for i := range 2 * maxMeters {
		u.Note(1000, &mvcc.Command{Txn: mvcc.Txn{Origin: fmt.Sprint("w", i), Ops: []mvcc.Op{{Key: fmt.Sprintf("/%d/k", i)}}}})
	}
	writers, folders := u.loads(1000)
	if len(writers) != maxMeters+1 || writers[Others].Writes != maxMeters || len(folders) != maxMeters+1 || folders[Others].Writes != maxMeters {
		t.Errorf("%d writers, %d folders", len(writers), len(folders))
	}
}
