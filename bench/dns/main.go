// Command dns measures agent/dns beside CoreDNS: both follow the same API server with
// the same Services, and answer the same questions of the same client. It prints one
// JSON object per side and case: the median round. Times hold for the machine they
// were taken on; compare figures of one run.
//
//	make bench-dns
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/clusterd/clusterd/bench/internal/proc"
)

// figure is one line of output. Keys follow HOUSE.md, section 7.
type figure struct {
	Bench    string `json:"bench"`
	Case     string `json:"case"`
	Side     string `json:"side"`
	Services int    `json:"services"`
	Clients  int    `json:"clients"` // sockets
	// Offered is how many questions a second were sent, whatever came back; 0: each
	// answer brought the next question.
	Offered float64 `json:"offered_per_s,omitempty"`
	Window  int     `json:"under_way,omitempty"` // questions, without Offered
	PerS    float64 `json:"per_s"`
	Lost    int     `json:"lost"`
	// P50, P99 and P999 are from when a question was due until the kernel had the answer
	// for the client: what holds up the sender counts as if the question had waited.
	P50  float64 `json:"p50_ms"`
	P99  float64 `json:"p99_ms"`
	P999 float64 `json:"p999_ms"`
	// ServerP99 is from when it was sent: the server's share, and the kernel's.
	ServerP50 float64 `json:"server_p50_ms,omitempty"`
	ServerP99 float64 `json:"server_p99_ms,omitempty"`
	// CPU is processor time of the server and of the client, an answer.
	CPU       float64 `json:"cpu_us"`
	ClientCPU float64 `json:"client_cpu_us"`
	// Others is what all other processes of the machine took meanwhile, of all
	// processors.
	Others  float64 `json:"others_cpu_pct"`
	RSS     float64 `json:"rss_mib"`
	Anon    float64 `json:"anonymous_mib"` // of it what is no page of a file
	Rounds  int     `json:"rounds"`
	Machine string  `json:"machine"`
}

// goal compares a value with what was set as its goal.
type goal struct {
	Bench string  `json:"bench"`
	Goal  string  `json:"goal"`
	Value float64 `json:"value"`
	Met   bool    `json:"met"`
}

type options struct {
	server   string
	coredns  string
	services int
	rates    []float64
	length   time.Duration
	rounds   int
}

