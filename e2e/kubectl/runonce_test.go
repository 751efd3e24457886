package kubectl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/clusterd/clusterd/features"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestE2EXRunOnce: static pods run to their end, each time again, and the exit
// code says whether all have succeeded.
func TestE2EXRunOnce(t *testing.T) {
	t.Parallel()
	k := start(t, "runonce") // for its programs and its way of waiting
	features.Shows(k, 147)
	space := netnstest.New(t)
	dir := t.TempDir()
	folder := filepath.Join(dir, "pods")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	bin, err := binDir()
	if err != nil {
		t.Fatal(err)
	}
	common := []string{"--data", filepath.Join(dir, "data"), "--cgroup-root", fmt.Sprintf("/runonce-%d", os.Getpid()), "--name", "once", "--advertise", "127.0.0.1"}
	clusterd := func(args ...string) (text string, code int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, filepath.Join(bin, "clusterd"), append(args, common...)...)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := netns.Do(space.Path, cmd.Start); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
			t.Fatalf("%v, %v: %s", err, ctx.Err(), out.String())
		}
		return out.String(), cmd.ProcessState.ExitCode()
	}
	t.Cleanup(func() {
		cmd := exec.Command(filepath.Join(bin, "clusterd"), append([]string{"reset"}, common...)...)
		var out []byte
		err := netns.Do(space.Path, func() (err error) { out, err = cmd.CombinedOutput(); return err })
		if err != nil {
			t.Errorf("reset: %v: %s", err, out)
		}
	})
	once := func(want int) string {
		t.Helper()
		text, code := clusterd("standalone", "--run-once", "--static-pods", folder, "--image", filepath.Join(bin, "hello.tar"))
		if code != want {
			t.Fatalf("exit code %d, want %d: %s", code, want, text)
		}
		return text
	}
	put(t, filepath.Join(folder, "for-ever.yaml"), simple("for-ever", "serve"))
	put(t, filepath.Join(folder, "good.yaml"), simple("good", `echo, ran`, "restartPolicy: Never"))
	k.has(once(1), "pod for-ever-once", "restartPolicy is Always", "Never or OnFailure")
	put(t, filepath.Join(folder, "for-ever.yaml"), "kind: Pod\n")
	text := once(1)
	k.has(text, "for-ever.yaml: apiVersion")
	k.lacks(text, "a pod has succeeded") // nothing was begun
	if err := os.Remove(filepath.Join(folder, "for-ever.yaml")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // nothing of the first run is left that the second could take for its own
		k.has(once(0), `msg="a pod has succeeded"`, "pod=good-once")
	}
	put(t, filepath.Join(folder, "bad.yaml"), simple("bad", `exit, "7"`, "restartPolicy: Never"))
	k.has(once(1), "pod=good-once", "pod=bad-once", "container main: Error, exit code 7", "1 of 2 pods have failed: bad-once")
	if pods, err := os.ReadDir(filepath.Join(dir, "data", "pods")); err != nil || len(pods) > 0 {
		t.Errorf("left of the pods: %v (%v)", pods, err)
	}
}
