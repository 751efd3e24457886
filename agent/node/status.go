package node

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/core"
)

// What the node keeps for itself and the system.
const reservedMemory = 128 << 20

// maxImages bounds the list of images in the status.
const maxImages = 50

// status fills the status in as the machine is now.
func (n *Node) status(ctx context.Context, node *v1.Node, now time.Time) {
	s := &node.Status
	capacity := n.capacity()
	allocatable := n.allocatable(capacity)
	keepExtended(capacity, s.Capacity)
	keepExtended(allocatable, s.Allocatable)
	if n.cfg.Devices != nil {
		all, free := n.cfg.Devices()
		maps.Copy(capacity, all)
		maps.Copy(allocatable, free)
	}
	s.Capacity, s.Allocatable = capacity, allocatable
	s.Addresses = nil
	for _, ip := range n.cfg.IPs {
		s.Addresses = append(s.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: ip.String()})
	}
	s.Addresses = append(s.Addresses, n.cfg.Addresses...)
	s.Addresses = append(s.Addresses, v1.NodeAddress{Type: v1.NodeHostName, Address: n.cfg.Name})
	s.Features = &v1.NodeFeatures{SupplementalGroupsPolicy: ptr.To(true)}
	s.DaemonEndpoints.KubeletEndpoint.Port = n.cfg.Port
	s.NodeInfo = n.info()
	if n.cfg.Handlers != nil {
		s.RuntimeHandlers = n.cfg.Handlers()
	}
	if n.cfg.VolumesInUse != nil {
		s.VolumesInUse = n.cfg.VolumesInUse()
	}
	if n.cfg.Images != nil {
		images, err := n.cfg.Images(ctx)
		if err != nil {
			klog.FromContext(ctx).Info("Images could not be listed for the node's status", "err", err)
		} else {
			slices.SortStableFunc(images, func(a, b v1.ContainerImage) int { return int(b.SizeBytes - a.SizeBytes) })
			s.Images = images[:min(len(images), maxImages)]
		}
	}
	conditions := n.conditions()
	if n.cfg.Conditions != nil {
		conditions = append(n.cfg.Conditions(), conditions...)
	}
	for _, c := range conditions {
		setCondition(s, c, now)
	}
}

// conditions are the node's health in four sentences.
func (n *Node) conditions() []v1.NodeCondition {
	cond := func(t v1.NodeConditionType, bad bool, badReason, badMessage, reason, message string) v1.NodeCondition {
		if bad {
			return v1.NodeCondition{Type: t, Status: v1.ConditionTrue, Reason: badReason, Message: badMessage}
		}
		return v1.NodeCondition{Type: t, Status: v1.ConditionFalse, Reason: reason, Message: message}
	}
	under := n.cfg.Pressure
	if under == nil {
		under = func(v1.NodeConditionType) bool { return false }
	}
	out := []v1.NodeCondition{
		cond(v1.NodeMemoryPressure, under(v1.NodeMemoryPressure), "KubeletHasInsufficientMemory", "the node runs short of memory",
			"KubeletHasSufficientMemory", "the node has sufficient memory available"),
		cond(v1.NodeDiskPressure, under(v1.NodeDiskPressure), "KubeletHasDiskPressure", "the disk of pods and images is nearly full",
			"KubeletHasNoDiskPressure", "the node has no disk pressure"),
		cond(v1.NodePIDPressure, under(v1.NodePIDPressure), "KubeletHasInsufficientPID", "the node has nearly no process IDs left",
			"KubeletHasSufficientPID", "the node has sufficient process IDs available"),
	}
	ready := v1.NodeCondition{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "KubeletReady", Message: "the node is ready to run pods"}
	if n.cfg.Ready != nil {
		if faults := n.cfg.Ready(); len(faults) > 0 {
			var words []string
			for _, f := range faults {
				words = append(words, f.Message)
			}
			ready.Status, ready.Reason, ready.Message = v1.ConditionFalse, "KubeletNotReady", strings.Join(words, "; ")
		}
	}
	return append(out, ready)
}

