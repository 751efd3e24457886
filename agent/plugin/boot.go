package plugin

import (
	"os"
	"strings"
)

// BootID tells one start of the machine from another; empty: it is not known.
// What plugins have made ready in one may be gone in the next.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
