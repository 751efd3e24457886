// Package vm holds the tests that need a machine where cgroup v2 is alone:
// run.sh boots one under emulation and runs them there, against `clusterd dev`.
// Everywhere else they are skipped.
package vm
