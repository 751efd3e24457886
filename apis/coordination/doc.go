// Package coordination describes the kinds of the coordination.k8s.io API group.
package coordination
