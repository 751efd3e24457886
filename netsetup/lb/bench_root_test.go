package lb

import (
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
)

// cpu is what this process and its system calls have taken of the processors.
func cpu() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestRootFigures measures, with `make bench-net`: a line of JSON each.
func TestRootFigures(t *testing.T) {
	if os.Getenv("CLUSTERD_BENCH") == "" {
		t.Skip("a benchmark: make bench-net")
	}
	w := newWorld(t)
	connect := func(to string) time.Duration {
		const times = 400
		var took time.Duration
		if err := netns.Do(w.client.Path, func() error {
			for range times {
				start := time.Now()
				c, err := net.Dial("tcp", to)
				if err != nil {
					return err
				}
				took += time.Since(start)
				_ = c.Close()
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return took / times
	}
	f := front(tcp, "10.43.0.1:80")
	w.update(f, &Backend{Endpoints: ends("10.42.1.2:80")})
	line := func(what string, services int, value time.Duration) {
		fmt.Printf(`{"bench":"net","what":%q,"services":%d,"endpoints":10,"us":%.1f}`+"\n", what, services, float64(value.Nanoseconds())/1e3)
	}
	for _, n := range []int{10, 1000, 10000} {
		many := manyFrontends(n, 10)
		start := time.Now()
		if err := w.lb.Update(many); err != nil {
			t.Fatal(err)
		}
		line("all set, elapsed", n, time.Since(start))
		connect("10.42.1.2:80") // warm
		line("TCP connection to the endpoint itself", n, connect("10.42.1.2:80"))
		line("TCP connection to the frontend", n, connect("10.43.0.1:80"))
		var one Frontend
		for one = range many {
			break
		}
		full := many[one].Endpoints
		const changes = 200
		before, start := cpu(), time.Now()
		for i := range changes {
			b := Backend{Endpoints: full}
			if i%2 == 0 {
				b.Endpoints = append(append([]Endpoint{}, full[:4]...), full[5:]...)
			}
			w.update(one, &b)
		}
		line("change of one endpoint, processor time", n, (cpu()-before)/changes)
		line("change of one endpoint, elapsed", n, time.Since(start)/changes)
	}
}
