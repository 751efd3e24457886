package nodelog

import (
	"io"
	"path/filepath"
	"slices"

	"gopkg.in/natefinch/lumberjack.v2"
)

// Sizes of this program's own log where there is no journal: two files.
const (
	ownMegabytes = 8
	ownBackups   = 1
)

// OwnLog opens a file for this program's own log, which it bounds in size.
func OwnLog(path string) io.WriteCloser {
	return &lumberjack.Logger{Filename: path, MaxSize: ownMegabytes, MaxBackups: ownBackups}
}

// OlderLogs are the files that were begun before path, the oldest first.
func OlderLogs(path string) []string {
	ext := filepath.Ext(path)
	older, _ := filepath.Glob(path[:len(path)-len(ext)] + "-*" + ext) // the pattern is ours
	slices.Sort(older)                                                // their names are their times
	return older
}
