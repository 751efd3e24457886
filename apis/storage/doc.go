// Package storage describes the kinds of the storage.k8s.io API group.
package storage
