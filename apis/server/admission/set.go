package admission

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	apiserverinstall "k8s.io/apiserver/pkg/apis/apiserver/install"
)

// Set is what an operator says of the plugins.
type Set struct {
	// Enable and Disable are names of plugins, beside and without those that are
	// there by default. Their order does not matter.
	Enable, Disable []string
	// File is an AdmissionConfiguration; empty: every plugin has its defaults.
	File string
}

// choose is which plugins of all there are.
func (s Set) choose(all []plugin) (map[string]bool, error) {
	chosen := map[string]bool{}
	for _, p := range all {
		chosen[p.name] = p.on
	}
	for _, names := range [][]string{s.Enable, s.Disable} {
		for _, name := range names {
			if _, known := chosen[name]; !known {
				return nil, fmt.Errorf("admission plugin %q: there is none of this name; there are %s", name, strings.Join(namesOf(all), ", "))
			}
		}
	}
	for _, name := range s.Enable {
		if slices.Contains(s.Disable, name) {
			return nil, fmt.Errorf("admission plugin %s: both enabled and disabled", name)
		}
		chosen[name] = true
	}
	for _, name := range s.Disable {
		chosen[name] = false
	}
	return chosen, nil
}

// configs are what File says of each plugin.
func (s Set) configs(all []plugin) (admission.ConfigProvider, error) {
	scheme := runtime.NewScheme()
	apiserverinstall.Install(scheme)
	configs, err := admission.ReadAdmissionConfiguration(namesOf(all), s.File, scheme)
	if err != nil {
		return nil, fmt.Errorf("admission configuration %s: %w", s.File, err)
	}
	return configs, nil
}

func namesOf(all []plugin) []string {
	names := make([]string, len(all))
	for i, p := range all {
		names[i] = p.name
	}
	return names
}
