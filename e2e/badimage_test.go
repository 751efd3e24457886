package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EBadImage asks for images that cannot be had; the pod says why in the
// registry's words, and runs once the image is there.
func TestE2EBadImage(t *testing.T) {
	features.Shows(t, 20)
	e := start(t)
	ns := e.namespace("images")
	host := e.registry("n2")

	for _, tt := range []struct {
		name, image string
		words       []string // of the message
	}{
		{"unknown", host + "/absent/nothing:1", []string{"NAME_UNKNOWN"}},
		{"refused", "127.0.0.1:1/a/b:1", []string{"connection refused"}},
	} {
		p := pod(tt.name)
		p.Spec.NodeName = "n2"
		p.Spec.Containers[0].Image = tt.image
		e.create(ns, p)
		seen := map[string]bool{}
		e.podIs(ns, tt.name, "ErrImagePull, then ImagePullBackOff", func(p *corev1.Pod) error {
			w := waiting(p)
			if w == nil {
				return errors.New("not waiting")
			}
			seen[w.Reason] = true
			if w.Reason == "ErrImagePull" || w.Reason == "ImagePullBackOff" {
				for _, word := range append(tt.words, tt.image) {
					if !strings.Contains(w.Message, word) {
						t.Errorf("%s: %s: %q lacks %q", tt.name, w.Reason, w.Message, word)
					}
				}
			}
			if p.Status.Phase != corev1.PodPending {
				t.Errorf("%s: phase %s", tt.name, p.Status.Phase)
			}
			if w.Reason != "ImagePullBackOff" {
				return fmt.Errorf("seen so far: %v", seen)
			}
			return nil
		})
		e.eventually("events tell of it", func(context.Context) error {
			text := e.ctl("-n", ns, "describe", "pod", tt.name)
			for _, w := range append(tt.words, "Failed", "ErrImagePull", "BackOff") {
				if !strings.Contains(text, w) {
					return fmt.Errorf("%q is not in:\n%s", w, text)
				}
			}
			return nil
		})
	}
	p := pod("bad-name")
	p.Spec.Containers[0].Image = "UPPER//bad"
	e.create(ns, p)
	e.podIs(ns, "bad-name", "InvalidImageName", func(p *corev1.Pod) error {
		if w := waiting(p); w == nil || w.Reason != "InvalidImageName" {
			return errors.New("not said")
		}
		return nil
	})
	mustContain(t, "run", e.refused("", "-n", ns, "run", "x", "--image=UPPER//bad"), "UPPER//bad")
	never := pod("never")
	never.Spec.Containers[0].Image = "clusterd.local/nothing:1"
	never.Spec.Containers[0].ImagePullPolicy = corev1.PullNever
	e.create(ns, never)
	e.podIs(ns, "never", "ErrImageNeverPull", func(p *corev1.Pod) error {
		if w := waiting(p); w == nil || w.Reason != "ErrImageNeverPull" {
			return errors.New("not said")
		}
		return nil
	})

	// Pushed at last, it is found at the next try.
	e.push("n2", host+"/absent/nothing:1")
	e.within(3*testTimeout, "the pod runs at its next try", func(ctx context.Context) error { // which may be minutes later
		p, err := e.api.CoreV1().Pods(ns).Get(ctx, "unknown", metav1.GetOptions{})
		if err == nil && !podReady(p) {
			err = errors.New(brief(p))
		}
		return err
	})
	second := pod("second")
	second.Spec.NodeName = "n2"
	second.Spec.Containers[0].Image = host + "/absent/nothing:1"
	e.create(ns, second)
	e.podReady(ns, "second")
	e.eventuallyHas([]string{"-n", ns, "describe", "pod", "second"}, "already present on machine")
	t.Run("the events of a pod's life", func(t *testing.T) { e.showEvents(t, ns, host) })
	for _, name := range []string{"refused", "bad-name", "never"} {
		e.ctl("-n", ns, "delete", "pod", name, "--timeout=110s")
	}
}

// showEvents: each step of a pod is an event, from where it is placed to its end.
func (e *env) showEvents(t *testing.T, ns, host string) {
	features.Shows(t, 160)
	e.push("n2", host+"/team/events:1")
	p := pod("told", "serve")
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "n2"}
	p.Spec.Containers[0].Image = host + "/team/events:1"
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "side", Image: image, Args: []string{"exit", "1"}})
	e.create(ns, p)
	told := func(what string, reasons ...string) {
		t.Helper()
		e.eventually(what+" is told", func(context.Context) error {
			for _, prog := range kubectls() {
				text, errs, code := e.run(prog, "", "-n", ns, "get", "events", "--field-selector", "involvedObject.kind=Pod,involvedObject.name=told", "-o", "jsonpath={.items[*].reason}")
				if code != 0 {
					return fmt.Errorf("%s: exit %d: %s", prog, code, errs)
				}
				for _, r := range reasons {
					if !slices.Contains(strings.Fields(text), r) {
						return fmt.Errorf("%s: there is no %s among %s", prog, r, text)
					}
				}
			}
			return nil
		})
	}
	told("its life", "Scheduled", "Pulling", "Pulled", "Created", "Started", "BackOff")
	e.ctl("-n", ns, "delete", "pod", "told", "--timeout=110s")
	told("its end", "Scheduled", "Pulling", "Pulled", "Created", "Started", "BackOff", "Killing")
}

func waiting(p *corev1.Pod) *corev1.ContainerStateWaiting {
	if len(p.Status.ContainerStatuses) == 0 {
		return nil
	}
	return p.Status.ContainerStatuses[0].State.Waiting
}

// registry runs an image registry without TLS on a node's loopback until the test ends.
func (e *env) registry(node string) (host string) {
	e.t.Helper()
	var l net.Listener
	err := e.Do(node, func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		e.t.Fatal(err)
	}
	for _, n := range e.Nodes() {
		if n.Name != node {
			continue
		}
		if err := n.AllowPlainHTTP(l.Addr().String()); err != nil {
			e.t.Fatal(err)
		}
	}
	srv := &http.Server{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	var g errgroup.Group
	g.Go(func() error { return srv.Serve(l) })
	e.t.Cleanup(func() { _ = srv.Close(); _ = g.Wait() })
	return l.Addr().String()
}

// push sends the demo image to a registry that only the node can reach.
func (e *env) push(node, ref string) {
	e.t.Helper()
	img, err := tarball.ImageFromPath(filepath.Join(e.binDir(), "hello.tar"), nil)
	if err != nil {
		e.t.Fatal(err)
	}
	to, err := name.ParseReference(ref)
	if err != nil {
		e.t.Fatal(err)
	}
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		err = e.Do(node, func() (err error) {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}}
	if err := remote.Write(to, img, remote.WithTransport(tr)); err != nil {
		e.t.Fatal(err)
	}
}
