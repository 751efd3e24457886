package pathprobe

import (
	"slices"
	"time"
)

// windowLen is how many pings a window remembers.
const windowLen = 60

// outage is how many in a row without an answer end what is counted: when they
// are answered again, it was an outage and is over, and says nothing of the way
// as it is now.
const outage = 5

// answerTimeout is how long an answer may take.
const answerTimeout = 2 * time.Second

// ping is one that was sent.
type ping struct {
	seq      uint32
	sent     time.Time
	answered bool
	rtt      time.Duration
	received uint32 // of the answer: pings of the run that had come to the peer
}

// window is the last pings of one run to one peer. Pure: times come from outside.
type window struct {
	pings [windowLen]ping // by seq modulo their number
	next  uint32
}

// send notes a ping and returns its number.
func (w *window) send(now time.Time) uint32 {
	seq := w.next
	w.next++
	w.pings[seq%windowLen] = ping{seq: seq, sent: now}
	return seq
}

// answer notes one, and reports whether it was waited for. A late one counts as
// lost: a way that takes so long is none.
func (w *window) answer(seq, received uint32, now time.Time) bool {
	p := &w.pings[seq%windowLen]
	if seq >= w.next || p.seq != seq || p.answered || now.Sub(p.sent) > answerTimeout {
		return false
	}
	p.answered, p.rtt, p.received = true, now.Sub(p.sent), received
	return true
}

// Counts of the last pings.
type Counts struct {
	// Sent are those whose answer came or is overdue, since the last outage.
	Sent, Lost int
	// LostThere never came to the peer; of LostBack the answer was lost. They are
	// known when a later ping is answered: together at most Lost.
	LostThere, LostBack int
	// Silent are the last ones in a row without an answer.
	Silent int
	// RTT is the median round trip of those answered, MaxRTT the longest.
	RTT, MaxRTT time.Duration
}

// count sums the window up.
func (w *window) count(now time.Time) Counts {
	var c Counts
	var trips []time.Duration
	var before *ping // the last one answered
	for seq := w.next - min(w.next, windowLen); seq != w.next; seq++ {
		p := &w.pings[seq%windowLen]
		if !p.answered {
			if now.Sub(p.sent) > answerTimeout {
				c.Sent++
				c.Lost++
				c.Silent++
			}
			continue
		}
		if c.Silent >= outage {
			c, before, trips = Counts{}, nil, nil
		}
		c.Sent++
		c.Silent = 0
		trips = append(trips, p.rtt)
		if before != nil {
			missed := int(p.seq - before.seq - 1)
			back := max(0, min(int(int32(p.received-before.received))-1, missed))
			c.LostBack += back
			c.LostThere += missed - back
		}
		before = p
	}
	if len(trips) > 0 {
		slices.Sort(trips)
		c.RTT, c.MaxRTT = trips[len(trips)/2], trips[len(trips)-1]
	}
	return c
}

// recent counts what happened in the last recentFor minutes. Times come from outside.
type recent [recentFor]struct {
	minute int64 // since 1970
	count  int
}

// recentFor is how many minutes count. What comes seldom, as by a card that damages a
// packet now and then, is seen once in some minutes.
const recentFor = 10

func (r *recent) add(now time.Time) {
	minute := now.Unix() / 60
	b := &r[minute%recentFor]
	if b.minute != minute {
		b.minute, b.count = minute, 0
	}
	b.count++
}

func (r *recent) sum(now time.Time) (n int) {
	minute := now.Unix() / 60
	for _, b := range r {
		if age := minute - b.minute; age >= 0 && age < recentFor {
			n += b.count
		}
	}
	return n
}

// sizes looks for the longest packet that gets through. Pure.
//
// It tries the kernel's MTU of the path. Three losses in a row, while
// short packets get through, make it one that does not pass; then it halves the
// distance to one that does.
type sizes struct {
	want int // by the kernel, in bytes with the IP header
	good int // the longest that came back since want is what it is; 0: none yet
	bad  int // the shortest that does not pass; 0: none known
	// found is what was last found, by this process or a former one, less than want;
	// 0: nothing. It holds until something else is found.
	found int
	// check: the length that is known to pass is tried next, as the way may have got
	// narrower, in place of the one that does not.
	check bool
	lost  int // in a row, at the length tried now
	seq   uint32
	sent  time.Time // of the ping under way; zero: none
	size  int       // its length
	last  time.Time // when the last one was sent
}

// lossesInARow make a length one that does not pass.
const lossesInARow = 3

// closeEnough is how near good and bad come to each other.
const closeEnough = 4

// aim sets the kernel's MTU of the path.
func (s *sizes) aim(want int) {
	if want == s.want {
		return
	}
	found := s.found
	if s.want != 0 || found >= want { // another interface than it was found with
		found = 0
	}
	*s = sizes{want: want, found: found}
}

// searching reports whether more is to be learned soon.
func (s *sizes) searching() bool {
	return s.want > 0 && (s.good < s.want && s.bad == 0 || s.bad > 0 && !s.settled() || s.check && s.lost > 0)
}

// settled reports whether it is known what the way carries, and that this is less
// than want.
func (s *sizes) settled() bool { return s.bad > 0 && s.bad-s.least() <= closeEnough }

// shortest4 is what each path carries at least (RFC 791; IPv6 has 1280, RFC 8200).
const shortest4 = 576

func (s *sizes) least() int { return max(s.good, min(shortest4, s.want)) }

// try is the length to try next.
func (s *sizes) try() int {
	switch {
	case s.settled() && s.check && s.good > 0:
		return s.good
	case s.bad == 0 || s.settled():
		return s.want // the first time, and now and then: the way may have been mended
	case s.good < s.found && s.found < s.bad:
		return s.found
	}
	return (s.least() + s.bad) / 2
}

// passed notes that a packet of the length under way came back.
func (s *sizes) passed() {
	s.lost, s.sent, s.check = 0, time.Time{}, false
	if s.size >= s.bad {
		s.bad = 0
	}
	s.good = max(s.good, s.size)
	s.note()
}

// note keeps what was found.
func (s *sizes) note() {
	switch {
	case s.settled():
		s.found = s.least()
	case s.good >= s.want:
		s.found = 0
	}
}

// failed notes that it did not. short says whether short packets pass: where
// they don't, nothing is learned.
func (s *sizes) failed(short bool) {
	s.sent = time.Time{}
	if !short {
		s.lost = 0
		return
	}
	if s.settled() && s.size >= s.bad { // as was known
		s.lost, s.check = 0, true
		return
	}
	if s.lost++; s.lost < lossesInARow {
		return
	}
	s.lost, s.check = 0, false
	if s.good >= s.size { // it passed once, and does not any more
		s.good = 0
	}
	if s.bad == 0 || s.size < s.bad {
		s.bad = s.size
	}
	s.note()
}

// carries is the longest length known to pass, or 0 while it is not known that
// want does not pass. While a way is measured again it is what was found before, or,
// where that does not pass any more, what is known to.
func (s *sizes) carries() int {
	if s.found > 0 && s.bad > 0 && s.found >= s.bad {
		return s.least()
	}
	return s.found
}
