package main

import (
	"testing"
	"time"
)

func TestRequests(t *testing.T) {
	r := &requests{began: time.Now()}
	r.counts = make([]int, 40)
	r.counts[0] = 100 // before
	for i := 12; i < 24; i++ {
		r.counts[i] = i
	}
	sum, peak := r.since(r.began.Add(time.Second))
	if sum != (12+23)*6 || peak != (14+23)*5 {
		t.Errorf("%d in all, %d in the busiest second", sum, peak)
	}
}

func TestContact(t *testing.T) {
	c := newContact(newRequests())
	a, b := &watched{of: c}, &watched{of: c}
	c.watches[a], c.watches[b] = "n1", "n2"
	if open, there := c.count("n1"); open != 2 || there != 1 {
		t.Error(open, there)
	}
	a.gone()
	a.gone()
	if open, there := c.count("n1"); open != 1 || there != 0 {
		t.Error(open, there)
	}
}

func TestAddresses(t *testing.T) {
	for number, want := range map[int][2]string{0: {"10.86.16.1", "10.192.0.2"}, 999: {"10.86.19.232", "10.195.231.2"}} {
		if addrOf(number).String() != want[0] || podAddr(number).String() != want[1] {
			t.Error(number, addrOf(number), podAddr(number))
		}
		if !machines.Contains(addrOf(number)) || !podRange.Contains(podAddr(number)) {
			t.Error(number)
		}
	}
}
