package pod

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/apis/core"
)

// The two class groups stand beside the Guaranteed pods, so their share of
// the cpu must follow what is in them: best-effort pods together weigh next to
// nothing, burstable ones as much as they asked for.

// cgroupMounts is where the kernel's cpu controller is: v1 beside v2, or v2
// alone.
var cgroupMounts = []string{"/sys/fs/cgroup/cpu", "/sys/fs/cgroup"}

// weigh sets the shares of the class groups, if they changed.
func (m *Manager) weigh(ctx context.Context) {
	m.mu.Lock()
	total := v1.ResourceList{}
	for _, p := range m.admitted {
		if core.QOSClass(p) == v1.PodQOSBurstable {
			podstate.AddList(total, core.Requests(p))
		}
	}
	want := map[string]uint64{"besteffort": 2, "burstable": podstate.CpuShares(total[v1.ResourceCPU])}
	for class, shares := range want {
		if m.shares[class] == shares {
			delete(want, class)
		} else {
			m.shares[class] = shares
		}
	}
	m.mu.Unlock()
	for class, shares := range want {
		err := setShares(cgroupMounts, filepath.Join(m.cfg.CgroupRoot, class), shares)
		if err == nil {
			continue
		}
		m.mu.Lock()
		delete(m.shares, class)
		m.mu.Unlock()
		if !errors.Is(err, fs.ErrNotExist) { // no pod of that class yet
			klog.FromContext(ctx).Error(err, "Class cgroup keeps its old weight", "class", class)
		}
	}
}

// setShares writes cpu.shares, or its counterpart of cgroup v2.
func setShares(mounts []string, group string, shares uint64) error {
	for _, base := range mounts {
		dir := filepath.Join(base, group)
		if err := writeExisting(filepath.Join(dir, "cpu.shares"), shares); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := writeExisting(filepath.Join(dir, "cpu.weight"), cpuWeight(shares)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return fs.ErrNotExist
}

// cpuWeight turns shares of cgroup v1 into a weight of version 2 as podmon's
// library does: 2 → 1, 1024 → 100, 262144 → 10000, a quadratic function of the
// logarithm between (opencontainers/cgroups, ConvertCPUSharesToCgroupV2Value).
// The class groups stand beside Guaranteed pods and must be on one scale with
// them.
func cpuWeight(shares uint64) uint64 {
	if shares <= 2 {
		return 1
	}
	if shares >= 262144 {
		return 10000
	}
	l := math.Log2(float64(shares))
	return uint64(math.Ceil(math.Pow(10, (l*l+125*l)/612-7.0/34)))
}

func writeExisting(path string, n uint64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(strconv.FormatUint(n, 10))
	return errors.Join(err, f.Close())
}
