package kubectl

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXCommands goes through the commands that every user's hands know.
func TestE2EXCommands(t *testing.T) {
	t.Parallel()
	k := start(t, "commands")
	k.apply(simple("one", "serve"))
	k.ready("one")
	k.sub("get", func(k *kit) {
		wide := k.ok("get", "pod", "one", "-o", "wide")
		k.has(wide, "NOMINATED NODE", "READINESS GATES", k.pod("one").Status.PodIP, node)
		k.has(k.ok("get", "pod", "one", "-o", "yaml"), "kind: Pod\n", "phase: Running\n")
		var p corev1.Pod
		k.decode(k.ok("get", "pod", "one", "-o", "json"), &p)
		k.is("name in JSON", p.Name, "one")
		k.is("phase", k.field("pod/one", "{.status.phase}"), "Running")
		k.has(k.ok("get", "pods", "-A"), "NAMESPACE", "commands ")
		k.is("-l", k.ok("get", "pods", "-l", "app=one", "-o", "name"), "pod/one\n")
		k.is("-l !=", k.ok("get", "pods", "-l", "app!=one", "-o", "name"), "")
		k.is("--field-selector", k.ok("get", "pods", "--field-selector", "spec.nodeName="+node+",status.phase=Running", "-o", "name"), "pod/one\n")
		k.has(k.fails("get", "pods", "--field-selector", "spec.nonsense=1"), "field label not supported: spec.nonsense")
		k.has(k.fails("get", "pod", "two"), `Error from server (NotFound): pods "two" not found`)
		k.has(k.fails("get", "nonsense"), `the server doesn't have a resource type "nonsense"`)
		k.has(k.ok("get", "nodes", "-o", "wide"), "Ready", "INTERNAL-IP", "clusterd://")
		k.has(k.ok("get", "all"), "pod/one")
	})
	k.sub("describe", func(k *kit) {
		k.eventuallyHas([]string{"describe", "pod", "one"}, "Node:             "+node+"/", "State:          Running", "QoS Class:", "BestEffort", "Started")
		k.has(k.ok("describe", "node", node), "Allocatable:", "MemoryPressure", "Non-terminated Pods:", "one", "PodCIDR:", "Container Runtime Version:")
		k.has(k.fails("describe", "pod", "two"), `pods "two" not found`)
	})
	k.sub("create, label, annotate, patch, edit", func(k *kit) {
		k.has(k.ok("create", "configmap", "cm", "--from-literal=a=b"), "configmap/cm created")
		k.has(k.ok("label", "cm", "cm", "l=1"), "configmap/cm labeled")
		k.has(k.fails("label", "cm", "cm", "l=2"), "already has a value (1), and --overwrite is false")
		k.has(k.ok("annotate", "cm", "cm", "n=1"), "configmap/cm annotated")
		for _, p := range []struct{ kind, patch, want string }{
			{"merge", `{"data":{"a":null,"c":"d"}}`, `{"c":"d"}`},
			{"json", `[{"op":"add","path":"/data/e","value":"f"}]`, `{"c":"d","e":"f"}`},
			{"strategic", `{"data":{"c":"x"}}`, `{"c":"x","e":"f"}`},
		} {
			k.has(k.ok("patch", "cm", "cm", "--type="+p.kind, "-p", p.patch), "configmap/cm patched")
			k.is(p.kind, k.field("cm/cm", "{.data}"), p.want)
		}
		// Strategic is more than merge: lists merge by name.
		k.ok("patch", "pod", "one", "--dry-run=server", "-p", `{"spec":{"containers":[{"name":"main","image":"a/b:2"}]}}`)
		k.has(k.fails("patch", "cm", "cm", "--type=json", "-p", `[{"op":"test","path":"/data/c","value":"y"}]`), "invalid")
		editor := k.file("editor", "#!/bin/sh\nsed -i 's/c: x/c: edited/' \"$1\"\n")
		if err := os.Chmod(editor, 0o700); err != nil {
			k.Fatal(err)
		}
		k.has(k.with([]string{"KUBE_EDITOR=" + editor}, "edit", "cm", "cm"), "configmap/cm edited")
		k.is("edited", k.field("cm/cm", "{.data.c}"), "edited")
		before := k.field("cm/cm", "{.metadata.resourceVersion}")
		k.with([]string{"KUBE_EDITOR=true"}, "edit", "cm", "cm")
		k.is("resourceVersion after no edit", k.field("cm/cm", "{.metadata.resourceVersion}"), before)
		k.has(k.ok("replace", "-f", k.file("r.yaml", configMap("cm", "", "replaced"))), "configmap/cm replaced")
		k.is("replaced", k.field("cm/cm", "{.data}"), `{"key":"replaced"}`)
	})
	k.sub("delete with grace", func(k *kit) {
		k.apply(strings.Replace(simple("slow", "serve"), "PeriodSeconds: 1", "PeriodSeconds: 30", 1))
		k.ready("slow")
		k.has(k.ok("delete", "pod", "slow", "--wait=false"), `pod "slow" deleted`)
		k.gone("slow") // it heeds SIGTERM: long before 30 s are over
		k.apply(simple("quick", "sleep"))
		k.ready("quick")
		k.has(k.ok("delete", "pod", "quick", "--grace-period=0", "--force"), "force deleted")
		k.fails("get", "pod", "quick")
		k.has(k.fails("delete", "pod", "quick"), "not found")
		k.ok("delete", "pod", "quick", "--ignore-not-found")
	})
	k.sub("scale and rollout", func(k *kit) {
		features.Shows(k, 93, 94, 97, 98)
		k.apply(web("web", 1))
		k.has(k.ok("rollout", "status", "deploy/web", timeoutFlag), "successfully rolled out")
		revision := func() string {
			return k.field("deploy/web", `{.metadata.annotations.deployment\.kubernetes\.io/revision}`)
		}
		k.is("revision", revision(), "1")
		for _, n := range []int{5, 2} {
			k.has(k.ok("scale", "deploy/web", fmt.Sprintf("--replicas=%d", n)), "scaled")
			k.eventually(fmt.Sprintf("%d pods", n), func(context.Context) error {
				if got := strings.Fields(k.ok("get", "pods", "-l", "app=web", "-o", "name")); len(got) != n {
					return fmt.Errorf("%q", got)
				}
				return nil
			})
		}
		k.has(k.fails("scale", "deploy/web", "--current-replicas=7", "--replicas=1"), "Expected replicas to be 7, was 2")
		k.has(k.ok("get", "rs", "-l", "app=web", "--show-labels"), "pod-template-hash=")
		k.ok("set", "env", "deploy/web", "WORD=second")
		k.has(k.ok("rollout", "status", "deploy/web", timeoutFlag), "successfully rolled out")
		k.is("revision", revision(), "2")
		k.has(k.ok("rollout", "history", "deploy/web"), "REVISION", "1 ", "2 ")
		k.has(k.ok("rollout", "history", "deploy/web", "--revision=2"), "WORD:\tsecond")
		k.has(k.ok("rollout", "undo", "deploy/web"), "rolled back")
		k.has(k.ok("rollout", "status", "deploy/web", timeoutFlag), "successfully rolled out")
		k.is("env after undo", k.field("deploy/web", "{.spec.template.spec.containers[0].env}"), "")
		k.is("revision", revision(), "3")
		k.has(k.ok("rollout", "restart", "deploy/web"), "restarted")
		k.ok("rollout", "status", "deploy/web", timeoutFlag)
		k.ok("rollout", "pause", "deploy/web")
		k.has(k.fails("rollout", "undo", "deploy/web"), "paused")
		k.ok("rollout", "resume", "deploy/web")
		k.ok("delete", "deploy", "web")
	})
	k.sub("logs", func(k *kit) {
		k.eventuallyHas([]string{"logs", "one"}, "serving on :8080")
		k.is("logs since the future", k.ok("logs", "one", "--since-time="+time.Now().Add(time.Hour).UTC().Format(time.RFC3339)), "")
		k.has(k.ok("logs", "one", "--since=1h", "--timestamps"), time.Now().UTC().Format("2006-"), "serving on")
		k.apply(simple("dies", "echo, last, words"))
		k.podIs("dies", "was started again", func(p *corev1.Pod) bool {
			return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
		})
		k.is("logs -p", k.ok("logs", "-p", "dies"), "last words\n")
		k.has(k.fails("logs", "-p", "one"), `Error from server (BadRequest): previous terminated container "main" in pod "one" not found`)
		k.has(k.fails("logs", "one", "-c", "x"), "container x is not valid for pod one")
		k.apply(simple("ends", "exit, '0', '2'", "restartPolicy: Never"))
		k.apply(simple("talks", "echo, spoken", "restartPolicy: Never"))
		k.phase("talks", "Succeeded")
		k.is("logs -f of an ended one", k.ok("logs", "-f", "talks"), "spoken\n")
		k.podIs("ends", "has begun", func(p *corev1.Pod) bool { return p.Status.Phase != "Pending" })
		k.is("logs -f until the end", k.ok("logs", "-f", "ends"), "ending with 0 in 2 s\n")
		k.phase("ends", "Succeeded")
		k.ok("delete", "pod", "dies", "ends", "talks")
	})
	k.sub("exec", func(k *kit) {
		_, _, code := k.in("", "exec", "one", "--", "/hello", "exit", "7")
		k.is("exit code", fmt.Sprint(code), "7")
		k.has(k.fails("exec", "one", "--", "/nosuch"), "/nosuch")
		k.is("-i", k.okIn("typed\n", "exec", "-i", "one", "--", "/hello", "cat", "/dev/stdin"), "typed\n")
		k.has(k.fails("exec", "one", "-c", "x", "--", "/hello"), "container x is not valid for pod one")
		k.has(k.fails("exec", "nobody", "--", "/hello"), `pods "nobody" not found`)
	})
	k.sub("exec with a terminal", func(k *kit) {
		k.terminal(func(tty *terminal) {
			tty.waitFor("\n10\r\n")
			tty.write("\x03") // Ctrl-C is a signal only where a terminal is
		}, "exec", "-it", "one", "--", "/hello", "count")
		k.terminal(func(tty *terminal) {
			tty.write("typed\r")
			tty.waitFor("typed\r\ntyped\r\n") // the echo, then the program's
			tty.write("\x04")
		}, "exec", "-it", "one", "--", "/hello", "cat", "/dev/tty")
	})
	k.sub("port-forward", func(k *kit) {
		ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
		defer cancel()
		cmd := k.command(ctx, "port-forward", "pod/one", ":8080", "--address=127.0.0.1")
		out, err := cmd.StdoutPipe()
		if err != nil {
			k.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			k.Fatal(err)
		}
		var port int
		if _, err := fmt.Fscanf(out, "Forwarding from 127.0.0.1:%d -> 8080", &port); err != nil {
			k.Fatal(err)
		}
		k.has(k.page(fmt.Sprintf("http://127.0.0.1:%d/", port)), "I am pod one")
		cancel()
		_ = cmd.Wait() // it was killed
	})
	k.sub("wait", func(k *kit) {
		k.has(k.ok("wait", "pod/one", "--for=condition=Ready", timeoutFlag), "condition met")
		k.has(k.fails("wait", "pod/one", "--for=condition=Nonsense", "--timeout=5s"), "timed out waiting") // longer than its first look takes
	})
	k.sub("manifests with mistakes", func(k *kit) {
		for _, tt := range []struct{ from, to, words string }{
			{"spec:", "spec:\n  nonsense: 1", `unknown field "spec.nonsense"`},
			{"args: [sleep]", "resources: {limits: {memory: 64Megs}}", "quantities must match the regular expression"},
			{"kind: Pod", "kind: Pot", `no matches for kind "Pot" in version "v1"`},
			{"apiVersion: v1", "apiVersion: v9", `no matches for kind "Pod" in version "v9"`},
		} {
			manifest := strings.Replace(simple("wrong", "sleep"), tt.from, tt.to, 1)
			k.has(k.failsIn(manifest, "apply", "-f", "-"), tt.words)
			k.has(k.failsIn(manifest, "create", "-f", "-"), tt.words)
		}
		_, warning, code := k.in(strings.Replace(simple("warned", "sleep"), "spec:", "spec:\n  nonsense: 1", 1), "create", "-f", "-", "--validate=warn")
		k.is("exit code", fmt.Sprint(code), "0")
		k.has(warning, `Warning: unknown field "spec.nonsense"`)
		k.ok("delete", "pod", "warned")
	})
}

