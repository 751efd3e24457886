package registry

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Auths are credentials by what they are for: a registry, or a part of its
// repositories ("registry.example.org/team").
type Auths map[string]Auth

// dockerEntry is one registry's entry in a docker config.
type dockerEntry struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"` // base64 of user:password
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

// ParseDockerConfig reads a docker config.json. Entries that cannot be read are left
// out and joined into err.
func ParseDockerConfig(b []byte) (Auths, error) {
	var c struct {
		Auths map[string]dockerEntry `json:"auths"`
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, err
	}
	return readEntries(c.Auths)
}

// ParseDockerCfg reads the older form, .dockercfg, which has nothing around the
// entries.
func ParseDockerCfg(b []byte) (Auths, error) {
	var c map[string]dockerEntry
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, err
	}
	return readEntries(c)
}

func readEntries(entries map[string]dockerEntry) (Auths, error) {
	out := Auths{}
	var errs []error
	for _, what := range slices.Sorted(maps.Keys(entries)) {
		a, err := entries[what].read()
		if err != nil {
			errs = append(errs, fmt.Errorf("auths[%q].%w", what, err))
			continue
		}
		out[what] = a
	}
	return out, errors.Join(errs...)
}

func (e dockerEntry) read() (Auth, error) {
	a := Auth{Username: e.Username, Password: e.Password, IdentityToken: e.IdentityToken, RegistryToken: e.RegistryToken}
	if e.Auth != "" && a.Username == "" {
		b, err := base64.StdEncoding.DecodeString(e.Auth)
		if err != nil {
			return a, errors.New("auth: not base64")
		}
		user, pass, ok := strings.Cut(string(b), ":")
		if !ok {
			return a, errors.New("auth: no colon between user and password")
		}
		a.Username, a.Password = user, strings.TrimRight(pass, "\x00")
	}
	return a, nil
}

// Fit are credentials and how well they fit a name.
type Fit struct {
	Auth   Auth
	Length int // of the part of the name that they are for
}

// Fits are the credentials for the image of that full name, those for the longest
// part of it first, each once.
func (a Auths) Fits(full string) []Fit {
	var fits []Fit
	for _, what := range slices.Sorted(maps.Keys(a)) {
		n := match(what, full)
		if n < 0 || slices.ContainsFunc(fits, func(f Fit) bool { return f.Auth == a[what] }) {
			continue
		}
		fits = append(fits, Fit{a[what], n})
	}
	slices.SortStableFunc(fits, func(a, b Fit) int { return b.Length - a.Length })
	return fits
}

// For is Fits without the lengths and without entries that say nothing.
func (a Auths) For(full string) []Auth {
	var out []Auth
	for _, f := range a.Fits(full) {
		if f.Auth != (Auth{}) {
			out = append(out, f.Auth)
		}
	}
	return out
}

// match says how many characters of the full image name an entry
// ("https://index.docker.io/v1/", "registry.io/team") speaks for, or -1.
// A label of the host may be a star.
func match(entry, full string) int {
	entry = strings.TrimPrefix(strings.TrimPrefix(entry, "https://"), "http://")
	entry = strings.TrimSuffix(entry, "/")
	for _, v := range []string{"/v1", "/v2"} {
		entry = strings.TrimSuffix(entry, v)
	}
	at, path, _ := strings.Cut(entry, "/")
	if c := canonical(at); c == hub {
		entry, at = strings.Replace(entry, at, hub, 1), hub
	}
	imageHost, imagePath, _ := strings.Cut(full, "/")
	if !matchHost(at, imageHost) {
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
