package image

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
)

// dockerHub is the name people use for the registry that the library calls
// index.docker.io.
const dockerHub = "docker.io"

var idPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Normalize completes a name as docker does: "nginx" becomes
// "docker.io/library/nginx:latest". An image ID stays as it is.
func Normalize(ref string) (string, error) {
	if idPattern.MatchString(ref) {
		return ref, nil
	}
	parsed, err := parse(ref)
	if err != nil {
		return "", err
	}
	return fullName(parsed), nil
}

// NameFor is how a status names the image that ref led to: by its digest in
// ref's repository, else in any that it came from, else by its ID. The same
// image may have come from several.
func (i Image) NameFor(ref string) string {
	if parsed, err := parse(ref); err == nil {
		for _, d := range i.RepoDigests {
			if strings.HasPrefix(d, fullRepository(parsed.Context())+"@") {
				return d
			}
		}
	}
	if len(i.RepoDigests) > 0 {
		return i.RepoDigests[0]
	}
	return i.ID
}

// parse reads a reference, refusing what a registry could never hold.
func parse(ref string) (name.Reference, error) {
	parsed, err := name.ParseReference(ref, name.WeakValidation)
	if err != nil {
		return nil, fmt.Errorf("%w: %q: %w", ErrInvalidName, ref, err)
	}
	if err := checkRepository(parsed.Context().RepositoryStr()); err != nil {
		return nil, fmt.Errorf("%w: %q: %w", ErrInvalidName, ref, err)
	}
	return parsed, nil
}

// repository components: lower case, separated by one '.', '_', '__' or dashes.
var repositoryPattern = regexp.MustCompile(`^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*$`)

func checkRepository(repo string) error {
	for part := range strings.SplitSeq(repo, "/") {
		if !repositoryPattern.MatchString(part) {
			return fmt.Errorf("repository name must be lower case letters, digits and single separators, not %q", part)
		}
	}
	return nil
}

// fullName is the canonical name of a parsed reference.
func fullName(r name.Reference) string {
	sep := ":"
	if _, ok := r.(name.Digest); ok {
		sep = "@"
	}
	return fullRepository(r.Context()) + sep + r.Identifier()
}

func fullRepository(r name.Repository) string {
	registry := r.RegistryStr()
	if registry == name.DefaultRegistry {
		registry = dockerHub
	}
	return registry + "/" + r.RepositoryStr()
}