// TestE2EXDrain is not parallel: it empties the only node.
func TestE2EXDrain(t *testing.T) {
	k := start(t, "drain")
	features.Shows(k, 113)
	k.apply(web("web", 2))
	k.apply(simple("bare", "sleep"))
	k.ok("rollout", "status", "deploy/web", timeoutFlag)
	k.ready("bare")
	k.has(k.ok("cordon", node), "node/"+node+" cordoned")
	k.Cleanup(func() { k.ok("uncordon", node) })
	k.has(k.ok("get", "nodes"), "Ready,SchedulingDisabled")
	k.has(k.fails("drain", node), "cannot delete", "bare")
	k.has(k.ok("drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data", timeoutFlag), "evicted", "drained")
	k.fails("get", "pod", "bare")
	k.eventually("the new pods wait for a node", func(context.Context) error {
		out := k.ok("get", "pods", "-l", "app=web", "-o", `jsonpath={range .items[*]}{.status.phase} {.status.conditions[?(@.type=="PodScheduled")].message}{"\n"}{end}`)
		if strings.Count(out, "Pending 0/1 nodes are available: 1 node(s) were unschedulable") != 2 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	k.has(k.ok("uncordon", node), "uncordoned")
	k.ok("rollout", "status", "deploy/web", timeoutFlag)
	k.ok("delete", "deploy", "web")
}

// page gets a page over HTTP.
func (k *kit) page(url string) string {
	k.Helper()
	client := http.Client{Timeout: testTimeout, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		k.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		k.Fatal(err)
	}
	return string(b)
}

// terminal is a pseudo terminal with a program on its other end.
type terminal struct {
	k    *kit
	file *os.File
	mu   sync.Mutex
	seen bytes.Buffer // guarded by mu
	news chan struct{}
}

// terminal runs kubectl on a terminal of its own; use types and reads. It has
// to end by itself.
func (k *kit) terminal(use func(*terminal), args ...string) {
	k.Helper()
	file, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		k.Fatal(err)
	}
	defer file.Close()
	fd := int(file.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		k.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		k.Fatal(err)
	}
	end, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		k.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
	defer cancel()
	cmd := k.command(ctx, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = end, end, end
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		k.Fatal(err)
	}
	_ = end.Close()
	tty := &terminal{k: k, file: file, news: make(chan struct{}, 1)}
	read := make(chan struct{})
	go func() { // ends when the program closes its end
		defer close(read)
		_, _ = io.Copy(tty, file)
	}()
	use(tty)
	err = cmd.Wait()
	<-read
	if err != nil {
		k.Errorf("kubectl %q: %v; the terminal shows %q", args, err, tty.text())
	}
}

// Write takes what the program prints.
func (t *terminal) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case t.news <- struct{}{}:
	default:
	}
	return t.seen.Write(b)
}

func (t *terminal) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seen.String()
}

func (t *terminal) write(keys string) {
	t.k.Helper()
	if _, err := t.file.WriteString(keys); err != nil {
		t.k.Fatal(err)
	}
}

func (t *terminal) waitFor(text string) {
	t.k.Helper()
	late := time.After(testTimeout)
	for !strings.Contains(t.text(), text) {
		select {
		case <-t.news:
		case <-late:
			t.k.Fatalf("%q is not on the terminal: %q", text, t.text())
		}
	}
}
