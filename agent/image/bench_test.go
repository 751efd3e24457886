package image

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
)

// BenchmarkPull is an image from a registry on the loopback, and its removal: a small one
// of three layers, and one of a layer of 64 MiB. With CLUSTERD_IMAGEWORKER=FILE the processes are of that program, else of
// this test's, which is larger.
func BenchmarkPull(b *testing.B) {
	host := serve(b, nil)
	var layers [][]byte
	for i := range 3 {
		layers = append(layers, archive(b, entry{name: fmt.Sprint("f", i), body: fmt.Sprint(i)}))
	}
	push(b, host+"/small:1", build(b, v1.Config{}, layers...))
	big := make([]byte, 64<<20)
	rand.NewChaCha8([32]byte{}).Read(big[:32<<20]) // half of it can be compressed
	push(b, host+"/large:1", build(b, v1.Config{}, archive(b, entry{name: "f", body: string(big)})))
	apart := isolation(b)
	if file := os.Getenv("CLUSTERD_IMAGEWORKER"); file != "" && apart != nil {
		apart.Program = func() (*os.File, error) {
			f, err := os.Open(file)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			return sealed.New("imageworker", f)
		}
	}
	for _, image := range []string{"small", "large"} {
		for name, how := range map[string]*Isolation{"here": nil, "processes": apart} {
			b.Run(image+"/"+name, func(b *testing.B) {
				benchmarkPull(b, host+"/"+image+":1", how)
			})
		}
	}
}

func benchmarkPull(b *testing.B, ref string, how *Isolation) {
	s, err := Open(Config{Dir: b.TempDir(), Registries: registries, Isolation: how, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	before, n := cpu(), 0.0
	for b.Loop() {
		n++
		if _, err := s.Pull(b.Context(), ref, Auth{}); err != nil {
			b.Fatal(err)
		}
		if err := s.Remove(b.Context(), ref); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric((cpu()-before)/n, "cpu-ms/op")
}

// cpu is the time of processors that this process and its children have taken, in
// milliseconds.
func cpu() (ms float64) {
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var r syscall.Rusage
		if syscall.Getrusage(who, &r) == nil {
			ms += float64(r.Utime.Nano()+r.Stime.Nano()) / 1e6
		}
	}
	return ms
}
