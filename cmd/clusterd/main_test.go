package main

import (
	"os"
	"testing"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/leaktest"
)

// asClusterd is set for a copy of this program that is clusterd.
const asClusterd = "CLUSTERD_DEBUG_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asClusterd) != "" {
		main()
		return
	}
	leaktest.Main(m, servertest.LeftRunning()...)
}
