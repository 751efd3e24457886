package pod

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
)

// Values of ImageVerification.Policy, as the kubelet's configuration has them
// (imagePullCredentialsVerificationPolicy).
const (
	NeverVerify                  = "NeverVerify"
	NeverVerifyPreloadedImages   = "NeverVerifyPreloadedImages"
	NeverVerifyAllowlistedImages = "NeverVerifyAllowlistedImages"
	AlwaysVerify                 = "AlwaysVerify"
)

// ImageVerification says for which images that are on the node a pod has to show that
// it could have pulled them. The zero value is NeverVerifyPreloadedImages.
type ImageVerification struct {
	Policy string
	// Allowed are full names of repositories, without tag and digest; one that ends
	// with "/*" is all below it. Of NeverVerifyAllowlistedImages alone.
	Allowed []string
}

// ParseImageVerification checks a policy ("": NeverVerifyPreloadedImages) and its list, which
// is separated by commas.
func ParseImageVerification(policy, list string) (ImageVerification, error) {
	if policy == "" {
		policy = NeverVerifyPreloadedImages
	}
	v := ImageVerification{Policy: policy}
	known := []string{NeverVerify, NeverVerifyPreloadedImages, NeverVerifyAllowlistedImages, AlwaysVerify}
	if !slices.Contains(known, policy) {
		return v, fmt.Errorf("--image-pull-credentials-verification-policy %q: give one of %s", policy, strings.Join(known, ", "))
	}
	for entry := range strings.SplitSeq(list, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		one := entry
		if below, all := strings.CutSuffix(entry, "/*"); all {
			one = below + "/x"
		}
		if full, err := image.Normalize(one); err != nil || full != one+":latest" {
			return v, fmt.Errorf("--preloaded-images-verification-allowlist %q: give full names without tag and digest, such as docker.io/library/nginx, or registry.example.org/team/* for all below", entry)
		}
		v.Allowed = append(v.Allowed, entry)
	}
	if (len(v.Allowed) > 0) != (policy == NeverVerifyAllowlistedImages) {
		return v, fmt.Errorf("--preloaded-images-verification-allowlist %q, --image-pull-credentials-verification-policy %q: the list belongs to the policy %s, and that needs one", list, policy, NeverVerifyAllowlistedImages)
	}
	return v, nil
}

// without says whether a pod gets an image that is here without showing anything.
func (v ImageVerification) without(names []string, preloaded bool) bool {
	switch v.Policy {
	case NeverVerify:
		return true
	case AlwaysVerify:
		return false
	case NeverVerifyAllowlistedImages:
		return preloaded && slices.ContainsFunc(names, v.allows)
	}
	return preloaded
}

// allows looks a full name up in the list.
func (v ImageVerification) allows(full string) bool {
	repository, _, _ := strings.Cut(full, "@")
	if i := strings.LastIndex(repository, ":"); i > strings.LastIndex(repository, "/") {
		repository = repository[:i]
	}
	return slices.ContainsFunc(v.Allowed, func(entry string) bool {
		if below, all := strings.CutSuffix(entry, "*"); all {
			return strings.HasPrefix(repository, below)
		}
		return repository == entry
	})
}

// unproven is why a pod does not get an image that is on the node: it has not shown
// credentials that open it. That the image is here is no reason to try again at once.
type unproven struct{ error }

func (u unproven) Unwrap() error { return u.error }

// mayUse says whether a pod may have an image that is here (KEP-2535). One that may
// not, as far as the node knows, has to pull it: its registry decides.
func (m *Manager) mayUse(ctx context.Context, pod *v1.Pod, ref string, img image.Image) (bool, error) {
	names, open, err := m.openToAll(ref, img)
	if err != nil || open {
		return open, err
	}
	asking, cancel := context.WithTimeout(ctx, authDeadline)
	defer cancel()
	auths, err := m.pullAuths(asking, pod, names...)
	if err != nil || len(auths) == 0 {
		return false, err
	}
	known, err := m.cfg.Images.Access(img.ID, ref, auths)
	return known.Proven, err
}

// openToAll says whether a pod may have an image that is here whatever it shows, and by
// which names it may be pulled.
func (m *Manager) openToAll(ref string, img image.Image) (names []string, open bool, err error) {
	known, err := m.cfg.Images.Access(img.ID, ref, nil)
	if err != nil {
		return nil, false, err
	}
	full, err := image.Normalize(ref)
	if err != nil {
		return nil, false, err
	}
	names = []string{full}
	if full == img.ID { // an ID: by any of its names
		names = img.RepoDigests
	}
	return names, known.Proven || m.cfg.Verify.without(names, known.Preloaded), nil
}
