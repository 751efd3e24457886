package podmon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"syscall"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/sirupsen/logrus"
)

// Main is the program: `podmon --root DIR --cgroup-root PATH`, or `podmon init`
// as which libcontainer starts it inside a new container. It returns the exit
// code.
func Main(args []string) int {
	if len(args) > 1 && args[1] == "init" {
		libcontainer.Init() // does not return
	}
	fs := flag.NewFlagSet("podmon", flag.ContinueOnError)
	root := fs.String("root", "", "state folder; its socket is podmon.sock (required)")
	cgroupRoot := fs.String("cgroup-root", "", "cgroup below which podmon puts itself, for example /clusterd/n1 (empty: stay)")
	detach := fs.Bool("detach", false, "start another podmon in a session of its own, and end")
	readyFD := fs.Int("ready-fd", 0, "descriptor to write to when serving, or the reason why not")
	keep := fs.Bool("keep", false, "be the keeper: start podmon, again and again")
	handoverFD := fs.Int("handover-fd", 0, "what the program that was here before left to the keeper")
	canFollow := fs.Int("can-follow", 0, "say whether this program can go on from a running one with this version of handing over, and end")
	linkFD := fs.Int("link-fd", 0, "connection to the keeper")
	startLimit := fs.Duration("start-limit", defaultStartLimit, "how long the start of a container may take")
	debugLog := fs.Bool("debug", false, "log every call")
	if err := fs.Parse(args[1:]); err != nil {
		return 2
	}
	if *root == "" || fs.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "usage: podmon --root DIR [--cgroup-root PATH]")
		return 2
	}
	if *canFollow != 0 {
		if err := follows(*root, *canFollow); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	if err := reexecSealed(); err != nil {
		fmt.Fprintln(os.Stderr, "podmon: run from sealed memory:", err)
		return 1
	}
	if *detach {
		if err := startDetached(args, *readyFD); err != nil {
			fmt.Fprintln(os.Stderr, "podmon: start detached:", err)
			return 1
		}
		return 0
	}
	level := slog.LevelInfo
	if *debugLog {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	logrus.SetLevel(logrus.WarnLevel) // libcontainer's; stderr

	// SIGTERM ends podmon, not its containers: the next one adopts them.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// Caught and dropped rather than ignored: an ignored signal stays ignored
	// in every process started from here.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	own := []string{"--root", *root, "--cgroup-root", *cgroupRoot, "--start-limit", startLimit.String(), "--debug=" + strconv.FormatBool(*debugLog)}
	if *keep {
		return keepMain(keeperConfig{dir: *root, cgroupRoot: *cgroupRoot, args: own, ready: inheritedFile(*readyFD, "ready"), log: log}, *handoverFD)
	}
	nameSelf("podmon")
	debug.SetGCPercent(200) // a heap of a few MiB: at 50 there was a collection for every other pod
	if err := spareInits(); err != nil {
		log.Warn("starts of containers take longer", "err", err)
	}
	s, err := New(Config{Dir: *root, CgroupRoot: *cgroupRoot, StartLimit: *startLimit, Link: inheritedFile(*linkFD, "link"), Args: own, Logger: log})
	tellReady(*readyFD, err)
	if err == nil {
		err = s.Run(ctx)
	}
	if err != nil {
		log.Error("podmon ends", "err", err)
		return 1
	}
	return 0
}

// keepMain runs the keeper.
func keepMain(cfg keeperConfig, handoverFD int) int {
	nameSelf("podmon-keeper")
	// Nothing is collected before the heap has this part of 4 MiB. What the
	// keeper holds is a few kB: with the default it would fill all of it.
	debug.SetGCPercent(12)
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM, syscall.SIGINT)
	if f := inheritedFile(handoverFD, "handover"); f != nil {
		var err error
		if cfg.handover, err = readHandover(f); err != nil {
			cfg.log.Error("descriptors of containers are lost", "err", err)
		}
	}
	err := runKeeper(cfg, term)
	switch {
	case errors.Is(err, errKept):
		_, _ = cfg.ready.WriteString(api.ReadyKept) // podmon is about to serve there
		return 0
	case err != nil:
		cfg.log.Error("keeper ends", "err", err)
		return 1
	}
	return 0
}

// inheritedFile is a descriptor that this process was started with; nil if it
// was not.
func inheritedFile(fd int, name string) *os.File {
	if fd <= 2 {
		return nil
	}
	syscall.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), name)
}

// startDetached starts the keeper, so that the caller of this process is not
// its parent and need not reap it.
func startDetached(args []string, readyFD int) error {
	rest := slices.DeleteFunc(slices.Clone(args[1:]), func(a string) bool { return a == "--detach" || a == "-detach" })
	cmd := exec.Command("/proc/self/exe", append(rest, "--keep")...)
	cmd.Args[0] = args[0]
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if readyFD > 2 {
		if readyFD != 3 {
			return fmt.Errorf("ready-fd is %d, want 3", readyFD)
		}
		cmd.ExtraFiles = []*os.File{os.NewFile(3, "ready")}
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// tellReady says to the starter how New went.
func tellReady(fd int, err error) {
	if fd <= 2 {
		return
	}
	f := inheritedFile(fd, "ready")
	defer f.Close()
	word := api.ReadyOK
	if err != nil {
		word = err.Error()
	}
	_, _ = f.WriteString(word) // a starter that is gone does not matter
}

// nameSelf sets what ps calls this process: it runs from /proc/self/exe, which
// would make it "exe".
func nameSelf(name string) {
	_ = os.WriteFile("/proc/self/comm", []byte(name), 0)
}
