package agent

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/stats"
	"github.com/clusterd/clusterd/slack"
)

// ImageGC says when images that nothing uses go.
type ImageGC struct {
	// High and Low are percentages of the images' file system: above High the
	// least recently used go until Low is reached. High 0: 85, Low 0: 80.
	High, Low int
	// MinAge spares images pulled or used less than that ago; default 2 min.
	MinAge time.Duration
}

const imageGCPeriod = 5 * time.Minute

// collectImages keeps the images' share of the disk below the high mark.
func (a *Agent) collectImages(ctx context.Context) error {
	tick := slack.NewTicker(imageGCPeriod)
	defer tick.Stop()
	for {
		if st, err := stats.FileSystem(a.imageDir()); err == nil && st.Blocks > 0 {
			if excess := excessBytes(int64(st.Blocks), int64(st.Bavail), st.Bsize, a.cfg.ImageGC); excess > 0 {
				if _, err := a.removeImages(ctx, image.GCPolicy{MinAge: a.cfg.ImageGC.MinAge, Bytes: excess}); err != nil {
					klog.FromContext(ctx).Error(err, "Images that nothing uses stay")
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// excessBytes is how much has to go: 0 below the high mark.
func excessBytes(blocks, free, size int64, gc ImageGC) int64 {
	used := blocks - free
	if used*100 < blocks*int64(gc.High) {
		return 0
	}
	return (used - blocks*int64(gc.Low)/100) * size
}

// reclaim frees what disk space it can without ending a pod.
func (a *Agent) reclaim(ctx context.Context) error {
	_, err := a.removeImages(ctx, image.GCPolicy{})
	return err
}

// imagesOf are the images that a pod names.
func imagesOf(p *v1.Pod) (names []string) {
	for _, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for _, c := range list {
			names = append(names, c.Image)
		}
	}
	for _, c := range p.Spec.EphemeralContainers {
		names = append(names, c.Image)
	}
	for _, v := range p.Spec.Volumes {
		if v.Image != nil {
			names = append(names, v.Image.Reference)
		}
	}
	return names
}

// removeImages removes images but those of the node's pods.
func (a *Agent) removeImages(ctx context.Context, policy image.GCPolicy) ([]image.Image, error) {
	for _, v := range a.pods.Views() {
		policy.Keep = append(policy.Keep, imagesOf(v.Pod)...)
	}
	removed, err := a.cfg.Images.GC(ctx, policy)
	for _, img := range removed {
		klog.FromContext(ctx).Info("Image removed to free disk space", "id", img.ID, "names", img.Refs, "bytes", img.Size)
	}
	if len(removed) > 0 {
		a.node.Poke()
	}
	return removed, err
}

// nodesImages are the images as the node's calls see them: what pods need stays.
type nodesImages struct{ a *Agent }

// List implements stream.Images.
func (n nodesImages) List(ctx context.Context) ([]image.Image, error) {
	return n.a.cfg.Images.List(ctx)
}

// Load implements stream.Images.
func (n nodesImages) Load(ctx context.Context, r io.Reader) ([]image.Image, error) {
	return n.a.cfg.Images.Load(ctx, r)
}

// Preload implements stream.Images.
func (n nodesImages) Preload(ctx context.Context, ref string) error {
	_, err := n.a.cfg.Images.PullAs(ctx, ref, image.Credential{})
	return err
}

// Pulling implements stream.Images.
func (n nodesImages) Pulling() []image.Progress { return n.a.cfg.Images.Pulling() }

// Pin implements stream.Images.
func (n nodesImages) Pin(ctx context.Context, ref string, pinned bool) error {
	return n.a.cfg.Images.Pin(ctx, ref, pinned)
}

// Remove implements stream.Images. A container that stands still for a moment has no
// mount of its image: its pod speaks for it.
func (n nodesImages) Remove(ctx context.Context, ref string) error {
	full, err := image.Normalize(ref)
	if err != nil {
		return err
	}
	for _, v := range n.a.pods.Views() {
		if slices.ContainsFunc(imagesOf(v.Pod), func(name string) bool {
			other, err := image.Normalize(name)
			return err == nil && other == full
		}) {
			return fmt.Errorf("remove image %s: %w: pod %s names it", ref, image.ErrInUse, klog.KObj(v.Pod))
		}
	}
	return n.a.cfg.Images.Remove(ctx, ref)
}

// Prune implements stream.Images.
func (n nodesImages) Prune(ctx context.Context) ([]image.Image, error) {
	return n.a.removeImages(ctx, image.GCPolicy{})
}
