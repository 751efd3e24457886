package agent_test

import (
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/stats"
	"github.com/clusterd/clusterd/features"
)

// TestRootImageGC: above the high mark images that nothing uses go, the least
// recently used first, until the low one; what was loaded by hand stays.
func TestRootImageGC(t *testing.T) {
	features.Shows(t, 164)
	m := newMachineWith(t, &machine{disk: "size=64m", imageGC: agent.ImageGC{High: 60, Low: 40, MinAge: time.Nanosecond}})
	m.stop()
	used := func() int {
		st, err := stats.FileSystem(filepath.Join(m.dir, "images"))
		if err != nil {
			t.Fatal(err)
		}
		return int((st.Blocks - st.Bfree) * 100 / st.Blocks)
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	m.plainHTTP(host)
	var pulled []string
	for used() < 60 {
		ref := fmt.Sprintf("%s/image-%d:1", host, len(pulled))
		tag, err := name.NewTag(ref, name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		img, err := random.Image(4<<20, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.Write(tag, img, remote.WithContext(t.Context())); err != nil {
			t.Fatal(err)
		}
		if _, err := m.images.Pull(t.Context(), ref, image.Auth{}); err != nil {
			t.Fatal(err)
		}
		pulled = append(pulled, ref)
	}
	t.Logf("%d images fill %d %%", len(pulled), used())
	m.start()
	m.eventually("less than the low mark", func() bool { return used() <= 40 })
	list, err := m.images.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	loaded := false
	for _, i := range list {
		for _, ref := range i.Refs {
			loaded = loaded || ref == appImage
			if slices.Contains(pulled, ref) {
				left = append(left, ref)
			}
		}
	}
	slices.Sort(left)
	if newest := slices.Sorted(slices.Values(pulled[len(pulled)-len(left):])); !slices.Equal(left, newest) {
		t.Errorf("left are %q, want the newest, %q", left, newest)
	}
	if !loaded {
		t.Errorf("the image that was loaded by hand has gone: %+v", list)
	}
	t.Logf("%d images are left, %d %%", len(left), used())
	if one := 100 * 4 / 64; len(left) == 0 || used() < 40-2*one {
		t.Errorf("more went than needed: %d images are left on %d %%", len(left), used())
	}
}
