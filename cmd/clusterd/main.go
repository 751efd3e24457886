// Command clusterd runs one node of a cluster: gossip, the Raft store, the API server,
// the scheduler and controllers while it leads, and the agent. See README.md for a
// first try.
package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/clusterd/clusterd/slack"
)

// exitGone tells the process manager that starting clusterd again is of no use:
// this machine does not belong to the cluster any more. systemd's unit knows it
// (RestartPreventExitStatus). The number is EX_CONFIG of sysexits(3): something
// a person must change.
const exitGone = 78

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	slack.Shift(rand.N(10 * time.Second)) // machines whose clocks agree do not all look at the same moment
	err := startOnTrial(os.Args, os.Stderr)
	if err == nil {
		err = rootCommand().ExecuteContext(ctx)
	}
	var again *reexecError
	if errors.As(err, &again) {
		fmt.Fprintln(os.Stderr, "clusterd:", again)
		err = reexec(again.data)
	}
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "clusterd:", err)
	var gone *goneError
	if errors.As(err, &gone) {
		os.Exit(exitGone)
	}
	os.Exit(1)
}

// reexec replaces this process's program by the one that is installed now,
// so that the pid stays. What was given to `clusterd run` is given again;
// `init` and `join` have written theirs down.
func reexec(data string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	if _, err := os.Stat(exe); err != nil { // it was replaced or removed
		exe = "/proc/self/exe"
	}
	restoreNotifySocket()
	if err := guardTrial(data); err != nil {
		return err
	}
	return fmt.Errorf("start again: %w", syscall.Exec(exe, runArgs(data), os.Environ()))
}

// runArgs is the command line that starts this process's node again.
func runArgs(data string) []string {
	if len(os.Args) > 1 && os.Args[1] == "run" {
		return os.Args
	}
	return []string{os.Args[0], "run", "--data", data}
}
