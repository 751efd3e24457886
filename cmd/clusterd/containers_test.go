package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podmon/api"
)

func TestPrintRecords(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ago := func(d time.Duration) int64 { return now.Add(-d).UnixNano() }
	sandbox := func(id, name string, attempt uint32) api.Sandbox {
		return api.Sandbox{ID: id, PodUID: "uid-" + name, Namespace: "default", Name: name, Attempt: attempt, CgroupParent: "/clusterd/poduid-" + name}
	}
	container := func(id, sandbox, name, kind string, attempt uint32) api.Container {
		return api.Container{
			ID: id, SandboxID: sandbox, Name: name, Attempt: attempt, LogPath: "/log/" + name + ".log",
			Labels: map[string]string{"type": kind, "image": "app:1"},
		}
	}
	list := pod.RuntimeRecords([]api.SandboxStatus{
		{Sandbox: sandbox("bbbbbbbbbbbbbbbb", "web", 1), State: api.StateRunning, Pid: 20, CreatedAt: ago(time.Hour)},
		{Sandbox: sandbox("aaaaaaaaaaaaaaaa", "job", 0), State: api.StateExited, Pid: 10, CreatedAt: ago(2 * time.Hour)},
	}, []api.ContainerStatus{
		{Container: container("c1", "bbbbbbbbbbbbbbbb", "main", "app", 3), State: api.StateRunning, Pid: 22, StartedAt: ago(90 * time.Second)},
		{Container: container("c0", "bbbbbbbbbbbbbbbb", "main", "app", 2), State: api.StateExited, Pid: 21, StartedAt: ago(5 * time.Minute), FinishedAt: ago(2 * time.Minute), ExitCode: 137, OOMKilled: true},
		{Container: container("i", "bbbbbbbbbbbbbbbb", "init", "init", 0), State: api.StateExited, StartedAt: ago(time.Hour), FinishedAt: ago(time.Hour), ExitCode: 0},
		{Container: container("j", "aaaaaaaaaaaaaaaa", "main", "app", 0), State: api.StateExited, StartedAt: ago(time.Hour), FinishedAt: ago(time.Hour), ExitCode: 255, Lost: true},
		{Container: container("k", "aaaaaaaaaaaaaaaa", "bad", "app", 0), State: api.StateExited, StartedAt: ago(time.Hour), FinishedAt: ago(time.Hour), ExitCode: 128, StartError: "no such file"},
	})
	const want = `
NAMESPACE  POD  CONTAINER  TYPE     ATTEMPT  STATE                               PID  AGE   LOG
default    job  -          sandbox  0        Exited                              -    120m  -
default    job  bad        app      0        Exited(128,StartError)              -    60m   /log/bad.log
default    job  main       app      0        Exited(255,ContainerStatusUnknown)  -    60m   /log/main.log
default    web  -          sandbox  1        Running                             20   60m   -
default    web  init       init     0        Exited(0)                           -    60m   /log/init.log
default    web  main       app      2        Exited(137,OOMKilled)               -    5m    /log/main.log
default    web  main       app      3        Running                             22   90s   /log/main.log
`
	var out bytes.Buffer
	if err := printRecords(&out, list, false, now); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.TrimPrefix(want, "\n"), out.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	out.Reset()
	if err := printRecords(&out, list[6:], true, now); err != nil {
		t.Fatal(err)
	}
	const wide = `
NAMESPACE  POD  CONTAINER  TYPE  ATTEMPT  STATE    PID  AGE  LOG             ID  SANDBOX       POD-UID  IMAGE  CGROUP
default    web  main       app   3        Running  22   90s  /log/main.log  c1  bbbbbbbbbbbb  uid-web  app:1  /clusterd/poduid-web
`
	if d := cmp.Diff(strings.Fields(wide), strings.Fields(out.String())); d != "" {
		t.Errorf("wide (-want +got):\n%s", d)
	}
	out.Reset()
	if err := printJSON(&out, list[5:6]); err != nil {
		t.Fatal(err)
	}
	const asJSON = `[
  {
    "namespace": "default",
    "pod": "web",
    "podUID": "uid-web",
    "name": "main",
    "type": "app",
    "id": "c0",
    "sandboxID": "bbbbbbbbbbbbbbbb",
    "attempt": 2,
    "image": "app:1",
    "logPath": "/log/main.log",
    "cgroupParent": "/clusterd/poduid-web",
    "running": false,
    "startedAt": "2026-01-02T02:59:05Z",
    "finishedAt": "2026-01-02T03:02:05Z",
    "exitCode": 137,
    "reason": "OOMKilled"
  }
]
`
	if d := cmp.Diff(asJSON, out.String()); d != "" {
		t.Errorf("JSON (-want +got):\n%s", d)
	}
}

func TestRecordsOfNobody(t *testing.T) {
	if _, err := runtimeRecords(t.Context(), "/no/such"); err == nil || !strings.Contains(err.Error(), `--data "/no/such": there is no such directory`) {
		t.Errorf("%v", err)
	}
	if _, err := runtimeRecords(t.Context(), t.TempDir()); err == nil || !strings.Contains(err.Error(), "no podmon serves in ") || !strings.Contains(err.Error(), "--data") {
		t.Errorf("%v", err)
	}
}
