// Command brokenrelease is a clusterd that can be asked for its version and is no
// node: run exits at once, as one that was removed does ("gone"), or does nothing.
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
	if code, exits := map[string]int{"exits": 3, "gone": 78}[how]; exits {
		fmt.Fprintln(os.Stderr, "brokenrelease:", how)
		os.Exit(code)
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	<-asked
}
