package shutdown

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/clusterd/clusterd/durable"
)

const (
	busService    = "org.freedesktop.DBus"
	logindService = "org.freedesktop.login1"
	logindPath    = dbus.ObjectPath("/org/freedesktop/login1")
	logindManager = "org.freedesktop.login1.Manager"

	// prepareWith comes before prepare, from systemd 255 on, and has the type.
	prepareWith = "PrepareForShutdownWithMetadata"
	prepare     = "PrepareForShutdown"

	systemdService = "org.freedesktop.systemd1"
	systemdPath    = dbus.ObjectPath("/org/freedesktop/systemd1")
	systemdManager = "org.freedesktop.systemd1.Manager"
)

// DropInDir is where drop-ins of logind lie that a boot removes: the machine is as it
// was when clusterd no longer runs there.
const DropInDir = "/run/systemd/logind.conf.d"

// dropIn is the name of ours: a later one than most, as the last one counts.
const dropIn = "99-clusterd.conf"

// callDeadline bounds one call over the bus.
const callDeadline = 10 * time.Second

// logind is a connection to systemd's manager of logins, which tells of shutdowns and
// waits for who holds a lock.
type logind struct {
	conn    *dbus.Conn
	signals chan *dbus.Signal // closed when the connection ends
	owner   string            // logind's name on the bus: any program may send signals of its words
	kind    string            // type of the shutdown that is under way; empty: not known
}

// dial connects to the bus and subscribes to what is told of shutdowns. address is
// the bus's; empty: the system's.
func dial(ctx context.Context, address string) (_ *logind, err error) {
	var conn *dbus.Conn
	if address == "" {
		conn, err = dbus.ConnectSystemBus(dbus.WithContext(ctx))
	} else {
		conn, err = dbus.Connect(address, dbus.WithContext(ctx))
	}
	if err != nil {
		return nil, fmt.Errorf("connect to D-Bus: %w", err)
	}
	l := &logind{conn: conn, signals: make(chan *dbus.Signal, 16)}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, callDeadline)
	defer cancel()
	conn.Signal(l.signals)
	for _, member := range []string{prepare, prepareWith} {
		if err := conn.AddMatchSignalContext(ctx, dbus.WithMatchInterface(logindManager), dbus.WithMatchMember(member), dbus.WithMatchObjectPath(logindPath)); err != nil {
			return nil, fmt.Errorf("subscribe to shutdowns: %w", err)
		}
	}
	if err := conn.AddMatchSignalContext(ctx, dbus.WithMatchSender(busService), dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(0, logindService)); err != nil {
		return nil, fmt.Errorf("subscribe to logind's restarts: %w", err)
	}
	return l, nil
}

func (l *logind) close() { l.conn.Close() }

// know asks the bus which connection is logind's. Signals that came before are held to it.
func (l *logind) know(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callDeadline)
	defer cancel()
	if err := l.conn.BusObject().CallWithContext(ctx, busService+".GetNameOwner", 0, logindService).Store(&l.owner); err != nil {
		return fmt.Errorf("ask D-Bus who %s is: %w", logindService, err)
	}
	return nil
}

// next waits for the next shutdown (true) or cancellation. It ends with an error when
// the connection is lost, logind has gone or come, or ctx ends.
func (l *logind) next(ctx context.Context) (bool, error) {
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case s, ok := <-l.signals:
			switch {
			case !ok:
				return false, errors.New("the connection to D-Bus was lost")
			case s.Name == busService+".NameOwnerChanged" && s.Sender == busService:
				return false, errors.New("logind was restarted, or has ended")
			case s.Sender != l.owner:
				continue
			case s.Name == logindManager+"."+prepareWith:
				l.kind = kindOf(s.Body)
				continue
			case s.Name != logindManager+"."+prepare || len(s.Body) != 1:
				continue
			}
			begins, ok := s.Body[0].(bool)
			if begins {
				// A signal alone does not end pods: logind has to confirm it.
				on, err := l.preparing(ctx)
				if err != nil {
					return false, err
				}
				if !on {
					l.kind = ""
					continue
				}
			}
			if ok {
				return begins, nil
			}
		}
	}
}

