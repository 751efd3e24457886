// Package auth has authenticators and authorizers of the API server. Identities are x509
// client certificates or components of this process; permissions here are those of nodes,
// which follow from the pods bound to them, and of system:masters; all others are RBAC's
// (package rbac). Requests are denied by default.
package auth
