package raftside

import (
	"testing"
	"time"

	"github.com/hashicorp/raft"
)

// oneByOne is a pipeline with no room at all: a request is done when its
// answer was taken.
type oneByOne struct {
	raft.AppendPipeline
	answers chan raft.AppendFuture
}

func (p oneByOne) AppendEntries(*raft.AppendEntriesRequest, *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	p.answers <- nil
	return nil, nil
}
func (p oneByOne) Consumer() <-chan raft.AppendFuture { return p.answers }
func (p oneByOne) Close() error                       { return nil }

// TestPipelineWithoutReaderGoesOn: raft stops reading answers at a refusal and
// sends once more before it closes the pipeline. That send used to wait for
// ever, and with it the member's replication and Close.
func TestPipelineWithoutReaderGoesOn(t *testing.T) {
	p := newDrained(oneByOne{answers: make(chan raft.AppendFuture)}, func() bool { return false })
	sent := make(chan error)
	go func() {
		for range 3 {
			_, err := p.AppendEntries(nil, nil)
			sent <- err
		}
	}()
	for range 3 {
		select {
		case err := <-sent:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(30 * time.Second):
			t.Fatal("a send waits for a reader that is gone")
		}
	}
	for range 2 {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}
