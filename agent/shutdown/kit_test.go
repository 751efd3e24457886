package shutdown

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// standIn is a message bus with a logind and a systemd on it, all in one: it speaks
// D-Bus over a socket, hands out locks as the ends of pipes, and reads the drop-ins of
// its folder at a SIGHUP.
type standIn struct {
	t        *testing.T
	listener *net.UnixListener
	dropIns  string
	deaf     bool // it does not read its drop-ins

	mu        sync.Mutex // guards all below
	conns     map[*net.UnixConn]bool
	delay     time.Duration
	preparing bool
	locks     int // taken, ever
	held      int
	asked     []string // members called
	wg        sync.WaitGroup
}

func newStandIn(t *testing.T) *standIn {
	dir := t.TempDir()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "bus"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	s := &standIn{t: t, listener: l, dropIns: filepath.Join(dir, "logind.conf.d"), conns: map[*net.UnixConn]bool{}, delay: 5 * time.Second}
	s.wg.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns[c] = true
			s.mu.Unlock()
			s.wg.Go(func() {
				defer s.drop(c)
				if err := s.serve(c); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("stand-in of logind: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		s.breakAll()
		s.wg.Wait()
	})
	return s
}

func (s *standIn) address() string { return "unix:path=" + s.listener.Addr().String() }

func (s *standIn) drop(c *net.UnixConn) {
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// breakAll ends all connections.
func (s *standIn) breakAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.Close()
	}
}

// serve is one connection: the handshake, then calls.
func (s *standIn) serve(c *net.UnixConn) error {
	in := bufio.NewReader(c)
	if _, err := in.ReadByte(); err != nil {
		return err
	}
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		words := strings.Fields(line)
		answer := "ERROR"
		switch {
		case words[0] == "BEGIN":
			answer = ""
		case words[0] == "AUTH" && len(words) == 1:
			answer = "REJECTED EXTERNAL"
		case words[0] == "AUTH":
			answer = "OK 0123456789abcdef0123456789abcdef"
		case words[0] == "NEGOTIATE_UNIX_FD":
			answer = "AGREE_UNIX_FD"
		}
		if answer == "" {
			break
		}
		if _, err := io.WriteString(c, answer+"\r\n"); err != nil {
			return err
		}
	}
	for {
		m, err := dbus.DecodeMessage(in)
		if err != nil {
			return err
		}
		if m.Type != dbus.TypeMethodCall {
			continue
		}
		if err := s.answer(c, m); err != nil {
			return err
		}
	}
}

func (s *standIn) answer(c *net.UnixConn, m *dbus.Message) error {
	member, _ := m.Headers[dbus.FieldMember].Value().(string)
	reply := &dbus.Message{Type: dbus.TypeMethodReply, Headers: map[dbus.HeaderField]dbus.Variant{dbus.FieldReplySerial: dbus.MakeVariant(m.Serial())}}
	body := func(values ...any) {
		reply.Body = values
		reply.Headers[dbus.FieldSignature] = dbus.MakeVariant(dbus.SignatureOf(values...))
	}
	s.mu.Lock()
	s.asked = append(s.asked, member)
	s.mu.Unlock()
	switch member {
	case "Hello":
		body(":1.1")
	case "AddMatch":
	case "Get":
		s.mu.Lock()
		switch name := m.Body[1].(string); name {
		case "InhibitDelayMaxUSec":
			body(dbus.MakeVariant(uint64(s.delay.Microseconds())))
		case "PreparingForShutdown":
			body(dbus.MakeVariant(s.preparing))
		default:
			s.t.Errorf("property %s was asked for", name)
		}
		s.mu.Unlock()
	case "KillUnit":
		if fmt.Sprint(m.Body) != "[systemd-logind.service main 1]" {
			s.t.Errorf("KillUnit%v", m.Body)
		}
		s.hangUp()
	case "Inhibit":
		if fmt.Sprint(m.Body) != "[shutdown clusterd pods are ended first delay]" {
			s.t.Errorf("Inhibit%v", m.Body)
		}
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer w.Close()
		s.mu.Lock()
		s.locks++
		s.held++
		s.mu.Unlock()
		s.wg.Go(func() { // the lock is held until the last copy of its end is closed
			defer r.Close()
			_, _ = io.Copy(io.Discard, r)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.held--
		})
		body(dbus.UnixFD(w.Fd()))
		reply.Headers[dbus.FieldUnixFDs] = dbus.MakeVariant(uint32(1))
	default:
		s.t.Errorf("%s was called", member)
	}
	return send(c, reply)
}

