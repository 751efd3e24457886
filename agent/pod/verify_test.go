package pod

import (
	"strings"
	"testing"
)

// TestImageVerificationPolicies has the policies of KEP-2535 for images without a record
// that fits.
func TestImageVerificationPolicies(t *testing.T) {
	const list = "registry.example.org/team/*, docker.io/library/nginx,10.0.0.5:5000/*"
	for _, tt := range []struct {
		policy, list, name string
		preloaded, want    bool
	}{
		{NeverVerify, "", "x.io/a:1", false, true},
		{NeverVerifyPreloadedImages, "", "x.io/a:1", true, true},
		{NeverVerifyPreloadedImages, "", "x.io/a:1", false, false},
		{AlwaysVerify, "", "x.io/a:1", true, false},
		{NeverVerifyAllowlistedImages, list, "docker.io/library/nginx:1.27", true, true},
		{NeverVerifyAllowlistedImages, list, "docker.io/library/nginx:1.27", false, false},
		{NeverVerifyAllowlistedImages, list, "docker.io/library/nginx@sha256:" + strings.Repeat("0", 64), true, true},
		{NeverVerifyAllowlistedImages, list, "docker.io/library/nginx2:1", true, false},
		{NeverVerifyAllowlistedImages, list, "registry.example.org/team/app:1", true, true},
		{NeverVerifyAllowlistedImages, list, "registry.example.org/teams/app:1", true, false},
		{NeverVerifyAllowlistedImages, list, "10.0.0.5:5000/a/b:1", true, true},
		{NeverVerifyAllowlistedImages, list, "10.0.0.5:5001/a/b:1", true, false},
	} {
		v, err := ParseImageVerification(tt.policy, tt.list)
		if err != nil {
			t.Fatal(err)
		}
		if got := v.without([]string{tt.name}, tt.preloaded); got != tt.want {
			t.Errorf("%s, %s, preloaded %t: %t", tt.policy, tt.name, tt.preloaded, got)
		}
	}
	if (ImageVerification{}).without(nil, false) || !(ImageVerification{}).without(nil, true) {
		t.Error("the zero value is not NeverVerifyPreloadedImages")
	}
	for _, tt := range []struct{ policy, list, want string }{
		{"Sometimes", "", `verification-policy "Sometimes": give one of NeverVerify, `},
		{NeverVerifyAllowlistedImages, "", "that needs one"},
		{AlwaysVerify, "docker.io/library/nginx", "the list belongs to the policy NeverVerifyAllowlistedImages"},
		{NeverVerifyAllowlistedImages, "nginx", `allowlist "nginx": give full names`},
		{NeverVerifyAllowlistedImages, "docker.io/library/nginx:1", `allowlist "docker.io/library/nginx:1": `},
		{NeverVerifyAllowlistedImages, "x.io/a*", `allowlist "x.io/a*": `},
		{NeverVerifyAllowlistedImages, "*", `allowlist "*": `},
	} {
		if _, err := ParseImageVerification(tt.policy, tt.list); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %q: %v", tt.policy, tt.list, err)
		}
	}
}
