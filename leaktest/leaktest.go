// Package leaktest is go.uber.org/goleak for busy machines: goleak gives up after less
// than half a second, and a goroutine that is about to end may wait longer than that
// for a processor.
package leaktest

import (
	"time"

	"go.uber.org/goleak"
)

// patience is how long goroutines may take to end after the last test.
const patience = time.Minute

// Main runs a package's tests and fails them if goroutines are left. It is for
// TestMain, and does not return.
func Main(m goleak.TestingM, ignore ...goleak.Option) {
	goleak.VerifyTestMain(patient{m, ignore}, ignore...)
}

type patient struct {
	goleak.TestingM
	ignore []goleak.Option
}

// Run implements goleak.TestingM.
func (p patient) Run() int {
	code := p.TestingM.Run()
	for end := time.Now().Add(patience); code == 0 && goleak.Find(p.ignore...) != nil && time.Now().Before(end); {
	}
	return code
}
