package security

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	corev1 "k8s.io/api/core/v1"
)

const arch = runtime.GOARCH

// hostileImages are brought to agent a1 as users bring theirs: by clusterctl image load,
// and from a registry. Pods of those that are taken run at the same time.
func hostileImages(s *suite) []attack {
	canary := filepath.Dir(s.canary())
	below := base(s.t, filepath.Join(s.bin, "escape.tar"))
	fill := strings.NewReplacer("$CANARY", canary, "$PROGRAM", string(program(s.t, "escape", below))).Replace
	// A picture without malice is taken and runs: the generator makes images.
	var out []attack
	control := func(s *suite) error {
		file := s.kept("fine", newPicture(v1.Config{}, below...).seal("clusterd.local/fine:1").archive())
		defer os.Remove(file)
		s.ctl("image", "load", file, "--node", "a1")
		p := s.imagePod("fine", "clusterd.local/fine:1", []string{"/etc/passwd"})
		s.create(p)
		defer s.remove("fine")
		if s.ended("fine").Status.Phase != corev1.PodSucceeded {
			return fmt.Errorf("a picture without malice does not run: %s", s.logs("fine"))
		}
		return nil
	}
	for i, h := range images() {
		name, ref := fmt.Sprintf("hostile-%d", i), fmt.Sprintf("clusterd.local/hostile-%d:1", i)
		file := s.kept(name, h.build(fill, below, ref))
		stdout, stderr, code := s.runFor(5*waitLimit, "", "image", "load", file, "--node", "a1")
		if err := os.Remove(file); err != nil {
			s.t.Fatal(err)
		}
		a := attack{name: h.name}
		if code != 0 {
			a.try = func(s *suite) verdict {
				if err := s.untouched(); err != nil {
					return open("%v", err)
				}
				if !strings.Contains(stderr, "a1") || strings.Contains(stderr, "EOF") && !strings.Contains(stderr, ":") {
					return broken(fmt.Errorf("the refusal says nothing: %s", stderr))
				}
				return shut("refused: %s", strings.Join(strings.Fields(stderr), " "))
			}
		} else {
			p := s.imagePod(name, ref, nil)
			for _, file := range h.show {
				p.Spec.Containers[0].Args = append(p.Spec.Containers[0].Args, fill(file))
			}
			if h.spec != nil {
				h.spec(p)
			}
			err := s.tryCreate(p)
			a.try = func(s *suite) verdict {
				if err != nil {
					return broken(err)
				}
				defer s.remove(name)
				v := s.settled(name, h.is)
				if h.refused && !v.open && v.err == nil {
					return open("it was loaded: %s; the pod: %s", stdout, v.said)
				}
				v.said = "harmless: " + v.said
				return v
			}
		}
		if i == 0 {
			a.control = control
		}
		out = append(out, a)
	}
	out = append(out, s.hostileRegistries(below)...)
	return append(out, attack{name: "the node is not healthy", try: func(s *suite) verdict {
		if err := s.healthy("a1", "after-images"); err != nil {
			return open("%v", err)
		}
		return shut("it is Ready, and pods start")
	}})
}

// build is the archive of an image.
func (h hostile) build(fill func(string) string, below [][]byte, ref string) []byte {
	all := append([][]byte{}, below...)
	for _, entries := range h.layers {
		var filled []entry
		for _, e := range entries {
			e.name, e.body = fill(e.name), fill(e.body)
			if e.pax != nil {
				pax := map[string]string{}
				for key, value := range e.pax {
					pax[key] = fill(value)
				}
				e.pax = pax
			}
			filled = append(filled, e)
		}
		all = append(all, layer(filled...))
	}
	all = append(all, layer(entry{name: "image-of", body: h.name})) // so that no layer is there already
	config := h.config
	config.User, config.WorkingDir = fill(config.User), fill(config.WorkingDir)
	p := newPicture(config, all...)
	if h.change != nil {
		h.change(p)
	}
	p.seal(ref)
	if h.after != nil {
		h.after(p)
	}
	for i := range p.files {
		p.files[i].name, p.files[i].body = fill(p.files[i].name), fill(p.files[i].body)
	}
	if p.index.body == nil { // docker's
		return layer(p.files...)
	}
	return p.archive()
}

// imagePod shows files by an image that is there, or is pulled.
func (s *suite) imagePod(name, ref string, show []string) *corev1.Pod {
	p := escaper(name)
	p.Spec.Containers[0].Image, p.Spec.Containers[0].Command, p.Spec.Containers[0].Args = ref, []string{"/escape", "show"}, show
	p.Spec.Containers[0].SecurityContext = nil // the user is the image's
	return p
}

