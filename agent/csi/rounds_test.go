package csi

import "testing"

// TestRounds: a driver that does not answer holds up no other, and is not asked a
// second time meanwhile.
func TestRounds(t *testing.T) {
	var r rounds
	hang, asked := make(chan struct{}), make(chan string, 10)
	r.begin("hangs", func() { asked <- "first"; <-hang })
	r.begin("hangs", func() { asked <- "second" })
	r.begin("works", func() { asked <- "other" })
	got := map[string]bool{<-asked: true, <-asked: true}
	if !got["first"] || !got["other"] {
		t.Errorf("asked: %v", got)
	}
	close(hang)
	r.wg.Wait()
	if len(asked) != 0 {
		t.Errorf("%s, while it hung", <-asked)
	}
	r.begin("hangs", func() { asked <- "third" })
	r.wg.Wait()
	if got := <-asked; got != "third" {
		t.Error(got)
	}
}
