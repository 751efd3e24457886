package slack

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestAlign(t *testing.T) {
	at := func(ms int64) time.Time { return time.UnixMilli(1_000_000_000_000 + ms) }
	for _, c := range []struct{ nowMS, d, grid, want int64 }{
		{0, 1000, 1000, 1000},
		{1, 1000, 1000, 999},
		{499, 1000, 1000, 501},
		{500, 1000, 1000, 1500},
		{999, 1000, 1000, 1001},
		{250, 750, 1000, 750}, // a grid wider than d is the caller's to narrow
		{900, 1250, 1000, 1100},
		{300, 15000, 1000, 14700},
		{0, 700, 0, 700},
	} {
		got := align(at(c.nowMS), time.Duration(c.d)*time.Millisecond, time.Duration(c.grid)*time.Millisecond).Milliseconds()
		if got != c.want {
			t.Errorf("at %d ms, %d ms on a grid of %d: %d ms, want %d", c.nowMS, c.d, c.grid, got, c.want)
		}
	}
}

func TestAlignIsMovedByShift(t *testing.T) {
	Shift(300 * time.Millisecond)
	defer Shift(0)
	if got := align(time.Unix(1_000_000_000, 0), time.Second, time.Second); got != 1300*time.Millisecond {
		t.Errorf("%v until the next second after its first 300 ms", got)
	}
}

// Tickers of one period that begin at different times tick at the same moments, and
// those of its multiples at some of them.
func TestTickersMeet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first := NewTicker(time.Second)
		defer first.Stop()
		time.Sleep(130 * time.Millisecond)
		second := NewTicker(time.Second)
		defer second.Stop()
		time.Sleep(270 * time.Millisecond)
		slow := NewTicker(5 * time.Second)
		defer slow.Stop()
		for i := range 12 {
			a, b := <-first.C, <-second.C
			if !a.Equal(b) {
				t.Fatalf("tick %d: %v and %v", i, a, b)
			}
			select {
			case c := <-slow.C:
				if !c.Equal(a) || c.Unix()%5 != 0 {
					t.Fatalf("%v is no multiple of 5 s", c)
				}
			default:
				if a.Unix()%5 == 0 {
					synctest.Wait()
					if c := <-slow.C; !c.Equal(a) {
						t.Fatalf("the slow one ticks at %v, not at %v", c, a)
					}
				}
			}
		}
	})
}

func TestTickerStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tick := NewTicker(time.Second)
		<-tick.C
		tick.Stop()
		time.Sleep(time.Minute)
		select {
		case at := <-tick.C:
			t.Errorf("a stopped ticker ticks at %v", at)
		default:
		}
	})
}

// A receiver that was away finds one tick, as with time.Ticker, and the next at its
// moment.
func TestTickerDropsTicks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tick := NewTicker(time.Second)
		defer tick.Stop()
		time.Sleep(10*time.Second + 100*time.Millisecond)
		<-tick.C
		began := time.Now()
		<-tick.C
		if waited := time.Since(began); waited != 900*time.Millisecond {
			t.Errorf("the next tick came after %v", waited)
		}
	})
}

func TestAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(200 * time.Millisecond)
		began := time.Now()
		<-After(2 * time.Second)
		if waited := time.Since(began); waited != 1800*time.Millisecond {
			t.Errorf("waited %v", waited)
		}
	})
}
