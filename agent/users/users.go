// Package users decides which user and group ids of the host are a pod's: each
// pod with a user namespace (user_namespaces(7), KEP-127) has 65536 of them for
// itself, which it knows as 0 to 65535. What the pod does on the machine, it
// does as these; none is another pod's or a person's.
//
// It keeps nothing on disk: podmon's record of a sandbox says what its pod has,
// and files on volumes and root file systems have the owners that the pod sees
// (mounts are id-mapped), whatever the range was.
package users

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Count is how many ids each pod has.
const Count = 1 << 16

// Range are the ids First to First+Count-1 of the host; the zero Range is none.
type Range struct{ First, Count uint32 }

func (r Range) end() uint64 { return uint64(r.First) + uint64(r.Count) }

func (r Range) overlaps(o Range) bool {
	return uint64(r.First) < o.end() && uint64(o.First) < r.end()
}

func (r Range) String() string { return fmt.Sprintf("%d-%d", r.First, r.end()-1) }

// DefaultIDRange is where ranges are taken from by default: from the first id
// above the host's own up to the last that programs with signed ids can name.
var DefaultIDRange = Range{First: Count, Count: math.MaxInt32 + 1 - Count}

// ParseIDRange reads FIRST-LAST.
func ParseIDRange(s string) (Range, error) {
	from, to, _ := strings.Cut(s, "-")
	first, err1 := strconv.ParseUint(from, 10, 32)
	last, err2 := strconv.ParseUint(to, 10, 32)
	switch {
	case err1 != nil || err2 != nil || last == math.MaxUint32:
		return Range{}, fmt.Errorf("%q: write it as FIRST-LAST, two ids below 4294967295, such as %s", s, DefaultIDRange)
	case first < Count:
		return Range{}, fmt.Errorf("%q: ids below %d are the host's own", s, Count)
	case last < first+Count-1:
		return Range{}, fmt.Errorf("%q: one pod alone needs %d ids", s, Count)
	}
	return Range{First: uint32(first), Count: uint32(last - first + 1)}, nil
}

// ErrFull is returned by Take when every range of the area is taken.
var ErrFull = errors.New("no range of ids is free for the pod's user namespace")

// Config of Ranges.
type Config struct {
	Area Range // where ranges are taken from; required
	// Granted are ids that pods must not have; see Granted.
	Granted []Range
	// Probe says why the node cannot give a pod a user namespace, nil: it can.
	Probe func() error
}

// Ranges knows which pod has which ids. Its methods may be called concurrently.
type Ranges struct {
	cfg Config

	probing sync.Mutex // guards the next two; held while Probe runs
	fault   error
	probed  time.Time

	mu   sync.Mutex       // guards held
	held map[string]Range // pod UID → its ids
}

// New holds no range yet.
func New(cfg Config) *Ranges { return &Ranges{cfg: cfg, held: map[string]Range{}} }

// probeAgain is how long a fault is believed; what works is not asked again.
const probeAgain = time.Minute

// Supported says why the node cannot give a pod a user namespace, nil: it can.
// It may take some milliseconds.
func (r *Ranges) Supported() error {
	r.probing.Lock()
	defer r.probing.Unlock()
	if r.probed.IsZero() || r.fault != nil && time.Since(r.probed) > probeAgain {
		r.fault, r.probed = r.cfg.Probe(), time.Now()
	}
	return r.fault
}

// Take gives the pod a range, the lowest that is free, or the one it has.
func (r *Ranges) Take(podUID string) (Range, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if have, ok := r.held[podUID]; ok {
		return have, nil
	}
	for first := uint64(r.cfg.Area.First); first+Count <= r.cfg.Area.end(); first += Count {
		if want := (Range{First: uint32(first), Count: Count}); r.free(want) {
			r.held[podUID] = want
			return want, nil
		}
	}
	return Range{}, fmt.Errorf("%w: all of %s are taken by %d pods or granted to others", ErrFull, r.cfg.Area, len(r.held))
}

// free reports whether no pod has any id of want; mu is held.
func (r *Ranges) free(want Range) bool {
	for _, have := range r.held {
		if have.overlaps(want) {
			return false
		}
	}
	for _, other := range r.cfg.Granted {
		if other.overlaps(want) {
			return false
		}
	}
	return true
}

// Keep notes what a pod has since before, wherever the area is by now.
func (r *Ranges) Keep(podUID string, have Range) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held[podUID] = have
}

// Has says whether the pod has a range.
func (r *Ranges) Has(podUID string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.held[podUID]
	return ok
}

// Free takes a pod's range back; a pod without one is fine.
func (r *Ranges) Free(podUID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.held, podUID)
}

// Held counts the pods that have a range.
func (r *Ranges) Held() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.held)
}

// kubelet's entry in subuid(5) is the one that is meant for pods.
const kubelet = "kubelet"

// Granted reads which ids the files give to others than pods, /etc/subuid and
// /etc/subgid (subuid(5)): the user namespaces of people's own containers. A
// missing file grants nothing; what is no entry is passed over.
func Granted(files ...string) ([]Range, error) {
	var out []Range
	for _, file := range files {
		f, err := os.Open(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			field := strings.Split(lines.Text(), ":")
			if len(field) != 3 || field[0] == kubelet {
				continue
			}
			first, err1 := strconv.ParseUint(field[1], 10, 32)
			count, err2 := strconv.ParseUint(field[2], 10, 32)
			if err1 == nil && err2 == nil && count > 0 {
				out = append(out, Range{First: uint32(first), Count: uint32(count)})
			}
		}
		err = errors.Join(lines.Err(), f.Close())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	return out, nil
}
