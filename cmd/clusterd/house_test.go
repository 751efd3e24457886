package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// treePath finds what looks like a path in the tree of HOUSE.md.
var treePath = regexp.MustCompile(`[A-Za-z0-9_.*-]+(?:/[A-Za-z0-9_.*-]+)*/?`)

// quotedPath finds what its sentences call one.
var quotedPath = regexp.MustCompile("`([a-z0-9]+/[A-Za-z0-9_./-]+)`")

// TestHouse holds HOUSE.md against the tree: each file and folder that it names
// is in the room that it names it in. When it fails, change the page: it is
// what a newcomer reads first.
func TestHouse(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "HOUSE.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(page)
	rooms := roomPaths(t)
	room := ""
	for i, line := range strings.Split(houseTree(t, text), "\n") {
		if name := strings.Fields(line + " x")[0]; line != "" && line[0] != ' ' {
			room = strings.TrimSuffix(name, "/")
		}
		for _, name := range treePath.FindAllString(line, -1) {
			in := room
			top, _, _ := strings.Cut(strings.TrimSuffix(name, "/"), "/")
			if _, other := rooms[top]; other && top+"/" != name {
				in = top // a path from the top
			} else if !strings.HasSuffix(name, "/") && !strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, ".md") || strings.Contains(name, "*") {
				continue
			}
			name = strings.TrimSuffix(name, "/")
			if !slices.ContainsFunc(rooms[in], func(p string) bool { return p == name || strings.HasSuffix(p, "/"+name) }) {
				t.Errorf("line %d of the tree names %s, which is not in %s: %s", i+1, name, in, line)
			}
		}
	}
	text, _, _ = strings.Cut(text, "\n## 9.") // the examples are others' paths
	for _, m := range quotedPath.FindAllStringSubmatch(text, -1) {
		top, _, _ := strings.Cut(m[1], "/")
		if paths, ours := rooms[top]; ours && !slices.Contains(paths, strings.TrimSuffix(m[1], "/")) {
			t.Errorf("HOUSE.md names `%s`, which does not exist", m[1])
		}
	}
}

// houseTree is the block of HOUSE.md that shows the folders.
func houseTree(t *testing.T, text string) string {
	t.Helper()
	for _, block := range strings.Split(text, "```") {
		if strings.HasPrefix(block, "\ncmd/\n") {
			return block
		}
	}
	t.Fatal("HOUSE.md shows no tree that begins with cmd/")
	return ""
}

// roomPaths are all files and folders of each folder at the top.
func roomPaths(t *testing.T) map[string][]string {
	t.Helper()
	rooms := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == "." {
			return err
		}
		if d.Name() == "bin" || strings.HasPrefix(d.Name(), ".") {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		room, _, _ := strings.Cut(rel, "/")
		rooms[room] = append(rooms[room], rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return rooms
}
