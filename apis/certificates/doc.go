// Package certificates describes the kinds of the certificates.k8s.io API
// group: requests for certificates, which are approved by a person or a program, and signed by a signer.
package certificates
