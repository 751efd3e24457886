// Command demo shows clusterd: three nodes on this machine, one manifest, real
// containers. The nodes keep running when it ends; "demo down" removes them and
// all they made.
//
//	go run ./e2e/demo up      (make demo)
//	go run ./e2e/demo down    (make demo-down)
//
// It is the same harness as the tests use, with words around it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const usage = `usage: demo [flags] up|down

  up     start five nodes on this machine and run examples/hello.yaml on them
  down   remove them and everything they made

flags:
`

// options are paths, given relative to the repository.
type options struct {
	dir      string // the demo's own folder
	bin      string
	image    string
	manifest string
	gateway  string // the way in to what manifest runs

	bridge, subnet string
}

func main() {
	var o options
	flag.StringVar(&o.dir, "dir", ".demo", "the demo's folder: data, logs, state")
	flag.StringVar(&o.bin, "bin", "bin", "the folder with clusterd and clusterctl")
	flag.StringVar(&o.image, "image", "bin/hello.tar", "the archive with the demo's image")
	flag.StringVar(&o.manifest, "manifest", "examples/hello.yaml", "what to run")
	flag.StringVar(&o.gateway, "gateway", "examples/gateway.yaml", "the way in to it")
	flag.StringVar(&o.bridge, "bridge", "clusterd-demo", "the switch that joins the nodes; two demos need two")
	flag.StringVar(&o.subnet, "subnet", "10.89.0.0/24", "the nodes' network")
	flag.Usage = func() {
		fmt.Fprint(os.Stderr, usage)
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	out := newScreen(os.Stdout)
	if err := run(ctx, o, flag.Args(), out); err != nil {
		out.failed(err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, args []string, out *screen) error {
	if len(args) != 1 {
		flag.Usage()
		return errors.New("say up or down")
	}
	for _, p := range []*string{&o.dir, &o.bin, &o.image, &o.manifest, &o.gateway} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return err
		}
		*p = abs
	}
	switch args[0] {
	case "up":
		return up(ctx, o, out)
	case "down":
		return down(ctx, o, out)
	default:
		flag.Usage()
		return fmt.Errorf("%q: say up or down", args[0])
	}
}

// hint is an error with the next step to take.
type hint struct {
	err  error
	next string
}

func (h *hint) Error() string { return h.err.Error() }
func (h *hint) Unwrap() error { return h.err }
