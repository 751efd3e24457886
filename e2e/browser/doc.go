// Package browser looks at a cluster's web page with a real browser: headless
// Chromium against the five nodes of the demo and real pods. `make ui-test` makes the cluster
// and says where it is; with the tag "chromium" alone is the driver compiled.
package browser
