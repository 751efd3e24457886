// Package crds carries the CustomResourceDefinitions of the Gateway API inside
// clusterd.
package crds

import (
	"compress/gzip"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// The pattern also matches crds.md, so that it builds before they are there.
//
//go:embed crds.*
var files embed.FS

// ErrAbsent is returned when clusterd was built without them.
var ErrAbsent = errors.New("clusterd was built without the CRDs of the Gateway API: run make build")

// BundleVersion is the annotation of a definition that names the release it is
// of.
const BundleVersion = "gateway.networking.k8s.io/bundle-version"

// Read returns the definitions, and the release that they are of.
func Read() (all []*unstructured.Unstructured, release string, _ error) {
	f, err := files.Open("crds.json.gz")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", ErrAbsent
	}
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = f.Close() }()
	unpacked, err := gzip.NewReader(f)
	if err != nil {
		return nil, "", fmt.Errorf("crds.json.gz: %w", err)
	}
	var list []map[string]any
	if err := json.NewDecoder(unpacked).Decode(&list); err != nil {
		return nil, "", fmt.Errorf("crds.json.gz: %w", err)
	}
	for _, object := range list {
		one := &unstructured.Unstructured{Object: object}
		all = append(all, one)
		release = one.GetAnnotations()[BundleVersion]
	}
	return all, release, nil
}
