// Package imageworkerbin carries the imageworker program inside clusterd.
package imageworkerbin

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
)

// The pattern also matches imageworker.md, so that it builds before imageworker does.
//
//go:embed imageworker*
var files embed.FS

// ErrAbsent is returned when clusterd was built without imageworker.
var ErrAbsent = errors.New("clusterd was built without imageworker and cannot read images: run make")

// Open gives the program as a sealed memory file to execute: nothing is written to disk,
// and nothing can change it.
func Open() (*os.File, error) {
	program, err := files.Open("imageworker")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrAbsent
	}
	if err != nil {
		return nil, err
	}
	defer program.Close()
	f, err := sealed.New("imageworker", program)
	if err != nil {
		return nil, fmt.Errorf("imageworker into memory: %w", err)
	}
	return f, nil
}
