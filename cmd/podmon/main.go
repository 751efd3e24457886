//go:build cgo

// Podmon is the supervisor that owns a node's containers, so that they outlive
// clusterd. Everything is in agent/podmon; see its DESIGN.md.
package main

import (
	"os"

	"github.com/clusterd/clusterd/agent/podmon"
	_ "github.com/clusterd/clusterd/agent/podmon/pause"     // `podmon pause-maker`, before Go starts
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // namespaces of `podmon init`, before Go starts
)

func main() { os.Exit(podmon.Main(os.Args)) }
