package nodelifecycle

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
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
