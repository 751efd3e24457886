package pod

import (
	"testing"
)

func TestPullSecret(t *testing.T) {
	for _, tt := range []struct {
		entry, image string
		fits         bool
	}{
		{"https://index.docker.io/v1/", "docker.io/library/nginx:1", true},
		{"registry.io", "registry.io/team/app:1", true},
		{"registry.io/team", "registry.io/team/app:1", true},
		{"registry.io/tea", "registry.io/team/app:1", false},
		{"*.registry.io", "eu.registry.io/app", true},
		{"*.registry.io", "registry.io/app", false},
		{"other.io", "registry.io/app", false},
		{"registry.io:5000", "registry.io:5000/app", true},
	} {
		if got := matchRegistry(tt.entry, tt.image) >= 0; got != tt.fits {
			t.Errorf("%s for %s: %t", tt.entry, tt.image, got)
		}
	}
	e := dockerAuth{Auth: "dXNlcjpwYTpzcw=="} // user:pa:ss
	if a, err := e.auth(); err != nil || a.Username != "user" || a.Password != "pa:ss" {
		t.Errorf("%+v %v", a, err)
	}
}
