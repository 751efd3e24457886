package podmon

import (
	"fmt"
	"os"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"golang.org/x/sys/unix"
)

// console is the socket through which a starting process hands over the master
// of the terminal it has made inside its container.
type console struct {
	parent int // our end
	child  *os.File
}

func newConsole() (*console, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("console socket: %w", err)
	}
	return &console{parent: fds[0], child: os.NewFile(uintptr(fds[1]), "console")}, nil
}

func (c *console) close() {
	unix.Close(c.parent)
	c.child.Close()
}

// receive takes the master. The process has started, so it has been sent.
func (c *console) receive() (*os.File, error) {
	name := make([]byte, 4096)
	oob := make([]byte, unix.CmsgSpace(4))
	_, oobn, _, _, err := unix.Recvmsg(c.parent, name, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("receive terminal: %w", err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		return nil, fmt.Errorf("receive terminal: %d control messages, %w", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("receive terminal: %d descriptors, %w", len(fds), err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), "terminal"), nil
}

// setSize sets the size of the terminal that the program sees (TIOCSWINSZ).
func setSize(master *os.File, width, height uint16) error {
	if master == nil {
		return errorf(api.CodeInvalid, "it has no terminal")
	}
	rc, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ioErr error
	err = rc.Control(func(fd uintptr) {
		ioErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height})
	})
	if err == nil {
		err = ioErr
	}
	return err
}
