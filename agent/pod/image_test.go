package pod_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ocispec "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
)

func TestImageFaults(t *testing.T) {
	inBubble(t, func(n *node) {
		pulls := 0
		n.images.PullErr = func(context.Context, string) error {
			pulls++
			if pulls > 2 {
				return nil
			}
			return &image.PullError{Ref: "x", Reason: image.ReasonNotFound, Says: "manifest unknown", Err: errors.New("manifest unknown")}
		}
		c := ctr("a")
		c.Image = "missing:1"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		w := n.get("p").Status.ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "ErrImagePull" || !strings.Contains(w.Message, "manifest unknown") {
			t.Fatalf("waiting %+v", w)
		}
		n.after(3 * time.Second)
		w = n.get("p").Status.ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "ImagePullBackOff" || !strings.Contains(w.Message, "manifest unknown") {
			t.Fatalf("waiting %+v", w)
		}
		n.after(10 * time.Second)
		if pulls != 2 {
			t.Fatalf("%d pulls", pulls)
		}
		n.after(21 * time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning {
			t.Fatalf("phase %s", p.Status.Phase)
		}

		never := ctr("a")
		never.Image, never.ImagePullPolicy = "absent:1", v1.PullNever
		n.create(testPod("never", v1.RestartPolicyAlways, never))
		bad := ctr("a")
		bad.Image = "Bad Name"
		n.create(testPod("bad", v1.RestartPolicyAlways, bad))
		n.after(time.Second)
		if w := n.get("never").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != "ErrImageNeverPull" {
			t.Errorf("waiting %+v", w)
		}
		if w := n.get("bad").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != "InvalidImageName" {
			t.Errorf("waiting %+v", w)
		}
	})
}

// TestImageBrought: who waits for an image that is loaded by hand starts at
// once, whether it is in back-off, forbidden to pull or in a pull that hangs.
func TestImageBrought(t *testing.T) {
	tests := []struct {
		name   string
		policy v1.PullPolicy
		hangs  bool
		waits  string // reason before
		runs   bool
	}{
		{"back-off", v1.PullIfNotPresent, false, "ImagePullBackOff", true},
		{"never pull", v1.PullNever, false, "ErrImageNeverPull", true},
		{"pull hangs", v1.PullIfNotPresent, true, "ContainerCreating", true},
		{"always pull", v1.PullAlways, false, "ImagePullBackOff", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				pulls := 0
				n.images.PullErr = func(ctx context.Context, ref string) error {
					pulls++
					if tt.hangs {
						<-ctx.Done()
						return ctx.Err()
					}
					return &image.PullError{Ref: ref, Reason: image.ReasonNotFound, Says: "manifest unknown", Err: errors.New("manifest unknown")}
				}
				c, other := ctr("a"), ctr("a")
				c.Image, c.ImagePullPolicy = "brought:1", tt.policy
				other.Image, other.ImagePullPolicy = "other:1", v1.PullIfNotPresent
				n.create(testPod("p", v1.RestartPolicyAlways, c))
				n.after(15 * time.Second) // the back-off after the second fault is 20 s
				if w := n.get("p").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != tt.waits {
					t.Fatalf("waiting %+v", w)
				}
				n.create(testPod("other", v1.RestartPolicyAlways, other))
				n.after(time.Second)
				before := pulls
				n.images.Add("brought:1", ocispec.Config{Entrypoint: []string{"/app"}})
				n.pods.ImagesChanged()
				n.after(500 * time.Millisecond)
				if got := n.get("p").Status.Phase == v1.PodRunning; got != tt.runs {
					t.Errorf("runs: %v, status %+v", got, n.get("p").Status)
				}
				if pulls != before {
					t.Errorf("%d further pulls", pulls-before)
				}
			})
		})
	}
}

// TestDeleteDuringPull is FEATURES row 194.
func TestDeleteDuringPull(t *testing.T) {
	inBubble(t, func(n *node) {
		n.images.PullErr = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
		c := ctr("a")
		c.Image = "slow:1"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.create(testPod("other", v1.RestartPolicyAlways, ctr("b")))
		n.after(2 * time.Second)
		w := n.get("p").Status.ContainerStatuses[0].State.Waiting
		if w == nil || !strings.Contains(w.Message, `Pulling image "slow:1" since`) {
			t.Errorf("waiting %+v", w)
		}
		if n.get("other").Status.Phase != v1.PodRunning {
			t.Error("the stuck pull stops another pod")
		}
		n.delete("p", 30)
		n.after(time.Second)
		if n.get("p") != nil {
			t.Error("still there")
		}
	})
}

// TestSlowPull: a pull takes as long as it takes. It once began again every quarter of
// an hour, so that a large image over a slow line never came.
func TestSlowPull(t *testing.T) {
	inBubble(t, func(n *node) {
		slow := func(ctx context.Context, _ string) error {
			select {
			case <-time.After(3 * time.Hour):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		n.images.PullErr = slow
		c := ctr("a")
		c.Image = "slow:1"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.create(imagePod("volume", "slow:2", v1.PullIfNotPresent))
		n.after(3*time.Hour + time.Minute)
		for _, name := range []string{"p", "volume"} {
			if s := n.get(name).Status; s.Phase != v1.PodRunning {
				t.Errorf("%s: %+v", name, s.ContainerStatuses)
			}
		}
	})
}

// TestImageChange is FEATURES row 200.
func TestImageChange(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.after(time.Second)
		p := n.get("p")
		p.Spec.Containers[0].Image = "app:2"
		if _, err := n.api.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		n.after(time.Second)
		s := n.get("p").Status.ContainerStatuses
		if s[0].RestartCount != 1 || s[0].Image != "app:2" || s[0].State.Running == nil || s[1].RestartCount != 0 {
			t.Errorf("status %+v", s)
		}
	})
}

// TestDamagedImage: a container that does not start because its image has
// become incomplete on disk gets the image again.
func TestDamagedImage(t *testing.T) {
	inBubble(t, func(n *node) {
		whole := false
		n.images.Damaged = func(string) bool { return !whole }
		n.images.PullErr = func(context.Context, string) error { whole = true; return nil }
		n.runtime.StartErr = func(api.Container) (string, error) {
			if whole {
				return "", nil
			}
			return `exec: "/app": stat /app: no such file or directory`, nil
		}
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Minute)
		p := n.get("p")
		if s := p.Status.ContainerStatuses[0]; s.State.Running == nil || s.RestartCount != 1 {
			t.Errorf("status %+v", s)
		}
		for _, e := range []string{"ImageDamaged Image will be pulled again", "Pulling image"} {
			if !n.events.has(e) {
				t.Errorf("no event %q in %v", e, n.events.list)
			}
		}
	})
}

// TestPullProgress: a long pull says how far it is, ever more seldom.
func TestPullProgress(t *testing.T) {
	inBubble(t, func(n *node) {
		n.images.PullErr = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
		c := ctr("a")
		c.Image = "slow:1"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.images.Tell(image.Progress{Ref: "docker.io/library/other:1", Done: 5 << 20, Total: 6 << 20}, image.Progress{Ref: "docker.io/library/slow:1", Done: 1 << 20, Total: 3 << 20})
		const says = `Pulling image "slow:1": 1.0 MiB of 3.0 MiB are here`
		n.after(25 * time.Second)
		if n.events.has(says) {
			t.Error("it is said too early")
		}
		n.after(time.Hour)
		if got := n.events.count(says); got < 3 || got > 10 {
			t.Errorf("it is said %d times in an hour", got)
		}
		if n.events.has("other:1") {
			t.Error("it speaks of another image")
		}
	})
}
