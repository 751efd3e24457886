package main

import "golang.org/x/sys/unix"

// machineCalls are the system calls that only this architecture has.
func machineCalls() []way {
	return []way{
		call("iopl", unix.SYS_IOPL, 3),
		call("ioperm", unix.SYS_IOPERM, 0, 1, 1),
		call("kexec_file_load", unix.SYS_KEXEC_FILE_LOAD, ^uintptr(0), ^uintptr(0), 0, 0, 0xffff),
	}
}
