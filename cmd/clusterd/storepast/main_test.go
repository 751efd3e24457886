package storepast

import (
	"testing"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) {
	leaktest.Main(m, servertest.LeftRunning()...)
}
