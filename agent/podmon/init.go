package podmon

import (
	"os"
	"slices"
	"strings"
)

// initLogLevel is what libcontainer's init logs (logrus's "warning"). By
// default it logs each of its steps, some forty lines, which podmon would read
// only to drop them.
const initLogLevel = "3"

const maxProcs = "GOMAXPROCS"

// spareInits has libcontainer's inits run on one processor from the beginning:
// it hands on this variable, and only that. A Go program of two processors
// starts a further thread, which execve has to end again, and stops the world to
// become one of one, as libcontainer's init does. podmon itself has read the
// variable long ago.
func spareInits() error { return os.Setenv(maxProcs, "1") }

// ownEnviron is the environment without what spareInits put there, for podmon's
// own program.
func ownEnviron() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, maxProcs+"=") })
}
