package agent

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/pod"
)

func TestResultOf(t *testing.T) {
	ended := func(name string, code int32, reason string) v1.ContainerStatus {
		return v1.ContainerStatus{Name: name, State: v1.ContainerState{Terminated: &v1.ContainerStateTerminated{ExitCode: code, Reason: reason}}}
	}
	for _, c := range []struct {
		status v1.PodStatus
		want   string
	}{
		{v1.PodStatus{Phase: v1.PodSucceeded, ContainerStatuses: []v1.ContainerStatus{ended("a", 0, "Completed")}}, ""},
		{v1.PodStatus{Phase: v1.PodFailed, ContainerStatuses: []v1.ContainerStatus{ended("a", 0, "Completed"), ended("b", 7, "Error")}}, "container b: Error, exit code 7"},
		{v1.PodStatus{Phase: v1.PodFailed, InitContainerStatuses: []v1.ContainerStatus{ended("i", 1, "Error")}}, "container i: Error, exit code 1"},
		{v1.PodStatus{Phase: v1.PodFailed, Reason: "OutOfcpu", Message: "Node didn't have enough resource: cpu"}, "OutOfcpu Node didn't have enough resource: cpu"},
	} {
		r := resultOf(&pod.View{Pod: &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, Status: &c.status})
		if r.Name != "web" || r.Phase != c.status.Phase || r.Why != c.want {
			t.Errorf("%+v, want %q", r, c.want)
		}
	}
}
