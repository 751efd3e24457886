// Package leaktest is goleak for machines with much other work: what is about to end is
// waited for.
package leaktest

import (
	"time"

	"go.uber.org/goleak"
)

// timeout is how long goroutines may take to end after the last test. goleak alone
// waits for less than half a second in all.
const timeout = time.Minute

// Main runs the tests of a package and ends the process. It fails if they have passed
// and left goroutines running, those that are ignored aside. goleak.Cleanup is not among
// the options that it takes.
func Main(m goleak.TestingM, ignored ...goleak.Option) {
	goleak.VerifyTestMain(Patient(m, ignored...), ignored...)
}

// Patient runs the tests of m, and then waits for the end of their goroutines.
func Patient(m goleak.TestingM, ignored ...goleak.Option) goleak.TestingM {
	return patient{m, ignored}
}

type patient struct {
	goleak.TestingM
	ignored []goleak.Option
}

// Run returns the code of the tests.
func (p patient) Run() int {
	code := p.TestingM.Run()
	if code == 0 {
		_ = wait(timeout, p.ignored...) // who called names what is left
	}
	return code
}

// wait returns nil once no goroutine is left, or what is left after that time.
func wait(most time.Duration, ignored ...goleak.Option) error {
	for end := time.Now().Add(most); ; {
		err := goleak.Find(ignored...) // which looks, and waits, several times
		if err == nil || !time.Now().Before(end) {
			return err
		}
	}
}
