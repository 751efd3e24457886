// Package apps describes the kinds of the apps API group.
package apps
