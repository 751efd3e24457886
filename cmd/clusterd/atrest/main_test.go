package atrest

import (
	"testing"

	"github.com/clusterd/clusterd/leaktest"
)

// TestMain checks that Close ends what watches over KMS plugins.
func TestMain(m *testing.M) { leaktest.Main(m) }
