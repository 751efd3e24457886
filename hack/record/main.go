// Command record runs a command and draws what it prints as an animated picture:
// an SVG in which each line appears when it did, for a README. No terminal and
// no other program is needed.
//
//	go run ./hack/record -o docs/demo.svg -title 'sudo make demo' go run ./e2e/demo up
package main

import (
	"bufio"
	"flag"
	"fmt"
	"html"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
	"unicode/utf8"
)

// line is a line of output and when it was complete.
type line struct {
	text string
	at   time.Duration
}

func main() {
	out := flag.String("o", "", "the file to write")
	title := flag.String("title", "", "the command to show as typed; default: the one that is run")
	until := flag.String("until", "", "leave out what comes from the line that begins so on")
	columns := flag.Int("columns", 120, "cut lines at so many letters")
	flag.Parse()
	if *out == "" || flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: record -o FILE [-title TEXT] COMMAND [ARG …]")
		os.Exit(2)
	}
	if *title == "" {
		*title = strings.Join(flag.Args(), " ")
	}
	lines, err := record(flag.Args(), os.Stdout)
	if err == nil {
		err = os.WriteFile(*out, []byte(draw(*title, cut(lines, *until, *columns))), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "record:", err)
		os.Exit(1)
	}
}

// record runs a command and notes when each line came; echo sees them too.
func record(command []string, echo io.Writer) ([]line, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var lines []line
	var first time.Time
	for s := bufio.NewScanner(io.TeeReader(stdout, echo)); s.Scan(); {
		if first.IsZero() {
			first = time.Now() // what came before is the command's own building
		}
		lines = append(lines, line{s.Text(), time.Since(first)})
	}
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(command, " "), err)
	}
	return lines, nil
}

// cut leaves out what is below or right of the picture.
func cut(lines []line, until string, columns int) []line {
	var kept []line
	for _, l := range lines {
		if until != "" && strings.HasPrefix(strings.TrimSpace(l.text), until) {
			break
		}
		if letters := []rune(l.text); len(letters) > columns {
			l.text = strings.TrimRight(string(letters[:columns]), " ")
		}
		kept = append(kept, l)
	}
	for len(kept) > 0 && strings.TrimSpace(kept[len(kept)-1].text) == "" {
		kept = kept[:len(kept)-1]
	}
	return kept
}

// The picture's measures, in pixels.
const (
	advance = 8.4 // of one letter
	leading = 20.0
	margin  = 18.0
	typing  = 1200 * time.Millisecond // before the first line
)

// draw makes the picture. A viewer without animations shows all lines.
func draw(title string, lines []line) string {
	wide := utf8.RuneCountInString(title) + 2
	for _, l := range lines {
		wide = max(wide, utf8.RuneCountInString(l.text))
	}
	width, height := advance*float64(wide)+2*margin, leading*float64(len(lines)+1)+2*margin
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img" aria-label="%s">`+"\n", width, height, width, height, html.EscapeString("Terminal: "+title))
	b.WriteString("<style>\ntext { font: 14px ui-monospace, 'DejaVu Sans Mono', Menlo, monospace; fill: #d7dde5; white-space: pre; }\n" +
		".typed { fill: #7fb0ff; font-weight: bold; }\n.ok { fill: #5fd38d; }\n" +
		"@keyframes appear { from { opacity: 0; } to { opacity: 1; } }\n" +
		"@media (prefers-reduced-motion: no-preference) { .line { animation: appear 0.15s backwards; } }\n</style>\n")
	fmt.Fprintf(&b, `<rect width="%.0f" height="%.0f" rx="8" fill="#12161d"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text class="typed" x="%.0f" y="%.0f">$ %s</text>`+"\n", margin, margin+leading*0.7, html.EscapeString(title))
	for i, l := range lines {
		if strings.TrimSpace(l.text) == "" {
			continue
		}
		class := "line"
		if strings.Contains(l.text, "✓") {
			class += " ok"
		}
		fmt.Fprintf(&b, `<text class="%s" style="animation-delay:%.2fs" x="%.0f" y="%.0f" xml:space="preserve">%s</text>`+"\n",
			class, (typing + l.at).Seconds(), margin, margin+leading*(float64(i+1)+0.7), html.EscapeString(l.text))
	}
	b.WriteString("</svg>\n")
	return b.String()
}
