// Package core describes the kinds of the core API group, and the pod spec that
// other groups embed as a template.
package core
