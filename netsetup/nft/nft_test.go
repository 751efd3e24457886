package nft

import (
	"errors"
	"flag"
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func prefixes(s ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range s {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func sample() Ruleset {
	return Ruleset{
		Forward: prefixes("10.42.0.0/16", "fd42::/48"),
		Masquerade: []Masquerade{
			{From: netip.MustParsePrefix("10.42.1.0/24"), Except: prefixes("10.42.0.0/16", "224.0.0.0/4")},
			{From: netip.MustParsePrefix("fd42:0:0:1::/64"), Except: prefixes("fd42::/48")},
		},
	}
}

func TestTextGolden(t *testing.T) {
	got := sample().Text(DefaultTable)
	const file = "testdata/ruleset.nft"
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Fatalf("ruleset text (-want +got), rewrite with -update:\n%s", d)
	}
}

func TestInvalidRangesAreRefused(t *testing.T) {
	for name, r := range map[string]Ruleset{
		"forward":        {Forward: []netip.Prefix{{}}},
		"from":           {Masquerade: []Masquerade{{}}},
		"mixed families": {Masquerade: []Masquerade{{From: prefixes("10.0.0.0/8")[0], Except: prefixes("fd00::/8")}}},
	} {
		if err := new(Fake).Apply(r); err == nil {
			t.Errorf("%s: passed", name)
		}
	}
}

// filter is what both the kernel and the fake do.
type filter interface {
	Apply(Ruleset) error
	List() ([]string, error)
	CleanUp() error
}

// suite holds for both twins.
func suite(t *testing.T, f filter) {
	t.Helper()
	want := []string{
		"forward: ip saddr 10.42.0.0/16 accept",
		"forward: ip daddr 10.42.0.0/16 accept",
		"forward: ip6 saddr fd42::/48 accept",
		"forward: ip6 daddr fd42::/48 accept",
		"postrouting: ip saddr 10.42.1.0/24 ip daddr 10.42.0.0/16 return",
		"postrouting: ip saddr 10.42.1.0/24 ip daddr 224.0.0.0/4 return",
		"postrouting: ip saddr 10.42.1.0/24 masquerade",
		"postrouting: ip6 saddr fd42:0:0:1::/64 ip6 daddr fd42::/48 return",
		"postrouting: ip6 saddr fd42:0:0:1::/64 masquerade",
	}
	expect := func(want []string) {
		t.Helper()
		got, err := f.List()
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatal(d)
		}
	}
	if err := f.CleanUp(); err != nil {
		t.Fatalf("clean up of nothing: %v", err)
	}
	expect(nil)
	for range 2 { // twice is once
		if err := f.Apply(sample()); err != nil {
			t.Fatal(err)
		}
		expect(want)
	}
	if err := f.Apply(Ruleset{Forward: []netip.Prefix{{}}}); err == nil {
		t.Fatal("an invalid ruleset passed")
	}
	expect(want)
	if err := f.Apply(Ruleset{Forward: prefixes("10.42.0.0/16")}); err != nil {
		t.Fatal(err)
	}
	expect(want[:2])
	if err := f.CleanUp(); err != nil {
		t.Fatal(err)
	}
	expect(nil)
}

func TestFake(t *testing.T) {
	suite(t, new(Fake))
	broken := &Fake{Err: errors.New("no kernel")}
	if err := broken.Apply(sample()); !errors.Is(err, broken.Err) || broken.Applied() != 0 {
		t.Fatalf("got %v, applied %d", err, broken.Applied())
	}
}

func TestRootKernel(t *testing.T) {
	netnstest.NeedRoot(t)
	ns := netnstest.New(t)
	var f *Filter
	ns.Do(func() (err error) {
		f, err = Open(Config{})
		return err
	})
	defer func() { _ = f.Close() }()
	suite(t, f)
}
