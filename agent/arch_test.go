package agent_test

import "runtime"

func goarch() string { return runtime.GOARCH }
