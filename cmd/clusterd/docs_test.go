package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/clusterd/clusterd/cmd/docstest"
)

// TestCommandsInDocs: each clusterd command that a page shows is one, with these flags.
func TestCommandsInDocs(t *testing.T) {
	shown := docstest.Commands(t, docstest.Pages(t, "../.."), "clusterd")
	if len(shown) < 20 {
		t.Errorf("only %d commands were found", len(shown))
	}
	for _, s := range shown {
		if err := docstest.Resolve(rootCommand(), s.Args); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
}

// TestReadmeFromAFreshClone: a clone has no clusterd yet. README says how it gets one
// before it uses it, and names no file that whoever typed sudo cannot read.
func TestReadmeFromAFreshClone(t *testing.T) {
	b, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	install, use := strings.Index(text, "$ sudo make install"), strings.Index(text, "$ sudo clusterd ")
	if install < 0 || use < 0 || install > use {
		t.Errorf("sudo make install stands at byte %d, the first use of clusterd at %d", install, use)
	}
	if want := "export KUBECONFIG=" + personKubeconfig(DefaultDevData) + "\n"; !strings.Contains(text, want) {
		t.Errorf("what clusterd dev prints is not in it: %s", want)
	}
	if strings.Contains(text, "KUBECONFIG="+DefaultData+"/") {
		t.Errorf("it names a kubeconfig in %s, which root alone enters", DefaultData)
	}
	if !strings.Contains(text, "stay in the foreground") {
		t.Error("it does not say that init and join stay in the foreground")
	}
}

// TestDocsAreFound: README leads to the index, and the index to each page.
func TestDocsAreFound(t *testing.T) {
	index, err := os.ReadFile("../../docs/README.md")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range docstest.Pages(t, "../..") {
		name := filepath.Base(page)
		if name != "README.md" && !strings.Contains(string(index), "]("+name+")") {
			t.Errorf("docs/README.md does not lead to %s", name)
		}
	}
	for _, page := range []string{"README", "install", "first", "configuration", "monitoring", "ports", "troubleshooting"} {
		if !strings.Contains(string(readme), "](docs/"+page+".md)") {
			t.Errorf("README does not lead to docs/%s.md", page)
		}
	}
}

// TestLinks: what pages link to in the repository is there.
func TestLinks(t *testing.T) { checkLinks(t, "../..") }

// checkLinks looks at the pages below a directory.
func checkLinks(t *testing.T, root string) {
	t.Helper()
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	found := 0
	for _, page := range docstest.Pages(t, root) {
		b, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(b), -1) {
			found++
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s: %v", page, err)
			}
		}
	}
	if found < 50 {
		t.Errorf("only %d links were found", found)
	}
}

// TestBenchmarkTable: each flag that the table of the CIS benchmark's sections names exists.
func TestBenchmarkTable(t *testing.T) {
	b, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(b), "\n## By the sections of the CIS benchmark\n")
	table, _, _ = strings.Cut(table, "\n## ")
	cfg, flags := defaultConfig(), pflag.NewFlagSet("", pflag.ContinueOnError)
	cfg.addFlags(flags)
	found := regexp.MustCompile("`--([a-z-]+)").FindAllStringSubmatch(table, -1)
	if len(found) < 8 {
		t.Errorf("only %d flags in it", len(found))
	}
	for _, m := range found {
		if flags.Lookup(m[1]) == nil {
			t.Errorf("--%s is no flag", m[1])
		}
	}
	for _, section := range []string{"1.1", "1.2", "1.3", "2", "3.1", "3.2", "4.1", "4.2", "5.1", "5.2", "5.3", "5.4"} {
		if !strings.Contains(table, "\n| "+section+" ") {
			t.Errorf("section %s is missing", section)
		}
	}
}