// setCondition replaces a condition; its transition time moves with its status.
func setCondition(s *v1.NodeStatus, c v1.NodeCondition, now time.Time) {
	c.LastHeartbeatTime = metav1.NewTime(now)
	c.LastTransitionTime = c.LastHeartbeatTime
	for i := range s.Conditions {
		if s.Conditions[i].Type != c.Type {
			continue
		}
		if s.Conditions[i].Status == c.Status {
			c.LastTransitionTime = s.Conditions[i].LastTransitionTime
		}
		s.Conditions[i] = c
		return
	}
	s.Conditions = append(s.Conditions, c)
}

// capacity is what the machine has.
func (n *Node) capacity() v1.ResourceList {
	out := v1.ResourceList{
		v1.ResourceCPU:    *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(meminfo("MemTotal"), resource.BinarySI),
		v1.ResourcePods:   *resource.NewQuantity(int64(n.cfg.MaxPods), resource.DecimalSI),
	}
	for size, count := range hugepages(hugepagesDir) {
		name := v1.ResourceName(v1.ResourceHugePagesPrefix + resource.NewQuantity(size, resource.BinarySI).String())
		out[name] = *resource.NewQuantity(size*count, resource.BinarySI)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(n.cfg.DataDir, &fs); err == nil {
		out[v1.ResourceEphemeralStorage] = *resource.NewQuantity(int64(fs.Blocks)*fs.Bsize, resource.BinarySI)
	}
	return out
}

// keepExtended keeps the extended resources that an administrator has patched
// into the status: they are nothing that a machine can be asked for.
func keepExtended(now, before v1.ResourceList) {
	for name, q := range before {
		if _, known := now[name]; !known && core.IsExtended(name) {
			now[name] = q
		}
	}
}

// allocatable is what pods may ask for: what there is, without huge pages,
// which the kernel has set aside of the memory, and without what is reserved.
func (n *Node) allocatable(capacity v1.ResourceList) v1.ResourceList {
	out := capacity.DeepCopy()
	mem := out[v1.ResourceMemory]
	for name, q := range out {
		if strings.HasPrefix(string(name), v1.ResourceHugePagesPrefix) {
			mem.Sub(q)
		}
	}
	out[v1.ResourceMemory] = mem
	reserved := v1.ResourceList{v1.ResourceMemory: *resource.NewQuantity(min(reservedMemory, mem.Value()/10), resource.BinarySI)}
	maps.Copy(reserved, n.cfg.Reserved)
	for name, q := range reserved {
		if have, ok := out[name]; ok {
			if have.Sub(q); have.Sign() < 0 {
				have = resource.Quantity{Format: have.Format}
			}
			out[name] = have
		}
	}
	return out
}

const hugepagesDir = "/sys/kernel/mm/hugepages"

// hugepages counts the node's huge pages by their size in bytes.
func hugepages(dir string) map[int64]int64 {
	out := map[int64]int64{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return out // a kernel without them
	}
	for _, e := range entries {
		var kb int64
		if _, err := fmt.Sscanf(e.Name(), "hugepages-%dkB", &kb); err != nil {
			continue
		}
		count, err := strconv.ParseInt(readLine(filepath.Join(dir, e.Name(), "nr_hugepages")), 10, 64)
		if err == nil {
			out[kb<<10] = count
		}
	}
	return out
}

func (n *Node) info() v1.NodeSystemInfo {
	var u unix.Utsname
	_ = unix.Uname(&u) // cannot fail with a valid pointer
	return v1.NodeSystemInfo{
		MachineID:               readLine("/etc/machine-id"),
		SystemUUID:              readLine("/sys/class/dmi/id/product_uuid"),
		BootID:                  readLine("/proc/sys/kernel/random/boot_id"),
		KernelVersion:           unix.ByteSliceToString(u.Release[:]),
		OSImage:                 osImage(),
		ContainerRuntimeVersion: "clusterd://" + n.cfg.Version,
		KubeletVersion:          n.cfg.Version,
		OperatingSystem:         "linux",
		Architecture:            runtime.GOARCH,
	}
}

func readLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func osImage() string {
	f, err := os.Open("/etc/os-release")
	if err != nil {
		return "Linux"
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if v, ok := strings.CutPrefix(s.Text(), "PRETTY_NAME="); ok {
			return strings.Trim(v, `"`)
		}
	}
	return "Linux"
}

// meminfo reads a line of /proc/meminfo in bytes; 0: unknown.
func meminfo(key string) int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if v, ok := strings.CutPrefix(s.Text(), key+":"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			return kb << 10
		}
	}
	return 0
}
