// Package doors tries what the API of three servers and two agents has to refuse,
// through kubectl, client-go and raw HTTP. Each refusal has the right status and the
// right message and leaves one line in the audit log of the server that was asked,
// and none at the others. Controls are the same for who may. `make doors-test` runs
// it and prints what was tried and what was shut.
package doors
