package pod

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
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

// pullAuth finds the credentials for an image among the pod's pull secrets:
// of all entries that fit, the one that names the longest part of the image's
// name. A secret that is missing is reported and left out.
func (m *Manager) pullAuth(ctx context.Context, pod *v1.Pod, ref string) (image.Auth, error) {
	if len(pod.Spec.ImagePullSecrets) == 0 {
		return image.Auth{}, nil
	}
	full, err := image.Normalize(ref)
	if err != nil {
		return image.Auth{}, err
	}
	var best image.Auth
	length := -1
	for _, s := range pod.Spec.ImagePullSecrets {
		o, err := m.cfg.Objects.Secret(ctx, pod.Namespace, s.Name)
		if apierrors.IsNotFound(err) {
			m.cfg.Recorder.Eventf(podRef(pod, ""), v1.EventTypeWarning, "FailedToRetrieveImagePullSecret",
				"Unable to retrieve image pull secret %s: the image pull may not succeed.", s.Name)
			continue
		}
		if err != nil {
			return image.Auth{}, fmt.Errorf("pull secret %s: %w", s.Name, err)
		}
		entries, err := parsePullSecret(o)
		if err != nil {
			klog.FromContext(ctx).Info("Pull secret cannot be read", "secret", s.Name, "err", err)
			continue
		}
		for host, e := range entries {
			if n := matchRegistry(host, full); n > length {
				if a, err := e.auth(); err == nil {
					best, length = a, n
				}
			}
		}
	}
	return best, nil
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

func (m *Manager) pullImage(ctx context.Context, ref string, policy v1.PullPolicy, auth image.Auth) (image.Image, error) {
	if policy == v1.PullAlways {
		return m.cfg.Images.Pull(ctx, ref, auth)
	}
	return m.cfg.Images.Ensure(ctx, ref, auth)
}
