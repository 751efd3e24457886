package podmon

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"
)

// dynmodsName names the empty cgroup hierarchy below; all podmons of a machine
// share it.
const dynmodsName = "clusterd"

const goingAway = 300 * time.Millisecond

// favorMoves tells the kernel that processes are often moved between cgroups
// here. Without it the first move after a pause of some milliseconds waits for
// a grace period of RCU, about 10 ms: once per pod start and once per exec.
// The price is a little work at each fork and exit on the machine.
//
// The switch is a mount option, favordynmods (Linux 6.0), for all hierarchies
// at once. To leave everybody's mounts as they are it is given to a hierarchy
// of our own, with no controller and mounted nowhere: it goes with the
// returned descriptor, and with the last podmon. (From Linux 6.18 on, where the
// price is less, the kernel keeps the switch until it is booted again.)
//
// A machine that has cgroup v2 alone is left as it is: programs there may take
// a v1 line in their /proc/self/cgroup for a hybrid machine.
func favorMoves() (*os.File, error) {
	if cgroups.IsCgroup2UnifiedMode() {
		return nil, errors.New("not done where cgroup v2 is alone")
	}
	fs, err := unix.Fsopen("cgroup", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "none"); err != nil {
		return nil, fmt.Errorf("no controllers: %w", err)
	}
	if err := unix.FsconfigSetString(fs, "name", dynmodsName); err != nil {
		return nil, fmt.Errorf("name: %w", err)
	}
	if err := unix.FsconfigSetFlag(fs, "favordynmods"); err != nil {
		return nil, fmt.Errorf("favordynmods: %w", err)
	}
	// The hierarchy of a podmon that has just ended may still be going away.
	for end := time.Now().Add(goingAway); ; {
		err := unix.FsconfigCreate(fs)
		if err == nil {
			break
		}
		if err != unix.EBUSY || time.Now().After(end) {
			return nil, fmt.Errorf("create hierarchy: %w", err)
		}
		time.Sleep(5 * time.Millisecond)
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount: %w", err)
	}
	return os.NewFile(uintptr(mnt), "cgroup hierarchy"), nil
}
