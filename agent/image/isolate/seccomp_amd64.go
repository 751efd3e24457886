package isolate

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_X86_64

// refusedHere are those that this architecture alone has.
var refusedHere = []uint32{unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT, unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_USELIB, unix.SYS_INOTIFY_INIT}
