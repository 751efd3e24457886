package subresource

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// TestEndApart: a reader that gives its last bytes together with the end is
// read to the end all the same, by one who looks at the error first.
func TestEndApart(t *testing.T) {
	r := endApart{io.NopCloser(iotest.DataErrReader(strings.NewReader("a log\n")))}
	p := make([]byte, 100)
	if n, err := r.Read(p); n != 6 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := r.Read(p); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("%d, %v", n, err)
	}
}
