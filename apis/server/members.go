package server

import (
	"bytes"
	"fmt"
	"mime"
	"strings"
)

// maxMembers bounds the entries of one map or list of what a client sends.
// Field ownership is kept in sorted sets that grow by insertion: their cost is
// the square of the entries, half a minute for 150 000. The size of an object
// is bounded elsewhere, and by it fewer than twice as many could be stored.
const maxMembers = 1 << 15

// maxDepth is how deep the library's decoders go.
const maxDepth = 10_000

// checkBody counts the entries of the maps and lists in a body as it was sent,
// before anything is made of it: of JSON and YAML, patches and applied
// configurations among them, of any kind. What comes as protobuf is counted when
// it is decoded: its form does not say what is a map. CBOR is not served.
func checkBody(contentType string, data []byte) error {
	if len(data) < 2*maxMembers {
		return nil // too short for so many
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		media = contentType
	}
	c := &counter{}
	switch {
	case strings.HasSuffix(media, "json") || media == "":
		c.flow(data, false)
	case strings.HasSuffix(media, "yaml"):
		c.yaml(data)
	}
	if c.exceeded {
		return fmt.Errorf("a map or list in it has more than %d entries, at most %d are allowed; split the object into several", maxMembers, maxMembers)
	}
	return nil
}

// counter finds maps and lists with too many entries.
type counter struct {
	exceeded bool
	// blocks are those of YAML that are told by how far lines are indented.
	blocks []block
}

type block struct {
	column  int
	list    bool
	entries int
}

// flow counts in JSON, and in what of YAML looks like it, which begins data,
// and returns where that ends. It does not check the form: the decoder does.
func (c *counter) flow(data []byte, yaml bool) int {
	var open []int     // the entries of the maps and lists that have not ended
	var last, to2 byte // the last two bytes that were no space
	for i := 0; i < len(data) && !c.exceeded; i++ {
		b := data[i]
		switch b {
		case ' ', '\t', '\n':
			continue
		case '"', '\'':
			if b == '"' && !yaml || yaml && startsValue(data, i, last, to2) {
				i += quoted(data[i:])
			}
		case '#':
			if yaml && i > 0 && strings.IndexByte(" \t\n", data[i-1]) >= 0 {
				end := bytes.IndexByte(data[i:], '\n')
				if end < 0 {
					return len(data)
				}
				i += end
				continue
			}
		case '{', '[':
			if len(open) >= maxDepth {
				return len(data)
			}
			open = append(open, 1)
		case '}', ']':
			if len(open) > 0 {
				open = open[:len(open)-1]
			}
			if len(open) == 0 && yaml {
				return i + 1
			}
		case ',':
			if top := len(open) - 1; top >= 0 {
				open[top]++
				c.exceeded = open[top] > maxMembers
			}
		}
		last, to2 = b, last
	}
	return len(data)
}

// startsValue reports whether what is at i begins a key or a value, and is not a
// part of a word. last and to2 are the two bytes before that are no space.
func startsValue(data []byte, i int, last, to2 byte) bool {
	switch last {
	case '{', '[', ',':
		return true
	case ':':
		return data[i-1] != ':' || strings.IndexByte("\"'}]", to2) >= 0
	case '?':
		return data[i-1] != '?'
	}
	return false
}

// quoted is where what is quoted ends, which begins data.
func quoted(data []byte) int {
	quote := data[0]
	for i := 1; i < len(data); i++ {
		switch {
		case data[i] == '\\' && quote == '"':
			i++
		case data[i] != quote:
		case quote == '\'' && i+1 < len(data) && data[i+1] == quote:
			i++ // a quote of the text
		default:
			return i
		}
	}
	return len(data)
}

// breaks are the ends of lines that YAML knows beside \n.
var breaks = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\u0085", "\n", "\u2028", "\n", "\u2029", "\n")

// yaml counts in YAML: entries of one map or list are indented alike.
func (c *counter) yaml(raw []byte) {
	data := []byte(breaks.Replace(string(raw)))
	text := -1 // the column that text of several lines is right of; -1: there is none
	for at := 0; at < len(data) && !c.exceeded; {
		end := len(data)
		if n := bytes.IndexByte(data[at:], '\n'); n >= 0 {
			end = at + n
		}
		line := string(data[at:end])
		content := strings.TrimLeft(line, " ")
		column := len(line) - len(content)
		if content == "" || content[0] == '#' || text >= 0 && column > text {
			at = end + 1
			continue
		}
		text = -1
		for strings.HasPrefix(content, "- ") || content == "-" {
			c.entry(column, true)
			rest := strings.TrimLeft(content[1:], " ")
			column += len(content) - len(rest)
			content = rest
		}
		value := content
		if key := colon(content); key >= 0 {
			c.entry(column, false)
			value = content[key+1:]
		} else if strings.HasPrefix(content, "? ") {
			c.entry(column, false)
			value = content[2:]
		}
		inList := len(value) == len(content)
		for value = strings.TrimLeft(value, " \t"); value != "" && (value[0] == '!' || value[0] == '&'); {
			_, value, _ = strings.Cut(value, " ") // what the value is, or is called
			value = strings.TrimLeft(value, " \t")
		}
		from := end - len(value)
		switch {
		case isText(value):
			text = column
			if inList && len(c.blocks) > 0 {
				text = c.blocks[len(c.blocks)-1].column
			}
			at = end + 1
		case value != "" && (value[0] == '{' || value[0] == '['):
			at = afterLine(data, from+c.flow(data[from:], true))
		case value != "" && (value[0] == '"' || value[0] == '\''):
			at = afterLine(data, from+quoted(data[from:]))
		default:
			at = end + 1
		}
	}
}

// afterLine is where the line after the one of i begins.
func afterLine(data []byte, i int) int {
	if i >= len(data) {
		return len(data)
	}
	if n := bytes.IndexByte(data[i:], '\n'); n >= 0 {
		return i + n + 1
	}
	return len(data)
}

// colon is where the key of a line ends; -1: it has none.
func colon(content string) int {
	from := 0
	if content != "" && (content[0] == '"' || content[0] == '\'') {
		from = quoted([]byte(content)) + 1
	} else if content != "" && (content[0] == '{' || content[0] == '[') {
		return -1
	}
	for i := from; i < len(content); i++ {
		if content[i] == ':' && (i+1 == len(content) || content[i+1] == ' ' || content[i+1] == '\t') {
			return i
		}
	}
	return -1
}

// isText reports whether text of several lines follows: | or >, with how the
// ends of lines count, and a comment.
func isText(value string) bool {
	value, _, _ = strings.Cut(value, " #")
	value = strings.TrimRight(value, " \t")
	return value != "" && (value[0] == '|' || value[0] == '>') && strings.Trim(value[1:], "+-0123456789") == ""
}

// entry counts one of a map or a list whose entries begin in that column.
func (c *counter) entry(column int, list bool) {
	for top := len(c.blocks) - 1; top >= 0; top-- {
		// A list may begin in the column of the key that it is of.
		if b := c.blocks[top]; b.column > column || b.column == column && b.list && !list {
			c.blocks = c.blocks[:top]
			continue
		}
		break
	}
	if top := len(c.blocks) - 1; top >= 0 && c.blocks[top].column == column && c.blocks[top].list == list {
		c.blocks[top].entries++
		c.exceeded = c.exceeded || c.blocks[top].entries > maxMembers
		return
	}
	if len(c.blocks) < maxDepth {
		c.blocks = append(c.blocks, block{column, list, 1})
	}
}
