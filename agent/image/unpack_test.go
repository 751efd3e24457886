package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// gated is a worker whose unpacking waits.
type gated struct {
	localWorker
	at   *atomic.Int64
	goOn chan struct{}
}

func (g gated) unpack(context.Context, io.Reader, unpackRequest) (unpacked, error) {
	g.at.Add(1)
	defer g.at.Add(-1)
	<-g.goOn
	return unpacked{}, ErrWorker
}

// TestUnpacksAtOnce: no more layers are unpacked at once than there are places, and who
// waits for one can give up.
func TestUnpacksAtOnce(t *testing.T) {
	s := open(t, t.TempDir())
	readHere(s)
	g := gated{at: &atomic.Int64{}, goOn: make(chan struct{})}
	defer close(g.goOn)
	s.work = g
	done := make(chan error, 3*unpacksAtOnce)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	unpack := func(i int) {
		diff, err := v1.NewHash(digestOf(fmt.Append(nil, i)))
		if err == nil {
			src := layerSource{diffID: diff, open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(&repeated{b: []byte("x")}), nil }}
			err = s.unpackAll(ctx, chainIDs([]v1.Hash{diff}), []layerSource{src})
		}
		done <- err
	}
	for i := range unpacksAtOnce {
		go unpack(i)
	}
	until(t, "all places are taken", func() bool { return g.at.Load() == unpacksAtOnce })
	for i := range 2 * unpacksAtOnce {
		go unpack(unpacksAtOnce + i)
	}
	for range 50 { // one more would be there soon
		if n := g.at.Load(); n != unpacksAtOnce {
			t.Fatalf("%d at once", n)
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	for range 2 * unpacksAtOnce {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	}
}
