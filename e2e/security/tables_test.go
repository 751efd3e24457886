package security

import (
	"strings"
	"testing"
)

// TestTables: names are what exceptions and the report go by.
func TestTables(t *testing.T) {
	lists := map[string][]string{}
	add := func(list, name string) { lists[list] = append(lists[list], name) }
	for _, g := range groups {
		add("groups", g.name)
	}
	for list, all := range map[string][]call{"agentCalls": agentCalls, "unconfirmedCalls": unconfirmedCalls, "climberCalls": climberCalls, "anonymousCalls": anonymousCalls} {
		for _, c := range all {
			add(list, c.name)
			if !strings.HasPrefix(c.path, "/") || c.method == "" {
				t.Errorf("%s: %s %s is no request", c.name, c.method, c.path)
			}
		}
	}
	for _, w := range wishes {
		add("wishes", w.name)
	}
	for _, l := range loosened {
		add("loosened", l.name)
	}
	for _, h := range images() {
		add("images", h.name)
	}
	for _, r := range registries {
		add("registries", r.name)
	}
	for _, d := range targets {
		add("targets", d.name)
	}
	for list, names := range lists {
		seen := map[string]bool{}
		for _, name := range names {
			if name == "" || seen[name] {
				t.Errorf("%s: the name %q is there twice, or is none", list, name)
			}
			seen[name] = true
		}
	}
}

// TestArchives: each of the hostile images can be made; the large ones where they are needed.
func TestArchives(t *testing.T) {
	for _, h := range images() {
		if h.large {
			continue
		}
		if b := h.build(strings.NewReplacer("$CANARY", "/canary", "$PROGRAM", "program").Replace, [][]byte{layer(entry{name: "escape", body: "x"})}, "clusterd.local/x:1"); len(b) == 0 {
			t.Errorf("%s: nothing", h.name)
		}
	}
}
