package server

import (
	"fmt"
	"strings"
	"testing"
)

// repeated is n parts with what join says between.
func repeated(n int, join string, part func(int) string) string {
	parts := make([]string, n)
	for i := range parts {
		parts[i] = part(i)
	}
	return strings.Join(parts, join)
}

func key(i int) string { return fmt.Sprintf("k%d: v", i) }

func TestCheckBody(t *testing.T) {
	const more = maxMembers + 1
	jsonKeys := func(n int) string {
		return repeated(n, ",", func(i int) string { return fmt.Sprintf(`"k%d":"a,b{"`, i) })
	}
	const json, yaml = "application/json", "application/apply-patch+yaml"
	for name, test := range map[string]struct {
		contentType, body string
		tooMany           bool
	}{
		"as many as may be":                {json, `{"data":{` + jsonKeys(maxMembers) + `}}`, false},
		"one more":                         {json, `{"data":{` + jsonKeys(more) + `}}`, true},
		"with a charset":                   {json + "; charset=utf-8", `{"data":{` + jsonKeys(more) + `}}`, true},
		"a patch":                          {"application/strategic-merge-patch+json", `{"data":{` + jsonKeys(more) + `}}`, true},
		"in two maps":                      {json, `{"data":{` + jsonKeys(maxMembers-1) + `},"more":{` + jsonKeys(maxMembers-1) + `}}`, false},
		"a list":                           {json, `{"env":[` + strings.Repeat(`{"a":1},`, maxMembers) + `{}]}`, true},
		"text":                             {json, `{"data":{"k":"` + strings.Repeat(`a,\",{`, more) + `"}}`, false},
		"another form":                     {"text/plain", strings.Repeat("a,", more), false},
		"JSON as YAML":                     {yaml, `{"data":{` + jsonKeys(more) + `}}`, true},
		"YAML":                             {yaml, "data:\n  " + repeated(more, "\n  ", key) + "\n", true},
		"YAML, as many as may be":          {yaml, "kind: X\ndata:\n  " + repeated(maxMembers, "\n  ", key) + "\n", false},
		"YAML, other ends of lines":        {yaml, "data:\r  " + repeated(more, "\r  ", key) + "\r", true},
		"YAML, an end of lines of its own": {yaml, "data:\u2028  " + repeated(more, "\u2028  ", key), true},
		"YAML, two maps":                   {yaml, "a:\n  " + repeated(maxMembers-1, "\n  ", key) + "\nb:\n  " + repeated(maxMembers-1, "\n  ", key), false},
		"YAML, many maps":                  {yaml, "env:\n" + repeated(maxMembers, "\n", func(i int) string { return fmt.Sprintf("- name: n%d\n  value: v", i) }), false},
		"YAML, a list of maps":             {yaml, "env:\n" + repeated(more, "\n", func(i int) string { return fmt.Sprintf("- name: n%d\n  value: v", i) }), true},
		"YAML, an indented list":           {yaml, "env:\n" + repeated(more, "\n", func(i int) string { return fmt.Sprintf("  - n%d", i) }), true},
		"YAML, text of many lines":         {yaml, "data:\n  file: |\n    " + repeated(more, "\n    ", key) + "\n  other: x\n", false},
		"YAML, text in a list":             {yaml, "data:\n- |-\n  " + repeated(more, "\n  ", key) + "\n- x\n", false},
		"YAML, keys after a text":          {yaml, "data:\n  file: |\n    x\n  " + repeated(more, "\n  ", key), true},
		"YAML, no text for all the bar":    {yaml, "data:\n  a: b |\n  " + repeated(more, "\n  ", key), true},
		"YAML, in braces":                  {yaml, "data: {" + repeated(more, ", ", key) + "}\n", true},
		"YAML, in braces of many lines":    {yaml, "data: {a: \"x\n  }\", " + repeated(more, ",\n ", key) + "}\n", true},
		"YAML, named braces":               {yaml, "data: &x {" + repeated(more, ", ", key) + "}\n", true},
		"YAML, an apostrophe":              {yaml, "data: {a: it's, " + repeated(more, ", ", key) + "}\n", true},
		"YAML, a quote after a dash":       {yaml, "data: {a: -\", " + repeated(more, ", ", key) + "}\n", true},
		"YAML, a quote in a word":          {yaml, "data: {a:\", " + repeated(more, ", ", key) + "}\n", true},
		"YAML, a quote in quotes":          {yaml, "data: {a: 'x''}', " + repeated(more, ", ", key) + "}\n", true},
		"YAML, a comment with a quote":     {yaml, "data: {a: b, # \"\n" + repeated(more, ", ", key) + "}\n", true},
		"YAML, quoted text":                {yaml, "data:\n  a: \"" + repeated(more, "\n  ", key) + "\"\n  b: x\n", false},
		"YAML, keys after quoted text":     {yaml, "data:\n  a: \"x\n    y: |\n  z\"\n  " + repeated(more, "\n  ", key), true},
		"YAML, unusual keys":               {yaml, "data:\n  " + repeated(more, "\n  ", func(i int) string { return fmt.Sprintf("? k%d\n  : v", i) }), true},
	} {
		if err := checkBody(test.contentType, []byte(test.body)); (err != nil) != test.tooMany {
			t.Errorf("%s: %v, want too many: %v", name, err, test.tooMany)
		}
	}
	// Depth alone is the decoder's business.
	if err := checkBody(json, []byte(strings.Repeat("[", 3<<20))); err != nil {
		t.Error(err)
	}
}

func FuzzCheckBody(f *testing.F) {
	f.Add("application/json", []byte(`{"a":[1,2,{"b":"\"c,"}]}`))
	f.Add("application/yaml", []byte("a:\n- b: |\n    c\n  d: {e: 'f''g', h: [i]}\n? j\n: k\n"))
	padding := []byte(strings.Repeat(" ", 2*maxMembers))
	f.Fuzz(func(t *testing.T, contentType string, data []byte) {
		if err := checkBody(contentType, append(padding, data...)); err != nil && len(data) < maxMembers {
			t.Errorf("%d bytes have too many entries: %v", len(data), err)
		}
	})
}
