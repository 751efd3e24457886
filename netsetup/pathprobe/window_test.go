package pathprobe

import (
	"net/netip"
	"testing"
	"time"
)

// at is a time of tests, in milliseconds.
func at(ms int) time.Time { return time.Unix(1_000_000, 0).Add(time.Duration(ms) * time.Millisecond) }

func TestCounts(t *testing.T) {
	late := at(1_000_000)
	for name, c := range map[string]struct {
		// received is what the answer to each ping said, 0: no answer came.
		received []uint32
		want     Counts
	}{
		"nothing sent":              {},
		"all well":                  {[]uint32{1, 2, 3}, Counts{Sent: 3}},
		"lost there":                {[]uint32{1, 0, 0, 2}, Counts{Sent: 4, Lost: 2, LostThere: 2}},
		"lost back":                 {[]uint32{1, 0, 0, 4}, Counts{Sent: 4, Lost: 2, LostBack: 2}},
		"both":                      {[]uint32{1, 0, 0, 0, 3}, Counts{Sent: 5, Lost: 3, LostThere: 2, LostBack: 1}},
		"silent since":              {[]uint32{1, 2, 0, 0}, Counts{Sent: 4, Lost: 2, Silent: 2}},
		"an outage that is over":    {[]uint32{1, 0, 3, 0, 0, 0, 0, 0, 4, 5, 0, 6}, Counts{Sent: 4, Lost: 1, LostThere: 1}},
		"one that is not":           {[]uint32{1, 0, 3, 0, 0, 0, 0, 0}, Counts{Sent: 8, Lost: 6, LostBack: 1, Silent: 5}},
		"never":                     {[]uint32{0, 0, 0}, Counts{Sent: 3, Lost: 3, Silent: 3}},
		"the peer forgot its count": {[]uint32{7, 0, 1, 2}, Counts{Sent: 4, Lost: 1, LostThere: 1}},
	} {
		var w window
		for i, n := range c.received {
			if seq := w.send(at(1000 * i)); seq != uint32(i) {
				t.Fatalf("%s: ping %d has the number %d", name, i, seq)
			}
			if n > 0 && !w.answer(uint32(i), n, at(1000*i+10)) {
				t.Errorf("%s: answer %d was not waited for", name, i)
			}
		}
		got := w.count(late)
		got.RTT, got.MaxRTT = 0, 0
		if got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

func TestAnswersNotWaitedFor(t *testing.T) {
	var w window
	w.send(at(0))
	if w.answer(1, 1, at(1)) || w.answer(60, 1, at(1)) || w.answer(0, 1, at(2001)) {
		t.Error("an answer to what was never sent, or a late one, counts")
	}
	if !w.answer(0, 1, at(2000)) || w.answer(0, 1, at(2000)) {
		t.Error("one answer to a ping counts, and one alone")
	}
	for i := 1; i <= windowLen; i++ {
		w.send(at(i))
	}
	if w.answer(0, 1, at(61)) {
		t.Error("an answer to a ping that is out of the window counts")
	}
	if c := w.count(at(50)); c.Sent != 0 || c.Lost != 0 {
		t.Errorf("pings under way count: %+v", c)
	}
	// The number goes round.
	w.next = 1<<32 - 2
	for i := range 4 {
		w.answer(w.send(at(10_000+i)), uint32(i+1), at(10_005+i))
	}
	if c := w.count(at(20_000)); c.Silent != 0 {
		t.Errorf("after the numbers went round: %+v", c)
	}
}

func TestRoundTrips(t *testing.T) {
	var w window
	for i, ms := range []int{5, 1, 30} {
		w.answer(w.send(at(1000*i)), uint32(i+1), at(1000*i+ms))
	}
	if c := w.count(at(9000)); c.RTT != 5*time.Millisecond || c.MaxRTT != 30*time.Millisecond {
		t.Errorf("median %s, longest %s", c.RTT, c.MaxRTT)
	}
}

// look tries lengths on a way that carries so much, until nothing more is to be
// learned, and returns how many pings it took.
func look(s *sizes, carries int) int {
	n := 0
	for ; s.searching(); n++ {
		s.size = s.try()
		if s.size <= carries {
			s.passed()
		} else {
			s.failed(true)
		}
		if n > 1000 {
			return n
		}
	}
	return n
}

func TestLengths(t *testing.T) {
	for _, carries := range []int{1500, 1499, 1450, 1280, 577, 576} {
		var s sizes
		s.aim(1500)
		n := look(&s, carries)
		if n > 40 {
			t.Errorf("%d: %d pings", carries, n)
		}
		got := s.carries()
		if carries == 1500 && got != 0 || carries < 1500 && (got > carries || got < carries-closeEnough) {
			t.Errorf("a way of %d: found %d", carries, got)
		}
		// It is mended.
		s.size = s.try()
		if s.passed(); s.size != 1500 || s.carries() != 0 || s.searching() {
			t.Errorf("%d: after a mend: %+v", carries, s)
		}
		// It gets worse.
		for range lossesInARow {
			s.size = s.try()
			s.failed(true)
		}
		look(&s, 700)
		if got := s.carries(); got > 700 || got < 700-closeEnough {
			t.Errorf("%d: then 700: %d", carries, got)
		}
		s.aim(1400)
		if s.carries() != 0 || !s.searching() {
			t.Errorf("another interface: %+v", s)
		}
	}
	// A way that is narrow gets narrower, and what is told meanwhile is no longer than
	// what was known.
	for _, now := range []int{1300, 600, 500} {
		var s sizes
		s.aim(1500)
		look(&s, 1400)
		for n := 0; ; n++ {
			if n > 100 {
				t.Fatalf("a way of 1400 that carries %d now: %+v", now, s)
			}
			if s.size = s.try(); s.size <= now {
				s.passed()
			} else {
				s.failed(true)
			}
			if s.carries() == 0 || s.carries() > 1400 {
				t.Fatalf("from 1400 to %d: %d is told: %+v", now, s.carries(), s)
			}
			if want := max(now, shortest4); s.carries() <= want && s.carries() >= want-closeEnough && !s.searching() {
				break
			}
		}
	}
	// A former process found it.
	for _, tt := range []struct{ found, want, carries, told, at int }{
		{1400, 1500, 1400, 1400, 1400}, // as it was
		{1400, 1500, 1300, 1400, 1300}, // narrower
		{1400, 1500, 1450, 1400, 1450}, // wider
		{1400, 1500, 1500, 1400, 0},    // mended
		{1400, 1400, 1400, 0, 0},       // the interface takes no more
	} {
		s := sizes{found: tt.found}
		if s.carries() != tt.found {
			t.Errorf("%+v: %d is told before anything was sent", tt, s.carries())
		}
		s.aim(tt.want)
		if s.carries() != tt.told {
			t.Errorf("%+v: %d is told at first", tt, s.carries())
		}
		look(&s, tt.carries)
		if got := s.carries(); got > tt.at || got < tt.at-closeEnough {
			t.Errorf("%+v: %d is found", tt, got)
		}
	}
	// Where short packets do not pass either, nothing is learned.
	var s sizes
	s.aim(1500)
	for range 10 {
		s.size = s.try()
		s.failed(false)
	}
	if s.bad != 0 {
		t.Errorf("a dead way was measured: %+v", s)
	}
}

func TestMessages(t *testing.T) {
	m := message{kind: kindAnswer, run: 1 << 60, seq: 7, received: 9}
	b := make([]byte, 100)
	b[50] = 1
	m.put(b)
	if got, v := parse(b); got != m || v != sound {
		t.Errorf("got %+v, %d", got, v)
	}
	for i := range b {
		c := append([]byte{}, b...)
		c[i] ^= 4
		want := damaged
		if i < 5 {
			want = foreign
		}
		if _, v := parse(c); v != want {
			t.Errorf("byte %d changed: %d, want %d", i, v, want)
		}
	}
	for n := range headerLen {
		if _, v := parse(b[:n]); v != foreign {
			t.Errorf("%d bytes: %d", n, v)
		}
	}
	if _, v := parse(b[:99]); v != damaged {
		t.Errorf("cut off: %d", v)
	}
}

func FuzzParse(f *testing.F) {
	b := make([]byte, headerLen)
	message{kind: kindPing, run: 2, seq: 3}.put(b)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, v := parse(b)
		if v != sound {
			return
		}
		again := append([]byte{}, b...)
		m.put(again)
		if got, v := parse(again); v != sound || got != m {
			t.Errorf("%+v, then %+v (%d)", m, got, v)
		}
	})
}

// The bug: one damaged packet was counted for as long as clusterd ran, and the way was
// never well again.
func TestDamageEnds(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	from := netip.MustParseAddr("10.42.2.1")
	o := &peer{}
	p := &Prober{peers: map[netip.Addr]*peer{from: o}}
	b := make([]byte, 100)
	message{kind: kindPing, run: 2, seq: 1}.put(b)
	b[50] ^= 1
	for i, want := range []int{1, 2, 3} {
		p.take(b, from, at.Add(time.Duration(i)*3*time.Minute))
		if got := o.damaged.sum(at.Add(time.Duration(i) * 3 * time.Minute)); got != want {
			t.Errorf("%d damaged packets count as %d", want, got)
		}
	}
	for after, want := range map[time.Duration]int{9 * time.Minute: 3, 11 * time.Minute: 2, 14 * time.Minute: 1, 17 * time.Minute: 0, time.Hour: 0} {
		if got := o.damaged.sum(at.Add(after)); got != want {
			t.Errorf("after %s there are %d, want %d", after, got, want)
		}
	}
}
