package node

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/features"
)

// TestSystemOOM: of what the kernel says, kills for the whole machine's want of
// memory become events of the node, and nothing else does.
func TestSystemOOM(t *testing.T) {
	features.Shows(t, 166)
	// A socket that keeps messages apart stands for /dev/kmsg.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	kernel, log := os.NewFile(uintptr(fds[0]), "kernel"), os.NewFile(uintptr(fds[1]), "log")
	defer kernel.Close()
	recorder := record.NewFakeRecorder(10)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- watchOOM(ctx, log, &v1.ObjectReference{Kind: "Node", Name: "n1"}, recorder) }()
	for _, message := range []string{
		"6,1,1,-;Linux version 6.18",
		"4,2,2,-;hog invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=0",
		"6,3,3,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/clusterd/podx,task_memcg=/clusterd/podx/c,task=inpod,pid=7,uid=0\n SUBSYSTEM=x\n",
		"14,4,4,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=forged,pid=8,uid=0",
		"6,5,5,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user,task=a,b hog,pid=4242,uid=1000\n",
		"no message",
		"6,6,6,-;oom-kill:constraint=CONSTRAINT_MEMORY_POLICY,nodemask=0,cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/,task=last,pid=9,uid=0",
	} {
		if _, err := kernel.Write([]byte(message)); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{
		"Warning SystemOOM System OOM encountered, victim process: a,b hog, pid: 4242",
		"Warning SystemOOM System OOM encountered, victim process: last, pid: 9",
	} {
		select {
		case got := <-recorder.Events:
			if got != want {
				t.Errorf("event %q, want %q", got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("no event %q", want)
		}
	}
	cancel() // it ends though nothing comes
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestKernelLog: the real one can be waited for, where it can be read at all.
func TestKernelLog(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- WatchOOM(ctx, &v1.ObjectReference{}, record.NewFakeRecorder(1)) }()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestNoKernelLog: where there is none, as in many containers, it waits all the same. It
// ended, and with it the agent, of which nobody heard again.
func TestNoKernelLog(t *testing.T) {
	none := filepath.Join(t.TempDir(), "kmsg")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- watchLog(ctx, none, &v1.ObjectReference{}, record.NewFakeRecorder(1)) }()
		synctest.Wait()
		select {
		case err := <-ended:
			t.Fatalf("it has ended: %v", err)
		default:
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
