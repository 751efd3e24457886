package server

import (
	"strings"

	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/util/compatibility"
	basecompatibility "k8s.io/component-base/compatibility"
)

// fallbackVersion is the Kubernetes release whose API this server speaks, for
// builds that do not stamp it (go test). Release builds set it with
// -ldflags "-X k8s.io/component-base/version.gitVersion=v1.37.2".
const fallbackVersion = "v1.37.2"

// effectiveVersion is the library's, with a version that clients can parse
// even where the build did not stamp one.
type effectiveVersion struct {
	basecompatibility.EffectiveVersion
}

func newEffectiveVersion() effectiveVersion {
	return effectiveVersion{compatibility.DefaultBuildEffectiveVersion()}
}

// Info is what /version answers.
func (v effectiveVersion) Info() *apiversion.Info {
	info := v.EffectiveVersion.Info()
	if strings.HasPrefix(info.GitVersion, "v0.0.0") {
		info.GitVersion = fallbackVersion
	}
	return info
}

// Version is the Kubernetes release whose API this server speaks.
func Version() string { return newEffectiveVersion().Info().GitVersion }
