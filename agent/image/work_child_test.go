package image

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/clusterd/clusterd/agent/podmon/api/frame"
	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// isolated opens a store whose images are read by processes of their own.
func isolated(t testing.TB, dir string, change func(*Isolation)) *Store {
	t.Helper()
	netnstest.NeedRoot(t)
	i := isolation(t)
	if i == nil {
		t.Skip("a program with the race detector cannot give up privileges in all threads")
	}
	if change != nil {
		change(i)
	}
	s, err := Open(Config{Dir: dir, Registries: registries, Isolation: i, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// workers are the running processes of the program that have that parent.
func workers(t testing.TB, parent int) (pids []int) {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		b, err := os.ReadFile(f)
		if err != nil || !strings.HasPrefix(string(b), "imageworker\x00") {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		stat, err := os.ReadFile(filepath.Join(filepath.Dir(f), "stat"))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		if fields := strings.Fields(rest); len(fields) > 1 && (parent == 0 || fields[1] == strconv.Itoa(parent)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so after a minute: %s", what)
		}
	}
}

// stuck serves an image whose layer stops half way, until go is closed.
func stuck(t testing.TB) (ref string, reached *atomic.Bool, goOn chan struct{}) {
	t.Helper()
	reached, goOn = &atomic.Bool{}, make(chan struct{})
	body := archive(t, entry{name: "f", body: noise(200_000)})
	layer := static.NewLayer(body, types.DockerUncompressedLayer)
	var once atomic.Bool
	host := serve(t, func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/"+digestOf(body)) || !once.CompareAndSwap(false, true) {
				next.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Length", strconv.Itoa(len(body)))
			_, _ = w.Write(body[:len(body)/2])
			w.(http.Flusher).Flush()
			reached.Store(true)
			select {
			case <-goOn:
				_, _ = w.Write(body[len(body)/2:])
			case <-r.Context().Done():
			}
		})
	})
	img, err := mutate.AppendLayers(build(t, v1.Config{}), layer)
	if err != nil {
		t.Fatal(err)
	}
	push(t, host+"/a:1", img)
	return host + "/a:1", reached, goOn
}

func noise(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7919 >> 3)
	}
	return string(b)
}

// bomb is an image of a layer that cannot be decompressed in 100 MiB of memory.
func bomb(t testing.TB) v1.Image {
	t.Helper()
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, zstd.WithWindowSize(128<<20), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	if err := w.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 300 << 20}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(w, &repeated{b: []byte(noise(1 << 20))}, 300<<20); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(build(t, v1.Config{}), &diffed{static.NewLayer(b.Bytes(), types.OCILayerZStd)})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// diffed is a layer whose archive nobody has to read for its digest.
type diffed struct{ v1.Layer }

func (diffed) DiffID() (v1.Hash, error) {
	return v1.NewHash("sha256:" + strings.Repeat("a", 64))
}

// repeated is the same bytes again and again, which compress well.
type repeated struct {
	b  []byte
	at int
}

func (r *repeated) Read(p []byte) (int, error) {
	n := copy(p, r.b[r.at:])
	r.at = (r.at + n) % len(r.b)
	return n, nil
}

