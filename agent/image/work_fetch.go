package image

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/image/isolate"
)

// resolverFiles are what Go's resolver reads of a machine.
var resolverFiles = []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"}

// childFetch is a pull by a process of its own.
type childFetch struct {
	c    *child
	docs documents
	read chan struct{} // closed when its reports have ended

	mu      sync.Mutex // guards all below
	waiting map[int]*receiving
	err     error // why the reports have ended
}

// receiving is a layer that is downloaded.
type receiving struct {
	how  *progress
	size int64
	done int64 // of it, as last reported
	end  chan receivedLayer
}

// fetch implements worker.
func (w *childWorker) fetch(ctx context.Context, req fetchRequest) (fetched, error) {
	o := order{Fetch: &req, Spec: isolate.Spec{User: unprivileged, Network: true, Files: resolverFiles, FileSize: req.Limits.Download + fileSlack}}
	c, err := w.start(ctx, jobFetch, "fetching it", o, nil, nil)
	if err != nil {
		return nil, err
	}
	r, err := c.read()
	if err != nil {
		return nil, err
	}
	if r.Documents == nil {
		_ = c.end() // it has said why
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if r.Err == nil {
			return nil, fmt.Errorf("%w: it reports no image", ErrWorker)
		}
		return nil, r.Err.received()
	}
	c.Conn.Bound(maxReport)
	f := &childFetch{c: c, docs: *r.Documents, read: make(chan struct{}), waiting: map[int]*receiving{}}
	go f.reports() // until close
	return f, nil
}

func (f *childFetch) documents() documents { return f.docs }

// close implements fetched.
func (f *childFetch) close() {
	_ = f.c.end() // whoever waited for something knows why it did not come
	<-f.read
}

// reports hands on what the process reports.
func (f *childFetch) reports() {
	defer close(f.read)
	for {
		r, err := f.c.read()
		f.mu.Lock()
		switch {
		case err != nil:
			f.err = err
			for _, w := range f.waiting {
				close(w.end)
			}
			f.waiting = nil
			f.mu.Unlock()
			return
		case r.Progress != nil:
			if w := f.waiting[r.Progress.Layer]; w != nil {
				w.progress(r.Progress.Done)
			}
		case r.Received != nil:
			if w := f.waiting[r.Received.Layer]; w != nil {
				r.Received.Notes = shortNotes(r.Received.Notes)
				w.end <- *r.Received
				delete(f.waiting, r.Received.Layer)
			}
		}
		f.mu.Unlock()
	}
}

// maxNotes and maxNote bound what goes to the log of one download: as many notes as an
// honest process has, and their bytes.
const (
	maxNotes = 4
	maxNote  = 512
)

func shortNotes(all []string) []string {
	all = all[:min(len(all), maxNotes)]
	for i, n := range all {
		all[i] = n[:min(len(n), maxNote)]
	}
	return all
}

// progress takes a report, if it can be true.
func (w *receiving) progress(done int64) {
	done = max(0, min(done, w.size))
	w.how.done.Add(done - w.done)
	w.done = done
}

// fileSlack is what a file may have behind the layer before the process ends by it: one
// that is too long is an error of its own.
const fileSlack = 1 << 20

// limitFiles lets no file get larger than the largest layer. Without CAP_SYS_RESOURCE, as
// in some containers, the limit for all layers remains that the process began with.
func (f *childFetch) limitFiles() error {
	var most int64
	for _, l := range f.docs.Layers {
		most = max(most, l.Size)
	}
	if err := f.c.LimitFiles(most + fileSlack); !errors.Is(err, unix.EPERM) {
		return err
	}
	return nil
}

// receive implements fetched. The process downloads until close.
func (f *childFetch) receive(ctx context.Context, layer int, p *part, how *progress) ([]string, error) {
	w := &receiving{how: how, size: f.docs.Layers[layer].Size, end: make(chan receivedLayer, 1)}
	f.mu.Lock()
	if f.waiting == nil {
		defer f.mu.Unlock()
		return nil, f.err
	}
	f.waiting[layer] = w
	f.mu.Unlock()
	if err := f.limitFiles(); err != nil { // the documents have been checked
		return nil, err
	}
	if err := f.c.Conn.Write(receiveOrder{Layer: layer, Have: p.have, Name: p.Name()}, p.File); err != nil {
		f.c.Kill()
	}
	r, ok := <-w.end // its end at the latest, which that of ctx brings
	if !ok {
		f.mu.Lock()
		defer f.mu.Unlock()
		return nil, f.err
	}
	if err := r.Err.received(); err != nil {
		p.came = max(0, min(r.Came, w.size))
		return r.Notes, err
	}
	if r.Came != w.size {
		return nil, fmt.Errorf("%w: it reports %d bytes of a layer of %d", ErrWorker, r.Came, w.size)
	}
	p.came = r.Came
	return r.Notes, nil
}
