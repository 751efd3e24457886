// Package apis says what can be said: the kinds clusterd serves, their
// defaults, validation, table columns and field selectors, as plain functions
// of values. It does no I/O and starts no goroutine; apis/server turns the
// list of kinds into an API server, clusterctl turns it into printers.
package apis

import "github.com/clusterd/clusterd/apis/kind"

// Kind is everything the API server has to know about one kind of object.
type Kind = kind.Kind

// View is another version, or another group, that a kind is served in.
type View = kind.View

// Status describes a kind's status subresource.
type Status = kind.Status

// Scale describes a kind's scale subresource.
type Scale = kind.Scale
