package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

func TestRecordAndDraw(t *testing.T) {
	lines, err := record([]string{"printf", `one\n\n  ✓ <b>&"two"\n`}, io.Discard)
	if err != nil || len(lines) != 3 || lines[2].text != `  ✓ <b>&"two"` {
		t.Fatalf("%+v %v", lines, err)
	}
	if short := cut(append(lines, line{text: ""}, line{text: "  Go on:"}, line{text: "more"}), "Go on", 5); len(short) != 3 || short[2].text != "  ✓ <" {
		t.Errorf("cut: %+v", short)
	}
	lines[2].at = 1500 * time.Millisecond
	picture := draw("make demo", lines)
	for _, want := range []string{"$ make demo", ">one<", "animation-delay:2.70s", "✓ &lt;b&gt;&amp;&#34;two&#34;<"} {
		if !strings.Contains(picture, want) {
			t.Errorf("%q is not in\n%s", want, picture)
		}
	}
	for d := xml.NewDecoder(strings.NewReader(picture)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := record([]string{"false"}, io.Discard); err == nil {
		t.Error("a command that fails makes a picture")
	}
}
