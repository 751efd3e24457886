package main

import (
	"math"
	"slices"
)

// figure is one line of output. Keys follow HOUSE.md, section 7; ratios are
// ours ÷ the peer's.
type figure struct {
	Bench   string  `json:"bench"`
	Case    string  `json:"case"`
	Nodes   int     `json:"nodes"`
	Clients int     `json:"clients,omitempty"`
	Size    int     `json:"size,omitempty"`
	Note    string  `json:"note,omitempty"`
	PerS    float64 `json:"per_s,omitempty"`
	P50     float64 `json:"p50_ms,omitempty"`
	P99     float64 `json:"p99_ms,omitempty"`
	RSS     float64 `json:"rss_mib,omitempty"` // of a member
	PSS     float64 `json:"pss_mib,omitempty"`
	Written float64 `json:"written_bytes,omitempty"` // to disk by a member: for one write, or in one idle hour
	Wakeups float64 `json:"wakeups_per_s,omitempty"` // of a member

	Peer        string  `json:"peer,omitempty"`
	PeerPerS    float64 `json:"peer_per_s,omitempty"`
	PeerP50     float64 `json:"peer_p50_ms,omitempty"`
	PeerP99     float64 `json:"peer_p99_ms,omitempty"`
	PeerRSS     float64 `json:"peer_rss_mib,omitempty"`
	PeerPSS     float64 `json:"peer_pss_mib,omitempty"`
	PeerWritten float64 `json:"peer_written_bytes,omitempty"`
	PeerWakeups float64 `json:"peer_wakeups_per_s,omitempty"`
	RatioPerS   float64 `json:"ratio_per_s,omitempty"`
	RatioP50    float64 `json:"ratio_p50,omitempty"`
	RatioP99    float64 `json:"ratio_p99,omitempty"`
	RatioRSS    float64 `json:"ratio_rss,omitempty"`
	RatioPSS    float64 `json:"ratio_pss,omitempty"`
}

// sample is what one round measured on one side.
type sample struct {
	Times
	usage
	perWrite float64 // bytes a member wrote to disk for one write
	perHour  float64 // … in an idle hour
	perS     float64 // wake-ups of a member a second
}

// report prints the medians of the rounds of a case: ours, and the peer's if
// there are any.
func (b *bench) report(f figure, rounds [][]sample) (figure, error) {
	f.Bench, f.Nodes = "store", nodes
	med := func(side int, of func(*sample) float64) float64 {
		var xs []float64
		for i := range rounds {
			if side < len(rounds[i]) {
				xs = append(xs, of(&rounds[i][side]))
			}
		}
		return median(xs)
	}
	ratio := func(of func(*sample) float64) (ours, peer, ratio float64) {
		ours, peer = round(med(0, of)), round(med(1, of))
		if peer != 0 {
			ratio = round(ours / peer)
		}
		return ours, peer, ratio
	}
	if b.peer != "" && len(rounds) > 0 && len(rounds[0]) > 1 {
		f.Peer = b.peer
	}
	f.PerS, f.PeerPerS, f.RatioPerS = ratio(func(s *sample) float64 { return s.PerS })
	f.P50, f.PeerP50, f.RatioP50 = ratio(func(s *sample) float64 { return s.P50 })
	f.P99, f.PeerP99, f.RatioP99 = ratio(func(s *sample) float64 { return s.P99 })
	f.RSS, f.PeerRSS, f.RatioRSS = ratio(func(s *sample) float64 { return s.rss })
	f.PSS, f.PeerPSS, f.RatioPSS = ratio(func(s *sample) float64 { return s.pss })
	f.Written, f.PeerWritten, _ = ratio(func(s *sample) float64 { return s.perWrite + s.perHour })
	f.Wakeups, f.PeerWakeups, _ = ratio(func(s *sample) float64 { return s.perS })
	return f, b.out.Encode(f)
}

func median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	slices.Sort(xs)
	return xs[len(xs)/2]
}

// round keeps three decimals.
func round(x float64) float64 { return math.Round(x*1000) / 1000 }

// goal is one line that compares a value with what was set as its goal.
type goal struct {
	Bench string  `json:"bench"`
	Goal  string  `json:"goal"`
	Value float64 `json:"value"`
	Met   bool    `json:"met"`
}

// atLeast and atMost note how a goal was met. Without a peer the value of a
// ratio is 0, and there is nothing to note.
func (b *bench) atLeast(what string, want, value float64) {
	if value != 0 {
		b.goals = append(b.goals, goal{"store", what, value, value >= want})
	}
}

func (b *bench) atMost(what string, want, value float64) {
	if value != 0 {
		b.goals = append(b.goals, goal{"store", what, value, value <= want})
	}
}
