package newname

import (
	"strings"
	"testing"
)

func TestOf(t *testing.T) {
	if long := Of(strings.Repeat("x", 100)+"-", 63); len(long) != 63 {
		t.Errorf("name of %d characters, want 63", len(long))
	}
	if a, b := Of("web-", 63), Of("web-", 63); a == b || !strings.HasPrefix(a, "web-") {
		t.Errorf("two pods are called %s and %s", a, b)
	}
}
