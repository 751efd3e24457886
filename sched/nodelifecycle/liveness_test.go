package nodelifecycle

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// answers is a node that answers questions so, one after the other; the last for ever.
type answers struct {
	list  []error
	asked int
}

func (a *answers) Suspects() <-chan string { return nil }

func (a *answers) Confirm(context.Context, string) error {
	err := a.list[min(a.asked, len(a.list)-1)]
	a.asked++
	return err
}

// TestQuestions: a node that is silent is dead after two questions; one that refuses
// connections may be starting, and is given more time.
func TestQuestions(t *testing.T) {
	refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	silent := errors.New("no answer in time")
	for name, test := range map[string]struct {
		answers []error
		dead    bool
		asked   int
	}{
		"answers":                 {[]error{nil}, false, 1},
		"answers late":            {[]error{silent, nil}, false, 2},
		"silent":                  {[]error{silent}, true, 2},
		"starts again":            {[]error{refused, refused, refused, refused, nil}, false, 5},
		"stays away":              {[]error{refused}, true, refusedTries},
		"refuses, then is silent": {[]error{refused, silent}, true, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wire := &answers{list: test.answers}
				c := &controller{cfg: Config{Liveness: wire}}
				if dead := c.question(t.Context(), "n1") != nil; dead != test.dead || wire.asked != test.asked {
					t.Errorf("dead %v after %d questions, want %v after %d", dead, wire.asked, test.dead, test.asked)
				}
			})
		})
	}
}

// busy is a server that hears of the end of its questions late, so many times.
type busy struct {
	answers
	late int
}

func (b *busy) Confirm(ctx context.Context, node string) error {
	if b.asked < b.late {
		time.Sleep(2 * confirmTimeout) // the deadline passes, and no processor is free to notice
	}
	return b.answers.Confirm(ctx, node)
}

// TestQuestionsOfABusyServer: that a server without a processor hears no answer says
// nothing of the node, for a while.
func TestQuestionsOfABusyServer(t *testing.T) {
	for name, test := range map[string]struct {
		late  int
		node  []error
		dead  bool
		asked int
	}{
		"a node that lives":       {3, []error{context.DeadlineExceeded, context.DeadlineExceeded, context.DeadlineExceeded, nil}, false, 4},
		"a node that is dead":     {3, []error{context.DeadlineExceeded}, true, 3 + confirmTries},
		"a server that stays so":  {100, []error{context.DeadlineExceeded}, true, lateTries + confirmTries},
		"a server that is not so": {0, []error{context.DeadlineExceeded}, true, confirmTries},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wire := &busy{answers{list: test.node}, test.late}
				c := &controller{cfg: Config{Liveness: wire}}
				if dead := c.question(t.Context(), "n1") != nil; dead != test.dead || wire.asked != test.asked {
					t.Errorf("dead %v after %d questions, want %v after %d", dead, wire.asked, test.dead, test.asked)
				}
			})
		})
	}
}
