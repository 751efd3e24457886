// Package networking describes the kinds of the networking.k8s.io API group.
package networking
