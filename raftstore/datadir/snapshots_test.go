package datadir

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// smallDisk is a file system of its own with 4 MiB, and room for so many files.
func smallDisk(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"+options); err != nil {
		t.Skipf("a tmpfs can be mounted by root only: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func room(t *testing.T, dir string) uint64 {
	t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return st.Bavail
}

func openSnapshots(t *testing.T, dir string) *Snapshots {
	t.Helper()
	s, err := OpenSnapshots(dir, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func create(s *Snapshots, index uint64) (raft.SnapshotSink, error) {
	_, trans := raft.NewInmemTransport("a")
	return s.Create(1, index, 1, raft.Configuration{}, 1, trans)
}

func content(t *testing.T, s *Snapshots) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(s.dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// What a snapshot has taken of a disk that it does not fit on is there again when it
// has failed, whichever of its calls did.
func TestFullDiskGetsItsRoomBack(t *testing.T) {
	fill := func(sink raft.SnapshotSink) (err error) {
		for range 8 {
			if _, err = sink.Write(make([]byte, 1<<20)); err != nil {
				break
			}
		}
		return err
	}
	for name, fail := range map[string]func(t *testing.T, dir string, sink raft.SnapshotSink) error{
		"a write, and it is cancelled": func(t *testing.T, _ string, sink raft.SnapshotSink) error {
			err := fill(sink)
			if cerr := sink.Cancel(); cerr != nil {
				t.Errorf("cancel: %v", cerr)
			}
			return err
		},
		"a write, and it is closed": func(_ *testing.T, _ string, sink raft.SnapshotSink) error {
			return errors.Join(fill(sink), sink.Close())
		},
		"the close": func(t *testing.T, dir string, sink raft.SnapshotSink) error {
			for _, n := range []int{1 << 20, 100} { // the last of it stays in raft's buffer
				if _, err := sink.Write(make([]byte, n)); err != nil {
					t.Fatal(err)
				}
			}
			other := filepath.Join(dir, "other")
			if err := os.WriteFile(other, make([]byte, 8<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			err := sink.Close()
			return errors.Join(err, os.Remove(other), sink.Cancel())
		},
	} {
		for _, pack := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				dir := smallDisk(t, "")
				s := openSnapshots(t, dir)
				s.Pack = func() bool { return pack }
				before := room(t, dir)
				sink, err := create(s, 10)
				if err != nil {
					t.Fatal(err)
				}
				if pack { // below the packer: zeros compressed fit on any disk
					sink = sink.(*snapshotSink).paced
				}
				if err := fail(t, dir, sink); !errors.Is(err, syscall.ENOSPC) {
					t.Fatalf("8 MiB on a disk of 4: %v", err)
				}
				if left := content(t, s); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
				if after := room(t, dir); after < before {
					t.Errorf("%d blocks were free, now %d", before, after)
				}
			})
		}
	}
}

// One that cannot even be created leaves nothing either, and takes nothing from one
// that is being written.
func TestSnapshotThatCannotBeCreated(t *testing.T) {
	dir := smallDisk(t, ",nr_inodes=7") // two directories, a snapshot's three files, and two of the next
	s := openSnapshots(t, dir)
	first, err := create(s, 10)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := create(s, 11); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("a second one: %v", err)
	}
	if left := content(t, s); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	if _, err := first.Write([]byte("state")); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if newest, _, err := s.Latest(); newest != 10 || err != nil {
		t.Errorf("the newest is %d, %v", newest, err)
	}
}

// Whoever decides about snapshots is asked before one is begun, and while it is
// written.
func TestSnapshotThatIsNotAllowed(t *testing.T) {
	s := openSnapshots(t, t.TempDir())
	refused := errors.New("no room")
	asked, upTo := 0, 0
	s.Allow = func() error {
		if asked++; asked > upTo {
			return refused
		}
		return nil
	}
	if _, err := create(s, 10); !errors.Is(err, refused) || len(content(t, s)) > 0 {
		t.Fatalf("%v, and there is %v", err, content(t, s))
	}
	asked, upTo = 0, 4
	sink, err := create(s, 10)
	if err != nil {
		t.Fatal(err)
	}
	written := 0
	for err == nil && written < 100<<20 {
		var n int
		n, err = sink.Write(make([]byte, 64<<10))
		written += n
	}
	if !errors.Is(err, refused) || written != 4<<20 {
		t.Errorf("%d bytes were written, then %v", written, err)
	}
	if err := sink.Cancel(); err != nil || len(content(t, s)) > 0 {
		t.Errorf("%v, and there is %v", err, content(t, s))
	}
}

// lateSink is raft's where the last step of finishing a snapshot fails, when it has
// its name.
type lateSink struct{ raft.SnapshotSink }

var errLate = errors.New("the folder could not be synced")

func (s lateSink) Close() error {
	return errors.Join(s.SnapshotSink.Close(), errLate)
}

// A snapshot that has its name stays as it is, whatever failed then.
func TestSnapshotThatStands(t *testing.T) {
	s := openSnapshots(t, t.TempDir())
	sink, err := create(s, 10)
	if err != nil {
		t.Fatal(err)
	}
	p := sink.(*snapshotSink).paced
	p.SnapshotSink = lateSink{p.SnapshotSink}
	if _, err := sink.Write(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	if err := sink.Close(); !errors.Is(err, errLate) {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(p.folder, snapState)); err != nil || info.Size() != 100 {
		t.Errorf("%v, %v", info, err)
	}
	if err := errors.Join(sink.Cancel(), s.RemoveUnfinished()); err != nil || len(content(t, s)) != 1 {
		t.Errorf("%v, and there is %v", err, content(t, s))
	}
}
