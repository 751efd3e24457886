package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// procs are the members' processes.
type procs struct{ cmds [nodes]*exec.Cmd }

func (p *procs) start(i int, cmd *exec.Cmd, log string) error {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	cmd.Stderr = f
	if cmd.Stdout == nil {
		cmd.Stdout = f
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmds[i] = cmd
	return nil
}

// kill ends member i as kill -9 does.
func (p *procs) kill(i int) {
	if cmd := p.cmds[i]; cmd != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		p.cmds[i] = nil
	}
}

// stop ends all of them and gives those that shut down cleanly a timeout.
func (p *procs) stop(sig os.Signal) {
	for _, cmd := range p.cmds {
		if cmd != nil {
			_ = cmd.Process.Signal(sig)
		}
	}
	for i, cmd := range p.cmds {
		if cmd == nil {
			continue
		}
		late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
		p.cmds[i] = nil
	}
}

func (p *procs) pids() (pids []int) {
	for _, cmd := range p.cmds {
		if cmd != nil {
			pids = append(pids, cmd.Process.Pid)
		}
	}
	return pids
}

// usage is what processes have used, all together, and of memory on average.
type usage struct {
	written  int64 // bytes sent to disk
	wakeups  int64 // voluntary context switches: threads that had to wait
	rss, pss float64
}

func usageOf(pids []int) (u usage, err error) {
	for _, pid := range pids {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		io, err := numbers(filepath.Join(dir, "io"))
		if err != nil {
			return u, err
		}
		u.written += io["write_bytes"] - io["cancelled_write_bytes"]
		memory, err := numbers(filepath.Join(dir, "smaps_rollup"))
		if err != nil {
			return u, err
		}
		u.rss += float64(memory["Rss"]) / 1024 / float64(len(pids))
		u.pss += float64(memory["Pss"]) / 1024 / float64(len(pids))
		tasks, err := filepath.Glob(filepath.Join(dir, "task", "*", "status"))
		if err != nil {
			return u, err
		}
		for _, t := range tasks {
			if st, err := numbers(t); err == nil { // a thread may end meanwhile
				u.wakeups += st["voluntary_ctxt_switches"]
			}
		}
	}
	return u, nil
}

// numbers reads lines of "name: number …".
func numbers(path string) (map[string]int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	m := map[string]int64{}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		name, rest, _ := strings.Cut(sc.Text(), ":")
		if fields := strings.Fields(rest); len(fields) > 0 {
			if n, err := strconv.ParseInt(fields[0], 10, 64); err == nil {
				m[name] = n
			}
		}
	}
	return m, nil
}

// freeAddrs returns addresses on loopback without a listener.
func freeAddrs(n int) (addrs []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = l.Close() }()
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}

// waitLeader asks until there is a leader.
func waitLeader(ctx context.Context, ask func() int) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		if i := ask(); i >= 0 {
			return i, nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("no leader: %w", ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}
