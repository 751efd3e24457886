package raftstore_test

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	runMember()
	goleak.VerifyTestMain(m)
}
