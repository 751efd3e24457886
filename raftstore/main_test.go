package raftstore_test

import (
	"testing"

	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) {
	runMember()
	leaktest.Main(m)
}
