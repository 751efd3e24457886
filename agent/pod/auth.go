package pod

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/image"
)

// dockerAuth is one registry's entry in a pull secret.
type dockerAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"` // base64 of user:password
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

// pullAuths finds the credentials for an image among the pod's pull secrets. A
// secret that is missing is reported and left out.
func (m *Manager) pullAuths(ctx context.Context, pod *v1.Pod, ref string) ([]image.Auth, error) {
	var secrets []*v1.Secret
	for _, s := range pod.Spec.ImagePullSecrets {
		if s.Name == "" {
			continue // charts leave them so; the API has warned
		}
		o, err := m.cfg.Objects.Secret(ctx, pod.Namespace, s.Name)
		if apierrors.IsNotFound(err) {
			m.cfg.Recorder.Eventf(podRef(pod, ""), v1.EventTypeWarning, "FailedToRetrieveImagePullSecret",
				"Unable to retrieve image pull secret %s: the image pull may not succeed.", s.Name)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("pull secret %s: %w", s.Name, err)
		}
		secrets = append(secrets, o)
	}
	if len(secrets) == 0 {
		return nil, nil
	}
	full, err := image.Normalize(ref)
	if err != nil {
		return nil, err
	}
	return fitting(ctx, secrets, full), nil
}

// fitting returns the credentials for the image of that full name, each once: first
// those whose entry names the longest part of the name, of alike ones the first
// secret's.
func fitting(ctx context.Context, secrets []*v1.Secret, full string) []image.Auth {
	type fit struct {
		auth   image.Auth
		length int
	}
	var fits []fit
	for _, s := range secrets {
		entries, err := parsePullSecret(s)
		if err != nil {
			klog.FromContext(ctx).Info("Pull secret cannot be read", "secret", s.Name, "err", err)
			continue
		}
		for _, host := range slices.Sorted(maps.Keys(entries)) {
			n := matchRegistry(host, full)
			auth, err := entries[host].auth()
			if n >= 0 && err == nil && !slices.ContainsFunc(fits, func(f fit) bool { return f.auth == auth }) {
				fits = append(fits, fit{auth, n})
			}
		}
	}
	slices.SortStableFunc(fits, func(a, b fit) int { return b.length - a.length })
	var auths []image.Auth
	for _, f := range fits {
		auths = append(auths, f.auth)
	}
	return auths
}

// parsePullSecret reads both forms of pull secret.
func parsePullSecret(s *v1.Secret) (map[string]dockerAuth, error) {
	if b, ok := s.Data[v1.DockerConfigJsonKey]; ok {
		var c struct {
			Auths map[string]dockerAuth `json:"auths"`
		}
		err := json.Unmarshal(b, &c)
		return c.Auths, err
	}
	if b, ok := s.Data[v1.DockerConfigKey]; ok {
		var c map[string]dockerAuth
		err := json.Unmarshal(b, &c)
		return c, err
	}
	return nil, fmt.Errorf("it has neither the key %s nor %s", v1.DockerConfigJsonKey, v1.DockerConfigKey)
}

func (e dockerAuth) auth() (image.Auth, error) {
	a := image.Auth{Username: e.Username, Password: e.Password, IdentityToken: e.IdentityToken, RegistryToken: e.RegistryToken}
	if e.Auth != "" && a.Username == "" {
		b, err := base64.StdEncoding.DecodeString(e.Auth)
		if err != nil {
			return a, fmt.Errorf("auth: %w", err)
		}
		user, pass, ok := strings.Cut(string(b), ":")
		if !ok {
			return a, fmt.Errorf("auth: no colon between user and password")
		}
		a.Username, a.Password = user, strings.TrimRight(pass, "\x00")
	}
	return a, nil
}

// matchRegistry says how many characters of the full image name an entry
// ("https://index.docker.io/v1/", "registry.io/team") speaks for, or -1.
// A label of the host may be a star.
func matchRegistry(entry, full string) int {
	entry = strings.TrimPrefix(strings.TrimPrefix(entry, "https://"), "http://")
	entry = strings.TrimSuffix(entry, "/")
	for _, v := range []string{"/v1", "/v2"} {
		entry = strings.TrimSuffix(entry, v)
	}
	switch entry {
	case "index.docker.io", "registry-1.docker.io":
		entry = "docker.io"
	}
	host, path, _ := strings.Cut(entry, "/")
	imageHost, imagePath, _ := strings.Cut(full, "/")
	if !matchHost(host, imageHost) {
		return -1
	}
	if path != "" && imagePath != path && !strings.HasPrefix(imagePath, path+"/") {
		return -1
	}
	return len(entry)
}

func matchHost(pattern, host string) bool {
	p, h := strings.Split(pattern, "."), strings.Split(host, ".")
	if len(p) != len(h) {
		return false
	}
	for i := range p {
		if p[i] != "*" && p[i] != h[i] {
			return false
		}
	}
	return true
}

// pullImage pulls with one of the credentials after the other, until one opens the
// image. Without any it pulls anonymously.
func (m *Manager) pullImage(ctx context.Context, ref string, policy v1.PullPolicy, auths []image.Auth) (image.Image, error) {
	pull := m.cfg.Images.Ensure
	if policy == v1.PullAlways {
		pull = m.cfg.Images.Pull
	}
	if len(auths) == 0 {
		return pull(ctx, ref, image.Auth{})
	}
	var err error
	for _, auth := range auths {
		var img image.Image
		if img, err = pull(ctx, ref, auth); err == nil {
			return img, nil
		}
		// Registries say of what one may not see that it is not there.
		var refused *image.PullError
		if !errors.As(err, &refused) || refused.Reason != image.ReasonUnauthorized && refused.Reason != image.ReasonNotFound {
			break
		}
	}
	return image.Image{}, err
}
