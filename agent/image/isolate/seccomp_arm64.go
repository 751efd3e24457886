package isolate

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_AARCH64

// refusedHere are those that this architecture alone has.
var refusedHere []uint32
