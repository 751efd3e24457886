package peer

// Answer is what became of one member's question.
type Answer struct {
	ID    string
	Frame Frame
	Err   error // no answer came, and none will
}

// Ask asks several members the same. One answer for each will be had from the
// channel, unless forget was called before. It does not
// block, and forget has to be called.
func (c *Calls) Ask(ids []string, kind byte, body []byte) (answers <-chan Answer, forget func()) {
	ch := make(chan Answer, len(ids))
	calls := make([]uint64, len(ids))
	for i, id := range ids {
		calls[i] = c.Call(id, kind, body, func(f Frame, _ bool, err error) { ch <- Answer{id, f, err} })
	}
	return ch, func() {
		for i, id := range ids {
			c.Forget(id, calls[i])
		}
	}
}

// Number is the number that a member has answered with; false: it has not.
func (a *Answer) Number() (uint64, bool) {
	if a.Err != nil || a.Frame.Kind != KindNumber {
		return 0, false
	}
	n, err := BodyNumber(a.Frame.Body)
	return n, err == nil
}
