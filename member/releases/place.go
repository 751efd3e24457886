package releases

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/durable"
)

// Place is where a node keeps releases.
//
//	dir of Exe/.clusterd-upgrade-HASH/   HASH: of State, since nodes may share Exe
//	    release.part      the file on its way, not checked; removed by the next
//	    next              the program of a release that was checked
//	    next-clusterctl   its clusterctl
//	    previous          the program that ran before the last switch
//	State/
//	    staged.json       Staged: written after next is whole
//	    trial.json        Trial: the program was switched and is not confirmed
//	    failure.json      Failure: the last switch that was taken back
//	    stopped           the node was asked to end while it went back
//	    lock              held while one of these changes; guard.lock by the guard
//
// Exe is replaced by rename alone.
type Place struct {
	Exe   string // the program as it is installed
	State string // a directory of the node's own
}

// Here is the place of the program that runs, for the node with that data directory.
func Here(data string) (Place, error) {
	exe, err := os.Executable()
	return Place{Exe: exe, State: filepath.Join(data, "upgrade")}, err
}

// dir is on the file system of the program, so that renames are one step.
func (p Place) dir() string {
	h := fnv.New32a()
	h.Write([]byte(filepath.Clean(p.State)))
	return filepath.Join(filepath.Dir(p.Exe), fmt.Sprintf(".clusterd-upgrade-%08x", h.Sum32()))
}

func (p Place) file(name string) string  { return filepath.Join(p.dir(), name) }
func (p Place) state(name string) string { return filepath.Join(p.State, name) }

// Previous is where the program lies that ran before the last switch.
func (p Place) Previous() string { return p.file("previous") }

// CleanUp removes what is beside the program. The state goes with the data directory.
func (p Place) CleanUp() error { return os.RemoveAll(p.dir()) }

// Staged is a release that was checked and is ready to run.
type Staged struct {
	Version string `json:"version"`
	// Digest is of the release's file: SHA-256.
	Digest string `json:"digest"`
	// Program is the SHA-256 of the program in it.
	Program string `json:"program"`
	Key     string `json:"key"` // that it was signed with
}

// Failure is a switch that was taken back.
type Failure struct {
	Version string    `json:"version"` // that was tried
	Why     string    `json:"why"`
	At      time.Time `json:"at"`
}

const (
	maxFile    = 1 << 30 // of a release
	maxProgram = 1 << 30 // of a program in it

	// tryFor is how long `next version` may take on a busy machine.
	tryFor = time.Minute
)

