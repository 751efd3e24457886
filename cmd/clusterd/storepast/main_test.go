package storepast

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// The library's check that logging works runs for as long as the process.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("k8s.io/apimachinery/pkg/util/wait.Forever"))
}
