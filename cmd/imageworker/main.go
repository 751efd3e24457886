// Imageworker reads what image registries and archives of images send, apart from the
// process of the node. clusterd carries it and starts it; see agent/image/DESIGN.md.
package main

import (
	"os"

	"github.com/clusterd/clusterd/agent/image"
)

func main() { os.Exit(image.Program(os.Args)) }