// open makes the directories. What lies beside the program is run, so that no other user may
// be able to write there: the program may lie where others can make directories.
func (p Place) open() error {
	dir := p.dir()
	if err := errors.Join(os.MkdirAll(p.State, 0o700), os.MkdirAll(dir, 0o755)); err != nil {
		return fmt.Errorf("make room beside %s for a release: %w", p.Exe, err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return refusedf("%s has to be a folder of user %d that no other user can write to, for what lies there is run: remove it", dir, os.Geteuid())
	}
	return nil
}

// sweep removes what a process that was killed in the middle has left.
func (p Place) sweep() error {
	var errs []error
	for _, pattern := range []string{".unpack-*", ".previous-*"} {
		left, err := filepath.Glob(p.file(pattern))
		errs = append(errs, err)
		for _, name := range left {
			errs = append(errs, ignoreMissing(os.Remove(name)))
		}
	}
	return errors.Join(errs...)
}

// locked runs do while no other process changes the place.
func (p Place) locked(do func() error) error {
	if err := os.MkdirAll(p.State, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(p.state("lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close() // which frees it
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return do()
}

// Stage reads a release's file, checks it and lays its programs ready. What is wrong
// with a file is a *RefusedError, said as early as it is known: a file that is signed
// by a stranger or for other machines is not read.
func (p Place) Stage(file io.Reader, signature []byte, keys []Key) (Staged, error) {
	sig, err := ParseSignature(signature)
	if err != nil {
		return Staged{}, err
	}
	key, m, err := sig.Trusted(keys)
	if err != nil {
		return Staged{}, err
	}
	if err := m.ForHere(); err != nil {
		return Staged{}, err
	}
	var s Staged
	err = p.locked(func() error {
		if err := errors.Join(p.open(), p.sweep()); err != nil {
			return err
		}
		if t, err := p.Trial(); err != nil || t != nil {
			return errors.Join(err, p.onTrial(t))
		}
		part := p.file("release.part")
		defer os.Remove(part)
		s, err = p.stage(part, file, sig, key, m)
		return err
	})
	return s, err
}

func (p Place) onTrial(t *Trial) error {
	if t == nil {
		return nil
	}
	if t.Back != "" {
		return refusedf("release %s was taken back on this node: %s", t.Version, t.Back)
	}
	return refusedf("release %s is on trial on this node until %s: confirm it or take it back first", t.Version, t.Deadline.Format(time.RFC3339))
}

func (p Place) stage(part string, file io.Reader, sig *Signature, key Key, m Manifest) (Staged, error) {
	out, err := os.OpenFile(part, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return Staged{}, err
	}
	defer out.Close()
	signed, plain := newDigest(), sha256.New()
	n, err := io.Copy(io.MultiWriter(out, signed, plain), io.LimitReader(file, maxFile+1))
	switch {
	case err != nil:
		return Staged{}, fmt.Errorf("receive the release: %w", err)
	case n > maxFile:
		return Staged{}, refusedf("the file is larger than %d MiB: it is no release", maxFile>>20)
	}
	if err := sig.verify(key, signed.Sum(nil)); err != nil {
		return Staged{}, err
	}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return Staged{}, err
	}
	// From here on what was staged before is no more.
	if err := errors.Join(ignoreMissing(os.Remove(p.state("staged.json"))), ignoreMissing(os.Remove(p.file("next"))), ignoreMissing(os.Remove(p.file("next-clusterctl")))); err != nil {
		return Staged{}, err
	}
	program, err := p.unpack(out, m)
	if err != nil {
		return Staged{}, err
	}
	s := Staged{Version: m.Version, Digest: hex.EncodeToString(plain.Sum(nil)), Program: program, Key: key.Name()}
	return s, p.write("staged.json", s)
}

// unpack lays the programs of a release that was checked beside the installed one.
func (p Place) unpack(file io.Reader, m Manifest) (program string, err error) {
	err = eachProgram(file, func(name string, content io.Reader) error {
		to := p.file("next-" + name)
		if name == "clusterd" {
			to = p.file("next")
		}
		f, err := os.CreateTemp(p.dir(), ".unpack-*")
		if err != nil {
			return err
		}
		h := sha256.New()
		n, err := io.Copy(io.MultiWriter(f, h), io.LimitReader(content, maxProgram+1))
		if err == nil && n > maxProgram {
			err = refusedf("%s in the release is larger than %d MiB", name, maxProgram>>20)
		}
		if err == nil {
			err = checkProgram(f, name, m.Arch)
		}
		if err == nil {
			err = f.Chmod(0o755)
		}
		if err != nil {
			return errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
		if name == "clusterd" {
			program = hex.EncodeToString(h.Sum(nil))
		}
		return durable.Commit(f, to)
	})
	if err == nil && program == "" {
		err = refusedf("there is no clusterd in the release: it has to be a tarball as `make deb` and `make release` write it")
	}
	return program, err
}

// Staged is the release that is ready; nil: there is none.
func (p Place) Staged() (*Staged, error) { return read[Staged](p, "staged.json") }

// Failure is the last switch that was taken back; nil: none since the last that was
// confirmed.
func (p Place) Failure() (*Failure, error) { return read[Failure](p, "failure.json") }

// Trial is what is on trial; nil: nothing.
func (p Place) Trial() (*Trial, error) { return read[Trial](p, "trial.json") }

func read[T any](p Place, name string) (*T, error) {
	b, err := os.ReadFile(p.state(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var v T
	if err == nil {
		err = json.Unmarshal(b, &v)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.state(name), err)
	}
	return &v, nil
}

func (p Place) write(name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return durable.ReplaceFile(p.state(name), b, 0o600)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// rename and syncDir are durable's; they are replaced by tests of disks that fail.
var (
	rename  = durable.Rename
	syncDir = durable.SyncDir
)

// notRenamed tells an error of rename that changed nothing from one that came after it:
// the file has its new name then, and a power cut may undo that.
func notRenamed(err error) bool {
	var link *os.LinkError
	return errors.As(err, &link)
}

// Switch makes the staged release with that digest the installed program, on trial
// with what t says of it: From, Args, Limit and UpWithin. The key that it was signed
// with has to be trusted still. The one that runs now is kept. guard is called when
// all is ready, to start the guard of the node's process: an error of it stops the
// switch. The caller starts the program again. After an error the program is the one
// that was.
func (p Place) Switch(ctx context.Context, digest string, keys []Key, t Trial, guard func() error, now time.Time) (Trial, error) {
	began := time.Now()
	err := p.locked(func() error {
		if running, err := p.Trial(); err != nil || running != nil {
			return errors.Join(err, p.onTrial(running))
		}
		s, err := p.Staged()
		if err != nil {
			return err
		}
		if s == nil || s.Digest != digest {
			return refusedf("the release with digest %.12s is not on this node: send it first", digest)
		}
		if !slices.ContainsFunc(keys, func(k Key) bool { return k.Name() == s.Key }) {
			return refusedf("release %s on this node is signed with key %s, which is trusted no more (trusted: %s): send one that is signed with a key that is", s.Version, s.Key, names(keys))
		}
		if err := p.open(); err != nil {
			return err
		}
		if sum, err := fileSum(p.file("next")); err != nil || sum != s.Program {
			return errors.Join(refusedf("the staged program of release %s is damaged on disk: send the file again", s.Version), err, os.Remove(p.state("staged.json")))
		}
		if err := tryVersion(ctx, p.file("next"), s.Version); err != nil {
			return err
		}
		if err := keepRunning(p.Previous()); err != nil {
			return fmt.Errorf("keep the present program: %w", err)
		}
		// What came before took its time, too.
		now = now.Add(time.Since(began))
		t.Version, t.Began, t.Deadline, t.UpBy = s.Version, now.UTC(), now.Add(t.Limit).UTC(), now.Add(t.UpWithin).UTC()
		t.Boot, t.Uptime = machineTime()
		return p.begin(t, guard, now)
	})
	return t, err
}

// begin writes the trial down, has it guarded and puts the new program in place.
func (p Place) begin(t Trial, guard func() error, now time.Time) error {
	err := p.write("trial.json", t)
	if err == nil {
		err = guard()
	}
	if err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(p.state("trial.json"))))
	}
	err = rename(p.file("next"), p.Exe)
	if notRenamed(err) {
		return errors.Join(fmt.Errorf("put the new program in place of %s: %w", p.Exe, err), os.Remove(p.state("trial.json")))
	}
	// What was staged is no more; a file that is left says so, as the program is gone.
	_ = os.Remove(p.state("staged.json"))
	if err != nil {
		why := fmt.Sprintf("the folder of %s could not be synced after the new program was put there, so a power cut might undo that", p.Exe)
		return errors.Join(fmt.Errorf("%s; the program before is in place again: look at the disk: %w", why, err), p.takeBack(t, why, now))
	}
	return nil
}

// tryVersion runs the program once, for its version: one that cannot be executed
// here or is not what its signature says is found before anything is stopped.
func tryVersion(ctx context.Context, program, version string) error {
	ctx, cancel := context.WithTimeout(ctx, tryFor)
	defer cancel()
	for {
		out, err := exec.CommandContext(ctx, program, "version").CombinedOutput()
		if errors.Is(err, syscall.ETXTBSY) && ctx.Err() == nil {
			// A child of this process that is about to run another program still holds
			// the file open for writing.
			time.Sleep(10 * time.Millisecond)
			continue
		}
		said := strings.TrimSpace(string(out))
		if err != nil {
			return refusedf("the new program does not run on this machine: `clusterd version`: %v %.300s", err, said)
		}
		if said != "clusterd "+version {
			return refusedf("the release is signed as %s, and its program says %.100q", version, said)
		}
		return nil
	}
}

// keepRunning copies the program that runs, which may not be the installed one.
func keepRunning(to string) error {
	from, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := os.CreateTemp(filepath.Dir(to), ".previous-*")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	if err == nil {
		err = f.Chmod(0o755)
	}
	if err != nil {
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return durable.Commit(f, to)
}

func fileSum(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

// Arch is the architecture of the program that runs.
const Arch = runtime.GOARCH