// TestRootMemoryBomb: a layer that takes more memory than it may ends the process that
// reads it, and no other; the error says which limit, and how it is changed.
func TestRootMemoryBomb(t *testing.T) {
	host := serve(t, nil)
	push(t, host+"/bomb:1", bomb(t))
	push(t, host+"/small:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	for what, dir := range map[string]string{"disk": t.TempDir(), "tmpfs": "/dev/shm"} {
		t.Run(what, func(t *testing.T) {
			dir, err := os.MkdirTemp(dir, "clusterd-bomb-")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			s := isolated(t, dir, func(i *Isolation) { i.Memory = 100 << 20 })
			_, err = s.Pull(t.Context(), host+"/bomb:1", Auth{})
			var pe *PullError
			if !errors.As(err, &pe) || pe.Reason != ReasonTooLarge {
				t.Fatalf("%v", err)
			}
			for _, part := range []string{host + "/bomb:1", "100 MiB", "--image-pull-memory"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
			t.Log(err)
			s.nothingLeft(t)
			if left, _ := os.ReadDir(s.path("blobs")); len(left) > 0 {
				t.Logf("blobs: %v", left) // until the next change
			}
			if _, err := s.Pull(t.Context(), host+"/small:1", Auth{}); err != nil {
				t.Errorf("the next image: %v", err)
			}
			if n := workers(t, os.Getpid()); len(n) > 0 {
				t.Errorf("processes are left: %v", n)
			}
			_ = s.Close()
		})
	}
}

// TestRootWorkerKilled: a process that is killed in the middle of a layer fails its pull,
// and the next one has the image.
func TestRootWorkerKilled(t *testing.T) {
	ref, reached, _ := stuck(t)
	s := isolated(t, t.TempDir(), nil)
	failed := make(chan error, 1)
	go func() {
		_, err := s.Pull(t.Context(), ref, Auth{})
		failed <- err
	}()
	until(t, "half of the layer has been sent", reached.Load)
	pids := workers(t, os.Getpid())
	if len(pids) != 1 {
		t.Fatalf("%v", pids)
	}
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	err := <-failed
	var pe *PullError
	if !errors.As(err, &pe) || !errors.Is(err, ErrWorker) || pe.Ref != ref || !strings.Contains(err.Error(), "killed") {
		t.Errorf("%v", err)
	}
	s.nothingLeft(t)
	img, err := s.Pull(t.Context(), ref, Auth{})
	if err != nil {
		t.Fatal(err)
	}
	if got := read(t, s.layerDirs(t)[0], "f"); got != noise(200_000) {
		t.Errorf("%s has other bytes", img.ID)
	}
}

// TestRootWorkerCanceled: the process ends with the wish for the image.
func TestRootWorkerCanceled(t *testing.T) {
	ref, reached, _ := stuck(t)
	s := isolated(t, t.TempDir(), nil)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := s.Pull(ctx, ref, Auth{})
		failed <- err
	}()
	until(t, "half of the layer has been sent", reached.Load)
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	until(t, "no process is left", func() bool { return len(workers(t, os.Getpid())) == 0 })
	until(t, "no temporary file is left", func() bool {
		left, _ := filepath.Glob(s.path("tmp", "*"))
		return len(left) == 0
	})
}

