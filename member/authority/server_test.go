package authority

import (
	"slices"
	"testing"
	"time"
)

// TestObsoleteSuccessors: the keys of CAs that were made and never named do not stay on the
// disk; those that a state may still name do.
func TestObsoleteSuccessors(t *testing.T) {
	old := now.Add(-2 * successorTimeout)
	made := map[string]time.Time{"used": old, "used now": now, "named": old, "just made": now, "left over": old}
	used := map[string]bool{"used": true, "used now": true}
	for _, test := range []struct {
		name  string
		named map[string]bool
		want  []string
	}{
		{"the state is known", map[string]bool{"named": true}, []string{"left over", "used", "used now"}},
		{"the state names none", map[string]bool{}, []string{"left over", "named", "used", "used now"}},
		{"the store does not answer", nil, []string{"used", "used now"}},
	} {
		got := obsolete(made, used, test.named, now)
		if slices.Sort(got); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q are dropped, want %q", test.name, got, test.want)
		}
	}
}
