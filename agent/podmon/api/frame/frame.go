// Package frame puts podmon's messages on a stream: a 4-byte big-endian length,
// then that many bytes of JSON. File descriptors travel beside a frame as
// SCM_RIGHTS of its first byte. Both sides use it; it knows no message.
package frame

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxSize bounds one frame's JSON, in bytes. A list of 10 000 containers fits.
const MaxSize = 64 << 20

// MaxFiles bounds the descriptors that travel with one frame.
const MaxFiles = 4

// maxCommas bounds the elements of a frame from who is not trusted: an element of two
// bytes of JSON may take a hundred bytes in memory.
const maxCommas = 1 << 16

// ErrTooLarge is returned when a frame's length is over MaxSize, or Bound, or when one
// with a Bound has too many elements.
var ErrTooLarge = errors.New("frame is larger than allowed")

// Decode reads one frame from r into v. A stream that ends between frames
// gives io.EOF, one that ends inside a frame io.ErrUnexpectedEOF.
func Decode(r io.Reader, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	return decodeBody(r, head, MaxSize, -1, v)
}

// decodeBody grows its buffer as bytes arrive: a length alone reserves nothing.
// commas below 0: any number.
func decodeBody(r io.Reader, head [4]byte, limit uint32, commas int, v any) error {
	size := binary.BigEndian.Uint32(head[:])
	if size > limit {
		return ErrTooLarge
	}
	var body bytes.Buffer
	if n, err := io.CopyN(&body, r, int64(size)); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("frame body, %d of %d bytes: %w", n, size, err)
	}
	if commas >= 0 && bytes.Count(body.Bytes(), []byte{','}) > commas {
		return ErrTooLarge
	}
	if err := json.Unmarshal(body.Bytes(), v); err != nil {
		return fmt.Errorf("frame body: %w", err)
	}
	return nil
}

// Encode returns v as one frame.
func Encode(v any) ([]byte, error) {
	var buf bytes.Buffer
	buf.Write(make([]byte, 4))
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode frame: %w", err)
	}
	b := buf.Bytes()
	if len(b)-4 > MaxSize {
		return nil, ErrTooLarge
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b, nil
}

// Conn carries frames and descriptors over a unix socket. One goroutine may
// read while any number write.
type Conn struct {
	c      *net.UnixConn
	max    uint32
	commas int        // see decodeBody
	wmu    sync.Mutex // one frame at a time
}

// NewConn takes over c.
func NewConn(c *net.UnixConn) *Conn { return &Conn{c: c, max: MaxSize, commas: -1} }

// Bound has Read, from the next on, take no frame of more than max bytes of JSON, and
// none of more elements than an honest one has. It is not for use during a Read.
func (c *Conn) Bound(max uint32) *Conn {
	c.max, c.commas = min(max, MaxSize), maxCommas
	return c
}

// Close ends both directions; a blocked Read returns.
func (c *Conn) Close() error { return c.c.Close() }

// Write sends v as one frame with files beside it. The files stay the caller's.
func (c *Conn) Write(v any, files ...*os.File) error {
	b, err := Encode(v)
	if err != nil {
		return err
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	n := 0
	err = withFDs(files, nil, func(fds []int) error {
		var oob []byte
		if len(fds) > 0 {
			oob = unix.UnixRights(fds...)
		}
		n, _, err = c.c.WriteMsgUnix(b, oob, nil)
		return err
	})
	if err == nil && n < len(b) {
		_, err = c.c.Write(b[n:])
	}
	return err
}

// withFDs calls f with the files' descriptors, open meanwhile and in the mode
// they are in (File.Fd would make them blocking for every process that shares them).
func withFDs(files []*os.File, fds []int, f func(fds []int) error) error {
	if len(files) == 0 {
		return f(fds)
	}
	rc, err := files[0].SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := rc.Control(func(fd uintptr) { ferr = withFDs(files[1:], append(fds, int(fd)), f) }); err != nil {
		return err
	}
	return ferr
}

// Read receives one frame into v and the descriptors sent beside it, which
// become the caller's, also when an error is returned with them.
func (c *Conn) Read(v any) ([]*os.File, error) {
	var head [4]byte
	var files []*os.File
	oob := make([]byte, unix.CmsgSpace(MaxFiles*4))
	for have := 0; have < len(head); {
		n, oobn, _, _, err := c.c.ReadMsgUnix(head[have:], oob)
		if oobn > 0 {
			files = append(files, received(oob[:oobn])...)
		}
		if err != nil {
			if errors.Is(err, io.EOF) { // net wraps it here, unlike in Read
				err = io.EOF
				if have > 0 {
					err = io.ErrUnexpectedEOF
				}
			}
			return files, err
		}
		if n == 0 {
			if have > 0 {
				return files, io.ErrUnexpectedEOF
			}
			return files, io.EOF
		}
		have += n
	}
	return files, decodeBody(c.c, head, c.max, c.commas, v)
}

// received turns a control message into files.
func received(oob []byte) []*os.File {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var files []*os.File
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files
}