// TestRootCredentialsAreNotShown: who can list processes sees no credentials, and the
// disk has none.
func TestRootCredentialsAreNotShown(t *testing.T) {
	const password = "correct-horse-battery"
	t.Setenv("HTTP_PROXY", "")
	ref, reached, goOn := stuck(t)
	dir := t.TempDir()
	s := isolated(t, dir, nil)
	done := make(chan error, 1)
	go func() {
		_, err := s.Pull(t.Context(), ref, Auth{Username: "me", Password: password})
		done <- err
	}()
	until(t, "half of the layer has been sent", reached.Load)
	pids := workers(t, os.Getpid())
	if len(pids) != 1 {
		t.Fatalf("%v", pids)
	}
	for _, f := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pids[0], f))
		if err != nil || len(b) == 0 || bytes.Contains(b, []byte(password)) {
			t.Errorf("%s: %q %v", f, b, err)
		}
	}
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pids[0])); err != nil || !bytes.Contains(b, []byte("CapEff:\t0000000000000000")) || !bytes.Contains(b, []byte("Uid:\t65534\t65534")) {
		t.Errorf("it has privileges: %s %v", b, err)
	}
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if b, err := os.ReadFile(p); err != nil || bytes.Contains(b, []byte(password)) {
			t.Errorf("%s has it: %v", p, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestRootParentKilled: no process outlives a clusterd that was killed, and the next one
// removes what was half done.
func TestRootParentKilled(t *testing.T) {
	ref, reached, _ := stuck(t)
	dir := t.TempDir()
	probe := isolated(t, t.TempDir(), nil) // for the conditions of these tests
	_ = probe.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"imagestore", dir, ref, testCgroup() + "/images"}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	until(t, "half of the layer has been sent", reached.Load)
	pids := workers(t, cmd.Process.Pid)
	if len(pids) != 1 {
		t.Errorf("%v", pids)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	until(t, "the processes have ended", func() bool {
		all := workers(t, 0)
		return !slices.ContainsFunc(pids, func(p int) bool { return slices.Contains(all, p) })
	})
	s := isolated(t, dir, nil)
	s.nothingLeft(t)
	for _, in := range []string{"memory", "pids", ""} { // cgroup v1, v2
		if left, _ := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/%s%s/images/%d-*", in, testCgroup(), cmd.Process.Pid)); len(left) > 0 {
			t.Errorf("cgroups are left: %v", left)
		}
	}
	if _, err := s.Pull(t.Context(), ref, Auth{}); err != nil {
		t.Error(err)
	}
}

// imageStore is the process of TestRootParentKilled.
func imageStore(dir, ref, cgroup string) int {
	served.Store(strings.Split(ref, "/")[0], true)
	i := isolation(nil)
	i.Cgroup = cgroup
	s, err := Open(Config{Dir: dir, Registries: registries, Isolation: i})
	if err == nil {
		_, err = s.Pull(context.Background(), ref, Auth{})
	}
	fmt.Fprintln(os.Stderr, "ended by itself:", err)
	return 1
}

// script is a program that says something on its connection, whatever it is asked.
func script(t *testing.T, says []byte, then string) func() (*os.File, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "says")
	if err := os.WriteFile(file, says, 0o644); err != nil {
		t.Fatal(err)
	}
	return func() (*os.File, error) {
		return sealed.New("imageworker", strings.NewReader("#!/bin/sh\ncat "+file+" >&3\n"+then+"\n"))
	}
}

