// Package logindtest has a stand-in of systemd-logind for tests.
package logindtest

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
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// Logind is a message bus with a logind and a systemd on it, all in one: it speaks
// D-Bus over a socket, hands out locks as the ends of pipes, and reads the drop-ins of
// its directory at a SIGHUP.
type Logind struct {
	t        testing.TB
	listener *net.UnixListener
	// DropIns is the directory of its configuration.
	DropIns string
	// Deaf: it does not read that. Set it before use.
	Deaf bool

	mu        sync.Mutex // guards all below
	conns     map[*net.UnixConn]bool
	delay     time.Duration
	preparing bool
	locks     int // taken, ever
	held      int
	asked     []string // members called
	wg        sync.WaitGroup
}

// Owner is its name on the bus.
const Owner = ":1.7"

// New returns one that waits for 5 s at most, and that ends with the test.
func New(t testing.TB) *Logind {
	dir := t.TempDir()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "bus"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	s := &Logind{t: t, listener: l, DropIns: filepath.Join(dir, "logind.conf.d"), conns: map[*net.UnixConn]bool{}, delay: 5 * time.Second}
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
				if err := s.serve(c); !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("stand-in of logind: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		s.Break()
		s.wg.Wait()
	})
	return s
}

// Address is the bus's.
func (s *Logind) Address() string { return "unix:path=" + s.listener.Addr().String() }

func (s *Logind) drop(c *net.UnixConn) {
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// Break ends all connections.
func (s *Logind) Break() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.Close()
	}
}

// serve is one connection: the handshake, then calls.
func (s *Logind) serve(c *net.UnixConn) error {
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

func (s *Logind) answer(c *net.UnixConn, m *dbus.Message) error {
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
	case "GetNameOwner":
		if fmt.Sprint(m.Body) != "[org.freedesktop.login1]" {
			s.t.Errorf("GetNameOwner%v", m.Body)
		}
		body(Owner)
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
func (s *Logind) hangUp() {
	if s.Deaf {
		return
	}
	s.wg.Go(func() {
		files, err := filepath.Glob(filepath.Join(s.DropIns, "*.conf"))
		if err != nil || len(files) != 1 {
			s.t.Errorf("drop-ins %q: %v", files, err)
			return
		}
		b, err := os.ReadFile(files[0])
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

// Prepare tells all of a shutdown, or of its cancellation.
func (s *Logind) Prepare(on bool) {
	s.SetPreparing(on)
	s.emit(Owner, "PrepareForShutdown", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", on)
}

// PrepareAs is Prepare with the type of the shutdown, as systemd 255 and later do it.
func (s *Logind) PrepareAs(on bool, kind string) {
	s.SetPreparing(on)
	s.emit(Owner, "PrepareForShutdownWithMetadata", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", on, map[string]dbus.Variant{"type": dbus.MakeVariant(kind)})
	s.emit(Owner, "PrepareForShutdown", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", on)
}

// Forge sends the signals of PrepareAs(true, kind) as that sender, while logind itself
// says, when it is asked, that no shutdown is under way.
func (s *Logind) Forge(sender, kind string) {
	s.emit(sender, "PrepareForShutdownWithMetadata", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", true, map[string]dbus.Variant{"type": dbus.MakeVariant(kind)})
	s.emit(sender, "PrepareForShutdown", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", true)
}

// SetPreparing has it say, when it is asked, that a shutdown is under way.
func (s *Logind) SetPreparing(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.preparing = on
}

// Restarted tells that logind has a new process.
func (s *Logind) Restarted() {
	s.emit("org.freedesktop.DBus", "NameOwnerChanged", "/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.login1", Owner, ":1.9")
}

func (s *Logind) emit(sender, member string, path dbus.ObjectPath, iface string, body ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		err := send(c, &dbus.Message{Type: dbus.TypeSignal, Body: body, Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldPath: dbus.MakeVariant(path), dbus.FieldInterface: dbus.MakeVariant(iface), dbus.FieldMember: dbus.MakeVariant(member),
			dbus.FieldSignature: dbus.MakeVariant(dbus.SignatureOf(body...)), dbus.FieldSender: dbus.MakeVariant(sender),
		}})
		if err != nil {
			s.t.Errorf("signal: %v", err)
		}
	}
}

// Locks are how many were taken since the beginning, and how many are held.
func (s *Logind) Locks() (taken, held int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.locks, s.held
}

// Delay is how long it waits at most.
func (s *Logind) Delay() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.delay
}

// SetDelay sets how long it waits at most.
func (s *Logind) SetDelay(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay = d
}

// Asked are the methods that were called, in their order.
func (s *Logind) Asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}
