package main

import (
	"fmt"
	"syscall"
	"unsafe"
)

func termSize() string {
	var ws struct{ rows, cols, x, y uint16 }
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, 0, syscall.TIOCGWINSZ, uintptr(unsafe.Pointer(&ws)))
	if errno != 0 {
		return errno.Error()
	}
	return fmt.Sprintf("%dx%d", ws.cols, ws.rows)
}
