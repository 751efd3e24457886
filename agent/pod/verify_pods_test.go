package pod_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ocispec "github.com/google/go-containerregistry/pkg/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/pod"
)

// TestPrivateImages has pods ask for an image that is on the node and was pulled with
// another pod's credentials (KEP-2535): as a container's and as a volume.
func TestPrivateImages(t *testing.T) {
	const ref = "private.example.org/app:1"
	namespaceOf := testPod("p", v1.RestartPolicyAlways, ctr("a")).Namespace
	for _, tt := range []struct {
		name          string
		policy        v1.PullPolicy
		secret        string // user of the pod's pull secret; empty: it has none
		verify        string
		opens         bool // the registry gives it to this pod
		runs          bool
		pulls         int
		reason, words string
	}{
		{name: "no credentials", policy: v1.PullIfNotPresent, pulls: 1, reason: "ErrImagePull", words: "was pulled with other credentials than this pod's: pull x: the registry says: who are you"},
		{name: "no credentials, open by now", policy: v1.PullIfNotPresent, opens: true, runs: true, pulls: 1},
		{name: "others' credentials", policy: v1.PullIfNotPresent, secret: "mallory", pulls: 1, reason: "ErrImagePull", words: "who are you"},
		{name: "its credentials", policy: v1.PullIfNotPresent, secret: "me", runs: true},
		{name: "never, no credentials", policy: v1.PullNever, reason: "ErrImageNeverPull", words: "is present with pull policy of Never but does not have the proper credentials"},
		{name: "never, its credentials", policy: v1.PullNever, secret: "me", runs: true},
		{name: "never verified", policy: v1.PullIfNotPresent, verify: pod.NeverVerify, runs: true},
		{name: "never verified, never pulled", policy: v1.PullNever, verify: pod.NeverVerify, runs: true},
		{name: "always pulled", policy: v1.PullAlways, secret: "me", opens: true, runs: true, pulls: 1},
	} {
		for _, volume := range []bool{false, true} {
			kind := "container"
			if volume {
				kind = "volume"
			}
			t.Run(tt.name+"/"+kind, func(t *testing.T) {
				inBubbleOf(t, func(n *node) { n.verify.Policy = tt.verify }, func(n *node) {
					pulls := 0
					n.images.PullErr = func(context.Context, string) error {
						if pulls++; tt.opens {
							return nil
						}
						return &image.PullError{Ref: "x", Reason: image.ReasonUnauthorized, Says: "who are you", Err: errors.New("401")}
					}
					n.images.Unproven = func(_ string, shown []image.Credential) bool {
						return !slices.ContainsFunc(shown, func(c image.Credential) bool {
							return c.Username == "me" && c.Secret == image.SecretID{Namespace: namespaceOf, Name: "pull", UID: "uid-pull"}
						})
					}
					n.images.Add(ref, ocispec.Config{Entrypoint: []string{"/app"}})
					c := ctr("a")
					c.Image, c.ImagePullPolicy = ref, tt.policy
					p := testPod("p", v1.RestartPolicyAlways, c)
					if volume {
						p = imagePod("p", ref, tt.policy)
						for i := range p.Spec.Containers {
							p.Spec.Containers[i].Image = "app:1"
						}
						n.images.Unproven = func(of func(string, []image.Credential) bool) func(string, []image.Credential) bool {
							return func(r string, shown []image.Credential) bool { return r == ref && of(r, shown) }
						}(n.images.Unproven)
					}
					if tt.secret != "" {
						s := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: "pull", UID: "uid-pull"}, Type: v1.SecretTypeDockerConfigJson,
							Data: map[string][]byte{v1.DockerConfigJsonKey: []byte(`{"auths":{"private.example.org":{"username":"` + tt.secret + `","password":"x"}}}`)}}
						if _, err := n.api.CoreV1().Secrets(p.Namespace).Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
							t.Fatal(err)
						}
						p.Spec.ImagePullSecrets = []v1.LocalObjectReference{{Name: "pull"}}
					}
					n.create(p)
					n.after(5 * time.Second) // the back-off after the first fault is 10 s
					st := n.get("p").Status
					if runs := st.Phase == v1.PodRunning; runs != tt.runs || pulls != tt.pulls {
						t.Errorf("runs %t after %d pulls: %+v", runs, pulls, st)
					}
					if tt.runs {
						return
					}
					w := st.ContainerStatuses[0].State.Waiting
					if w == nil || w.Reason != tt.reason && w.Reason != "ImagePullBackOff" || !strings.Contains(w.Message, tt.words) {
						t.Errorf("waiting: %+v", w)
					}
					if !n.events.has(tt.reason) {
						t.Errorf("no event %s: %v", tt.reason, n.events.all())
					}
				})
			})
		}
	}
}

// TestPrivateImageIsPinned: what happens to images of the node neither begins again the
// pull of a pod that may not have the image that is here, nor ends its back-off, until
// the image is one that all pods may have.
func TestPrivateImageIsPinned(t *testing.T) {
	const ref = "private.example.org/app:1"
	for _, tt := range []struct {
		name          string
		volume, hangs bool
	}{
		{"container in back-off", false, false},
		{"container that pulls", false, true},
		{"volume in back-off", true, false},
		{"volume that pulls", true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				var pulls, ended atomic.Int64
				var loaded atomic.Bool
				n.images.PullErr = func(ctx context.Context, _ string) error {
					pulls.Add(1)
					if tt.hangs {
						<-ctx.Done()
						ended.Add(1)
						return ctx.Err()
					}
					return &image.PullError{Ref: "x", Reason: image.ReasonUnauthorized, Says: "who are you", Err: errors.New("401")}
				}
				n.images.Unproven = func(r string, _ []image.Credential) bool { return r == ref && !loaded.Load() }
				n.images.Add(ref, ocispec.Config{Entrypoint: []string{"/app"}})
				c := ctr("a")
				c.Image, c.ImagePullPolicy = ref, v1.PullIfNotPresent
				p := testPod("p", v1.RestartPolicyAlways, c)
				if tt.volume {
					p = imagePod("p", ref, v1.PullIfNotPresent)
				}
				n.create(p)
				n.after(time.Second)
				for range 10 {
					n.pods.ImagesChanged()
					n.after(100 * time.Millisecond)
				}
				if pulls.Load() != 1 || ended.Load() != 0 {
					t.Errorf("%d pulls began, %d were given up", pulls.Load(), ended.Load())
				}
				loaded.Store(true)
				n.pods.ImagesChanged()
				n.after(time.Second)
				if st := n.get("p").Status; st.Phase != v1.PodRunning {
					t.Errorf("though all may have the image: %+v", st)
				}
			})
		})
	}
}
