package mvcc

import "testing"

func TestOriginFrom(t *testing.T) {
	for _, c := range []struct{ said, from, want, who string }{
		{"alice via kubectl", "n2", "alice via kubectl [from n2]", "alice via kubectl"},
		{"alice via kubectl", "", "alice via kubectl", "alice via kubectl"},
		{"", "n2", "[from n2]", ""},
		{"", "", "", ""},
		// Who names a member himself.
		{"alice [from n1]", "n2", "alice [from n2]", "alice"},
		{"alice [from n1]", "", "alice", "alice"},
		{"alice [from n1] [from n3]", "n2", "alice [from n2]", "alice"},
		{"[from n1]", "n2", "[from n2]", ""},
		{"[from n1] [from n1]", "", "", ""},
		// What only looks like it stays, and is told apart.
		{"alice[from n1]", "n2", "alice[from n1] [from n2]", "alice[from n1]"},
		{"alice [from n1", "n2", "alice [from n1 [from n2]", "alice [from n1"},
		{"alice [from ]", "n2", "alice [from ] [from n2]", "alice [from ]"},
		{"alice [from n1 or n3]", "n2", "alice [from n1 or n3] [from n2]", "alice [from n1 or n3]"},
		{"alice [from [from n1]]", "n2", "alice [from [from n1]] [from n2]", "alice [from [from n1]]"},
	} {
		got := OriginFrom(c.said, c.from)
		if got != c.want {
			t.Errorf("%q from %q: %q, want %q", c.said, c.from, got, c.want)
		}
		if who, from := SplitOrigin(got); who != c.who || from != c.from {
			t.Errorf("%q: by %q, from %q", got, who, from)
		}
		if again := OriginFrom(got, c.from); again != got {
			t.Errorf("%q twice: %q", c.said, again)
		}
	}
}

func TestPlainOrigin(t *testing.T) {
	for who, want := range map[string]string{
		"bob": "bob", "": "", "bob via curl": "bob via curl", "bob[from x]": "bob[from x]",
		"bob [from x]": "bob [from: x]", "[from x]": "[from: x]", "bob [from x] [from y]": "bob [from x] [from: y]",
	} {
		got := PlainOrigin(who)
		if got != want {
			t.Errorf("%q: %q, want %q", who, got, want)
		}
		// The leader leaves it as it is.
		if kept := OriginFrom(got, ""); kept != got {
			t.Errorf("%q becomes %q", got, kept)
		}
		if by, from := SplitOrigin(OriginFrom(got, "n2")); by != got || from != "n2" {
			t.Errorf("%q: by %q, from %q", got, by, from)
		}
	}
}
