package image

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/image/isolate"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
)

// Program is the main function of the program that reads hostile bytes: it does one job
// for the Store that started it. It returns the exit code.
func Program(args []string) int {
	conn, err := isolate.Parent()
	if err != nil || len(args) != 2 {
		fmt.Fprintln(os.Stderr, "this program is started by clusterd, to read images:", err)
		return 2
	}
	var o order
	files, err := conn.Read(&o)
	if err != nil || len(files) > 0 {
		fmt.Fprintln(os.Stderr, "read the order:", err)
		return 2
	}
	if o.Fetch != nil {
		// They are on the disk, which is out of reach soon. What goes wrong shows with
		// the first certificate.
		_, _ = x509.SystemCertPool()
		// The indexes of interfaces are in the kernel: Go keeps them for addresses that
		// name one (fe80::1%eth0), as name servers, proxies and mirrors may have.
		_, _ = net.Interfaces()
	}
	if err := isolate.Enter(o.Spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if o.Fetch != nil {
		err = programFetch(conn, *o.Fetch)
	} else {
		go endWithParent(conn)
		err = conn.Write(programJob(args[1], o))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// endWithParent ends the process when nobody is left to report to.
func endWithParent(conn *frame.Conn) {
	_, err := conn.Read(new(struct{}))
	if err != nil {
		os.Exit(1)
	}
}

// programJob does a job that has one report.
func programJob(job string, o order) report {
	ctx := context.Background()
	var out report
	var err error
	switch {
	case job == jobInflate:
		var r io.ReadCloser
		if r, err = decompress(os.Stdin); err == nil {
			_, err = io.Copy(os.Stdout, r)
		}
	case o.Layer != nil:
		var r io.ReadCloser
		if r, err = openDockerLayer(os.Stdin, *o.Layer); err == nil {
			_, err = io.Copy(os.Stdout, r)
		}
	case o.List != nil:
		out.Listed, err = listArchive(os.Stdin, "/"+jailOut, *o.List)
	case o.Unpack != nil:
		req := unpackRequest{dir: "/" + jailOut, limits: o.Unpack.Limits, below: o.Unpack.Below, from: o.Unpack.From}
		for i := range o.Unpack.Lowers {
			req.lowers = append(req.lowers, "/"+strconv.Itoa(i+1))
		}
		var done unpacked
		if done, err = unpackLayer(ctx, os.Stdin, req, o.Unpack.Shown); err == nil {
			out.Unpacked = &done
		}
	default:
		err = fmt.Errorf("no such job: %q", job)
	}
	out.Err = newWorkError(err)
	return out
}

// progressEvery is how often a download reports.
const progressEvery = 250 * time.Millisecond

// programFetch reports what a registry has and downloads the layers that are ordered
// then, until the connection ends.
func programFetch(conn *frame.Conn, req fetchRequest) error {
	f, err := startFetch(context.Background(), req)
	if err != nil {
		return conn.Write(report{Err: newWorkError(err)})
	}
	defer f.close()
	if err := conn.Write(report{Documents: &f.docs}); err != nil {
		return err
	}
	for {
		var o receiveOrder
		files, err := conn.Read(&o)
		if errors.Is(err, io.EOF) {
			return nil // the caller has what it wants, or is gone
		}
		if err != nil {
			return err
		}
		if len(files) != 1 || o.Layer < 0 || o.Layer >= len(f.layers) {
			return fmt.Errorf("layer %d with %d files", o.Layer, len(files))
		}
		go func() { // ends with the process, at the latest
			done := programReceive(f, conn, o, files[0])
			_ = conn.Write(report{Received: &done})
		}()
	}
}

func programReceive(f *fetch, conn *frame.Conn, o receiveOrder, file *os.File) receivedLayer {
	fd, err := unix.Dup(int(file.Fd())) // under its own name
	_ = file.Close()
	if err != nil {
		return receivedLayer{Layer: o.Layer, Err: newWorkError(err)}
	}
	p := &part{File: os.NewFile(uintptr(fd), o.Name), have: o.Have}
	defer p.Close()
	how := &progress{}
	said := func() { _ = conn.Write(report{Progress: &progressOf{o.Layer, how.done.Load()}}) }
	how.look = said
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	type result struct {
		notes []string
		err   error
	}
	end := make(chan result, 1)
	go func() {
		notes, err := f.receive(f.ctx, o.Layer, p, how)
		end <- result{notes, err}
	}()
	for {
		select {
		case <-tick.C:
			said()
		case r := <-end:
			said()
			return receivedLayer{Layer: o.Layer, Came: p.came, Notes: r.notes, Err: newWorkError(r.err)}
		}
	}
}
