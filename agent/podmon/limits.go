package podmon

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api"
	libcaps "github.com/opencontainers/runc/libcontainer/capabilities"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// ownCapabilities is the bit set of what this process may do, read once.
var ownCapabilities = sync.OnceValue(func() uint64 {
	var data [2]unix.CapUserData
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capget(&head, &data[0]); err != nil {
		return 0
	}
	return uint64(data[1].Permitted)<<32 | uint64(data[0].Permitted)
})

// capabilities gives a container's sets. A privileged one gets all we have;
// what we lack ourselves (we may be in a container) cannot be given on.
func capabilities(spec *api.Container) (*configs.Capabilities, error) {
	known := libcaps.KnownCapabilities()
	want := spec.Capabilities
	if spec.Privileged {
		want = known
	}
	own := ownCapabilities()
	have := []string{}
	for _, name := range want {
		bit := slices.Index(known, name)
		if bit < 0 {
			return nil, invalidf("unknown capability %q", name)
		}
		if own&(1<<bit) != 0 {
			have = append(have, name)
		}
	}
	return &configs.Capabilities{Bounding: have, Effective: have, Permitted: have}, nil
}

var rlimitTypes = map[string]int{
	"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_CPU": unix.RLIMIT_CPU,
	"RLIMIT_DATA": unix.RLIMIT_DATA, "RLIMIT_FSIZE": unix.RLIMIT_FSIZE, "RLIMIT_LOCKS": unix.RLIMIT_LOCKS,
	"RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK, "RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE,
	"RLIMIT_NOFILE": unix.RLIMIT_NOFILE, "RLIMIT_NPROC": unix.RLIMIT_NPROC, "RLIMIT_RSS": unix.RLIMIT_RSS,
	"RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO, "RLIMIT_RTTIME": unix.RLIMIT_RTTIME,
	"RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING, "RLIMIT_STACK": unix.RLIMIT_STACK,
}

// defaultNoFile is how many files a container may open by default.
const defaultNoFile = 1 << 20

// rlimits are a container's, held within our own hard limits where we lack the
// right to go beyond them.
func rlimits(asked []api.Rlimit) ([]configs.Rlimit, error) {
	if !slices.ContainsFunc(asked, func(r api.Rlimit) bool { return r.Type == "RLIMIT_NOFILE" }) {
		asked = append(slices.Clone(asked), api.Rlimit{Type: "RLIMIT_NOFILE", Soft: defaultNoFile, Hard: defaultNoFile})
	}
	out := make([]configs.Rlimit, 0, len(asked))
	for _, r := range asked {
		kind, ok := rlimitTypes[r.Type]
		if !ok {
			return nil, invalidf("unknown limit %q", r.Type)
		}
		if r.Soft > r.Hard {
			return nil, invalidf("limit %s: soft %d is over hard %d", r.Type, r.Soft, r.Hard)
		}
		l := configs.Rlimit{Type: kind, Soft: r.Soft, Hard: r.Hard}
		var own unix.Rlimit
		if err := unix.Getrlimit(kind, &own); err != nil {
			return nil, err
		}
		if ownCapabilities()&(1<<unix.CAP_SYS_RESOURCE) == 0 {
			l.Hard = min(l.Hard, own.Max)
			l.Soft = min(l.Soft, l.Hard)
		}
		out = append(out, l)
	}
	return out, nil
}

// clampOOMScore holds a score at or above our own where we lack the right to
// lower it.
func clampOOMScore(score int) int {
	score = max(-1000, min(1000, score))
	if ownCapabilities()&(1<<unix.CAP_SYS_RESOURCE) != 0 {
		return score
	}
	b, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return score
	}
	own, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return score
	}
	return max(score, own)
}
