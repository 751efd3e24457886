package peer

import (
	"bufio"
	"bytes"
	"net"
	"testing"
)

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte{9, 0, 0, 0, KindTerm, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{17, 0, 0, 0, KindNumber, 1, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8})
	f.Add([]byte{255, 255, 255, 255, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		fr, err := readFrame(bufio.NewReader(bytes.NewReader(data)))
		if err != nil {
			return
		}
		// Written again it is what was read.
		a, b := net.Pipe()
		w := NewWriter(a)
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.Run()
		}()
		if !w.Send(fr) {
			t.Fatal("not sent")
		}
		again, err := readFrame(bufio.NewReader(b))
		w.Close()
		<-done
		_ = b.Close()
		if err != nil || again.Kind != fr.Kind || again.Call != fr.Call || !bytes.Equal(again.Body, fr.Body) {
			t.Fatalf("%+v, %v; want %+v", again, err, fr)
		}
	})
}
