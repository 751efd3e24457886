// Command brokenrelease is a clusterd that can be asked for its version and is no
// node: run exits at once, or does nothing.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Set by the linker.
var version, how string

func main() {
	if len(os.Args) > 1 && os.Args[1] == "version" {
		fmt.Println("clusterd", version)
		return
	}
	if how == "exits" {
		fmt.Fprintln(os.Stderr, "brokenrelease: exits")
		os.Exit(3)
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	<-asked
}
