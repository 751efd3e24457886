package podmon

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"golang.org/x/sys/unix"
)

const (
	pausesCgroup = "pauses" // below Config.CgroupRoot: the maker and every pause
	makerTime    = 10 * time.Second
	maxPauseText = 60 << 10 // of one request; see pause.c
	// titleRoom is how much of a pod's name ps shows: two names of 253 letters.
	titleRoom = 512
)

// pauseMaker is the small process that forks pauses, see pause/pause.c. It is
// started when first needed and again when it has died, and ends with podmon.
type pauseMaker struct {
	s *Supervisor

	mu   sync.Mutex // guards what follows; held for one request
	conn *net.UnixConn
	cmd  *exec.Cmd
}

// pauseRequest is what a pause is made with.
type pauseRequest struct {
	flags    uintptr // clone(2)'s, the namespaces to make
	pod      string  // shown by ps
	hostname string  // empty: none is set
	sysctls  []string
	link     *os.File // the pause's end of a message pair
	netns    *os.File // nil: the host's
	userns   *os.File // nil: the host's; needs netns
}

// fork makes a pause. It is podmon's child.
func (m *pauseMaker) fork(r pauseRequest) (pid int, err error) {
	text := strings.Join(append([]string{r.pod, r.hostname}, r.sysctls...), "\x00") + "\x00"
	if len(text) > maxPauseText {
		return 0, invalidf("the pod's sysctls take %d bytes, at most %d are possible", len(text), maxPauseText)
	}
	message := append(binary.NativeEndian.AppendUint32(nil, uint32(r.flags)), text...)
	fds := []int{int(r.link.Fd())}
	if r.netns != nil {
		fds = append(fds, int(r.netns.Fd()))
	}
	if r.userns != nil {
		fds = append(fds, int(r.userns.Fd()))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if pid, err = m.ask(message, fds); err != nil {
		// It was killed: another one.
		m.stop()
		pid, err = m.ask(message, fds)
	}
	if err != nil {
		return 0, fmt.Errorf("start pause: %w", err)
	}
	if pid < 0 {
		return 0, fmt.Errorf("start pause: clone: %w", syscall.Errno(-pid))
	}
	return pid, nil
}

// ask makes one request; mu is held. A failed one has made nothing that lives
// on: without its socket a pause ends.
func (m *pauseMaker) ask(message []byte, fds []int) (int, error) {
	if m.conn == nil {
		if err := m.start(); err != nil {
			return 0, fmt.Errorf("maker: %w", err)
		}
	}
	if err := m.conn.SetDeadline(time.Now().Add(makerTime)); err != nil {
		return 0, err
	}
	if _, _, err := m.conn.WriteMsgUnix(message, unix.UnixRights(fds...), nil); err != nil {
		return 0, err
	}
	var answer [4]byte
	if n, err := m.conn.Read(answer[:]); err != nil {
		return 0, err
	} else if n != len(answer) {
		return 0, errors.New("the maker gives no answer")
	}
	return int(int32(binary.NativeEndian.Uint32(answer[:]))), nil
}

// start starts the maker in the cgroup where pauses are; mu is held.
func (m *pauseMaker) start() error {
	ours, theirs, err := messagePair("pause maker")
	if err != nil {
		return err
	}
	defer ours.Close() // FileConn makes a descriptor of its own
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"podmon", "pause-maker", strings.Repeat(" ", titleRoom)}
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{theirs, m.s.nowhere} // 3 and 4
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		conn.Close()
		return err
	}
	m.s.orphans.own(cmd.Process.Pid)
	m.conn, m.cmd = conn.(*net.UnixConn), cmd
	if err := m.s.enterPauses(cmd.Process.Pid); err != nil {
		m.s.log.Warn("pauses stay in podmon's cgroup", "err", err)
	}
	return nil
}

// stop ends the maker; mu is held.
func (m *pauseMaker) stop() {
	if m.conn == nil {
		return
	}
	m.conn.Close()
	_ = m.cmd.Process.Kill()
	_ = m.cmd.Wait()
	m.s.orphans.disown(m.cmd.Process.Pid)
	m.conn, m.cmd = nil, nil
}

// close ends the maker. Pauses go on.
func (m *pauseMaker) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stop()
}

// enterPauses puts the maker into the cgroup that every pause is born in: a
// pause uses next to nothing, and to make, enter and remove a cgroup for it in
// every hierarchy of version 1 takes longer than the pause itself.
func (s *Supervisor) enterPauses(pid int) error {
	if s.cfg.CgroupRoot == "" {
		return nil
	}
	g, err := cgroupManager(path.Join(s.cfg.CgroupRoot, pausesCgroup), api.Resources{})
	if err != nil {
		return err
	}
	return g.Apply(pid)
}

// endStrayPauses ends what a former podmon left among the pauses and no sandbox
// is on record for: a record was lost.
func (s *Supervisor) endStrayPauses() {
	if s.cfg.CgroupRoot == "" {
		return
	}
	g, err := cgroupManager(path.Join(s.cfg.CgroupRoot, pausesCgroup), api.Resources{})
	if err != nil {
		return // there are no cgroups, as New has said
	}
	held := map[int]bool{}
	for _, sb := range s.sandboxes {
		if sb.pause != nil {
			held[sb.pause.pid] = true
		}
	}
	pids, err := processesOf(g)
	if err != nil {
		s.log.Warn("pauses of lost records not looked for", "err", err)
	}
	for _, pid := range pids {
		if held[pid] {
			continue
		}
		p, err := openProcess(pid, 0)
		if err != nil {
			continue // it has ended
		}
		// Now that it is held, the number means this process and no other.
		if again, err := processesOf(g); err == nil && slices.Contains(again, pid) {
			_ = p.signal(unix.SIGKILL)
			s.log.Warn("ended a pause that is on no record", "pid", pid)
		}
		p.close()
	}
}
