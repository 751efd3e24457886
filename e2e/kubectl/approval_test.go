package kubectl

import (
	"bufio"
	"context"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A machine without a token shows a code, and joins once a person has repeated it.
func TestE2EXJoinByApproval(t *testing.T) {
	t.Parallel()
	k := start(t, "approval")
	ctx, cancel := context.WithTimeout(t.Context(), 2*testTimeout)
	defer cancel()
	clusterctl := func(args ...string) string {
		k.Helper()
		out, said, _ := k.clusterctl(args...)
		return out + said
	}
	server := k.c.Nodes()[0].Addr.String() + ":6443"
	code := regexp.MustCompile(`members approve ([0-9A-Z]{4}-[0-9A-Z]{4}) `)
	// ask starts a machine and returns its code, and how to wait for its end.
	ask := func(name, dir string) (string, func() (string, error)) {
		k.Helper()
		cmd := exec.CommandContext(ctx, k.c.Bin("clusterd"), "join", server, "--ask", "--prepare", "--name", name, "--advertise", "127.0.0.1", "--port", "17443", "--data", dir)
		said, err := cmd.StderrPipe()
		k.must(err)
		k.must(cmd.Start())
		lines := bufio.NewScanner(said)
		var text strings.Builder
		for lines.Scan() {
			text.WriteString(lines.Text() + "\n")
			if found := code.FindStringSubmatch(lines.Text()); found != nil {
				return found[1], func() (string, error) {
					rest, _ := io.ReadAll(said) // ends with the program
					return text.String() + string(rest), cmd.Wait()
				}
			}
		}
		k.Fatalf("no code: %s (%v)", text.String(), cmd.Wait())
		return "", nil
	}

	dir := filepath.Join(k.dir, "asker")
	shown, end := ask("asker", dir)
	out := clusterctl("members", "pending")
	k.has(out, "asker", "127.0.0.1:17443")
	k.lacks(out, shown)
	k.has(clusterctl("members", "approve", shown), "--role", "agent", "server")
	k.has(clusterctl("members", "approve", "0000-0000", "--role", "agent"), `no machine asks with the code "0000-0000"`)
	k.has(clusterctl("members", "approve", strings.ToLower(shown), "--role", "agent"), `machine "asker" at 127.0.0.1:17443 may join as an agent`)
	if said, err := end(); err != nil {
		k.Fatalf("join: %v: %s", err, said)
	}
	k.has(clusterctl("members", "-o", "json"), `"asker"`)
	k.has(clusterctl("members", "rm", "--yes", "asker"), `member "asker" removed`)

	dir = filepath.Join(k.dir, "denied")
	_, end = ask("denied", dir)
	id := ""
	for line := range strings.Lines(clusterctl("members", "pending")) {
		if f := strings.Fields(line); len(f) > 1 && f[1] == "denied" {
			id = f[0]
		}
	}
	k.has(clusterctl("members", "deny", id), "denied")
	if said, err := end(); err == nil || !strings.Contains(said, "or it was denied") {
		k.Errorf("denied: %v: %s", err, said)
	}
	if left, err := filepath.Glob(dir + "*"); err != nil || len(left) > 0 {
		k.Errorf("left behind: %q %v", left, err)
	}
}
