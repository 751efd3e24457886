package stats

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// networkInterface is the counters of one interface.
type networkInterface struct {
	name   string
	rx, tx traffic
}

type traffic struct{ bytes, packets, errors, dropped uint64 }

// interfaces reads the counters of a network namespace's interfaces (proc(5),
// net/dev). Loopback is left out.
func interfaces(file string) ([]networkInterface, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var out []networkInterface
	for line := range strings.Lines(string(b)) {
		name, rest, ok := strings.Cut(strings.TrimSpace(line), ":")
		v := strings.Fields(rest)
		if !ok || name == "lo" || len(v) < 12 {
			continue // the two lines of headings have no colon
		}
		read := func(from int) (traffic, error) {
			var n [4]uint64
			for i := range n {
				if n[i], err = strconv.ParseUint(v[from+i], 10, 64); err != nil {
					return traffic{}, fmt.Errorf("%s: %s: %w", file, name, err)
				}
			}
			return traffic{n[0], n[1], n[2], n[3]}, nil
		}
		i := networkInterface{name: name}
		if i.rx, err = read(0); err != nil {
			return nil, err
		}
		if i.tx, err = read(8); err != nil {
			return nil, err
		}
		out = append(out, i)
	}
	return out, nil
}
