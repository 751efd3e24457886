package kind

import "k8s.io/apimachinery/pkg/runtime"

// Inert makes the warning of a kind that is stored while nothing acts on it:
// effect is what its user expects and does not get.
func Inert[T runtime.Object](effect string) func(T) []string {
	return func(T) []string { return []string{"stored, but clusterd does not " + effect + " yet"} }
}
