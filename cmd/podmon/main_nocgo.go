//go:build !cgo

// Podmon needs cgo: this stands in for it so that tools can load the package.
package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "podmon was built without cgo and cannot start containers: build it with make")
	os.Exit(1)
}
