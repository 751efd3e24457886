package raftlog

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/logtest"
)

// TestConvertLog converts a log from each engine to the other, stops at every
// moment as kill -9 would, and starts again: with the same wish or with the old
// one. The entries are there each time.
func TestConvertLog(t *testing.T) {
	logger := slog.New(slog.DiscardHandler)
	want := append(logtest.Entries(1, 50, 1, 100), logtest.Entries(51, 53, 2, 700<<10)...)
	errStop := errors.New("killed")
	for i, from := range Engines {
		to := Engines[1-i]
		for moment := 0; ; moment++ {
			dir := logtest.MemDir(t)
			first := Record{Engine: from, Folder: logDir}
			l, err := first.Open(dir, 0, logger)
			if err != nil {
				t.Fatal(err)
			}
			logtest.Store(t, l, want...)
			if err := errors.Join(writeRecord(dir, first), l.Close()); err != nil {
				t.Fatal(err)
			}
			// open is what a start does with its wish.
			open := func(wish Engine, at func(string) error) (name string, err error) {
				var l Log
				r, _, err := ReadRecord(dir)
				if err != nil {
					return "", err
				}
				if at == nil {
					if l, err = Open(Options{Dir: dir, Engine: wish, Logger: logger}); err != nil {
						return "", err
					}
				} else {
					if l, err = r.Open(dir, 0, logger); err != nil {
						return "", err
					}
					if _, err := convert(dir, r, l, wish, 0, logger, at); err != nil {
						return "", errors.Join(err, l.Close())
					}
				}
				got := logtest.Contents(t, l)
				same := len(got) == len(want)
				for i := range got {
					same = same && got[i].Index == want[i].Index && got[i].Term == want[i].Term && bytes.Equal(got[i].Data, want[i].Data)
				}
				if !same {
					t.Fatalf("%s to %s, moment %d, opened as %s: %d entries, other ones than %d", from, to, moment, wish, len(got), len(want))
				}
				r, _, err = ReadRecord(dir)
				return fmt.Sprint(r.Engine), errors.Join(err, l.Close())
			}
			n := 0
			_, err = open(to, func(string) error {
				if n++; n > moment {
					return errStop
				}
				return nil
			})
			if err != nil && !errors.Is(err, errStop) {
				t.Fatal(err)
			}
			for _, wish := range []Engine{from, to, from} {
				if got, err := open(wish, nil); err != nil || got != string(wish) {
					t.Fatalf("%s to %s, killed at moment %d, then wished for as %s: it is %s, %v", from, to, moment, wish, got, err)
				}
			}
			if logs, _ := filepath.Glob(filepath.Join(dir, "log*")); len(logs) != 2 { // and log.json
				t.Errorf("%s to %s, moment %d: %v is left", from, to, moment, logs)
			}
			if n < moment {
				break // it got to its end
			}
		}
	}
}

func TestLogRecord(t *testing.T) {
	dir := logtest.MemDir(t)
	if r, recorded, err := ReadRecord(dir); r.Engine != Segments || r.Folder != logDir || recorded || err != nil {
		t.Errorf("without one: %+v, %v, %v", r, recorded, err)
	}
	for _, bad := range []string{"", "{", `{"version":1,"engine":"bolt","folder":"../x"}`, `{"version":1,"engine":"tape","folder":"log"}`, `{"version":1,"engine":"bolt","folder":"log/../../x"}`} {
		if err := os.WriteFile(filepath.Join(dir, logFile), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := ReadRecord(dir); !errors.As(err, new(*datadir.DamageError)) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, logFile), []byte(`{"version":2,"engine":"stone","folder":"log"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ReadRecord(dir); err == nil || errors.As(err, new(*datadir.DamageError)) {
		t.Errorf("of a newer version: %v", err)
	}
}
