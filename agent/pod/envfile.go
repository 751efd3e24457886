package pod

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// maxEnvFile bounds a file of variables: it is read whole at each start.
const maxEnvFile = 64 << 10

// fileValue reads a variable from a file that an earlier container has left in
// a volume of the pod (KEP-3721). The file is a container's: it is looked up
// without leaving the volume and read only if it is a plain one.
func fileValue(in envInput, ref *v1.FileKeySelector) (value string, ok bool, err error) {
	where := fmt.Sprintf("file %q of volume %q", ref.Path, ref.VolumeName)
	dir, err := in.volumeDir(ref.VolumeName)
	if err != nil {
		return "", false, err
	}
	b, err := readPlain(dir, ref.Path)
	if errors.Is(err, fs.ErrNotExist) && isTrue(ref.Optional) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("%s: %w", where, err)
	}
	vars, err := parseEnvFile(string(b))
	if err != nil {
		return "", false, fmt.Errorf("%s: %w", where, err)
	}
	if value, ok = vars[ref.Key]; !ok && !isTrue(ref.Optional) {
		return "", false, fmt.Errorf("couldn't find key %v in %s", ref.Key, where)
	}
	return value, ok, nil
}

// readPlain reads a plain file of bounded size below dir; no link leads out of
// dir, and no pipe holds us up.
func readPlain(dir, name string) ([]byte, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil {
		return nil, err
	} else if !st.Mode().IsRegular() {
		return nil, errors.New("is not a plain file")
	}
	b, err := io.ReadAll(io.LimitReader(f, maxEnvFile+1))
	if err == nil && len(b) > maxEnvFile {
		err = fmt.Errorf("is larger than %d KiB", maxEnvFile>>10)
	}
	return b, err
}

// parseEnvFile reads lines NAME='value': what a POSIX shell would make of them,
// and nothing else that a shell understands. A value is taken as it is up to
// its closing quote, over several lines if need be. Blank lines, lines that
// begin with # and blanks before a name mean nothing; a later line wins.
func parseEnvFile(text string) (map[string]string, error) {
	vars := map[string]string{}
	for line := 1; text != ""; {
		head := strings.TrimLeft(text, " \t")
		if head == "" || head[0] == '#' || head[0] == '\n' || strings.HasPrefix(head, "\r\n") {
			_, text, _ = strings.Cut(head, "\n")
			line++
			continue
		}
		name, rest, ok := strings.Cut(head, "='")
		if !ok || strings.Contains(name, "\n") {
			return nil, fmt.Errorf("line %d: want NAME='value', the value in single quotes", line)
		}
		if faults := validation.IsRelaxedEnvVarName(name); len(faults) > 0 || strings.ContainsAny(name, " \t") {
			return nil, fmt.Errorf("line %d: %q is not a name of a variable: want printable characters without blanks and without =", line, name)
		}
		value, rest, ok := strings.Cut(rest, "'")
		if !ok {
			return nil, fmt.Errorf("line %d: the value of %s has no closing quote", line, name)
		}
		line += strings.Count(value, "\n")
		after, rest, _ := strings.Cut(rest, "\n")
		if strings.TrimRight(after, " \t\r") != "" {
			return nil, fmt.Errorf("line %d: %q follows the closing quote of %s", line, after, name)
		}
		vars[name], text = value, rest
		line++
	}
	return vars, nil
}
