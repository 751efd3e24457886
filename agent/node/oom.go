package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
)

// KernelLog is where the kernel tells whom it has killed for want of memory.
const KernelLog = "/dev/kmsg"

// WatchOOM tells, as an event SystemOOM of the node, of each process that the
// kernel kills because the machine as a whole is out of memory, from now on
// until ctx ends. A container that exceeds the limit of its cgroup is reported by its
// own status. It waits for the kernel's messages and costs nothing between
// them. That a machine does not let its log be read is logged once.
func WatchOOM(ctx context.Context, node *v1.ObjectReference, recorder record.EventRecorder) error {
	return watchLog(ctx, KernelLog, node, recorder)
}

func watchLog(ctx context.Context, log string, node *v1.ObjectReference, recorder record.EventRecorder) error {
	f, err := os.OpenFile(log, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err == nil {
		_, err = f.Seek(0, io.SeekEnd)
	}
	if err != nil {
		klog.FromContext(ctx).Info("Processes that the kernel kills for want of memory will not be reported as events", "err", err)
		<-ctx.Done() // the agent ends with its parts
		return nil
	}
	return watchOOM(ctx, f, node, recorder)
}

// watchOOM reads f, which it closes: one message at each read, as the kernel
// gives them (Documentation/ABI/testing/dev-kmsg).
func watchOOM(ctx context.Context, f *os.File, node *v1.ObjectReference, recorder record.EventRecorder) error {
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })()
	for b := make([]byte, 8<<10); ; {
		n, err := f.Read(b)
		switch {
		case ctx.Err() != nil || errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, unix.EPIPE):
			continue // messages were overwritten before they were read
		case err != nil:
			return fmt.Errorf("read the kernel's log: %w", err)
		}
		if process, pid, ok := victim(string(b[:n])); ok {
			recorder.Eventf(node, v1.EventTypeWarning, "SystemOOM", "System OOM encountered, victim process: %s, pid: %d", process, pid)
		}
	}
}

// oomKill is how the kernel sums up each such kill (mm/oom_kill.c,
// dump_oom_summary).
var oomKill = regexp.MustCompile(`^oom-kill:constraint=(CONSTRAINT_[A-Z_]+),.*,task=(.*),pid=([0-9]+),uid=[0-9]+`)

// victim says whom a message tells to have been killed for the whole machine's
// want of memory.
func victim(message string) (process string, pid int, ok bool) {
	prefix, text, ok := strings.Cut(message, ";")
	if !ok {
		return "", 0, false
	}
	// "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS": from 8 up it is no word of the
	// kernel's, but a process's that wrote into its log.
	priority, _, _ := strings.Cut(prefix, ",")
	if p, err := strconv.Atoi(priority); err != nil || p >= 8 {
		return "", 0, false
	}
	m := oomKill.FindStringSubmatch(text)
	if m == nil || m[1] == "CONSTRAINT_MEMCG" {
		return "", 0, false
	}
	pid, err := strconv.Atoi(m[3])
	return m[2], pid, err == nil
}
