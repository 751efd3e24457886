// Package flowcontrol describes the kinds of the flowcontrol.apiserver.k8s.io
// API group: who is served before whom when a server has more requests than it
// can work on (KEP 1040).
package flowcontrol
