// Package auth answers the API server's two first questions about a request:
// who are you, and may you. Identities are x509 client certificates or parts
// of this process; permissions are a fixed table of rules plus what a node may
// do with the pods bound to it. Nobody is let in by default.
package auth
