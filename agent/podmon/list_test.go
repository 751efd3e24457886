package podmon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
)

// TestListFitsIntoAMessage: what one pod's containers are given does not keep the
// node from listing the others.
func TestListFitsIntoAMessage(t *testing.T) {
	s := &Supervisor{containers: map[string]*container{}}
	big := slices.Repeat([]string{"V=" + strings.Repeat("x", 100<<10)}, 20)
	reserve := func(id, sandbox string) error {
		return s.reserveContainer(&container{id: id, state: stateStarting, status: api.ContainerStatus{Container: api.Container{
			ID: id, SandboxID: sandbox, Name: id, Args: []string{"a"}, Env: big, Mounts: []api.Mount{{Source: "/s", Destination: "/d"}}, Labels: map[string]string{"l": id},
		}}})
	}
	for pod := range 10 {
		for i := range 8 {
			if err := reserve(fmt.Sprintf("c%d-%d", pod, i), fmt.Sprintf("p%d", pod)); err != nil {
				t.Fatal(err)
			}
		}
	}
	var refused *api.Error
	if err := reserve("ninth", "p0"); !errors.As(err, &refused) || refused.Code != api.CodeInvalid || !strings.Contains(err.Error(), "container ninth") {
		t.Errorf("a pod's ninth container with 2 MiB: %v", err)
	}
	if _, list := s.list(false); len(list) != 0 {
		t.Errorf("%d are listed to who did not ask for those that are being started", len(list))
	}
	_, list := s.list(true)
	if len(list) != 80 || list[0].State != api.StateStarting {
		t.Fatalf("%d containers, the first %s", len(list), list[0].State)
	}
	for _, c := range list {
		if c.Container.Labels["l"] != c.Container.ID || c.Container.Env != nil || c.Container.Args != nil || c.Container.Mounts != nil {
			t.Fatalf("listed: %d variables, %v, %v", len(c.Container.Env), c.Container.Mounts, c.Container.Labels)
		}
	}
	if _, err := frame.Encode(api.Response{Containers: list}); err != nil {
		t.Error(err)
	}
	if c := s.containers["c0-0"]; len(c.status.Container.Env) != 20 {
		t.Error("podmon itself forgot the environment: nothing could be executed")
	}
}
