package pod_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	ocispec "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podspec"
)

// imagePod has a volume of an image, which a and b mount and c does not.
func imagePod(name, ref string, policy v1.PullPolicy) *v1.Pod {
	mount := v1.VolumeMount{Name: "model", MountPath: "/model"}
	a, b, c := ctr("a"), ctr("b"), ctr("c")
	a.VolumeMounts, b.VolumeMounts = []v1.VolumeMount{mount}, []v1.VolumeMount{mount}
	p := testPod(name, v1.RestartPolicyAlways, a, b, c)
	p.Spec.Volumes = []v1.Volume{{Name: "model", VolumeSource: v1.VolumeSource{Image: &v1.ImageVolumeSource{Reference: ref, PullPolicy: policy}}}}
	return p
}

// mountOf is what the runtime was told to mount for a container at a place.
func mountOf(n *node, container, at string) api.Mount {
	n.t.Helper()
	_, list, err := n.runtime.List(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	for _, c := range list {
		for _, m := range c.Container.Mounts {
			if c.Container.Name == container && m.Destination == at {
				return m
			}
		}
	}
	n.t.Errorf("container %s mounts nothing at %s", container, at)
	return api.Mount{}
}

func TestImageVolume(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(imagePod("p", "model:1", v1.PullIfNotPresent))
		n.after(time.Second)
		p := n.get("p")
		if p.Status.Phase != v1.PodRunning {
			t.Fatalf("status %+v", p.Status)
		}
		img, _, _ := n.images.Get("model:1")
		for i, want := range []string{img.ID, img.ID, ""} {
			got := ""
			for _, m := range p.Status.ContainerStatuses[i].VolumeMounts {
				if m.Name == "model" && m.VolumeStatus != nil {
					got = m.VolumeStatus.Image.ImageRef
				}
			}
			if got != want {
				t.Errorf("container %d: image of the volume is told as %q, want %q", i, got, want)
			}
		}
		for _, e := range []string{`Pulling Pulling image "model:1"`, `Pulled Successfully pulled image "model:1"`} {
			if c := n.events.count(e); c != 1 {
				t.Errorf("event %q %d times: %v", e, c, n.events.list)
			}
		}
		for _, name := range []string{"a", "b"} {
			m := mountOf(n, name, "/model")
			if opts := strings.Join(m.Options, ","); m.Source != n.images.VolumePath("uid-p", "model") || !m.ReadOnly || opts != "noexec,nosuid,nodev" {
				t.Errorf("%s: %+v", name, m)
			}
		}

		// Another agent finds what is mounted, and tells the same meanwhile.
		n.images.PullErr = func(context.Context, string) error { return errors.New("nobody may pull again") }
		n.stop()
		n.start()
		n.runtime.Exit("a", 1)
		n.after(time.Second)
		p = n.get("p")
		if s := p.Status.ContainerStatuses[0]; s.RestartCount != 1 || s.State.Running == nil || s.VolumeMounts[0].VolumeStatus == nil {
			t.Errorf("after a restart of agent and container: %+v", s)
		}
		n.delete("p", 30)
		n.after(time.Minute)
		if n.get("p") != nil {
			t.Error("still there")
		}
		if owners, _ := n.images.VolumeOwners(); len(owners) > 0 {
			t.Errorf("left mounted: %v", owners)
		}
	})
}

// TestImageVolumeFaults: what keeps an image volume away is told of the
// containers that mount it, and holds up no others.
func TestImageVolumeFaults(t *testing.T) {
	notFound := &image.PullError{Ref: "x", Reason: image.ReasonNotFound, Says: "manifest unknown", Err: errors.New("manifest unknown")}
	for _, tt := range []struct {
		name, ref string
		policy    v1.PullPolicy
		at        time.Duration // after the pod's creation
		reason    string
		message   string
		events    []string
	}{
		{"not to be had", "model:1", v1.PullIfNotPresent, time.Second, "ErrImagePull", "manifest unknown",
			[]string{`Failed Failed to pull image "model:1": `, "Failed Error: ErrImagePull"}},
		{"back-off", "model:1", v1.PullAlways, 5 * time.Second, "ImagePullBackOff", `Back-off pulling image "model:1": ErrImagePull: `,
			[]string{`BackOff Back-off pulling image "model:1"`, "Failed Error: ImagePullBackOff"}},
		{"never pulled", "model:1", v1.PullNever, time.Second, "ErrImageNeverPull", `"model:1" is not present with pull policy of Never`,
			[]string{"Warning ErrImageNeverPull", "Failed Error: ErrImageNeverPull"}},
		{"no name", "Bad Name", v1.PullIfNotPresent, time.Second, "InvalidImageName", "Bad Name", []string{"InspectFailed"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				n.images.PullErr = func(context.Context, string) error { return notFound }
				n.create(imagePod("p", tt.ref, tt.policy))
				n.create(testPod("other", v1.RestartPolicyAlways, ctr("a")))
				n.after(tt.at)
				st := n.get("p").Status.ContainerStatuses
				for i := range 2 {
					if w := st[i].State.Waiting; w == nil || w.Reason != tt.reason || !strings.Contains(w.Message, tt.message) {
						t.Errorf("container %s waits: %+v", st[i].Name, w)
					}
				}
				if st[2].State.Running == nil {
					t.Errorf("the container without the volume: %+v", st[2].State)
				}
				for _, e := range tt.events {
					if c := n.events.count(e); c != 1 {
						t.Errorf("event %q %d times: %v", e, c, n.events.list)
					}
				}
				if s := n.get("other").Status; s.Phase != v1.PodRunning {
					t.Errorf("another pod: %+v", s)
				}
				// It is brought by hand: nobody waits for the back-off's end.
				if tt.policy != v1.PullAlways && tt.ref == "model:1" {
					n.images.Add("model:1", ocispec.Config{})
					n.pods.ImagesChanged()
					n.after(time.Second)
					if s := n.get("p").Status; s.Phase != v1.PodRunning {
						t.Errorf("with the image there: %+v", s)
					}
				}
			})
		})
	}
}

