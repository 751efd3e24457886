package pod

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestLogLinks(t *testing.T) {
	dir, logs := LogLinks(t.TempDir()), t.TempDir()
	list := func() []string {
		t.Helper()
		entries, err := os.ReadDir(string(dir))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	log := filepath.Join(logs, "0.log")
	if err := os.WriteFile(log, []byte("said"), 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(string(dir), "others.log")
	if err := os.Symlink("/nowhere/0.log", foreign); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a start that is tried again
		if err := dir.set("ns", "web-0", "main", "id1", log); err != nil {
			t.Fatal(err)
		}
	}
	if err := dir.set("ns", "web-0", "side", "id2", filepath.Join(logs, "gone.log")); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(string(dir), "web-0_ns_main-id1.log")); err != nil || string(b) != "said" {
		t.Errorf("%q %v", b, err)
	}
	if err := dir.sweep(logs); err != nil {
		t.Fatal(err)
	}
	if got := list(); !slices.Equal(got, []string{"others.log", "web-0_ns_main-id1.log"}) {
		t.Errorf("swept, there are %q", got)
	}
	for range 2 {
		if err := dir.remove("id1"); err != nil {
			t.Fatal(err)
		}
	}
	if got := list(); !slices.Equal(got, []string{"others.log"}) {
		t.Errorf("removed, there are %q", got)
	}

	folder := filepath.Join(logs, "ns_web-0_uid")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := dir.setPod(folder); err != nil {
			t.Fatal(err)
		}
	}
	if err := dir.sweep(logs); err != nil {
		t.Fatal(err)
	}
	if got := list(); !slices.Equal(got, []string{"ns_web-0_uid", "others.log"}) {
		t.Errorf("with a pod's folder, there are %q", got)
	}
	if err := dir.removePod(folder); err != nil {
		t.Fatal(err)
	}
	if got := list(); !slices.Equal(got, []string{"others.log"}) {
		t.Errorf("without the pod's folder, there are %q", got)
	}

	long := strings.Repeat("p", 253)
	if err := dir.set("ns", long, "c", "id3", log); err != nil {
		t.Fatal(err)
	}
	if got := list(); len(got) != 2 || len(got[1]) != 255 || !strings.HasSuffix(got[1], "-id3.log") {
		t.Errorf("a name of 253 letters gives %q", got)
	}
	if err := LogLinks("/proc/none").set("ns", "p", "c", "id", log); err == nil {
		t.Error("a folder that cannot be is no error")
	}
	if LogLinks("").set("ns", "p", "c", "id", log) != nil || LogLinks("").remove("id") != nil || LogLinks("").sweep(logs) != nil || LogLinks("").setPod(folder) != nil || LogLinks("").removePod(folder) != nil {
		t.Error("without a folder there is something to do")
	}
}
