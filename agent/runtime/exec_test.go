package runtime_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

func TestRootExec(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "c", "sleep")
	spec.Env = append(spec.Env, "WHO=container")
	n.start(spec)
	run := func(req api.Exec, stdin string, args ...string) (string, string, int, error) {
		var out, errOut bytes.Buffer
		req.ContainerID, req.Args = "c", append([]string{"/bin/box"}, args...)
		eio := runtime.ExecIO{Stdout: &out, Stderr: &errOut}
		if stdin != "" {
			eio.Stdin = strings.NewReader(stdin)
		}
		code, err := n.client.Exec(n.ctx, req, eio)
		return out.String(), errOut.String(), code, err
	}
	if out, errOut, code, err := run(api.Exec{}, "", "echo", "hi"); out != "hi\n" || errOut != "" || code != 0 || err != nil {
		t.Errorf("echo: %q %q %d %v", out, errOut, code, err)
	}
	if out, errOut, code, err := run(api.Exec{}, "", "echoerr", "hi"); out != "" || errOut != "hi\n" || code != 0 || err != nil {
		t.Errorf("echoerr: %q %q %d %v", out, errOut, code, err)
	}
	if _, _, code, err := run(api.Exec{}, "", "exit", "42"); code != 42 || err != nil {
		t.Errorf("exit: %d %v", code, err)
	}
	if out, _, _, err := run(api.Exec{}, "x", "modes"); out != "0 blocks: true\n1 blocks: true\n2 blocks: true\n" || err != nil {
		t.Errorf("modes: %q %v", out, err)
	}
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB both ways
	if out, _, code, err := run(api.Exec{}, big, "cat"); out != big || code != 0 || err != nil {
		t.Errorf("cat: %d bytes, %d %v", len(out), code, err)
	}
	if out, _, _, err := run(api.Exec{Env: []string{"MORE=1"}, Cwd: "/tmp"}, "", "env"); !strings.Contains(out, "WHO=container\n") || !strings.Contains(out, "MORE=1\n") || err != nil {
		t.Errorf("env: %q %v", out, err)
	}
	if out, _, _, err := run(api.Exec{Cwd: "/tmp"}, "", "pwd"); out != "/tmp <nil>\n" || err != nil {
		t.Errorf("pwd: %q %v", out, err)
	}
	if out, _, _, _ := run(api.Exec{}, "", "cat", "/proc/self/status"); !strings.Contains(out, "CapEff:\t00000000a80425fb") ||
		!strings.Contains(out, "NoNewPrivs:\t1") || !strings.Contains(out, "Seccomp:\t2") {
		t.Errorf("status of exec: %s", out)
	}
	for name, args := range map[string][]string{"not found": {"foo"}, "no permission": {"/bin/noexec"}} {
		_, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", Args: args}, runtime.ExecIO{})
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.CodeStartFailed || !strings.Contains(e.Message, `exec: "`+args[0]+`": `) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var e *api.Error
	if _, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "none", Args: []string{"x"}}, runtime.ExecIO{}); !errors.As(err, &e) || e.Code != api.CodeNotFound {
		t.Errorf("exec nowhere: %v", err)
	}
	// Many at once on one container.
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if out, _, code, err := run(api.Exec{}, "", "echo", "x"); out != "x\n" || code != 0 || err != nil {
				t.Errorf("one of many: %q %d %v", out, code, err)
			}
		})
	}
	wg.Wait()
}

// TestRootExecIsKilled: a probe that timed out leaves no process behind.
func TestRootExecIsKilled(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	n.start(n.spec("p", "c", "sleep"))
	ctx, cancel := context.WithCancel(n.ctx)
	r, w := io.Pipe()
	go func() { // once it says "ready"
		_, _ = r.Read(make([]byte, 16))
		cancel()
		_, _ = io.Copy(io.Discard, r)
	}()
	_, err := n.client.Exec(ctx, api.Exec{ContainerID: "c", Args: []string{"/bin/box", "sleep"}}, runtime.ExecIO{Stdout: w})
	w.Close()
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled exec: %v", err)
	}
	eventually(t, "end of the process", func() bool {
		var out bytes.Buffer
		if _, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", Args: []string{"/bin/box", "ls", "/proc"}}, runtime.ExecIO{Stdout: &out}); err != nil {
			t.Fatal(err)
		}
		pids := 0
		for f := range strings.FieldsSeq(out.String()) {
			if name := strings.TrimPrefix(f, "/proc/"); name[0] >= '1' && name[0] <= '9' {
				pids++
			}
		}
		return pids == 2 // the container's own and ls
	})
}

// terminalScript answers a terminal's output.
type terminalScript struct {
	mu   sync.Mutex
	out  bytes.Buffer
	wait map[string]func() // called once when the output contains the key
}

