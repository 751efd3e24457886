// Package unread reads what is left in pipes whose writers have ended.
package unread

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// most is what a pipe can hold (fs.pipe-max-size, pipe(7), as the kernel sets it).
const most = 1 << 20

// Each calls each with the bytes that are in a pipe or terminal by now, and waits
// for no others: deadlines of f do not count. It ends when there is nothing, when
// each returns false, and when it has read as much as a pipe can hold, since
// a writer may be faster than the reader. f must be non-blocking, as files
// with deadlines are.
func Each(f *os.File, each func([]byte) bool) {
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, 32<<10)
	for left := most; left > 0; {
		n := 0
		var readErr error
		err := rc.Control(func(fd uintptr) {
			for {
				if n, readErr = unix.Read(int(fd), buf); !errors.Is(readErr, unix.EINTR) {
					return
				}
			}
		})
		if err != nil || readErr != nil || n <= 0 || !each(buf[:n]) {
			return
		}
		left -= n
	}
}