func main() {
	o := options{}
	flag.StringVar(&o.server, "server", "../bin/bench-dns-server", "agent/dns as a program (bench/dns/server)")
	flag.StringVar(&o.coredns, "coredns", "../bin/peers/coredns", "CoreDNS (hack/peers/coredns); empty: without")
	flag.IntVar(&o.services, "services", 10_000, "Services in the cluster, each with a slice of two endpoints")
	rates := flag.String("rates", "10000,50000", "questions a second that are offered")
	flag.DurationVar(&o.length, "for", 5*time.Second, "how long each case takes")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds of all cases, the sides one after the other in each; the median counts")
	api := flag.Int("api", 0, "be the API server, at this port")
	flag.Parse()
	for _, r := range strings.Split(*rates, ",") {
		rate, err := strconv.ParseFloat(r, 64)
		if err != nil || rate <= 0 {
			fmt.Fprintf(os.Stderr, "bench dns: -rates %q: questions a second are required, such as 10000,50000\n", *rates)
			os.Exit(2)
		}
		o.rates = append(o.rates, rate)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	switch {
	case *api != 0:
		err = serveAPI(ctx, *api)
	default:
		err = run(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench dns:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	outside, err := newOutside()
	if err != nil {
		return err
	}
	defer outside.close()
	cluster, err := startAPI(ctx, o.services)
	if err != nil {
		return err
	}
	defer cluster.end()
	sides, err := startSides(ctx, o, cluster.url, outside.addr)
	if err != nil {
		return err
	}
	defer func() {
		for _, s := range sides {
			s.end()
		}
	}()
	for _, s := range sides { // all answers from outside are remembered from here on
		if err := ask(s.addr, remembered, 30*time.Second); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	figures := map[string][]figure{}
	var order []string
	for range o.rounds {
		for _, c := range cases(o) {
			for _, s := range sides {
				for _, each := range sides {
					if err := each.settle(ctx); err != nil {
						return err
					}
				}
				f, err := c.measure(ctx, s)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", c.name, s.name, err)
				}
				f.Services, f.Rounds = o.services, o.rounds
				k := fmt.Sprint(f.Case, f.Side, f.Offered, f.Window)
				if figures[k] == nil {
					order = append(order, k)
				}
				figures[k] = append(figures[k], f)
			}
		}
	}
	var goals []goal
	out := json.NewEncoder(os.Stdout)
	for _, k := range order {
		rounds := figures[k]
		slices.SortFunc(rounds, func(a, b figure) int {
			if a.Offered > 0 {
				return cmp.Compare(a.P99, b.P99)
			}
			return cmp.Compare(b.PerS, a.PerS)
		})
		f := rounds[len(rounds)/2]
		if err := out.Encode(f); err != nil {
			return err
		}
		switch {
		case f.Side != ours:
		case f.Case == "remembered name" && f.Offered == 0 && f.Window > 1:
			goals = append(goals, goal{"dns", "50 000 answers a second of remembered names", f.PerS, f.PerS >= 50_000})
		case f.Case == "cluster name" && f.Offered == 50_000:
			goals = append(goals, goal{"dns", "p99 of a cluster name at 50 000 a second, ms: at most 1", f.P99, f.P99 <= 1 && f.Lost == 0})
		}
	}
	for _, g := range goals {
		if err := out.Encode(g); err != nil {
			return err
		}
	}
	return nil
}

// benchCase is a kind of question, and how it is asked.
type benchCase struct {
	name    string
	names   []string
	offered float64 // 0: window questions are under way all the time
	window  int
	length  time.Duration
}

func cases(o options) []benchCase {
	var list []benchCase
	for _, c := range []benchCase{
		{name: "remembered name", names: remembered},
		{name: "cluster name", names: serviceNames(o.services)},
		// What a resolver with ndots:5 asks before it asks for the name itself.
		{name: "search domain", names: searched},
	} {
		c.length = o.length
		for _, window := range []int{64, 1} {
			c.window = window
			list = append(list, c)
		}
		c.window = 0
		for _, r := range o.rates {
			c.offered = r
			list = append(list, c)
		}
	}
	return list
}

func (c benchCase) measure(ctx context.Context, s *side) (figure, error) {
	f := figure{Bench: "dns", Case: c.name, Side: s.name, Clients: flows, Offered: c.offered, Window: c.window, Machine: machine()}
	runtime.GC()
	before, err := proc.One(s.pid())
	if err != nil {
		return f, err
	}
	began, busy, own := time.Now(), busyTime(), ownTime()
	var r result
	if c.offered > 0 {
		r, err = offer(ctx, s.addr, c.names, c.offered, c.length)
	} else {
		f.Clients = min(flows, c.window)
		r, err = saturate(ctx, s.addr, c.names, c.window, c.length)
	}
	if err != nil {
		return f, err
	}
	if len(r.took) == 0 {
		return f, errors.New("there is no answer")
	}
	whole := time.Since(began)
	busy, own = busyTime()-busy, ownTime()-own
	after, err := proc.One(s.pid())
	if err != nil {
		return f, err
	}
	spent := after.CPU - before.CPU
	f.PerS, f.Lost = math.Round(float64(len(r.took))/r.length.Seconds()), r.sent-len(r.took)
	f.P50, f.P99, f.P999 = quantile(r.took, 0.5), quantile(r.took, 0.99), quantile(r.took, 0.999)
	if len(r.server) > 0 {
		f.ServerP50, f.ServerP99 = quantile(r.server, 0.5), quantile(r.server, 0.99)
	}
	f.CPU = round(float64(spent.Microseconds()) / float64(len(r.took)))
	f.ClientCPU = round(float64(own.Microseconds()) / float64(len(r.took)))
	f.Others = round(100 * max(0, (busy-own-spent).Seconds()) / whole.Seconds() / float64(runtime.NumCPU()))
	f.RSS, f.Anon = round(after.RSS/(1<<20)), round((after.RSS-after.File)/(1<<20))
	return f, nil
}

// quantile sorts times and is in milliseconds.
func quantile(times []time.Duration, q float64) float64 {
	if len(times) == 0 {
		return 0
	}
	slices.Sort(times)
	return round(float64(times[min(len(times)-1, int(q*float64(len(times))))].Nanoseconds()) / 1e6)
}

func round(x float64) float64 { return math.Round(x*1000) / 1000 }
