// Package certificates describes the kinds of the certificates.k8s.io API
// group: requests for certificates, which somebody approves and a signer signs.
package certificates
