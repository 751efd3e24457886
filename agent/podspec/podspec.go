// Package podspec translates a pod of the API into what podmon is asked for:
// command and environment, users, capabilities and profiles, signals, mounts,
// and the files that the node writes for it (/etc/hosts, /etc/resolv.conf, the
// termination message). What it cannot translate is refused with an error that
// names the field.
package podspec
