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

// TestHouse holds HOUSE.md against the tree: each file and directory that it names
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

// houseTree is the block of HOUSE.md that shows the directories.
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

// roomPaths are all files and directories of each directory at the top.
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

// namedFile finds what a page calls a file of code.
var namedFile = regexp.MustCompile("`([A-Za-z0-9_./*-]+\\.(?:go|c|sh))`")

// TestDesignPages holds the rooms' pages against the tree: each file of code that they
// name is in their room, or where the path that they give says; and the page of this
// folder, where everything meets, names each file of it.
func TestDesignPages(t *testing.T) {
	rooms := roomPaths(t)
	named := map[string]bool{}
	pages := 0
	for room, paths := range rooms {
		for _, page := range paths {
			if filepath.Base(page) != "DESIGN.md" || page == "DESIGN.md" {
				continue
			}
			pages++
			text, err := os.ReadFile(filepath.Join(root, page))
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range namedFile.FindAllStringSubmatch(string(text), -1) {
				in := paths
				if top, _, _ := strings.Cut(m[1], "/"); rooms[top] != nil && top != m[1] && top != room {
					in = rooms[top]
				}
				is := func(p string) bool { return isNamed(p, m[1]) }
				if !slices.ContainsFunc(in, is) {
					t.Errorf("%s names %s, which is not there", page, m[1])
				}
				if page == "cmd/clusterd/DESIGN.md" {
					named[m[1]] = true
				}
			}
		}
	}
	if pages < 10 {
		t.Errorf("only %d pages were found", pages)
	}
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("files of this folder: %v, %v", files, err)
	}
	for _, f := range files {
		if !strings.HasSuffix(f, "_test.go") && !named[f] {
			t.Errorf("cmd/clusterd/DESIGN.md does not say what %s is for", f)
		}
	}
}

// isNamed reports whether the path ends with the name, which may have wildcards.
func isNamed(path, name string) bool {
	parts := strings.Split(path, "/")
	n := strings.Count(name, "/") + 1
	if len(parts) < n {
		return false
	}
	ok, err := filepath.Match(name, strings.Join(parts[len(parts)-n:], "/"))
	return err == nil && ok
}
