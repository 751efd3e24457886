package main

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// asClusterd is set for a copy of this program that is clusterd.
const asClusterd = "CLUSTERD_DEBUG_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asClusterd) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m, servertest.LeftRunning()...)
}
