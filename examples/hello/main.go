// Command hello is the demo's web server, and the one program in its image. It
// answers with the pod and node it runs on and a message; its subcommands do
// in a container without a shell what a test needs to see.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const usage = `hello                 serve on :8080 (PORT), pages by TCP and lines by UDP
hello fetch URL [TIMES]
                      print the page, by a new connection each time; exit 1
                      unless the status is 2xx
hello api PATH        ask the API server by the pod's account and print the answer
hello mtls serve BUNDLE ROOTS, mtls fetch URL BUNDLE ROOTS
                      speak TLS on :8443 with certificates on both sides
hello dial HOST:PORT  exit 0 when a TCP connection opens
hello ask HOST:PORT   send a datagram and print the answer
hello lookup KIND NAME [tcp]
                      ask by the pod's resolv.conf: host, srv, addr or cname
hello sleep [SECONDS] wait, for ever without a number; a signal ends it
hello exit CODE [SECONDS]
                      end with this exit code, after some time
hello count           print a number every 10 ms, for ever
hello alloc MIB       take so much memory and keep it
hello echo WORD...    print the words
hello cat FILE        print a file
hello write FILE WORD...
                      write the words to a file
hello fill FILE MIB   write so many MiB to a file
hello sign FILE WORD  add a line with the word to the file every 5 ms, for ever
hello follow FROM TO  copy a file now and whenever it changes, for ever
hello make MODE FILE WORD...
                      make a file of this mode (octal) with the words
