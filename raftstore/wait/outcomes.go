package wait

import "sync"

// Outcomes are those that have not come by in the log yet, of this member's
// commands by their sequence numbers.
type Outcomes[T any] struct {
	mu    sync.Mutex
	bySeq map[uint64]chan T
}

// NewOutcomes begins with none.
func NewOutcomes[T any]() *Outcomes[T] { return &Outcomes[T]{bySeq: make(map[uint64]chan T)} }

// Add waits for one. The channel is closed without it when AskAgain was called.
func (w *Outcomes[T]) Add(seq uint64) <-chan T {
	ch := make(chan T, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bySeq[seq] = ch
	return ch
}

// Remove waits for it no longer.
func (w *Outcomes[T]) Remove(seq uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.bySeq, seq)
}

// Resolve hands it to the goroutine that waits for it, if there is one.
func (w *Outcomes[T]) Resolve(seq uint64, out T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ch, ok := w.bySeq[seq]; ok {
		delete(w.bySeq, seq)
		ch <- out
	}
}

// AskAgain closes every channel: the commands have to be handed over again.
func (w *Outcomes[T]) AskAgain() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for seq, ch := range w.bySeq {
		close(ch)
		delete(w.bySeq, seq)
	}
}
