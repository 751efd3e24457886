// Package docstest holds the documentation against the commands of a program: it
// writes the reference of a tree of commands, and finds the commands that pages show,
// so that they can be resolved in it. It runs none of them.
package docstest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Reference writes a section for each command below c, and for those below it, with
// its own flags but for those that leave says.
func Reference(out *bytes.Buffer, c *cobra.Command, leave func(*pflag.Flag) bool) {
	for _, sub := range c.Commands() {
		if sub.Hidden || sub.Name() == "help" || sub.Name() == "completion" {
			continue
		}
		Section(out, sub, leave)
	}
}

// Section writes the section of a command, and of those below it.
func Section(out *bytes.Buffer, c *cobra.Command, leave func(*pflag.Flag) bool) {
	_, args, _ := strings.Cut(c.Use, " ")
	fmt.Fprintf(out, "\n### %s\n\n%s.\n", strings.TrimSpace(c.CommandPath()+" "+args), strings.TrimSuffix(c.Short, "."))
	var rows []string
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Hidden || leave(f) {
			return
		}
		def := ""
		if f.DefValue != "" && f.DefValue != "[]" && f.DefValue != "false" {
			def = "`" + f.DefValue + "`"
		}
		rows = append(rows, fmt.Sprintf("| `--%s` | %s | %s |", f.Name, def, Cell(f.Usage)))
	})
	if len(rows) > 0 {
		fmt.Fprintf(out, "\n| flag | default | |\n|---|---|---|\n%s\n", strings.Join(rows, "\n"))
	}
	Reference(out, c, leave)
}

// Cell is a text as it stands in a table.
func Cell(s string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(s), " "), "|", "\\|")
}

// Shown is a command that a page shows.
type Shown struct {
	Page string
	Line int
	Args []string // the program first
}

func (s Shown) String() string {
	return fmt.Sprintf("%s:%d: %s", s.Page, s.Line, strings.Join(s.Args, " "))
}

// Pages are README and the pages below docs, in the repository's root.
func Pages(t *testing.T, root string) []string {
	t.Helper()
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(pages) < 15 {
		t.Fatalf("only %d pages: %v", len(pages), err)
	}
	return append(pages, filepath.Join(root, "README.md"), filepath.Join(root, "examples", "README.md"))
}

// Commands are those of the programs in the fenced blocks of pages.
func Commands(t *testing.T, pages []string, programs ...string) (out []Shown) {
	t.Helper()
	for _, page := range pages {
		b, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, find(page, string(b), programs)...)
	}
	return out
}

func find(page, text string, programs []string) (out []Shown) {
	fenced, begun, whole := false, 0, ""
	for i, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if !fenced {
			continue
		}
		if whole == "" {
			begun = i + 1
		}
		if head, more := strings.CutSuffix(line, "\\"); more {
			whole += head
			continue
		}
		for _, args := range commandsIn(whole + line) {
			if slices.Contains(programs, args[0]) {
				out = append(out, Shown{Page: page, Line: begun, Args: args})
			}
		}
		whole = ""
	}
	return out
}

// before is what may stand before a program: a prompt, sudo, a variable, a word of the shell.
var before = regexp.MustCompile(`^([a-z0-9]*[$]|sudo|do|then|exec|time|[A-Z_]+=\S*)$`)

// commandsIn are the simple commands of a line of a shell, with those between $( and ).
func commandsIn(line string) (out [][]string) {
	var words []string
	word, has, quote := "", false, rune(0)
	end := func() {
		if has {
			words = append(words, word)
		}
		word, has = "", false
	}
	finish := func() {
		end()
		for len(words) > 0 && before.MatchString(words[0]) {
			words = words[1:]
		}
		if len(words) > 0 {
			words[0] = filepath.Base(words[0])
			for i := 1; i < len(words); i++ {
				if strings.HasPrefix(words[i], ">") || strings.HasPrefix(words[i], "<") && !strings.HasSuffix(words[i], ">") {
					words = words[:i] // redirections end it here
				}
			}
			out = append(out, words)
		}
		words = nil
	}
	runes := []rune(line)
	for i := 0; i < len(runes); i++ {
		r := runes[i]
		next := rune(0)
		if i+1 < len(runes) {
			next = runes[i+1]
		}
		switch {
		case r == '$' && next == '(' && quote != '\'': // its result is one word here
			inner, depth := i+2, 1
			for i += 2; i < len(runes) && depth > 0; i++ {
				switch runes[i] {
				case '(':
					depth++
				case ')':
					depth--
				}
			}
			i--
			out = append(out, commandsIn(strings.TrimSuffix(string(runes[inner:i]), ")"))...)
			word, has = word+"VALUE", true
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word += string(r)
		case r == '\'' || r == '"':
			quote, has = r, true
		case r == '#' && !has: // a remark
			finish()
			return out
		case r == '|' || r == ';' || r == '&' || r == '(' || r == ')':
			finish()
		case r == ' ' || r == '\t':
			end()
		default:
			word, has = word+string(r), true
		}
	}
	finish()
	return out
}

// placeholder is a value that stands for one in a page: NUMBER, <name>, ….
var placeholder = regexp.MustCompile(`invalid argument "([A-Z_-]+|<.*>|.*….*)"`)

// Resolve says what is wrong with a command by the tree of root, whose name the
// program's is not asked to be: an unknown command, an unknown flag, a value that no
// flag of its type takes, or arguments that the command refuses.
func Resolve(root *cobra.Command, args []string) error {
	c, rest, err := root.Find(args[1:])
	if err != nil {
		return err
	}
	if err := c.ParseFlags(rest); err != nil {
		if placeholder.MatchString(err.Error()) {
			return nil
		}
		return err
	}
	left := c.Flags().Args()
	if c.HasAvailableSubCommands() && len(left) > 0 && c.Args == nil {
		return fmt.Errorf("%s has no command %q", c.CommandPath(), left[0])
	}
	return c.ValidateArgs(left)
}
