package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// progress shows how far the upload to each node is, on one line that is
// written over. Where the output is no terminal it shows nothing: the lines
// about finished nodes say enough.
type progress struct {
	mu    sync.Mutex
	w     io.Writer // nil: show nothing
	name  string
	size  int64
	nodes []string
	bytes map[string]int64
	over  map[string]bool
	width int // of the line that stands there
	end   chan struct{}
	ended sync.WaitGroup
}

const progressEvery = 100 * time.Millisecond

func newProgress(w io.Writer, name string, size int64, nodes []string) *progress {
	p := &progress{name: name, size: size, nodes: nodes, bytes: map[string]int64{}, over: map[string]bool{}, end: make(chan struct{})}
	if f, ok := w.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		return p
	}
	p.w = w
	p.ended.Go(p.run)
	return p
}

func (p *progress) run() {
	ticker := time.NewTicker(progressEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			p.draw()
		case <-p.end:
			p.clear()
			return
		}
	}
}

// stop removes the line. It may be called again.
func (p *progress) stop() {
	p.mu.Lock()
	select {
	case <-p.end:
	default:
		close(p.end)
	}
	p.mu.Unlock()
	p.ended.Wait()
}

func (p *progress) sent(node string, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes[node] = n
}

func (p *progress) done(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over[node] = true
}

// clear makes room for a line of output.
func (p *progress) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.w != nil && p.width > 0 {
		fmt.Fprintf(p.w, "\r%s\r", strings.Repeat(" ", p.width))
		p.width = 0
	}
}

func (p *progress) draw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	line := p.line()
	fmt.Fprintf(p.w, "\r%-*s", p.width, line)
	p.width = len(line)
}

// maxShown keeps the line short enough for a terminal.
const maxShown = 4

func (p *progress) line() string {
	var parts []string
	left := 0
	for _, node := range p.nodes {
		switch n, begun := p.bytes[node]; {
		case p.over[node]:
		case !begun, len(parts) == maxShown:
			left++
		case n >= p.size:
			parts = append(parts, node+" unpacking")
		default:
			parts = append(parts, fmt.Sprintf("%s %d%%", node, n*100/max(p.size, 1)))
		}
	}
	if left > 0 {
		parts = append(parts, fmt.Sprintf("%d waiting", left))
	}
	return fmt.Sprintf("%s (%s): %s", p.name, size(p.size), strings.Join(parts, ", "))
}
