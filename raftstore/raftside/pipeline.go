package raftside

import (
	"sync"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/disk"
)

// AppendEntriesPipeline implements raft.Transport.
func (p *Transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	inner, err := p.NetworkTransport.AppendEntriesPipeline(id, target)
	if err != nil {
		return nil, err
	}
	return newDrained(inner, p.cfg.Disk.Stuck), nil
}

// drained is a pipeline whose answers are taken off although raft does not read
// them. raft stops reading at the first refusal, and only then, after its next
// send, closes the pipeline. With two requests under way that send waited for
// room that only the reader could make: the replication to that member stood
// still for as long as the process lived, and the process could not end.
type drained struct {
	raft.AppendPipeline
	stuck   func() bool // see disk.Disk
	answers chan raft.AppendFuture
	closed  chan struct{}
	close   func()
}

// drainedAnswers is how many answers wait for raft. Without a reader there are
// as many as raft still sends before it notices: one or two.
const drainedAnswers = 128

func newDrained(inner raft.AppendPipeline, stuck func() bool) *drained {
	d := &drained{AppendPipeline: inner, stuck: stuck, answers: make(chan raft.AppendFuture, drainedAnswers), closed: make(chan struct{})}
	d.close = sync.OnceFunc(func() { close(d.closed) })
	go d.drain()
	return d
}

func (d *drained) drain() {
	for {
		select {
		case answer := <-d.AppendPipeline.Consumer():
			select {
			case d.answers <- answer:
			case <-d.closed:
				return
			}
		case <-d.closed:
			return
		}
	}
}

// AppendEntries implements raft.AppendPipeline.
func (d *drained) AppendEntries(req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	if d.stuck() {
		return nil, disk.ErrStuck
	}
	return d.AppendPipeline.AppendEntries(req, resp)
}

// Consumer implements raft.AppendPipeline.
func (d *drained) Consumer() <-chan raft.AppendFuture { return d.answers }

// Close implements raft.AppendPipeline.
func (d *drained) Close() error {
	d.close()
	return d.AppendPipeline.Close()
}
