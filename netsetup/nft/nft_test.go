package nft

import (
	"flag"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

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
		if _, err := r.Table(DefaultTable); err == nil {
			t.Errorf("%s: passed", name)
		}
	}
}

// published is sample with a port of the node that leads inside: it has more
// base chains.
func published() Ruleset {
	r := sample()
	r.Inside = Inside{Ranges: prefixes("10.42.1.0/24"), Interface: "pods0"}
	r.Publish = []Publish{{Protocol: "tcp", Port: 80, To: netip.MustParseAddrPort("10.42.1.2:8080")}}
	return r
}

// The bug (CVE-2020-8558 again): pods reached what listens on the node's loopback alone,
// once the last published port was taken back: the rule went, the kernel's switch stayed.
func TestGuardStays(t *testing.T) {
	r := published()
	const want = "iifname \"pods0\" ip daddr 127.0.0.0/8 drop"
	for _, publish := range [][]Publish{r.Publish, nil} {
		r.Publish = publish
		table, err := r.Table(DefaultTable)
		if err != nil {
			t.Fatal(err)
		}
		if c := table.Chains[0]; c.Name != "guard" || c.Hook != "prerouting" || c.Priority != -300 || strings.Join(c.Comments(), "\n") != want {
			t.Errorf("%d published ports: the first chain is %s %s %d %q, want guard with %q", len(publish), c.Name, c.Hook, c.Priority, c.Comments(), want)
		}
	}
}

// suite keeps rulesets in a kernel, or its twin, by a Keeper.
func suite(t *testing.T, kernel TableKernel) {
	t.Helper()
	var repaired []string
	k := NewKeeper(KeeperConfig{Kernel: kernel, Repaired: func(_, what string) { repaired = append(repaired, what) }})
	table := func(r Ruleset) Table {
		t.Helper()
		table, err := r.Table(DefaultTable)
		if err != nil {
			t.Fatal(err)
		}
		return table
	}
	set := func(r Ruleset) {
		t.Helper()
		if err := k.Set(table(r)); err != nil {
			t.Fatal(err)
		}
		have, err := kernel.Read(table(r), true)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range table(r).Chains {
			if d := cmp.Diff(c.Comments(), have.Chains[c.Name], cmpopts.EquateEmpty()); d != "" {
				t.Errorf("chain %s (-want +got):\n%s", c.Name, d)
			}
		}
		if !have.Whole || len(repaired) > 0 {
			t.Errorf("whole %t, repaired %q", have.Whole, repaired)
		}
		// What the Keeper did itself is not another program's change.
		if err := k.Check(); err != nil || len(repaired) > 0 {
			t.Errorf("the next look: %v, repaired %q", err, repaired)
		}
	}
	for _, r := range []Ruleset{sample(), sample(), published(), {Forward: prefixes("10.42.0.0/16")}, published(), sample()} {
		set(r)
	}
	if err := kernel.Delete(table(sample())); err != nil {
		t.Fatal(err)
	}
	if err := k.Check(); err != nil || len(repaired) != 1 {
		t.Errorf("the table was gone: %v, repaired %q", err, repaired)
	}
	for range 2 {
		if err := k.CleanUp(table(sample())); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := kernel.Read(table(sample()), true); err != nil || have.Whole {
		t.Errorf("after the clean-up: %+v, %v", have, err)
	}
}

func TestRulesetFake(t *testing.T) { suite(t, new(FakeTables)) }

func TestRootRulesetKernel(t *testing.T) {
	netnstest.NeedRoot(t)
	var tables *Tables
	netnstest.New(t).Do(func() (err error) {
		tables, err = OpenTables()
		return err
	})
	defer func() { _ = tables.Close() }()
	suite(t, tables)
}