// kindOf is the type of a shutdown that begins; empty: it does not, or names none.
func kindOf(body []any) (kind string) {
	if len(body) != 2 {
		return ""
	}
	begins, _ := body[0].(bool)
	metadata, _ := body[1].(map[string]dbus.Variant)
	if begins {
		kind, _ = metadata["type"].Value().(string)
	}
	return kind
}

func (l *logind) property(ctx context.Context, name string, to any) error {
	ctx, cancel := context.WithTimeout(ctx, callDeadline)
	defer cancel()
	var v dbus.Variant
	err := l.conn.Object(logindService, logindPath).CallWithContext(ctx, "org.freedesktop.DBus.Properties.Get", 0, logindManager, name).Store(&v)
	if err == nil {
		err = v.Store(to)
	}
	if err != nil {
		return fmt.Errorf("read %s of logind: %w", name, err)
	}
	return nil
}

// preparing says whether a shutdown is under way.
func (l *logind) preparing(ctx context.Context) (on bool, err error) {
	return on, l.property(ctx, "PreparingForShutdown", &on)
}

// maxDelay is how long logind waits for a lock at most.
func (l *logind) maxDelay(ctx context.Context) (time.Duration, error) {
	var us uint64
	err := l.property(ctx, "InhibitDelayMaxUSec", &us)
	return time.Duration(min(us, math.MaxInt64/1000)) * time.Microsecond, err
}

// inhibit takes a lock, which holds up shutdowns until the file is closed.
func (l *logind) inhibit(ctx context.Context) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, callDeadline)
	defer cancel()
	var fd dbus.UnixFD
	call := l.conn.Object(logindService, logindPath).CallWithContext(ctx, logindManager+".Inhibit", 0, "shutdown", "clusterd", "pods are ended first", "delay")
	if err := call.Store(&fd); err != nil {
		return nil, fmt.Errorf("take a lock of logind's: %w", err)
	}
	return os.NewFile(uintptr(fd), "inhibitor"), nil
}

// raise has logind wait for want at most, by a drop-in, if it waits for less. It
// returns how long logind waits.
func (l *logind) raise(ctx context.Context, dir string, want time.Duration) (time.Duration, error) {
	have, err := l.maxDelay(ctx)
	if err != nil || have >= want {
		return have, err
	}
	// A file that is there with these words was read, or will be by the next SIGHUP.
	text := fmt.Sprintf("# Written by clusterd: shutdowns wait for its pods (--shutdown-grace-period).\n[Login]\nInhibitDelayMaxSec=%dms\n", want.Milliseconds())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return have, fmt.Errorf("raise InhibitDelayMaxSec of logind: %w", err)
	}
	if err := durable.ReplaceFile(filepath.Join(dir, dropIn), []byte(text), 0o644); err != nil {
		return have, fmt.Errorf("raise InhibitDelayMaxSec of logind: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, callDeadline)
	defer cancel()
	const hangup = int32(1)
	err = l.conn.Object(systemdService, systemdPath).CallWithContext(ctx, systemdManager+".KillUnit", 0, "systemd-logind.service", "main", hangup).Err
	if err != nil {
		return have, fmt.Errorf("have logind read InhibitDelayMaxSec again: %w", err)
	}
	// It reads its files some time after the signal, and tells nobody.
	for {
		select {
		case <-ctx.Done():
			return have, fmt.Errorf("logind keeps InhibitDelayMaxSec at %s: a file read after %s says so, or it is too old to read its files again", have, filepath.Join(dir, dropIn))
		case <-time.After(50 * time.Millisecond):
		}
		now, err := l.maxDelay(ctx)
		if err == nil && now >= want {
			return now, nil
		}
	}
}
