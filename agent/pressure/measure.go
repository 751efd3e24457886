package pressure

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine measures this machine.
type Machine struct {
	// NodeDir and ImageDir are on the file systems of pods and of images.
	NodeDir, ImageDir string
}

// Measure looks at the kernel's figures; a signal that cannot be had is left
// out.
func (m Machine) Measure() map[Signal]Level {
	out := map[Signal]Level{}
	if l, err := memory("/proc/meminfo"); err == nil {
		out[MemoryAvailable] = l
	}
	if space, inodes, err := disk(m.NodeDir); err == nil {
		out[NodefsAvailable] = space
		if inodes.Capacity > 0 { // some file systems have no such number
			out[NodefsInodesFree] = inodes
		}
	}
	if space, _, err := disk(m.ImageDir); err == nil {
		out[ImagefsAvailable] = space
	}
	if l, err := pids("/proc/loadavg", "/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"); err == nil {
		out[PidAvailable] = l
	}
	return out
}

func memory(file string) (Level, error) {
	f, err := os.Open(file)
	if err != nil {
		return Level{}, err
	}
	defer f.Close()
	found := map[string]int64{}
	for s := bufio.NewScanner(f); s.Scan() && len(found) < 2; {
		name, rest, _ := strings.Cut(s.Text(), ":")
		if name != "MemTotal" && name != "MemAvailable" {
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return Level{}, err
		}
		found[name] = kb << 10
	}
	if len(found) < 2 {
		return Level{}, fmt.Errorf("%s tells no MemTotal and MemAvailable", file)
	}
	return Level{Available: found["MemAvailable"], Capacity: found["MemTotal"]}, nil
}

func disk(dir string) (space, inodes Level, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return space, inodes, err
	}
	space = Level{Available: int64(fs.Bavail) * fs.Bsize, Capacity: int64(fs.Blocks) * fs.Bsize}
	return space, Level{Available: int64(fs.Ffree), Capacity: int64(fs.Files)}, nil
}

// pids counts threads as the kernel does: a new one needs a number, and to be within
// the number that memory is enough for, which is the lower limit on most machines
// of 64 bits.
func pids(load string, limits ...string) (Level, error) {
	most := int64(math.MaxInt64)
	for _, limit := range limits {
		b, err := os.ReadFile(limit)
		if err != nil {
			return Level{}, err
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return Level{}, err
		}
		most = min(most, n)
	}
	b, err := os.ReadFile(load)
	if err != nil { // "0.1 0.2 0.3 2/345 6789"
		return Level{}, err
	}
	fields := strings.Fields(string(b))
	if len(fields) < 4 {
		return Level{}, errors.New(load + " is not as proc(5) says")
	}
	_, total, _ := strings.Cut(fields[3], "/")
	used, err := strconv.ParseInt(total, 10, 64)
	return Level{Available: most - used, Capacity: most}, err
}
