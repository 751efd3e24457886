package podspec

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/agent/internal/plainfile"
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
	var b []byte
	f, err := plainfile.OpenBeneath(dir, ref.Path)
	if err == nil {
		b, err = plainfile.Read(f, maxEnvFile)
	}
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