// TestImageVolumePullHangs: a pull that hangs is named, and given up when the
// pod is deleted.
func TestImageVolumePullHangs(t *testing.T) {
	inBubble(t, func(n *node) {
		n.images.PullErr = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
		n.create(imagePod("p", "slow:1", v1.PullIfNotPresent))
		n.after(2 * time.Second)
		st := n.get("p").Status.ContainerStatuses
		if w := st[0].State.Waiting; w == nil || w.Reason != "ContainerCreating" || !strings.Contains(w.Message, `Pulling image "slow:1" for volume "model" since`) {
			t.Errorf("waiting %+v", w)
		}
		n.delete("p", 30)
		n.after(time.Minute)
		if n.get("p") != nil {
			t.Error("still there")
		}
	})
}

// TestImageVolumeOfNobody: what is mounted for a pod that the API does not know
// goes.
func TestImageVolumeOfNobody(t *testing.T) {
	inBubble(t, func(n *node) {
		n.stop()
		img, _, _ := n.images.Get("app:1")
		if _, err := n.images.MountVolume(t.Context(), img, "uid-gone", "v"); err != nil {
			t.Fatal(err)
		}
		n.start()
		n.after(time.Second)
		if owners, _ := n.images.VolumeOwners(); len(owners) > 0 {
			t.Errorf("left mounted: %v", owners)
		}
	})
}

// TestImageVolumeSubPath: a path that the image does not have is an error of
// the container's creation, and made for nobody.
func TestImageVolumeSubPath(t *testing.T) {
	inBubble(t, func(n *node) {
		p := imagePod("p", "app:1", v1.PullIfNotPresent)
		p.Spec.Containers[1].VolumeMounts[0].SubPath = "no/such"
		n.create(p)
		n.after(time.Second)
		st := n.get("p").Status.ContainerStatuses
		if w := st[1].State.Waiting; w == nil || w.Reason != "CreateContainerError" || w.Message != `ImageVolumeMountFailed: volume "model" has no subPath "no/such"` {
			t.Errorf("waiting %+v", w)
		}
		if st[0].State.Running == nil || st[2].State.Running == nil {
			t.Errorf("the others: %+v", st)
		}
		if _, err := os.Lstat(filepath.Join(n.images.VolumePath("uid-p", "model"), "no")); !os.IsNotExist(err) {
			t.Errorf("the path in the image: %v", err)
		}
	})
}

// TestVolumeMountsTold: the status repeats the mounts, with what has become of
// recursiveReadOnly.
func TestVolumeMountsTold(t *testing.T) {
	inBubble(t, func(n *node) {
		c := ctr("a")
		c.VolumeMounts = []v1.VolumeMount{
			{Name: "v", MountPath: "/rw"},
			{Name: "v", MountPath: "/ro", ReadOnly: true},
			{Name: "v", MountPath: "/rro", ReadOnly: true, RecursiveReadOnly: ptr.To(v1.RecursiveReadOnlyIfPossible)},
		}
		p := testPod("p", v1.RestartPolicyAlways, c)
		p.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
		n.create(p)
		n.after(time.Second)
		recursive := v1.RecursiveReadOnlyDisabled
		if podspec.ReadOnlyTrees() {
			recursive = v1.RecursiveReadOnlyEnabled
		}
		got := n.get("p").Status.ContainerStatuses[0].VolumeMounts
		if len(got) != 3 || got[0].RecursiveReadOnly != nil || got[0].ReadOnly || *got[1].RecursiveReadOnly != v1.RecursiveReadOnlyDisabled ||
			!got[1].ReadOnly || *got[2].RecursiveReadOnly != recursive || got[2].MountPath != "/rro" {
			t.Errorf("told %+v", got)
		}
	})
}
