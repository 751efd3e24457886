package agent_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/features"
)

// TestRootLogLinks: a container's log is found by the name that log shippers
// read the pod from, and the link goes with the container.
func TestRootLogLinks(t *testing.T) {
	features.Shows(t, 163)
	m := newMachine(t)
	m.create(newPod("one", app("a", "serve", "8080")))
	m.ready("one")
	id := strings.TrimPrefix(m.get("one").Status.ContainerStatuses[0].ContainerID, podstate.ContainerIDPrefix)
	link := filepath.Join(m.dir, "links", "one_default_a-"+id+".log")
	m.eventually("the log by its link", func() bool {
		b, err := os.ReadFile(link)
		return err == nil && strings.Contains(string(b), "stdout F serving on")
	})
	if target, err := os.Readlink(link); err != nil || target != filepath.Join(m.dir, "log", "pods", "default_one_uid-one", "a", "0.log") {
		t.Errorf("the link leads to %q, %v", target, err)
	}
	m.delete("one", 1)
	m.eventually("the link goes", func() bool {
		_, err := os.Lstat(link)
		return os.IsNotExist(err)
	})
}
