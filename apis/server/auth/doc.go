// Package auth answers the API server's two first questions about a request:
// who are you, and may you. Identities are x509 client certificates or parts
// of this process; permissions are those of nodes, which follow from the pods
// bound to them, and of system:masters; those of all others are stored (package
// rbac). No request is let in by default.
package auth
