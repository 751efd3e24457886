package podspec

import (
	"fmt"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/users"
)

// HasUsers says whether the pod asks for a user namespace (KEP-127).
func HasUsers(pod *v1.Pod) bool {
	return pod.Spec.HostUsers != nil && !*pod.Spec.HostUsers
}

// insideUsers refuses users and groups that the pod's user namespace has not.
func insideUsers(out *api.Container, pod *v1.Pod) error {
	if !HasUsers(pod) {
		return nil
	}
	for _, id := range append([]uint32{out.UID, out.GID}, out.ExtraGIDs...) {
		if id >= users.Count {
			return fmt.Errorf("user or group %d (of runAsUser, runAsGroup, fsGroup, supplementalGroups or the image) is above %d, the last of a pod with hostUsers: false", id, users.Count-1)
		}
	}
	return nil
}
