// Package releases is about a new clusterd on its way onto a machine: the signed file
// that it comes in, the place beside the program that runs where it is kept, and
// the trial that it is on until it was seen to work.
//
//	file ──verify──▶ next ──switch──▶ program, on trial ──confirm──▶ program
//	                                     │ ended, or not confirmed in time
//	                                     └────────────▶ previous is the program again
//
// It knows files, signatures and processes. It does not know the cluster: whether
// a node is well is judged by the client that confirms. Nothing is run of a file before
// its signature, all of its bytes and its architecture were checked here.
package releases

import (
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"strings"
)

// Manifest is what a signature says of a release, beside its bytes.
type Manifest struct {
	Version string // as `clusterd version` prints it
	Arch    string // as Go names it
}

// Platform is the manifest's and the machine's kernel and architecture.
func (m Manifest) Platform() string { return "linux/" + m.Arch }

// comment is the trusted comment of the signature.
func (m Manifest) comment() string { return "clusterd " + m.Version + " " + m.Platform() }

var manifestForm = regexp.MustCompile(`^clusterd (\S{1,128}) linux/([a-z0-9]{1,16})$`)

func parseManifest(comment string) (Manifest, error) {
	f := manifestForm.FindStringSubmatch(comment)
	if f == nil {
		return Manifest{}, fmt.Errorf("the signature's trusted comment is %q and names no release: it has to be \"clusterd VERSION linux/ARCH\", which `clusterctl upgrade sign` writes", comment)
	}
	return Manifest{f[1], f[2]}, nil
}

// Check refuses a manifest that cannot be signed, or a release for other machines.
func (m Manifest) Check() error {
	if _, err := parseManifest(m.comment()); err != nil {
		return fmt.Errorf("version %q, architecture %q: a version has no spaces, an architecture is one such as amd64", m.Version, m.Arch)
	}
	return nil
}

// ForHere refuses a release for another architecture than this program's.
func (m Manifest) ForHere() error {
	if m.Arch != runtime.GOARCH {
		return &RefusedError{fmt.Sprintf("release %s is for %s, and this machine is linux/%s: give the file for that", m.Version, m.Platform(), runtime.GOARCH)}
	}
	return nil
}

// RefusedError is returned for a file that is not taken, and for wishes that do not
// fit what is there. Nothing was changed then.
type RefusedError struct{ why string }

func (e *RefusedError) Error() string { return e.why }

func refusedf(format string, args ...any) error {
	return &RefusedError{fmt.Sprintf(format, args...)}
}

// IsRefused reports whether err is, or wraps, a *RefusedError.
func IsRefused(err error) bool {
	var no *RefusedError
	return errors.As(err, &no)
}

// names lists keys for an error.
func names(keys []Key) string {
	if len(keys) == 0 {
		return "none"
	}
	var all []string
	for _, k := range keys {
		all = append(all, k.Name())
	}
	return strings.Join(all, ", ")
}
