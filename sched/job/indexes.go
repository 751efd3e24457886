package job

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// span is a run of indexes, both ends included.
type span struct{ first, last int }

// indexes is a set of completion indexes: sorted spans with gaps between them.
type indexes []span

// parseIndexes reads "0,2-4"; what is out of range or order is left out, as the
// status may come from elsewhere.
func parseIndexes(text string, completions int) indexes {
	var out indexes
	for part := range strings.SplitSeq(text, ",") {
		first, second, isRange := strings.Cut(part, "-")
		from, err := strconv.Atoi(first)
		if err != nil {
			continue
		}
		to := from
		if isRange {
			if to, err = strconv.Atoi(second); err != nil {
				continue
			}
		}
		if to = min(to, completions-1); from < 0 || from > to {
			continue
		}
		out = append(out, span{from, to})
	}
	return out.merged()
}

// merged sorts the spans and joins those that touch.
func (x indexes) merged() indexes {
	slices.SortFunc(x, func(a, b span) int { return a.first - b.first })
	var out indexes
	for _, s := range x {
		if n := len(out); n > 0 && s.first <= out[n-1].last+1 {
			out[n-1].last = max(out[n-1].last, s.last)
			continue
		}
		out = append(out, s)
	}
	return out
}

// with returns the set with more indexes in it.
func (x indexes) with(more []int) indexes {
	if len(more) == 0 {
		return x
	}
	out := slices.Clone(x)
	for _, i := range more {
		out = append(out, span{i, i})
	}
	return out.merged()
}

func (x indexes) has(i int) bool {
	n, found := slices.BinarySearchFunc(x, i, func(s span, i int) int { return s.first - i })
	return found || n > 0 && i <= x[n-1].last
}

func (x indexes) count() (n int) {
	for _, s := range x {
		n += s.last - s.first + 1
	}
	return n
}

// in counts the indexes that both sets have.
func (x indexes) in(other indexes) (n int) {
	for _, a := range x {
		for _, b := range other {
			if first, last := max(a.first, b.first), min(a.last, b.last); first <= last {
				n += last - first + 1
			}
		}
	}
	return n
}

// String is the form that Job status has: two neighbours are a list, three a
// range.
func (x indexes) String() string {
	var out []string
	for _, s := range x {
		switch s.last - s.first {
		case 0:
			out = append(out, strconv.Itoa(s.first))
		case 1:
			out = append(out, strconv.Itoa(s.first), strconv.Itoa(s.last))
		default:
			out = append(out, fmt.Sprintf("%d-%d", s.first, s.last))
		}
	}
	return strings.Join(out, ",")
}
