// Package kubectl tests what users see through the unmodified kubectl: one
// cluster of one node for the whole package, one namespace a test. Where no
// kubectl is installed, clusterctl, built on the same packages, stands in.
package kubectl
