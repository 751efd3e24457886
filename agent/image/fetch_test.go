package image

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestDocumentsCheck: documents are taken only where each is the one that the document
// above has for the platform. Other digests that a document names stand for nothing.
func TestDocumentsCheck(t *testing.T) {
	platform := v1.Platform{OS: "linux", Architecture: "amd64"}
	layer, err := v1.NewHash("sha256:" + strings.Repeat("a", 64))
	if err != nil {
		t.Fatal(err)
	}
	manifestOf := func(config []byte) []byte {
		return fmt.Appendf(nil, `{"config":{"digest":%q},"layers":[{"digest":%q,"size":5}]}`, digestOf(config), layer)
	}
	good, base, arm := []byte(`{"good":1}`), []byte(`{"base":1}`), []byte(`{"arm":1}`)
	const kind = `"mediaType":"application/vnd.oci.image.manifest.v1+json"`
	index := fmt.Appendf(nil, `{"subject":{"digest":%[1]q},"manifests":[{%[4]s,"digest":%[2]q,"platform":{"os":"linux","architecture":"amd64"},"annotations":{"org.opencontainers.image.base.digest":%[1]q}},{%[4]s,"digest":%[3]q,"platform":{"os":"linux","architecture":"arm64"}}]}`,
		digestOf(manifestOf(base)), digestOf(manifestOf(good)), digestOf(manifestOf(arm)), kind)
	annotated := fmt.Appendf(nil, `{"config":{"digest":%q},"layers":[{"digest":%q,"size":5}],"annotations":{"x":%q}}`, digestOf(good), layer, digestOf(base))
	layers := []layerRef{{layer, 5}}
	other, err := v1.NewHash("sha256:" + strings.Repeat("b", 64))
	if err != nil {
		t.Fatal(err)
	}
	many := fmt.Appendf(nil, `{"config":{"digest":%q},"layers":[%s{}]}`, digestOf(good), strings.Repeat("{},", maxElements+1))
	for what, tt := range map[string]struct {
		docs documents
		is   error
	}{
		"the image":                   {documents{[][]byte{index, manifestOf(good)}, good, layers}, nil},
		"without an index":            {documents{[][]byte{annotated}, good, layers}, nil},
		"one of an annotation":        {documents{[][]byte{index, manifestOf(base)}, base, layers}, ErrDigest},
		"one of another platform":     {documents{[][]byte{index, manifestOf(arm)}, arm, layers}, ErrDigest},
		"a config of an annotation":   {documents{[][]byte{annotated}, base, layers}, ErrDigest},
		"an index for a manifest":     {documents{[][]byte{index}, good, nil}, ErrDigest},
		"a manifest for an index":     {documents{[][]byte{annotated, manifestOf(good)}, good, layers}, ErrDigest},
		"another layer":               {documents{[][]byte{index, manifestOf(good)}, good, []layerRef{{other, 5}}}, ErrDigest},
		"another size of a layer":     {documents{[][]byte{index, manifestOf(good)}, good, []layerRef{{layer, 6}}}, ErrDigest},
		"no layer":                    {documents{[][]byte{index, manifestOf(good)}, good, nil}, ErrDigest},
		"more elements than it needs": {documents{[][]byte{many}, good, nil}, ErrTooLarge},
	} {
		t.Run(what, func(t *testing.T) {
			ref, err := name.ParseReference("registry.example/a:1")
			if len(tt.docs.Chain) > 0 {
				ref, err = name.ParseReference("registry.example/a@" + digestOf(tt.docs.Chain[0]))
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := tt.docs.check(ref, Limits{}.withDefaults(), platform); !errors.Is(err, tt.is) {
				t.Errorf("%v, want %v", err, tt.is)
			}
		})
	}
	config := []byte(`{"history":[` + strings.Repeat("{},", maxElements+1) + `{}]}`)
	if _, err := newContent(config, Limits{}.withDefaults(), platform); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a config of many elements: %v", err)
	}
}