func framed(t *testing.T, v any) []byte {
	t.Helper()
	b, err := frame.Encode(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// frameOf is a frame of n elements behind a beginning.
func frameOf(t *testing.T, n int, begin, element, end string) []byte {
	t.Helper()
	return framed(t, json.RawMessage(begin+strings.Repeat(element+",", n-1)+element+end))
}

// TestRootWorkerTalksNonsense: whatever a process reports that has been taken over, the
// pull fails, or has an image that is another one than its name says at worst: of a name
// with a digest nothing else is taken.
func TestRootWorkerTalksNonsense(t *testing.T) {
	config := []byte(`{"rootfs":{"type":"layers","diff_ids":[]}}`)
	manifest := []byte(`{"config":{"digest":"` + digestOf(config) + `"},"layers":[]}`)
	const ref = "registry.example/a@sha256:" + "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for what, tt := range map[string]struct {
		says []byte
		is   error
	}{
		"nothing":              {nil, ErrWorker},
		"garbage":              {[]byte("HTTP/1.1 200 OK\r\n\r\n"), ErrWorker},
		"a long frame":         {[]byte("\xff\xff\xff\xff{}"), ErrWorker},
		"half a frame":         {[]byte("\x00\x00\x01\x00{"), ErrWorker},
		"another kind":         {framed(t, report{Unpacked: &unpacked{Size: 1}}), ErrWorker},
		"no documents":         {framed(t, report{Documents: &documents{}}), nil},
		"another image":        {framed(t, report{Documents: &documents{Chain: [][]byte{manifest}, Config: config}}), ErrDigest},
		"a path for a digest":  {framed(t, map[string]any{"documents": map[string]any{"layers": []any{map[string]any{"digest": "sha256:../../../etc", "size": 1}}}}), ErrWorker},
		"a million elements":   {frameOf(t, 1<<20, `{"listed":[`, `{}`, `]}`), ErrWorker},
		"a million layers":     {frameOf(t, 1<<20, `{"documents":{"layers":[`, `{}`, `]}}`), ErrWorker},
		"a long number":        {frameOf(t, 1, `{"progress":{"layer":`, strings.Repeat("1", 1<<20), `}}`), ErrWorker},
		"a descriptor in text": {framed(t, report{Err: &workError{Text: strings.Repeat("x", 1<<20), Marks: []string{"none of ours"}}}), nil},
	} {
		t.Run(what, func(t *testing.T) {
			s := isolated(t, t.TempDir(), func(i *Isolation) { i.Program = script(t, tt.says, "sleep 0.2") })
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := s.Pull(t.Context(), ref, Auth{})
			if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 40<<20 {
				t.Errorf("it took %d MiB to read", (after.TotalAlloc-before.TotalAlloc)>>20)
			}
			var pe *PullError
			if !errors.As(err, &pe) || tt.is != nil && !errors.Is(err, tt.is) || len(err.Error()) > 2*maxErrorText {
				t.Errorf("%.300v", err)
			}
			s.nothingLeft(t)
			if list, _ := s.List(t.Context()); len(list) > 0 {
				t.Errorf("%v", list)
			}
		})
	}
	// By a name without a digest, the documents have to be of one another all the same.
	other := bytes.Replace(manifest, []byte(digestOf(config)), []byte(digestOf(manifest)), 1)
	s := isolated(t, t.TempDir(), func(i *Isolation) {
		i.Program = script(t, framed(t, report{Documents: &documents{Chain: [][]byte{other}, Config: config}}), "sleep 100")
	})
	if _, err := s.Pull(t.Context(), "registry.example/a:1", Auth{}); !errors.Is(err, ErrDigest) {
		t.Errorf("%v", err)
	}
}

// TestRootLayerOfOthers: a process that was taken over by one image's layer cannot put
// another layer in its place: what was read is what its digest says, or it is not taken.
func TestRootLayerOfOthers(t *testing.T) {
	s := isolated(t, t.TempDir(), func(i *Isolation) {
		i.Program = script(t, framed(t, report{Unpacked: &unpacked{Size: 3, Sum: strings.Repeat("a", 64)}}), "cat >/dev/null")
	})
	wanted := archive(t, entry{name: "f", body: "good"})
	hash, err := v1.NewHash(digestOf(wanted))
	if err != nil {
		t.Fatal(err)
	}
	evil := archive(t, entry{name: "f", body: "evil"})
	src := layerSource{diffID: hash, open: func(context.Context) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(evil)), nil
	}}
	if err := s.unpackAll(t.Context(), chainIDs([]v1.Hash{hash}), []layerSource{src}); !errors.Is(err, ErrDigest) {
		t.Errorf("%v", err)
	}
	if dirs := s.layerDirs(t); len(dirs) > 0 {
		t.Errorf("%v", dirs)
	}
}

// TestSpoiltBlob: a layer that is here under its digest's name and is another one fails one
// pull, and the next one downloads it. What another repository sent is not used at all.
func TestSpoiltBlob(t *testing.T) {
	host := serve(t, nil)
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "good"}))
	push(t, host+"/a:1", img)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	for what, evil := range map[string][]byte{"another archive": archive(t, entry{name: "f", body: "evil"}), "garbage": []byte(noise(5000))} {
		t.Run(what, func(t *testing.T) {
			s := open(t, t.TempDir())
			ours := s.blobPath(partKey(digest.Hex, host+"/a"))
			for _, file := range []string{ours, s.blobPath(partKey(digest.Hex, host+"/b")), s.blobPath(digest.Hex)} {
				if err := os.WriteFile(file, evil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := s.Pull(t.Context(), host+"/a:1", Auth{}); !errors.Is(err, ErrDigest) && !isBadLayer(err) {
				t.Errorf("%v", err)
			}
			if _, err := os.Stat(ours); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("it is still there: %v", err)
			}
			if _, err := s.Pull(t.Context(), host+"/a:1", Auth{}); err != nil {
				t.Fatal(err)
			}
			if got := read(t, s.layerDirs(t)[0], "f"); got != "good" {
				t.Errorf("%q", got)
			}
		})
	}
}
