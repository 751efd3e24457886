package raftstore_test

import (
	"flag"
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

var (
	calmFor  = flag.Duration("calm", 0, "how long TestCalm looks for needless elections on busy processors; 0: for some seconds, a few times")
	calmLoad = flag.Int("calm-load", 20, "how many processes want a processor all that while; without -calm: 2")
)

// TestCalm: a busy machine deposes no leader. Three members in processes of
// their own, with the default timeouts, serve clients beside processes that
// take all the processors they can get. With -calm not one election may happen in
// that time. Without it the machine may be busier than the timeouts allow for:
// then one quiet try of some is enough.
func TestCalm(t *testing.T) {
	tries, window, load := 30, 4*time.Second, 2
	if *calmFor != 0 {
		tries, window, load = 1, *calmFor, *calmLoad
	}
	p := startProcesses(t)
	for range load {
		burn := exec.Command("sh", "-c", "while :; do :; done")
		burn.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := burn.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = burn.Process.Kill()
			_ = burn.Wait()
		})
	}
	least, round := uint64(1<<63), 0
	for range tries {
		began := p.term()
		for end := time.Now().Add(window); time.Now().Before(end); round++ {
			h := startHistoryOf(t, uint64(round), fmt.Sprintf("/calm/%d/", round), p.try)
			for over := time.Now().Add(min(chaosRound, time.Until(end))); time.Now().Before(over); {
				h.more(20)
			}
			h.check()
		}
		if elections := p.term() - began; elections < least {
			least = elections
		}
		if least == 0 {
			break
		}
	}
	if least != 0 {
		t.Errorf("at least %d elections in each of %d times %v beside %d busy processes", least, tries, window, load)
	}
}

// term is the latest that any member knows.
func (p *processes) term() (term uint64) {
	p.t.Helper()
	p.leader("")
	for _, id := range p.ids {
		if st, err := p.status(id); err == nil {
			term = max(term, st.Term)
		}
	}
	return term
}