hello stat PATH...    print mode, owner, group, kind of file system
hello hostname NAME   set the host's name, which needs CAP_SYS_ADMIN
hello id              print user, group and further groups
hello env             print the environment
`

// fill writes to a file until it is so large, or there is no room.
func fill(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("a file and a number of MiB are needed\n%s", usage)
	}
	mib, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	f, err := os.OpenFile(args[0], os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	part := bytes.Repeat([]byte{'x'}, 1<<20)
	for range mib {
		if _, err := f.Write(part); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return errors.Join(f.Sync(), f.Close())
}

func main() {
	args := os.Args[1:]
	if len(args) == 0 {
		args = []string{"serve"}
	}
	code, err := run(args[0], args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "hello:", err)
	}
	os.Exit(code)
}

// run does one subcommand and returns the exit code.
func run(cmd string, args []string) (int, error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	var err error
	switch cmd {
	case "serve":
		err = serve(ctx)
	case "fetch":
		err = fetchTimes(ctx, args)
	case "api":
		err = withArg(args, func(path string) error { return askAPI(ctx, path) })
	case "mtls":
		err = mutual(ctx, args)
	case "dial":
		err = withArg(args, func(addr string) error { return dial(ctx, addr) })
	case "ask":
		err = withArg(args, func(addr string) error { return ask(ctx, addr) })
	case "lookup":
		err = lookup(ctx, args)
	case "sleep":
		return sleep(ctx, args)
	case "exit":
		return exit(ctx, args)
	case "count":
		count(ctx)
	case "alloc":
		err = withArg(args, func(s string) error { return alloc(ctx, s) })
	case "echo":
		fmt.Println(strings.Join(args, " "))
	case "cat":
		err = withArg(args, cat)
	case "write":
		if len(args) == 0 {
			return 2, fmt.Errorf("a file is needed\n%s", usage)
		}
		err = os.WriteFile(args[0], []byte(strings.Join(args[1:], " ")), 0o644)
	case "fill":
		err = fill(args)
	case "sign":
		err = sign(ctx, args)
	case "follow":
		err = follow(ctx, args)
	case "make":
		err = makeFile(args)
	case "stat":
		err = stat(args)
	case "hostname":
		err = withArg(args, func(name string) error { return syscall.Sethostname([]byte(name)) })
	case "id":
		var groups []int
		groups, err = os.Getgroups()
		fmt.Println(os.Getuid(), os.Getgid(), groups)
	case "env":
		for _, kv := range os.Environ() {
			fmt.Println(kv)
		}
	case "help", "-h", "--help":
		fmt.Print(usage)
	default:
		return 2, fmt.Errorf("no subcommand %q\n%s", cmd, usage)
	}
	if err != nil {
		return 1, err
	}
	return 0, nil
}

func withArg(args []string, fn func(string) error) error {
	if len(args) != 1 {
		return fmt.Errorf("one argument is needed\n%s", usage)
	}
	return fn(args[0])
}

// serve answers until it is asked to stop, then lets running requests end.
func serve(ctx context.Context) error {
	mux := pages()
	port := os.Getenv("PORT")
	if port == "" {
		port = "8080"
	}
	srv := &http.Server{Addr: ":" + port, Handler: mux, ReadHeaderTimeout: 5 * time.Second, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true) // as gRPC is spoken
	lines, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", ":"+port)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- srv.ListenAndServe() }()
	go answerLines(lines) // until it is closed
	defer func() { _ = lines.Close() }()
	fmt.Printf("hello from %s, serving on :%s\n", podName(), port)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	fmt.Println("stopping")
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = srv.Shutdown(grace)
	if serr := <-done; err == nil && !errors.Is(serr, http.ErrServerClosed) {
		err = serr
	}
	return err
}

// pages are all that is answered by HTTP.
func pages() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /busy", busy)
	mux.HandleFunc("GET /echo", echo)
	for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions} {
		mux.HandleFunc(m+" /method/", method)
	}
	mux.HandleFunc("POST /grpc.health.v1.Health/Check", health)
	mux.HandleFunc("GET /", page)
	return mux
}

// page says who answers. The message is read each time: a mounted ConfigMap
// may change while the pod runs.
func page(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "%s\nI am pod %s on node %s", message(), podName(), orUnknown("NODE_NAME"))
	if ip := os.Getenv("POD_IP"); ip != "" {
		fmt.Fprintf(w, " at %s", ip)
	}
	from, _, _ := net.SplitHostPort(r.RemoteAddr)
	fmt.Fprintf(w, "; you come from %s\n", from)
	fmt.Printf("%s %s from %s\n", r.Method, r.URL.Path, r.RemoteAddr)
}

// health answers the one call of gRPC that is known here: the pod, named in a
// header, serves.
func health(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor < 2 || r.Header.Get("Content-Type") != "application/grpc" {
		http.Error(w, "ask over gRPC", http.StatusUnsupportedMediaType)
		return
	}
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("X-Pod", podName())
	w.Header().Set("Trailer", "Grpc-Status")
	// A message of two bytes, not compressed: field 1 (status) is 1, SERVING.
	_, _ = w.Write([]byte{0, 0, 0, 0, 2, 8, 1})
	w.Header().Set("Grpc-Status", "0")
}

// echo sends back what comes over a connection that was upgraded to "echo".
func echo(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "echo" {
		http.Error(w, "ask with Connection: Upgrade and Upgrade: echo", http.StatusUpgradeRequired)
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer func() { _ = conn.Close() }()
	_, _ = fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	_, _ = io.Copy(conn, rw)
}

// message comes from the file named by MESSAGE_FILE, else from MESSAGE.
func message() string {
	if file := os.Getenv("MESSAGE_FILE"); file != "" {
		b, err := os.ReadFile(file)
		if err != nil {
			return "(no message: " + err.Error() + ")"
		}
		return strings.TrimSpace(string(b))
	}
	if m := os.Getenv("MESSAGE"); m != "" {
		return m
	}
	return "Hello from clusterd!"
}

func podName() string {
	if n := os.Getenv("POD_NAME"); n != "" {
		return n
	}
	n, err := os.Hostname()
	if err != nil {
		return "unknown"
	}
	return n
}

func orUnknown(key string) string {
	if v := os.Getenv(key); v != "" {
		return v
	}
	return "unknown"
}

// fetchTimes prints a page so often as the second argument says, once without it.
func fetchTimes(ctx context.Context, args []string) error {
	times := 1
	if len(args) == 2 {
		n, err := strconv.Atoi(args[1])
		if err != nil || n < 1 {
			return fmt.Errorf("TIMES is %q: it must be a number from 1 on", args[1])
		}
		times, args = n, args[:1]
	}
	return withArg(args, func(url string) error {
		for range times {
			if err := fetch(ctx, url); err != nil {
				return err
			}
			http.DefaultClient.CloseIdleConnections()
		}
		return nil
	})
}

func fetch(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	return show(resp)
}

func dial(ctx context.Context, addr string) error {
	d := net.Dialer{Timeout: 5 * time.Second}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return c.Close()
}

// lookup prints the answers in order, one a line.
func lookup(ctx context.Context, args []string) error {
	r := &net.Resolver{PreferGo: true}
	switch {
	case len(args) == 3 && args[2] == "tcp":
		r.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		}
	case len(args) != 2:
		return fmt.Errorf("a kind and a name are needed\n%s", usage)
	}
	var out []string
	var err error
	switch kind, name := args[0], args[1]; kind {
	case "host":
		out, err = r.LookupHost(ctx, name)
	case "addr":
		out, err = r.LookupAddr(ctx, name)
	case "cname":
		var target string
		target, err = r.LookupCNAME(ctx, name)
		out = []string{target}
	case "srv":
		var list []*net.SRV
		_, list, err = r.LookupSRV(ctx, "", "", name)
		for _, s := range list {
			out = append(out, fmt.Sprintf("%d %s", s.Port, s.Target))
		}
	default:
		err = fmt.Errorf("no kind %q\n%s", kind, usage)
	}
	if err != nil {
		return err
	}
	slices.Sort(out)
	for _, line := range out {
		fmt.Println(line)
	}
	return nil
}

// sleep ends with 0 when the time is over and with 143 when a signal ended it.
func sleep(ctx context.Context, args []string) (int, error) {
	var over <-chan time.Time
	if len(args) > 0 {
		seconds, err := strconv.ParseFloat(args[0], 64)
		if err != nil {
			return 1, err
		}
		over = time.After(time.Duration(seconds * float64(time.Second)))
	}
	select {
	case <-over:
		return 0, nil
	case <-ctx.Done():
		return 128 + int(syscall.SIGTERM), nil
	}
}

// exit ends with a code, at once or later; a signal ends it at once.
func exit(ctx context.Context, args []string) (int, error) {
	if len(args) == 0 || len(args) > 2 {
		return 1, fmt.Errorf("a code is needed, and perhaps a time\n%s", usage)
	}
	code, err := strconv.Atoi(args[0])
	if err != nil {
		return 1, err
	}
	if len(args) == 2 {
		// A reader of this may send a signal: the handler is installed by now.
		fmt.Printf("ending with %d in %s s\n", code, args[1])
	}
	if _, err := sleep(ctx, append(args[1:], "0")[:1]); err != nil {
		return 1, err
	}
	return code, nil
}

// count prints a line after the other, for tests that no line gets lost.
func count(ctx context.Context) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		fmt.Println(i)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// alloc takes memory page by page, so that the kernel must really give it.
func alloc(ctx context.Context, arg string) error {
	mib, err := strconv.Atoi(arg)
	if err != nil {
		return err
	}
	var kept [][]byte
	for i := range mib {
		b := make([]byte, 1<<20)
		for j := 0; j < len(b); j += 4096 {
			b[j] = byte(i + 1)
		}
		kept = append(kept, b)
	}
	fmt.Printf("holding %d MiB\n", len(kept))
	<-ctx.Done()
	return nil
}

func cat(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	_, err = io.Copy(os.Stdout, f)
	return err
}

// makeFile makes a file with exactly the mode that is asked for.
func makeFile(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("a mode and a file are needed\n%s", usage)
	}
	mode, err := strconv.ParseUint(args[0], 8, 12)
	if err != nil {
		return fmt.Errorf("mode %q is no octal number", args[0])
	}
	if err := os.WriteFile(args[1], []byte(strings.Join(args[2:], " ")), 0o600); err != nil {
		return err
	}
	return os.Chmod(args[1], os.FileMode(mode))
}

// tmpfsMagic is what statfs(2) says of a file system in memory.
const tmpfsMagic = 0x01021994

func stat(paths []string) error {
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		var fs syscall.Statfs_t
		if err := syscall.Statfs(path, &fs); err != nil {
			return fmt.Errorf("statfs %s: %w", path, err)
		}
		kind := "disk"
		if fs.Type == tmpfsMagic {
			kind = "tmpfs"
		}
		owner := info.Sys().(*syscall.Stat_t)
		fmt.Println(info.Mode(), owner.Uid, owner.Gid, kind)
	}
	return nil
}
