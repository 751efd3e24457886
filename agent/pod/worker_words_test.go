package pod

import (
	"os"
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// The bug of issue 9: after a restart the messages of ended containers were
// read under the manager's lock, where one slow disk stalled every pod.
func TestWordsAreReadByTheWorkerItself(t *testing.T) {
	path := filepath.Join(t.TempDir(), "message")
	if err := os.WriteFile(path, []byte("out of cheese"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{{Name: "main"}}}}
	p.UID = "u"
	w := newWorker(&Manager{}, p, false, podstate.Records{Containers: []api.ContainerStatus{{
		Container: api.Container{ID: "c1", Name: "main", Labels: map[string]string{podstate.LabelMessage: path}},
		State:     api.StateExited, ExitCode: 3,
	}}})
	if got := w.obs.Containers["main"].Now; got == nil || got.Message != "" || len(w.unread) != 1 {
		t.Fatalf("the file was read when the worker was made: %+v", got)
	}
	w.readWords()
	if got := w.obs.Containers["main"].Now.Message; got != "out of cheese" || len(w.unread) != 0 {
		t.Errorf("message %q", got)
	}
}
