// Package resource turns a kind, which is a handful of pure functions, into
// the storage objects that the API server library installs: the resource
// itself, its status and its scale. There is one adapter for all kinds; what a
// kind does differently it says in its apis.Kind.
package resource
