package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/apis/past"
	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/member/sealkey"
)

// TestE2ESealedKeys: a cluster whose nodes have a sealing key from the beginning keeps no key in
// clear on disk, whatever changes: the key of gossip, the authority, a role. The commands of
// docs/security.md unseal a node, seal it again and change its sealing key. The history says
// through which server a change came.
func TestE2ESealedKeys(t *testing.T) {
	need(t)
	keys := t.TempDir()
	key := filepath.Join(keys, "n1")
	made, err := sealkey.New()
	if err == nil {
		err = os.WriteFile(key, made, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	e := startBare(t, 3, func(c *cluster.Config) { c.Agents, c.Args = 1, []string{"--seal-key", key} })
	e.ready(4)
	all := []string{"n1", "n2", "n3", "a1"}
	sealed := func(what string) {
		t.Helper()
		for _, node := range all {
			for _, path := range e.keysInClear(node) {
				t.Errorf("%s: %s has a key in clear: %s", what, node, path)
			}
		}
	}
	sealed("after init and join")

	e.ctl("create", "secret", "generic", "kept", "--from-literal=word=from-before")
	leader := e.leader()
	follower := e.other(leader, "a1")
	through := "--kubeconfig=" + nodeOf(e, follower).Kubeconfig()
	e.ctl("create", "configmap", "seen", through)
	var h past.History
	if err := json.Unmarshal([]byte(e.ctl("history", "configmap/seen", "-o", "json")), &h); err != nil || len(h.Changes) != 1 {
		t.Fatalf("history: %+v, %v", h, err)
	}
	if now := e.leader(); h.Changes[0].Server != follower && now == leader {
		t.Errorf("the change came through %s: %+v", follower, h.Changes[0])
	}
	mustContain(t, "history", e.ctl("history", "configmap/seen"), "SERVER", h.Changes[0].Server)

	e.ctl("members", "gossip-key", "rotate", "--wait")
	e.ctl("ca", "rotate", "--yes", "--finish", "--wait")
	sealed("after other keys")
	pass := filepath.Join(t.TempDir(), "pass")
	if err := os.WriteFile(pass, []byte("correct horse battery\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "c.backup")
	e.ctl("snapshot", "save", file, "--passphrase-file", pass)
	mustContain(t, "snapshot", e.ctl("snapshot", "verify", file, "--passphrase-file", pass), "is whole")
	e.ctl("members", "demote", "n3")
	e.ctl("members", "promote", "n3")
	e.eventually("n3 is a server again", func(context.Context) error {
		list, err := e.members()
		for _, m := range list.Members {
			if m.Name == "n3" && m.Role != "agent" && m.Gossip == "alive" {
				return nil
			}
		}
		return errors.Join(err, fmt.Errorf("%+v", list))
	})
	e.allAlive()
	sealed("after changes of the role")

	// A power cut of a server, then one without its key.
	if err := e.Kill("n2"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(key, key+".away"); err != nil {
		t.Fatal(err)
	}
	n2 := nodeOf(e, "n2")
	for want, args := range map[string][]string{
		"--seal-key: ":                         {"run", "--data", n2.Data},
		"it is sealed, and no sealing key was": {"run", "--data", n2.Data, "--seal-key", ""},
	} {
		out, err := e.Exec(t.Context(), "n2", e.Bin("clusterd"), args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("clusterd %q: %v, %s", args, err, out)
		}
	}
	if err := os.Rename(key+".away", key); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), "n2"); err != nil {
		t.Fatal(err)
	}
	e.allAlive()

	// The commands of the page: in clear again, sealed, another sealing key, another key for Secrets.
	blocks := sealCommands(t)
	if len(blocks) != 4 {
		t.Fatalf("docs/security.md has %d blocks of commands on sealed key files: %q", len(blocks), blocks)
	}
	e.onPage("n2", keys, blocks[3])
	if len(e.keysInClear("n2")) < 4 {
		t.Errorf("unsealed: %q", e.keysInClear("n2"))
	}
	mine := t.TempDir()
	out := e.onPage("n2", mine, blocks[0])
	mustContain(t, "keys status", out, "pki/ca.key", "sealed with key 1 of "+mine+"/n1", "in memory, ")
	sealed("sealed by the page's commands")
	before, err := os.ReadFile(filepath.Join(mine, "n1"))
	if err != nil {
		t.Fatal(err)
	}
	out = e.onPage("n2", mine, blocks[1])
	if strings.Contains(out, "key 2 of") || !strings.Contains(out, "key 1 of") {
		t.Errorf("another sealing key: %s", out)
	}
	if after, err := os.ReadFile(filepath.Join(mine, "n1")); err != nil || bytes.Equal(before, after) || bytes.Contains(after, bytes.TrimSpace(before)) {
		t.Errorf("the sealing key is not another one: %v", err)
	}
	e.onPage("n2", mine, blocks[2])
	sealed("with another key for Secrets at rest")
	clear := filepath.Join(n2.Data, "seal.keys")
	own, err := e.Exec(t.Context(), "n2", e.Bin("clusterd"), "keys", "show", "seal.keys", "--data", n2.Data).Output()
	if err == nil {
		err = os.WriteFile(clear, own, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.eventually("seal.keys, which was put there in clear, is sealed", func(context.Context) error {
		if left := e.keysInClear("n2"); len(left) > 0 {
			return fmt.Errorf("in clear: %q", left)
		}
		return nil
	})
	if err := e.Kill("n2"); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), "n2"); err != nil {
		t.Fatal(err)
	}
	e.allAlive()
	e.eventuallyHas([]string{"get", "secret", "kept", "-o", "jsonpath={.data.word}", "--kubeconfig=" + n2.Kubeconfig()}, "ZnJvbS1iZWZvcmU=")

	// A node whose sealing key is lost can be removed.
	a1 := nodeOf(e, "a1")
	if err := e.Stop(t.Context(), "a1"); err != nil {
		t.Fatal(err)
	}
	lost := filepath.Join(keys, "none")
	if out, err := e.Exec(t.Context(), "a1", e.Bin("clusterd"), "reset", "--data", a1.Data, "--seal-key", lost).CombinedOutput(); err != nil {
		t.Errorf("reset: %v: %s", err, out)
	}
}

// keysInClear are the files of a node's data directory that hold a key in clear, but for links.
func (e *env) keysInClear(node string) (found []string) {
	e.t.Helper()
	data := e.data(node)
	err := filepath.WalkDir(data, func(path string, d fs.DirEntry, err error) error {
		switch {
		case os.IsNotExist(err): // files come and go
			return nil
		case err != nil:
			return err
		case d.IsDir():
			if name := d.Name(); path != data && name != "pki" && name != "network" && !strings.HasPrefix(name, "pki.new-") {
				return fs.SkipDir
			}
			return nil
		case !d.Type().IsRegular():
			return nil
		}
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			return nil
		}
		name := d.Name()
		if err == nil && !sealkey.Sealed(b) && (bytes.Contains(b, []byte("PRIVATE KEY")) || bytes.Contains(b, []byte("client-key-data")) ||
			strings.Contains(name, "gossip.key") || strings.Contains(name, "gossip-ring") || strings.Contains(name, "seal.keys") || strings.Contains(name, "wireguard.json")) {
			found = append(found, path)
		}
		return err
	})
	if err != nil {
		e.t.Fatal(err)
	}
	return found
}

// sealCommands are the blocks of commands in the page's section on sealed key files.
func sealCommands(t *testing.T) (blocks []string) {
	t.Helper()
	b, err := os.ReadFile("../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(b), "\n## Sealed key files\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for {
		_, rest, more := strings.Cut(section, "```sh\n")
		if !more {
			return blocks
		}
		var block string
		block, section, _ = strings.Cut(rest, "```")
		blocks = append(blocks, block)
	}
}

// onPage runs a block of commands of a page on a node, with the page's directories replaced by
// the node's and by the directory of sealing keys, and returns what it printed.
func (e *env) onPage(node, keys, block string) string {
	e.t.Helper()
	data := e.data(node)
	tools := e.t.TempDir() // there a command that is called by its name finds the data directory
	wrapper := fmt.Sprintf("#!/bin/sh\na=$1 b=$2\nshift 2\ncase $b in new) exec %s $a $b \"$@\";; esac\nexec %s $a $b --data %s \"$@\"\n", e.Bin("clusterd"), e.Bin("clusterd"), data)
	if err := os.WriteFile(filepath.Join(tools, "clusterd"), []byte(wrapper), 0o700); err != nil {
		e.t.Fatal(err)
	}
	replace := strings.NewReplacer("sudo ", "", "/media/key", keys, "/var/lib/clusterd", data)
	var all strings.Builder
	for line := range strings.Lines(block) {
		line = strings.TrimSpace(line)
		var err error
		switch line {
		case "sudo systemctl stop clusterd":
			err = e.Stop(e.t.Context(), node)
		case "sudo systemctl start clusterd":
			err = e.Start(e.t.Context(), node)
			e.eventually(node+" has started", func(context.Context) error { // as systemd waits for it
				out, errs, code := e.run("clusterctl", "", "get", "--raw", "/readyz", "--kubeconfig="+nodeOf(e, node).Kubeconfig())
				if code != 0 || out != "ok" {
					return fmt.Errorf("exit %d: %s%s", code, out, errs)
				}
				return nil
			})
		default:
			var out []byte
			cmd := e.Exec(e.t.Context(), node, "sh", "-c", "PATH="+tools+":$PATH; "+replace.Replace(line))
			out, err = cmd.CombinedOutput()
			fmt.Fprintf(&all, "%s", out)
		}
		if err != nil {
			e.t.Fatalf("%s: %v\n%s", line, err, all.String())
		}
	}
	e.allAlive()
	return all.String()
}
