package pod

import (
	"context"
	"net/http"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
)

// lockedImages open to one user.
type lockedImages struct {
	Images
	opens string
	fault image.Reason
	tried []string
}

func (l *lockedImages) PullAs(_ context.Context, ref string, auth image.Credential) (image.Image, error) {
	l.tried = append(l.tried, auth.Username)
	if auth.Username != l.opens {
		return image.Image{}, &image.PullError{Ref: ref, Reason: l.fault, Says: http.StatusText(http.StatusForbidden)}
	}
	return image.Image{ID: "sha256:1"}, nil
}

// TestPullSecretsInTurn: the credentials that fit are tried one after the other
// while the registry refuses them, in an order that does not change.
func TestPullSecretsInTurn(t *testing.T) {
	secret := func(config string) *v1.Secret {
		return &v1.Secret{Data: map[string][]byte{v1.DockerConfigJsonKey: []byte(config)}}
	}
	auths := fitting(t.Context(), []*v1.Secret{
		secret(`{"auths":{"ghcr.io":{"username":"a"},"https://ghcr.io/v2/":{"username":"a2"},"other.io":{"username":"no"}}}`),
		secret(`{"auths":{"ghcr.io":{"username":"b"},"ghcr.io/team":{"username":"team"}}}`),
	}, "ghcr.io/team/app:1")
	for _, tt := range []struct {
		opens string
		fault image.Reason
		tried []string
		ok    bool
	}{
		{"team", image.ReasonUnauthorized, []string{"team"}, true},
		{"b", image.ReasonUnauthorized, []string{"team", "a", "a2", "b"}, true},
		{"b", image.ReasonNotFound, []string{"team", "a", "a2", "b"}, true},
		{"x", image.ReasonUnauthorized, []string{"team", "a", "a2", "b"}, false},
		{"b", image.ReasonUnreachable, []string{"team"}, false},
	} {
		images := &lockedImages{opens: tt.opens, fault: tt.fault}
		m := &Manager{cfg: Config{Images: images}}
		if _, err := m.pullImage(t.Context(), "ghcr.io/team/app:1", auths); (err == nil) != tt.ok || !slices.Equal(images.tried, tt.tried) {
			t.Errorf("open to %s (%s): tried %q, %v; want %q", tt.opens, tt.fault, images.tried, err, tt.tried)
		}
	}
}
