package image

import (
	"fmt"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// BenchmarkPull is a small image of three layers from a registry on the loopback, and
// its removal.
func BenchmarkPull(b *testing.B) {
	host := serve(b, nil)
	var layers [][]byte
	for i := range 3 {
		layers = append(layers, archive(b, entry{name: fmt.Sprint("f", i), body: fmt.Sprint(i)}))
	}
	push(b, host+"/a:1", build(b, v1.Config{}, layers...))
	for name, how := range map[string]*Isolation{"here": nil, "processes": isolation(b)} {
		b.Run(name, func(b *testing.B) {
			s, err := Open(Config{Dir: b.TempDir(), Registries: registries, Isolation: how})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			for b.Loop() {
				if _, err := s.Pull(b.Context(), host+"/a:1", Auth{}); err != nil {
					b.Fatal(err)
				}
				if err := s.Remove(b.Context(), host+"/a:1"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
