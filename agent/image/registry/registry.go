// Package registry says how a node speaks to image registries: by which mirrors,
// with which authorities, certificates and credentials, and where without TLS. It
// reads that from a file, and speaks to none itself.
package registry

import (
	"crypto/tls"
	"slices"
	"strings"
)

const (
	// hub is the name people use for the registry that answers at hubHost.
	hub     = "docker.io"
	hubHost = "index.docker.io"
	// others is the entry for registries that have none of their own.
	others = "*"
)

// Auth are the credentials for one registry; the zero value is none.
type Auth struct {
	Username, Password string
	IdentityToken      string // exchanged for an access token
	RegistryToken      string // sent as a bearer token as it is
}

// Settings are what one file says, checked and with all files that it names read.
// They do not change. A nil *Settings is a node that says nothing of registries.
type Settings struct {
	hosts map[string]*host // by canonical host
	auths Auths            // of the docker config for all registries
}

// host is what is said of one registry or mirror.
type host struct {
	mirrors []mirror // nil: the entry names none, those of others count
	set     bool     // the entry has mirrors, if only an empty list
	last    bool     // the registry itself is asked after its mirrors
	Connection
	tls   *tls.Config // nil: nothing beside the system's
	auths Auths
}

type mirror struct {
	host string // canonical
	path string // put before the repository; may be empty
}

// Endpoint is one place to ask for an image.
type Endpoint struct {
	// Host is where to connect to: "index.docker.io" for Docker Hub.
	Host string
	// Repository is the image's name there.
	Repository string
	// Namespace is the registry whose mirror this is, as image names have it; empty:
	// this is the registry itself.
	Namespace string
	// PlainHTTP: it is spoken to without TLS, and never with it.
	PlainHTTP bool
	// Auths are the node's own credentials for it, to be tried in this order. They
	// are for no other host.
	Auths []Auth
}

// Endpoints are where to ask for a repository of a registry, in order. There is at
// least one.
func (s *Settings) Endpoints(registry, repository string) []Endpoint {
	registry = canonical(registry)
	own := s.host(registry)
	from := own
	if !own.set {
		from = s.host(others)
	}
	var out []Endpoint
	for _, m := range from.mirrors {
		if m.host == registry && m.path == "" {
			continue // "*" means the others
		}
		there := repository
		if m.path != "" {
			there = m.path + "/" + repository
		}
		e := s.endpoint(m.host, there)
		e.Namespace = registry
		out = append(out, e)
	}
	if len(out) == 0 || from.last {
		out = append(out, s.endpoint(registry, repository))
	}
	return out
}

func (s *Settings) endpoint(at, repository string) Endpoint {
	h := s.host(at)
	e := Endpoint{Host: at, Repository: repository, PlainHTTP: h.PlainHTTP}
	if at == hub {
		e.Host = hubHost
	}
	full := at + "/" + repository
	if e.Auths = h.auths.For(full); len(e.Auths) == 0 && s != nil {
		e.Auths = s.auths.For(full)
	}
	return e
}

// TLS is what is said of TLS with that host, as it stands in a URL; nil: nothing,
// so the system's authorities count and no certificate is shown.
func (s *Settings) TLS(at string) *tls.Config { return s.host(canonical(at)).tls }

// PlainHTTP reports whether that host, as it stands in a URL, is named as one that is
// spoken to without TLS.
func (s *Settings) PlainHTTP(at string) bool { return s.host(canonical(at)).PlainHTTP }

var unsaid = &host{last: true}

func (s *Settings) host(canonical string) *host {
	if s == nil || s.hosts[canonical] == nil {
		return unsaid
	}
	return s.hosts[canonical]
}

// canonical is a host as image names have it.
func canonical(at string) string {
	at = strings.ToLower(at)
	if slices.Contains([]string{hubHost, "registry-1." + hub}, at) {
		return hub
	}
	return at
}