// registries answer a puller as they like. They get the parts of a good image.
var registries = []struct {
	name string
	// serve returns false for requests that it answers as a good registry would.
	serve func(p *picture, w http.ResponseWriter, r *http.Request) (done bool)
}{
	{"a manifest without end", func(_ *picture, w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
		for b := make([]byte, 1<<16); ; {
			if _, err := w.Write(b); err != nil {
				return true
			}
		}
	}},
	{"a manifest that is a page", func(_ *picture, w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<html>")
		return true
	}},
	{"an old manifest", func(_ *picture, w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Content-Type", string(types.DockerManifestSchema1))
		_, _ = io.WriteString(w, `{"schemaVersion":1,"fsLayers":[],"history":[]}`)
		return true
	}},
	{"another manifest than its digest says", func(p *picture, w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
		w.Header().Set("Docker-Content-Digest", digest([]byte("other")))
		_, _ = w.Write(p.manifest.body)
		return true
	}},
	{"a configuration without end", blobOf(func(p *picture) blob { return p.config }, func(w http.ResponseWriter, _ []byte) {
		for b := make([]byte, 1<<16); ; {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	})},
	{"another configuration", blobOf(func(p *picture) blob { return p.config }, func(w http.ResponseWriter, b []byte) {
		_, _ = w.Write(bytes.Replace(b, []byte(`linux`), []byte(`linuX`), 1))
	})},
	{"a layer without end", blobOf(func(p *picture) blob { return *p.top() }, func(w http.ResponseWriter, b []byte) {
		for {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	})},
	{"another layer", blobOf(func(p *picture) blob { return *p.top() }, func(w http.ResponseWriter, b []byte) {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
		_, _ = w.Write(b)
	})},
	{"half a layer", blobOf(func(p *picture) blob { return *p.top() }, func(w http.ResponseWriter, b []byte) {
		w.Header().Set("Content-Length", fmt.Sprint(len(b)))
		_, _ = w.Write(b[:len(b)/2])
	})},
	{"a layer elsewhere", blobOf(func(p *picture) blob { return *p.top() }, func(w http.ResponseWriter, _ []byte) {
		w.Header().Set("Location", "file:///etc/passwd")
		w.WriteHeader(http.StatusTemporaryRedirect)
	})},
	{"a layer around in circles", blobOf(func(p *picture) blob { return *p.top() }, func(w http.ResponseWriter, _ []byte) {
		w.Header().Set("Location", "?again")
		w.WriteHeader(http.StatusTemporaryRedirect)
	})},
	{"a realm of another host", func(_ *picture, w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("WWW-Authenticate", `Bearer realm="http://169.254.169.254/latest/meta-data/",service="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}},
	{"headers without end", func(_ *picture, w http.ResponseWriter, _ *http.Request) bool {
		for i := range 2000 {
			w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("x", 4096))
		}
		return true
	}},
	{"an error of ten megabytes", func(_ *picture, w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write(bytes.Repeat([]byte("e"), 10<<20))
		return true
	}},
}

// harmlessRegistries send what the image needs, and something that is not looked at.
var harmlessRegistries = []string{"another manifest than its digest says", "a layer without end"}

// blobOf answers requests for one part of the image.
func blobOf(which func(*picture) blob, answer func(http.ResponseWriter, []byte)) func(*picture, http.ResponseWriter, *http.Request) bool {
	return func(p *picture, w http.ResponseWriter, r *http.Request) bool {
		b := which(p).body
		if !strings.HasSuffix(r.URL.Path, digest(b)) {
			return false
		}
		answer(w, b)
		return true
	}
}

// hostileRegistries serve on a1's loopback, without TLS.
func (s *suite) hostileRegistries(below [][]byte) []attack {
	var out []attack
	for i := range len(registries) + 1 {
		name := fmt.Sprintf("pulled-%d", i)
		p := newPicture(v1.Config{}, append(slices.Clone(below), layer(entry{name: "image-of", body: name + strings.Repeat("x", 1<<16)}))...).seal("")
		var ln net.Listener
		if err := s.Do("a1", func() (err error) {
			ln, err = net.Listen("tcp", "127.0.0.1:0")
			return err
		}); err != nil {
			s.t.Fatal(err)
		}
		if err := s.node("a1").AllowPlainHTTP(ln.Addr().String()); err != nil {
			s.t.Fatal(err)
		}
		srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if i < len(registries) && registries[i].serve(p, w, r) {
				return
			}
			p.serve(w, r)
		})}
		done := make(chan struct{})
		go func() { defer close(done); _ = srv.Serve(ln) }()
		s.t.Cleanup(func() { _ = srv.Close(); <-done })
		pulls := s.imagePod(name, ln.Addr().String()+"/team/image:1", []string{"/etc/passwd"})
		s.create(pulls)
		if i == len(registries) {
			out[0].control = func(s *suite) error {
				defer s.remove(name)
				if got := s.ended(name); got.Status.Phase != corev1.PodSucceeded {
					return fmt.Errorf("an image of a good registry does not run: %s", s.logs(name))
				}
				return nil
			}
			break
		}
		out = append(out, attack{name: "a registry with " + registries[i].name, try: func(s *suite) verdict {
			defer s.remove(name)
			v := s.settled(name, nil)
			if !v.open && v.err == nil && !strings.Contains(v.said, "ErrImagePull") && !strings.Contains(v.said, "ImagePullBackOff") && !slices.Contains(harmlessRegistries, registries[i].name) {
				return open("it was pulled: %s", v.said)
			}
			return v
		}})
	}
	return out
}

// serve answers as a registry does.
func (p *picture) serve(w http.ResponseWriter, r *http.Request) {
	if strings.HasSuffix(r.URL.Path, "/v2/") {
		return
	}
	for _, b := range p.blobs() {
		tag := strings.HasSuffix(r.URL.Path, "/manifests/1") && bytes.Equal(b.body, p.manifest.body)
		if !tag && !strings.HasSuffix(r.URL.Path, digest(b.body)) {
			continue
		}
		w.Header().Set("Content-Type", string(b.kind))
		w.Header().Set("Content-Length", fmt.Sprint(len(b.body)))
		w.Header().Set("Docker-Content-Digest", digest(b.body))
		if r.Method == http.MethodGet {
			_, _ = w.Write(b.body)
		}
		return
	}
	w.WriteHeader(http.StatusNotFound)
	_ = json.NewEncoder(w).Encode(map[string]any{"errors": []any{}})
}
