// Package pressure keeps a node alive when memory, disk or process numbers run
// short: it decides when the node is under pressure, which pod has to go, and
// drives what can be reclaimed without that. Decisions are pure functions; the
// loop around them asks and acts through its Config.
package pressure

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Signal names a quantity of the node that can run short.
type Signal string

// The signals, under the names that Kubernetes gives them.
const (
	MemoryAvailable  Signal = "memory.available"
	NodefsAvailable  Signal = "nodefs.available"
	NodefsInodesFree Signal = "nodefs.inodesFree"
	ImagefsAvailable Signal = "imagefs.available"
	PidAvailable     Signal = "pid.available"
)

// order is that of urgency: memory first, for it runs out fastest.
var order = []Signal{MemoryAvailable, NodefsAvailable, NodefsInodesFree, ImagefsAvailable, PidAvailable}

// condition is what a node with a signal below its threshold is under.
func (s Signal) condition() v1.NodeConditionType {
	switch s {
	case MemoryAvailable:
		return v1.NodeMemoryPressure
	case PidAvailable:
		return v1.NodePIDPressure
	}
	return v1.NodeDiskPressure
}

// resource is the word that an evicted pod's message names.
func (s Signal) resource() string {
	switch s {
	case MemoryAvailable:
		return "memory"
	case PidAvailable:
		return "pids"
	case NodefsInodesFree:
		return "inodes"
	}
	return "ephemeral-storage"
}

// Threshold is a limit below which a signal is pressure.
type Threshold struct {
	Signal   Signal
	Quantity int64   // bytes, inodes or process numbers; 0: Percent counts
	Percent  float64 // of the signal's capacity
	// Grace is how long the signal has to stay below before it counts; 0: a
	// hard threshold.
	Grace time.Duration
}

// limit is the threshold as a number.
func (t Threshold) limit(capacity int64) int64 {
	if t.Quantity > 0 {
		return t.Quantity
	}
	return int64(float64(capacity) * t.Percent / 100)
}

// Parse reads thresholds such as "memory.available<100Mi,nodefs.available<10%".
func Parse(s string) ([]Threshold, error) {
	var out []Threshold
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		name, value, ok := strings.Cut(part, "<")
		t := Threshold{Signal: Signal(strings.TrimSpace(name))}
		if value = strings.TrimSpace(value); !ok || value == "" {
			return nil, fmt.Errorf("%q: write it as signal<quantity, such as memory.available<100Mi", part)
		}
		if !slices.Contains(order, t.Signal) {
			return nil, fmt.Errorf("%q: unknown signal %q: there are %s", part, t.Signal, words(order))
		}
		if slices.ContainsFunc(out, func(o Threshold) bool { return o.Signal == t.Signal }) {
			return nil, fmt.Errorf("%q: %s is given twice", part, t.Signal)
		}
		if number, percent := strings.CutSuffix(value, "%"); percent {
			p, err := strconv.ParseFloat(number, 64)
			if err != nil || p < 0 || p > 100 {
				return nil, fmt.Errorf("%q: %q is no percentage between 0%% and 100%%", part, value)
			}
			t.Percent = p
		} else {
			q, err := resource.ParseQuantity(value)
			if err != nil || q.Sign() < 0 {
				return nil, fmt.Errorf("%q: %q is no quantity such as 100Mi or 10%%", part, value)
			}
			t.Quantity = q.Value()
		}
		out = append(out, t)
	}
	return out, nil
}

// ParseSoft reads soft thresholds and their grace periods, such as
// "memory.available=90s": every one needs a time, and every time a threshold.
func ParseSoft(thresholds, grace string) ([]Threshold, error) {
	out, err := Parse(thresholds)
	if err != nil {
		return nil, err
	}
	for part := range strings.SplitSeq(grace, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		name, value, _ := strings.Cut(part, "=")
		i := slices.IndexFunc(out, func(t Threshold) bool { return t.Signal == Signal(strings.TrimSpace(name)) })
		if i < 0 {
			return nil, fmt.Errorf("grace period %q: there is no soft threshold of %s", part, name)
		}
		d, err := time.ParseDuration(strings.TrimSpace(value))
		if err != nil || d <= 0 {
			return nil, fmt.Errorf("grace period %q: write it as signal=duration, such as memory.available=90s", part)
		}
		out[i].Grace = d
	}
	for _, t := range out {
		if t.Grace == 0 {
			return nil, fmt.Errorf("soft threshold of %s has no grace period: give one, such as %s=90s", t.Signal, t.Signal)
		}
	}
	return out, nil
}

func words(signals []Signal) string {
	var out []string
	for _, s := range signals {
		out = append(out, string(s))
	}
	return strings.Join(out, ", ")
}
