// Package podstate says what comes next for a pod of this node, and what its
// status says. All of it is computed from values: what is desired (the API's
// object), what is observed (Observed, made by Seed after a restart), the node
// and the time.
//
//	Admit        may the pod run here?
//	Plan         which steps are next?
//	BuildStatus  what does the API report?
//
// Nothing here opens a file, asks an API or waits; agent/pod does, and changes
// what is observed.
package podstate
