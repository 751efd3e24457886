package podmon

import (
	"os"
	"slices"
	"strings"
)

// initLogLevel is what libcontainer's init logs (logrus's "warning"). Told
// nothing it writes each step it takes, some forty lines that podmon reads, one
// by one, to drop them.
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
