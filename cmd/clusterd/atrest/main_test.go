package atrest

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain checks that Close ends what watches over KMS plugins.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