func (s *terminalScript) Write(p []byte) (int, error) {
	s.mu.Lock()
	s.out.Write(p)
	var act []func()
	for k, f := range s.wait {
		if strings.Contains(s.out.String(), k) {
			act = append(act, f)
			delete(s.wait, k)
		}
	}
	s.mu.Unlock()
	for _, f := range act {
		f()
	}
	return len(p), nil
}

func (s *terminalScript) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.String()
}

func TestRootExecTerminal(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	n.start(n.spec("p", "c", "sleep"))
	sizes := make(chan api.Resize, 1)
	out := &terminalScript{wait: map[string]func(){"ready": func() { sizes <- api.Resize{Width: 132, Height: 43} }}}
	code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", TTY: true, Args: []string{"/bin/box", "size"}}, runtime.ExecIO{Stdout: out, Resize: sizes})
	if code != 0 || err != nil || !strings.Contains(out.String(), "132x43\r\n") {
		t.Errorf("size: %d %v %q", code, err, out)
	}
	// What is typed is echoed and read; ^D ends the input.
	in, typed := io.Pipe()
	out = &terminalScript{wait: map[string]func(){"hello\r\nhello\r\n": func() { go typed.Write([]byte{4}) }}}
	go typed.Write([]byte("hello\n"))
	code, err = n.client.Exec(n.ctx, api.Exec{ContainerID: "c", TTY: true, Args: []string{"/bin/box", "cat"}}, runtime.ExecIO{Stdin: in, Stdout: out})
	typed.Close()
	if code != 0 || err != nil || out.String() != "hello\r\nhello\r\n" {
		t.Errorf("cat: %d %v %q", code, err, out)
	}
}

func TestRootAttach(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "cat", "cat")
	spec.Stdin, spec.StdinOnce = true, true
	n.start(spec)
	var out bytes.Buffer
	if err := n.client.Attach(n.ctx, "cat", runtime.ExecIO{Stdin: strings.NewReader("through\n"), Stdout: &out}, false); err != nil {
		t.Fatal(err)
	}
	if st := n.exited("cat"); st.ExitCode != 0 || out.String() != "through\n" || n.output(spec) != "through\n" {
		t.Errorf("%+v, attached %q, logged %q", st, out.String(), n.output(spec))
	}

	// A terminal: two watch it, one types, one leaves.
	tty := n.spec("p", "tty", "cat")
	tty.Stdin, tty.TTY = true, true
	n.start(tty)
	if err := n.client.Resize(n.ctx, api.Resize{ID: "tty", Width: 100, Height: 30}); err != nil {
		t.Error(err)
	}
	ctx, leave := context.WithCancel(n.ctx)
	watched := &terminalScript{wait: map[string]func(){"one\r\none\r\n": leave}}
	left := make(chan error, 1)
	go func() { left <- n.client.Attach(ctx, "tty", runtime.ExecIO{Stdout: watched}, true) }()
	in, typed := io.Pipe()
	typist := &terminalScript{}
	ended := make(chan error, 1)
	go func() { ended <- n.client.Attach(n.ctx, "tty", runtime.ExecIO{Stdin: in, Stdout: typist}, true) }()
	eventually(t, "watcher to see what is typed", func() bool {
		select {
		case err := <-left:
			left <- err
			return true
		case <-time.After(20 * time.Millisecond): // both may not have been attached yet
			go typed.Write([]byte("one\n"))
			return false
		}
	})
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("watcher left with %v", err)
	}
	eventually(t, "the end", func() bool {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			return true
		case <-time.After(20 * time.Millisecond):
			go typed.Write([]byte{4})
			return false
		}
	})
	typed.Close()
	in.Close()
	if st := n.exited("tty"); st.ExitCode != 0 {
		t.Errorf("terminal: %+v", st)
	}
	// Output of one that has no input, cut by its end.
	ticker := n.spec("p", "tick", "tick")
	n.start(ticker)
	// Any tick will do: the first may come before the attachment.
	seen := &terminalScript{wait: map[string]func(){"tick ": func() {
		if err := n.client.Signal(n.ctx, api.Signal{ID: "tick", Signal: int(syscall.SIGTERM)}); err != nil {
			t.Error(err)
		}
	}}}
	eventually(t, "readiness", func() bool { return strings.Contains(n.output(ticker), "ready") })
	go func() {
		ended <- n.client.Attach(n.ctx, "tick", runtime.ExecIO{Stdout: seen, Stderr: io.Discard}, false)
	}()
	eventually(t, "end of ticker", func() bool {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			return true
		case <-time.After(20 * time.Millisecond):
			_ = n.client.Signal(n.ctx, api.Signal{ID: "tick", Signal: int(syscall.SIGUSR1)})
			return false
		}
	})
	if st := n.exited("tick"); st.ExitCode != 7 {
		t.Errorf("ticker: %+v", st)
	}
}
