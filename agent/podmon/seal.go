package podmon

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const memfdSeals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// reexecSealed replaces this process by the same program running from a sealed
// memory file, unless it already does. libcontainer runs /proc/self/exe as
// every container's init: from a sealed file it may do so as it is, from any
// other it makes a protected copy at every start (a container must not be able
// to write to the program that root runs next).
func reexecSealed() error {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	if seals, err := unix.FcntlInt(self.Fd(), unix.F_GET_SEALS, 0); err == nil && seals&memfdSeals == memfdSeals {
		return nil
	}
	fd, err := unix.MemfdCreate("podmon", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC|unix.MFD_EXEC)
	if err == unix.EINVAL { // before Linux 6.3 there is no MFD_EXEC: all are executable
		fd, err = unix.MemfdCreate("podmon", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	}
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	mem := os.NewFile(uintptr(fd), "podmon")
	defer mem.Close()
	if _, err := io.Copy(mem, self); err != nil {
		return fmt.Errorf("copy own program: %w", err)
	}
	if err := mem.Chmod(0o511); err != nil {
		return err
	}
	if _, err := unix.FcntlInt(mem.Fd(), unix.F_ADD_SEALS, memfdSeals); err != nil {
		return fmt.Errorf("seal own program: %w", err)
	}
	path := fmt.Sprintf("/proc/self/fd/%d", mem.Fd())
	return fmt.Errorf("execute own program: %w", unix.Exec(path, os.Args, os.Environ()))
}
