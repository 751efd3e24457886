package main

import (
	"fmt"
	"log/slog"
	"path"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/image/imageworkerbin"
	"github.com/clusterd/clusterd/agent/image/registry"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
)

// ImageConfig is how a node comes by images.
type ImageConfig struct {
	// RegistriesConfig is a file that says how registries are spoken to: mirrors,
	// authorities, certificates, credentials of the node, and which may be spoken to
	// without TLS (docs/images.md). It is followed without a restart. Default:
	// DATA/registries.yaml, if it is there.
	RegistriesConfig string `json:"registriesConfig,omitempty"`
	// ImagePullCredentialsVerificationPolicy says which images that are on the node a
	// pod gets without having shown credentials that open them: NeverVerify (all),
	// NeverVerifyPreloadedImages (those that were loaded from files),
	// NeverVerifyAllowlistedImages (of those, the ones that are listed), AlwaysVerify
	// (none). What was pulled without credentials, or with the node's own, is for all.
	ImagePullCredentialsVerificationPolicy string `json:"imagePullCredentialsVerificationPolicy,omitempty"`
	// PreloadedImagesVerificationAllowlist is the list of NeverVerifyAllowlistedImages:
	// full names without tag and digest, separated by commas; NAME/* is all below NAME.
	PreloadedImagesVerificationAllowlist string `json:"preloadedImagesVerificationAllowlist,omitempty"`
	// ImagePullMemory is how much memory each process may take that reads what a registry
	// or an archive sends, such as 512Mi. An image that needs more is not taken.
	ImagePullMemory string `json:"imagePullMemory"`
}

func defaultImages() ImageConfig {
	return ImageConfig{ImagePullMemory: "512Mi"}
}

// minPullMemory is what reading an image takes that was compressed with small windows.
const minPullMemory = 128 << 20

func (c *ImageConfig) addFlags(f *pflag.FlagSet) {
	f.StringVar(&c.RegistriesConfig, "registries-config", c.RegistriesConfig, "file with registry mirrors, CAs, credentials and plain-HTTP registries (default: DATA/registries.yaml, if it exists)")
	f.StringVar(&c.ImagePullCredentialsVerificationPolicy, "image-pull-credentials-verification-policy", c.ImagePullCredentialsVerificationPolicy, "when a pod may use an image that is already on the node without credentials for it: NeverVerify, NeverVerifyPreloadedImages (the default), NeverVerifyAllowlistedImages or AlwaysVerify")
	f.StringVar(&c.PreloadedImagesVerificationAllowlist, "preloaded-images-verification-allowlist", c.PreloadedImagesVerificationAllowlist, "images for NeverVerifyAllowlistedImages: full names without tag and digest, separated by commas; NAME/* matches all below NAME")
	f.StringVar(&c.ImagePullMemory, "image-pull-memory", c.ImagePullMemory, "memory limit of each process that fetches or unpacks an image; an image that needs more is not taken")
}

func (c *ImageConfig) check() error {
	if c.RegistriesConfig != "" && !filepath.IsAbs(c.RegistriesConfig) {
		return fmt.Errorf("--registries-config %q: an absolute path is required, such as /etc/clusterd/registries.yaml", c.RegistriesConfig)
	}
	if _, err := bytesOf("--image-pull-memory", c.ImagePullMemory, minPullMemory); err != nil {
		return err
	}
	_, err := c.verification()
	return err
}

func (c *ImageConfig) verification() (pod.ImageVerification, error) {
	return pod.ParseImageVerification(c.ImagePullCredentialsVerificationPolicy, c.PreloadedImagesVerificationAllowlist)
}

// openImages opens the node's image store.
func openImages(cfg Config, log *slog.Logger) (*image.Store, error) {
	dir := nodedir.Dir(cfg.Data)
	file, optional := cfg.RegistriesConfig, cfg.RegistriesConfig == ""
	if optional {
		path, err := filepath.Abs(dir.Path("registries.yaml"))
		if err != nil {
			return nil, err
		}
		file = path
	}
	log = room(log, "image")
	registries, err := registry.Open(file, optional, log)
	if err != nil {
		return nil, fmt.Errorf("--registries-config: %w", err)
	}
	memory, err := bytesOf("--image-pull-memory", cfg.ImagePullMemory, minPullMemory)
	if err != nil {
		return nil, err
	}
	images, err := image.Open(image.Config{
		Dir: dir.Path("images"), Own: ownImage(), Registries: registries.Settings, Logger: log,
		Isolation: &image.Isolation{Program: imageworkerbin.Open, Cgroup: path.Join(cfg.CgroupRoot, "images"), Memory: memory},
	})
	if err != nil {
		return nil, fmt.Errorf("open the image store: %w", err)
	}
	return images, nil
}
