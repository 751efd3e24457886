package releases

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

func newKey(t *testing.T) SecretKey {
	t.Helper()
	k, err := NewSecretKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// tarball is one as packaging/build.sh makes it.
func tarball(t *testing.T, files map[string][]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.NoCompression) // the programs are large
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// self is a program for this machine: the test's own.
func self(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// place is one with an installed program.
func place(t *testing.T) Place {
	t.Helper()
	dir := t.TempDir()
	p := Place{Exe: filepath.Join(dir, "bin", "clusterd"), State: filepath.Join(dir, "data", "upgrade")}
	if err := os.MkdirAll(filepath.Dir(p.Exe), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.Exe, []byte("installed"), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

func sign(t *testing.T, k SecretKey, file []byte, m Manifest) []byte {
	t.Helper()
	sig, err := k.Sign(bytes.NewReader(file), m)
	if err != nil {
		t.Fatal(err)
	}
	return sig
}

var here = Manifest{Version: "v2", Arch: runtime.GOARCH}

func TestKeysAreReadBack(t *testing.T) {
	k := newKey(t)
	again, err := ParseSecretKey(k.File())
	if err != nil || !again.secret.Equal(k.secret) || again.id != k.id {
		t.Fatalf("%v", err)
	}
	for _, text := range []string{string(k.Public().File()), k.Public().String(), " " + k.Public().String() + "\n"} {
		p, err := ParseKey(text)
		if err != nil || p.Name() != k.Public().Name() || !p.Public.Equal(k.Public().Public) {
			t.Errorf("%q: %v", text, err)
		}
	}
	file := k.File()
	file[len(file)-60] ^= 1
	for what, text := range map[string][]byte{"a changed key": file, "a public key": k.Public().File(), "nothing": nil} {
		if _, err := ParseSecretKey(text); err == nil {
			t.Errorf("%s was taken for a secret key", what)
		}
	}
	two, err := ParseKeys(k.Public().String() + ", " + newKey(t).Public().String() + ",")
	if err != nil || len(two) != 2 {
		t.Errorf("%v %v", two, err)
	}
	if _, err := ParseKeys("RWQ="); err == nil {
		t.Error("a short key was taken")
	}
}

func TestSignature(t *testing.T) {
	k, file := newKey(t), []byte("a release")
	sig := sign(t, k, file, here)
	check := func(sig, file []byte, keys ...Key) error {
		s, err := ParseSignature(sig)
		if err != nil {
			return err
		}
		m, err := s.Verify(bytes.NewReader(file), keys)
		if err == nil && m != here {
			t.Errorf("signed as %+v, read as %+v", here, m)
		}
		return err
	}
	if err := check(sig, file, newKey(t).Public(), k.Public()); err != nil {
		t.Fatal(err)
	}
	other := bytes.Replace(sig, []byte("v2"), []byte("v3"), 1)
	forged := k.Public()
	forged.Public = newKey(t).Public().Public
	for _, tt := range []struct {
		what string
		err  error
		want string
	}{
		{"another file", check(sig, []byte("another"), k.Public()), "not what key"},
		{"a part of it", check(sig, file[:4], k.Public()), "not what key"},
		{"another version", check(other, file, k.Public()), "forged"},
		{"no key", check(sig, file), "not trusted (trusted: none)"},
		{"another key", check(sig, file, newKey(t).Public()), "not trusted"},
		{"another key of that id", check(sig, file, forged), "forged"},
		{"none", check(nil, file, k.Public()), "there is none"},
		{"half of it", check(sig[:len(sig)/2], file, k.Public()), "four lines"},
	} {
		if tt.err == nil || !strings.Contains(tt.err.Error(), tt.want) || !IsRefused(tt.err) {
			t.Errorf("%s: %v, want %q", tt.what, tt.err, tt.want)
		}
	}
	for _, m := range []Manifest{{"", "amd64"}, {"v 1", "amd64"}, {"v1", "AMD 64"}} {
		if _, err := k.Sign(bytes.NewReader(file), m); err == nil {
			t.Errorf("%+v was signed", m)
		}
	}
}

// What minisign 0.11 has made, for this test, with -G -W and -S -H.
const (
	minisignSecret = `untrusted comment: minisign encrypted secret key
RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAmA8HvYc51WCg2mYLw5mXbtlUCk3xy8ieWifgcUkoGDQanz/bhFkFVrqQHXB6P+EaRQsPykVY6esIS97IO6H76YMLS9GaRBzYAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
`
	minisignPublic = `untrusted comment: minisign public key 60D53987BD070F98
RWSYDwe9hznVYLqQHXB6P+EaRQsPykVY6esIS97IO6H76YMLS9GaRBzY
`
	minisignSignature = `untrusted comment: signature from minisign secret key
RUSYDwe9hznVYEG612736gkpPwr0TrCq06BwnMRG3x+L4wRFSMwiMRJqm6IYstHK+YGTI0hTu+HswrS0cDT8qrSk7P2IgVBT8gs=
trusted comment: clusterd v9 linux/amd64
/zC9vTpboeFhCgWyrX4hJzRAWSW13PlKBHhNW9Pw2dTjx/11f6W8s3U9lEGQkq9UNrkqvDIxBuKlq7bc+Op0CQ==
`
)

func TestMinisign(t *testing.T) {
	secret, err := ParseSecretKey([]byte(minisignSecret))
	if err != nil {
		t.Fatal(err)
	}
	public, err := ParseKey(minisignPublic)
	if err != nil || public.String() != secret.Public().String() {
		t.Fatalf("%s %v", public, err)
	}
	if !strings.Contains(minisignPublic, public.Name()) {
		t.Errorf("the key is called %s", public.Name())
	}
	file, m := "hello", Manifest{"v9", "amd64"}
	ours := sign(t, secret, []byte(file), m)
	if got, want := strings.Split(string(ours), "\n")[1:], strings.Split(minisignSignature, "\n")[1:]; strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("signed as\n%s\nand by minisign as\n%s", got, want)
	}
	theirs, err := ParseSignature([]byte(minisignSignature))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := theirs.Verify(strings.NewReader(file), []Key{public}); err != nil || got != m {
		t.Errorf("%+v %v", got, err)
	}
}

func FuzzParseSignature(f *testing.F) {
	f.Add([]byte("untrusted comment: x\nRUQ=\ntrusted comment: clusterd v1 linux/amd64\nAA==\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSignature(b)
		if err != nil {
			return
		}
		if _, _, err := s.Trusted(nil); err == nil {
			t.Error("trusted without a key")
		}
	})
}

func TestStage(t *testing.T) {
	k := newKey(t)
	keys := []Key{k.Public()}
	good := tarball(t, map[string][]byte{"./usr/bin/clusterd": self(t), "./usr/bin/clusterctl": self(t), "./usr/share/doc/clusterd": []byte("no program")})
	p := place(t)
	s, err := p.Stage(bytes.NewReader(good), sign(t, k, good, here), keys)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(good)
	if s.Version != "v2" || s.Digest != hex.EncodeToString(sum[:]) || s.Key != k.Public().Name() {
		t.Errorf("%+v", s)
	}
	if again, err := p.Staged(); err != nil || *again != s {
		t.Errorf("%+v %v", again, err)
	}
	if b, err := os.ReadFile(p.file("next")); err != nil || !bytes.Equal(b, self(t)) {
		t.Errorf("the program is not there: %v", err)
	}
	if _, err := os.Stat(p.file("release.part")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file was left: %v", err)
	}

	otherArch := bytes.Clone(self(t))
	otherArch[18], otherArch[19] = 0xf3, 0 // RISC-V
	elsewhere := tarball(t, map[string][]byte{"usr/bin/clusterd": otherArch})
	script := tarball(t, map[string][]byte{"usr/bin/clusterd": []byte("#!/bin/sh\n")})
	without := tarball(t, map[string][]byte{"usr/bin/other": self(t), "etc/clusterd": self(t)})
	for _, tt := range []struct {
		what string
		file []byte
		sig  []byte
		want string
	}{
		{"not signed", good, nil, "there is none"},
		{"signed by a stranger", good, sign(t, newKey(t), good, here), "not trusted"},
		{"cut short", good[:len(good)/2], sign(t, k, good, here), "cut short"},
		{"more behind it", append(bytes.Clone(good), 0), sign(t, k, good, here), "not what key"},
		{"signed for another machine", good, sign(t, k, good, Manifest{"v2", "s390x"}), "is for linux/s390x"},
		{"a program of another machine", elsewhere, sign(t, k, elsewhere, here), "EM_RISCV"},
		{"no program", script, sign(t, k, script, here), "is no program"},
		{"no clusterd", without, sign(t, k, without, here), "no clusterd"},
		{"no tarball", []byte("x"), sign(t, k, []byte("x"), here), "no gzip"},
	} {
		_, err := p.Stage(bytes.NewReader(tt.file), tt.sig, keys)
		if err == nil || !strings.Contains(err.Error(), tt.want) || !IsRefused(err) {
			t.Errorf("%s: %v, want %q", tt.what, err, tt.want)
		}
	}
	// What was staged before is ready as long as nothing that was checked replaced it.
	if _, err := p.Stage(bytes.NewReader(good), sign(t, k, good, here), keys); err != nil {
		t.Fatal(err)
	}
	broken := io.MultiReader(bytes.NewReader(good[:100]), failing{})
	if _, err := p.Stage(broken, sign(t, k, good, here), keys); err == nil || IsRefused(err) {
		t.Errorf("a transfer that broke off: %v", err)
	}
	if s, err := p.Staged(); err != nil || s == nil {
		t.Errorf("%+v %v", s, err)
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("the line is cut") }

// program is a small clusterd of that version, as a release's would be.
func program(version string) []byte {
	return fmt.Appendf(nil, "#!/bin/sh\necho clusterd %s\n", version)
}

// stagedKey is the key that staged's release was signed with.
var stagedKey = Key{ID: [8]byte{1}}

// staged is a place with v2 on its disk, as Stage leaves it; the program says version.
func staged(t *testing.T, version string) (Place, Staged) {
	t.Helper()
	p := place(t)
	sum := sha256.Sum256(program(version))
	s := Staged{Version: "v2", Digest: "a digest of a file", Key: stagedKey.Name(), Program: hex.EncodeToString(sum[:])}
	err := errors.Join(p.open(), os.WriteFile(p.file("next"), program(version), 0o755), os.WriteFile(p.file("next-clusterctl"), []byte("new"), 0o755), p.write("staged.json", s))
	if err != nil {
		t.Fatal(err)
	}
	return p, s
}

// unguarded is in the place of the start of a guard.
func unguarded() error { return nil }

func (p Place) mustSwitch(t *testing.T, digest string, limit time.Duration) {
	t.Helper()
	if _, err := p.Switch(t.Context(), digest, []Key{stagedKey}, Trial{From: "v1", Args: []string{"clusterd", "run"}, Limit: limit, UpWithin: limit / 2}, unguarded, time.Now()); err != nil {
		t.Fatal(err)
	}
}

// state is what is left of a switch.
func (p Place) outcome(t *testing.T) (trial bool, failure string) {
	t.Helper()
	tr, err := p.Trial()
	if err != nil {
		t.Fatal(err)
	}
	f, err := p.Failure()
	if err != nil {
		t.Fatal(err)
	}
	if f != nil {
		failure = f.Why
	}
	return tr != nil, failure
}

func same(t *testing.T, path string, want []byte) bool {
	t.Helper()
	b, err := os.ReadFile(path)
	return err == nil && bytes.Equal(b, want)
}

func TestSwitchAndConfirm(t *testing.T) {
	p, s := staged(t, "v2")
	ctl := filepath.Join(filepath.Dir(p.Exe), "clusterctl")
	if err := os.WriteFile(ctl, []byte("old"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Switch(t.Context(), "0123456789abcdef", []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now()); !IsRefused(err) {
		t.Errorf("another release was switched to: %v", err)
	}
	p.mustSwitch(t, s.Digest, time.Minute)
	if !same(t, p.Exe, program("v2")) || !same(t, p.Previous(), self(t)) {
		t.Error("the programs are not in their places")
	}
	if _, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now()); !IsRefused(err) || !strings.Contains(err.Error(), "on trial") {
		t.Errorf("a second switch: %v", err)
	}
	if err := p.Confirm("v3"); !IsRefused(err) {
		t.Errorf("another version was confirmed: %v", err)
	}
	back, on, err := p.Start("v2", time.Now())
	if back || on == nil || on.Starts != 1 || err != nil {
		t.Fatalf("%v %+v %v", back, on, err)
	}
	for range 2 {
		if err := p.Confirm("v2"); err != nil {
			t.Fatal(err)
		}
	}
	if trial, failure := p.outcome(t); trial || failure != "" {
		t.Errorf("%v %q", trial, failure)
	}
	if !same(t, ctl, []byte("new")) {
		t.Error("clusterctl was not replaced")
	}
	if back, on, err := p.Start("v2", time.Now()); back || on != nil || err != nil {
		t.Errorf("%v %+v %v", back, on, err)
	}
}

func TestSwitchTriesTheProgram(t *testing.T) {
	p, s := staged(t, "v3")
	if _, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now()); !IsRefused(err) || !strings.Contains(err.Error(), "signed as v2") {
		t.Errorf("a program of another version: %v", err)
	}
	if !same(t, p.Exe, []byte("installed")) {
		t.Error("it was put in place")
	}
	if err := os.WriteFile(p.file("next"), []byte("half"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now()); !IsRefused(err) || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a damaged program: %v", err)
	}
	if s, err := p.Staged(); s != nil || err != nil {
		t.Errorf("it is staged still: %+v %v", s, err)
	}
}

// What a start finds decides what it does.
func TestStart(t *testing.T) {
	for _, tt := range []struct {
		what    string
		prepare func(*testing.T, Place)
		version string
		after   time.Duration
		back    bool
		failure string
	}{
		{what: "the first", version: "v2"},
		{what: "the second", version: "v2", prepare: startOnce, back: true, failure: "ended by itself"},
		{what: "the second after somebody stopped it", version: "v2", prepare: func(t *testing.T, p Place) {
			startOnce(t, p)
			if err := p.Stopping(); err != nil {
				t.Fatal(err)
			}
		}},
		{what: "one too late", version: "v2", after: time.Hour, back: true, failure: "not up within 30s"},
		{what: "one too late that was up", version: "v2", after: time.Hour, back: true, failure: "not confirmed within 1m0s", prepare: beUp},
		{what: "one that was up in time", version: "v2", after: 31 * time.Second, prepare: beUp},
		{what: "another program", version: "v1", failure: "version v1 was started instead"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			p, s := staged(t, "v2")
			p.mustSwitch(t, s.Digest, time.Minute)
			if tt.prepare != nil {
				tt.prepare(t, p)
			}
			p.age(t, tt.after)
			back, on, err := p.Start(tt.version, time.Now())
			if err != nil || back != tt.back || (on != nil) != (tt.failure == "") {
				t.Errorf("back %v, on trial %+v, %v", back, on, err)
			}
			trial, failure := p.outcome(t)
			if trial != (tt.failure == "") || !strings.Contains(failure, tt.failure) || tt.failure == "" && failure != "" {
				t.Errorf("on trial %v, failure %q", trial, failure)
			}
			if _, err := os.Stat(p.Previous()); tt.back != errors.Is(err, os.ErrNotExist) {
				t.Errorf("taken back %v, and the program before: %v", tt.back, err)
			}
		})
	}
}

// age makes a trial older than it is.
func (p Place) age(t *testing.T, by time.Duration) {
	t.Helper()
	p.change(t, func(tr *Trial) { tr.Uptime -= by })
}

// change changes what is written of the trial.
func (p Place) change(t *testing.T, do func(*Trial)) {
	t.Helper()
	tr, err := p.Trial()
	if err != nil || tr == nil {
		t.Fatal(tr, err)
	}
	do(tr)
	if err := p.write("trial.json", *tr); err != nil {
		t.Fatal(err)
	}
}

func startOnce(t *testing.T, p Place) {
	if back, _, err := p.Start("v2", time.Now()); back || err != nil {
		t.Fatal(back, err)
	}
}

func beUp(t *testing.T, p Place) {
	if on, err := p.Up("v1"); on || err != nil {
		t.Fatal("another version is up", err)
	}
	if on, err := p.Up("v2"); !on || err != nil {
		t.Fatal(on, err)
	}
}

// node is a process in the place of a node's.
func node(t *testing.T) *exec.Cmd {
	t.Helper()
	c := exec.Command("sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	return c
}

// guardOf runs one for the node; the channel has its end.
func guardOf(p Place, pid int) <-chan string {
	end := make(chan string, 1)
	go func() {
		start, args, err := p.Guard(pid, func() {}, io.Discard)
		end <- fmt.Sprint(start, args, err)
	}()
	return end
}

func TestGuard(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	const taken, left = "true [clusterd run] <nil>", "false [] <nil>"
	for _, tt := range []struct {
		what    string
		limit   time.Duration
		do      func(*testing.T, Place, *exec.Cmd)
		want    string
		failure string
	}{
		{"confirmed", time.Hour, func(t *testing.T, p Place, _ *exec.Cmd) {
			if err := p.Confirm("v2"); err != nil {
				t.Error(err)
			}
		}, left, ""},
		{"ended by itself", time.Hour, func(t *testing.T, p Place, c *exec.Cmd) { startOnce(t, p); _ = c.Process.Kill(); _ = c.Wait() }, taken, "ended by itself"},
		{"stopped by somebody", time.Hour, func(t *testing.T, p Place, c *exec.Cmd) {
			if err := p.Stopping(); err != nil {
				t.Error(err)
			}
			_ = c.Process.Kill()
			_ = c.Wait()
		}, left, ""},
		{"not up in time", time.Second, func(_ *testing.T, _ Place, c *exec.Cmd) { _ = c.Wait() }, taken, "not up within 500ms"},
		{"not confirmed in time", time.Millisecond, func(_ *testing.T, _ Place, c *exec.Cmd) { _ = c.Wait() }, taken, "not confirmed"},
		{"taken back by another", time.Hour, func(t *testing.T, p Place, _ *exec.Cmd) {
			if err := p.Back("v2", "it is not Ready", time.Now()); err != nil {
				t.Error(err)
			}
		}, left, "it is not Ready"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			p, s := staged(t, "v2")
			p.mustSwitch(t, s.Digest, tt.limit)
			if tt.failure == "not confirmed" {
				beUp(t, p)
			}
			c := node(t)
			end := guardOf(p, c.Process.Pid)
			tt.do(t, p, c)
			select {
			case got := <-end:
				if got != tt.want {
					t.Errorf("the guard ended with %s, want %s", got, tt.want)
				}
			case <-time.After(time.Minute):
				t.Fatal("the guard does not end")
			}
			if _, failure := p.outcome(t); !strings.Contains(failure, tt.failure) || tt.failure == "" && failure != "" {
				t.Errorf("failure %q, want %q", failure, tt.failure)
			}
		})
	}
}

// Where a service manager starts the node again, the guard leaves that to it.
func TestGuardOfAService(t *testing.T) {
	for _, env := range []string{"NOTIFY_SOCKET", "SYSTEMD_EXEC_PID"} {
		t.Run(env, func(t *testing.T) {
			p, s := staged(t, "v2")
			p.mustSwitch(t, s.Digest, time.Hour)
			startOnce(t, p)
			c := node(t)
			t.Setenv("NOTIFY_SOCKET", "")
			t.Setenv(env, fmt.Sprint(c.Process.Pid))
			end := guardOf(p, c.Process.Pid)
			_ = c.Process.Kill()
			_ = c.Wait()
			if got := <-end; got != "false [] <nil>" {
				t.Error(got)
			}
			if _, failure := p.outcome(t); !strings.Contains(failure, "ended by itself") {
				t.Errorf("failure %q", failure)
			}
		})
	}
}

// There is one guard at a time.
func TestGuardIsAlone(t *testing.T) {
	p, s := staged(t, "v2")
	p.mustSwitch(t, s.Digest, time.Hour)
	c := node(t)
	first := guardOf(p, c.Process.Pid)
	second := guardOf(p, c.Process.Pid)
	select {
	case got := <-second:
		if got != "false [] <nil>" {
			t.Fatal(got)
		}
	case got := <-first: // the second was quicker: then it is the one
		if got != "false [] <nil>" {
			t.Fatal(got)
		}
		first = second
	case <-time.After(time.Minute):
		t.Fatal("two guards watch")
	}
	if err := p.Confirm("v2"); err != nil {
		t.Fatal(err)
	}
	<-first
}
