// Package podmonbin carries the podmon program inside clusterd.
package podmonbin

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
)

// The pattern also matches podmon.md, so that it builds before podmon does.
//
//go:embed podmon*
var files embed.FS

// ErrAbsent is returned when clusterd was built without podmon.
var ErrAbsent = errors.New("clusterd was built without podmon: run make")

// Open gives the program as a sealed memory file to execute: nothing is written
// to disk, nothing can change it, and containers' inits run from it as it is.
func Open() (*os.File, error) {
	program, err := files.Open("podmon")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrAbsent
	}
	if err != nil {
		return nil, err
	}
	defer program.Close()
	f, err := sealed.New("podmon", program)
	if err != nil {
		return nil, fmt.Errorf("podmon into memory: %w", err)
	}
	return f, nil
}
