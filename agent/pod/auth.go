package pod

import (
	"context"
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/image/registry"
)

// pullAuths finds the credentials for an image among the pod's pull secrets. A
// secret that is missing is reported and left out. names are those that the image may
// be pulled by.
func (m *Manager) pullAuths(ctx context.Context, pod *v1.Pod, names ...string) ([]image.Credential, error) {
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
	var out []image.Credential
	for _, n := range names {
		full, err := image.Normalize(n)
		if err != nil {
			return nil, err
		}
		out = append(out, fitting(ctx, secrets, full)...)
	}
	return out, nil
}

// fitting returns the credentials for the image of that full name, each once: first
// those whose entry names the longest part of the name, of alike ones the first
// secret's.
func fitting(ctx context.Context, secrets []*v1.Secret, full string) []image.Credential {
	type fit struct {
		image.Credential
		length int
	}
	var fits []fit
	for _, s := range secrets {
		entries, err := parsePullSecret(s)
		if err != nil {
			klog.FromContext(ctx).Info("Pull secret cannot be read", "secret", s.Name, "err", err)
		}
		id := image.SecretID{Namespace: s.Namespace, Name: s.Name, UID: string(s.UID)}
		for _, e := range entries.Fits(full) {
			if !slices.ContainsFunc(fits, func(f fit) bool { return f.Auth == e.Auth }) {
				fits = append(fits, fit{image.Credential{Auth: e.Auth, Secret: id}, e.Length})
			}
		}
	}
	slices.SortStableFunc(fits, func(a, b fit) int { return b.length - a.length })
	var out []image.Credential
	for _, f := range fits {
		out = append(out, f.Credential)
	}
	return out
}

// parsePullSecret reads both forms of pull secret; what cannot be read of it is left
// out, and an error.
func parsePullSecret(s *v1.Secret) (registry.Auths, error) {
	if b, ok := s.Data[v1.DockerConfigJsonKey]; ok {
		return registry.ParseDockerConfig(b)
	}
	if b, ok := s.Data[v1.DockerConfigKey]; ok {
		return registry.ParseDockerCfg(b)
	}
	return nil, fmt.Errorf("it has neither the key %s nor %s", v1.DockerConfigJsonKey, v1.DockerConfigKey)
}

// pullImage pulls with one of the credentials after the other, until one opens the
// image. Without any it pulls with the node's, or anonymously.
func (m *Manager) pullImage(ctx context.Context, ref string, auths []image.Credential) (img image.Image, err error) {
	if len(auths) == 0 {
		return m.cfg.Images.PullAs(ctx, ref, image.Credential{})
	}
	for _, auth := range auths {
		if img, err = m.cfg.Images.PullAs(ctx, ref, auth); err == nil {
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
