package main

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, servertest.LeftRunning()...)
}
