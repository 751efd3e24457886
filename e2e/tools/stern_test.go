package tools

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
)

// TestE2EStern follows the logs of pods that come and go, by a pattern, by a
// workload and by a label, and in one go.
func TestE2EStern(t *testing.T) {
	k := start(t, "tools-stern")
	k.okIn(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: talk}
spec:
  replicas: 2
  selector: {matchLabels: {app: talk}}
  template:
    metadata: {labels: {app: talk}}
    spec:
      terminationGracePeriodSeconds: 1
      initContainers:
      - {name: before, image: "`+image+`", args: [echo, warming, up]}
      containers:
      - {name: main, image: "`+image+`", args: [serve]}
      - {name: side, image: "`+image+`", args: [sleep]}
`, "clusterctl", "apply", "-f", "-")
	k.ok("clusterctl", "rollout", "status", "deployment/talk", "--timeout="+testTimeout.String())
	pods := strings.Fields(k.field("pods", "{.items[*].metadata.name}"))
	if len(pods) != 2 {
		t.Fatalf("pods %q", pods)
	}

	for _, p := range pods { // without a probe they may be Ready before they say so
		k.eventuallyHas([]string{"hello from " + p}, "", "clusterctl", "logs", p, "-c", "main")
	}

	// In one go, of every container, with the init containers.
	out := k.ok("stern", "deployment/talk", "--no-follow", "--color=never")
	for _, p := range pods {
		k.has(out, p+" before warming up", p+" main hello from "+p)
	}
	out = k.ok("stern", ".", "-l", "app=talk", "--container", "main", "--no-follow", "--color=never", "--output", "raw", "--since", "1h")
	k.lacks(out, "warming")
	k.has(out, "hello from "+pods[0], "hello from "+pods[1])
	k.has(k.ok("stern", pods[0], "--no-follow", "--color=never", "--tail=1", "--timestamps=short", "--include=warming"), "warming up")
	k.has(k.fails("stern", "cupboard/talk", "--no-follow"), "cupboard")

	// Followed: a later pod's log is read as well, and its end is reported.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := k.command(ctx, "stern", "talk", "--container", "main", "--color=never")
	var heard heard
	cmd.Stdout, cmd.Stderr = &heard, &heard
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var ended sync.WaitGroup
	ended.Go(func() { _ = cmd.Wait() }) // cancelled below
	defer ended.Wait()
	defer cancel()
	listen := func(words ...string) {
		t.Helper()
		k.eventually(fmt.Sprintf("stern says %q", words), func(context.Context) error {
			for _, w := range words {
				if text := heard.text(); !strings.Contains(text, w) {
					return fmt.Errorf("it says: %s", text)
				}
			}
			return nil
		})
	}
	listen(pods[0]+" main hello from "+pods[0], pods[1]+" main hello from "+pods[1])
	k.ok("clusterctl", "delete", "pod", pods[0], "--wait=false")
	listen("- " + pods[0])
	var third string
	k.eventually("there is another pod", func(context.Context) error {
		for _, p := range strings.Fields(k.field("pods", "{.items[*].metadata.name}")) {
			if p != pods[0] && p != pods[1] {
				third = p
				return nil
			}
		}
		return fmt.Errorf("only %q", pods)
	})
	listen("+ "+third, third+" main hello from "+third)
}

// heard is what a tool has said so far.
type heard struct {
	mu sync.Mutex
	b  bytes.Buffer
}

var _ io.Writer = (*heard)(nil)

func (h *heard) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.b.Write(b)
}

func (h *heard) text() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.b.String()
}
