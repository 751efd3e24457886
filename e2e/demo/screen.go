package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// screen writes the demo's output: one line a step, living while the step
// runs on a terminal, written once at its end elsewhere.
type screen struct {
	out   *os.File
	tty   bool
	width int
}

func newScreen(out *os.File) *screen {
	s := &screen{out: out, width: 80}
	s.tty = term.IsTerminal(int(out.Fd())) && os.Getenv("TERM") != "dumb"
	if w, _, err := term.GetSize(int(out.Fd())); err == nil && w > 20 {
		s.width = w
	}
	return s
}

// paint colours a text where that is wanted.
func (s *screen) paint(code, text string) string {
	if !s.tty || os.Getenv("NO_COLOR") != "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (s *screen) bold(text string) string  { return s.paint("1", text) }
func (s *screen) dim(text string) string   { return s.paint("2", text) }
func (s *screen) green(text string) string { return s.paint("32", text) }
func (s *screen) red(text string) string   { return s.paint("31", text) }

func (s *screen) println(a ...any) { fmt.Fprintln(s.out, a...) }

// indented prints a block of text, such as a table of clusterctl.
func (s *screen) indented(text string) {
	for line := range strings.Lines(strings.TrimRight(text, "\n") + "\n") {
		fmt.Fprint(s.out, "  ", line)
	}
}

// failed prints an error and the step to take next.
func (s *screen) failed(err error) {
	fmt.Fprintf(s.out, "\n%s %v\n", s.red("error:"), err)
	var h *hint
	if errors.As(err, &h) {
		fmt.Fprintf(s.out, "%s %s\n", s.bold("next:"), h.next)
	}
}

const spinner = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

// step runs fn under a title. fn may say what it is at; what it said last
// stands behind the title in the end.
func (s *screen) step(title string, fn func(say func(string)) error) error {
	var (
		mu     sync.Mutex
		detail string
	)
	say := func(what string) { mu.Lock(); detail = what; mu.Unlock() }
	said := func() string { mu.Lock(); defer mu.Unlock(); return detail }
	began := time.Now()
	done := make(chan error, 1)
	go func() { done <- fn(say) }()

	tick := time.NewTicker(80 * time.Millisecond)
	defer tick.Stop()
	frames := []rune(spinner)
	for frame := 0; ; frame++ {
		select {
		case err := <-done:
			mark := s.green("✓")
			if err != nil {
				mark = s.red("✗")
			}
			s.line(mark, title, said(), time.Since(began), true)
			return err
		case <-tick.C:
			if s.tty {
				s.line(s.dim(string(frames[frame%len(frames)])), title, said(), time.Since(began), false)
			}
		}
	}
}

// titleWidth aligns the times behind the titles.
const titleWidth = 34

func (s *screen) line(mark, title, detail string, took time.Duration, last bool) {
	pad := strings.Repeat(" ", max(0, titleWidth-len([]rune(title))))
	// Cut before colouring, so that a narrow terminal does not wrap the line.
	if room := s.width - titleWidth - 14; s.tty && len([]rune(detail)) > room {
		detail = string([]rune(detail)[:max(0, room-1)]) + "…"
	}
	text := fmt.Sprintf("  %s %s%s %s  %s", mark, title, pad, s.dim(fmt.Sprintf("%5.1f s", took.Seconds())), s.dim(detail))
	if s.tty {
		fmt.Fprint(s.out, "\r\x1b[K", text)
		if last {
			fmt.Fprintln(s.out)
		}
		return
	}
	fmt.Fprintln(s.out, strings.TrimRight(text, " "))
}
