package podmon

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
)

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
	if sealed.Is(self) {
		return nil
	}
	mem, err := sealed.New("podmon", self)
	if err != nil {
		return err
	}
	defer mem.Close()
	path := fmt.Sprintf("/proc/self/fd/%d", mem.Fd())
	return fmt.Errorf("execute own program: %w", unix.Exec(path, os.Args, os.Environ()))
}