func send(c *net.UnixConn, m *dbus.Message) error {
	var b bytes.Buffer
	fds, err := m.EncodeToWithFDs(&b, binary.LittleEndian)
	if err != nil {
		return err
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err = c.WriteMsgUnix(b.Bytes(), oob, nil)
	return err
}

var inhibitDelay = regexp.MustCompile(`(?m)^\[Login\]\nInhibitDelayMaxSec=(\d+ms)$`)

// hangUp has logind read its drop-ins, some time after the signal.
func (s *standIn) hangUp() {
	if s.deaf {
		return
	}
	s.wg.Go(func() {
		b, err := os.ReadFile(filepath.Join(s.dropIns, dropIn))
		found := inhibitDelay.FindSubmatch(b)
		if err != nil || found == nil {
			s.t.Errorf("drop-in %q: %v", b, err)
			return
		}
		d, err := time.ParseDuration(string(found[1]))
		if err != nil {
			s.t.Error(err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.delay = d
	})
}

// prepare tells all of a shutdown, or of its cancellation.
func (s *standIn) prepare(on bool) { s.emit("PrepareForShutdown", logindPath, logindManager, on) }

// restarted tells that logind has a new process.
func (s *standIn) restarted() {
	s.emit("NameOwnerChanged", "/org/freedesktop/DBus", busService, logindService, ":1.7", ":1.9")
}

func (s *standIn) emit(member string, path dbus.ObjectPath, iface string, body ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if on, ok := body[0].(bool); ok {
		s.preparing = on
	}
	for c := range s.conns {
		err := send(c, &dbus.Message{Type: dbus.TypeSignal, Body: body, Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldPath: dbus.MakeVariant(path), dbus.FieldInterface: dbus.MakeVariant(iface), dbus.FieldMember: dbus.MakeVariant(member),
			dbus.FieldSignature: dbus.MakeVariant(dbus.SignatureOf(body...)), dbus.FieldSender: dbus.MakeVariant(":1.7"),
		}})
		if err != nil {
			s.t.Errorf("signal: %v", err)
		}
	}
}

func (s *standIn) state() (locks, held int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.locks, s.held
}

// pods are those of a node that ends them when the test says so.
type pods struct {
	mu    sync.Mutex // guards all below
	list  []*v1.Pod
	down  []bool // as set
	ended []string
	left  map[types.UID]chan struct{}
	seen  chan struct{}
}

func newPods(list ...*v1.Pod) *pods {
	p := &pods{list: list, left: map[types.UID]chan struct{}{}, seen: make(chan struct{})}
	for _, o := range list {
		p.left[o.UID] = make(chan struct{})
	}
	return p
}

func podOf(name string, priority int32) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	p.Spec.Priority = &priority
	return p
}

func (p *pods) SetShutdown(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = append(p.down, on)
}

func (p *pods) Active() []*v1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.list
}

func (p *pods) Seen() <-chan struct{} { return p.seen }

func (p *pods) Terminate(uid types.UID, most time.Duration) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = append(p.ended, fmt.Sprintf("%s in %s", uid, most))
	return p.left[uid]
}

// leave has a pod end.
func (p *pods) leave(uid types.UID) { close(p.left[uid]) }

func (p *pods) told() (down []bool, ended []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]bool{}, p.down...), append([]string{}, p.ended...)
}
