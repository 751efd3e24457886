// Package sysctl sets kernel switches of the calling thread's network
// namespace.
package sysctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// Router is what a node needs to pass its pods' packets on.
//
// send_redirects is off because a router with one leg would tell pods of
// shorter ways that only hold for one packet filter's state.
func Router() map[string]string {
	return map[string]string{
		"net.ipv4.ip_forward":                  "1",
		"net.ipv4.conf.all.send_redirects":     "0",
		"net.ipv4.conf.default.send_redirects": "0",
	}
}

// Router6 is Router for packets of IPv6. Interfaces on which the machine hears
// of routers (accept_ra 1) have to go on with it, as a router itself does not
// unless it is set to: see KeepRouters.
func Router6() map[string]string {
	return map[string]string{"net.ipv6.conf.all.forwarding": "1"}
}

// Host6 is what an interface of pods is to have, on the node and inside: IPv6,
// and no messages of others about routers and routes. iface may be "default": those
// that will be made.
func Host6(iface string) map[string]string {
	at := "net.ipv6.conf." + iface + "."
	return map[string]string{at + "disable_ipv6": "0", at + "accept_ra": "0", at + "accept_redirects": "0"}
}

// KeepRouters makes the interfaces that accept router advertisements do so though the machine
// is one: without that it would lose the default route that a router advertised once that
// expires. A machine that passes packets of IPv6 on already is left as it is. Call
// it before Router6 is set.
func KeepRouters() error {
	const dir = "/proc/sys/net/ipv6/conf"
	if is, err := Get("net.ipv6.conf.all.forwarding"); err == nil && is == "1" {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("IPv6 of this machine (is it switched off, by ipv6.disable=1?): %w", err)
	}
	var errs []error
	for _, e := range entries {
		if e.Name() == "all" || e.Name() == "default" {
			continue
		}
		path := filepath.Join(dir, e.Name(), "accept_ra")
		have, err := os.ReadFile(path)
		if err == nil && strings.TrimSpace(string(have)) == "1" {
			err = os.WriteFile(path, []byte("2"), 0o644) //nolint:forbidigo // the kernel's setting, not a file
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it went in between
			errs = append(errs, fmt.Errorf("set accept_ra of %s: %w", e.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// Bridge keeps br_netfilter, where the kernel has it, off: it would hand frames
// whose destination was translated to the port of the new one, past the router
// that packets between isolated ports need.
func Bridge() map[string]string {
	return map[string]string{
		"net.bridge.bridge-nf-call-iptables":  "0",
		"net.bridge.bridge-nf-call-ip6tables": "0",
	}
}

// SetPresent is Set for switches that a kernel may be without.
func SetPresent(values map[string]string) error {
	present := map[string]string{}
	for k, v := range values {
		if _, err := Get(k); !errors.Is(err, fs.ErrNotExist) {
			present[k] = v
		}
	}
	return Set(present)
}

// Set writes each value that differs, in the order of the keys, and returns
// all errors together.
func Set(values map[string]string) error {
	keys := make([]string, 0, len(values))
	for k := range values {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	var errs []error
	for _, k := range keys {
		if err := set(k, values[k]); err != nil {
			errs = append(errs, fmt.Errorf("set %s=%s: %w", k, values[k], err))
		}
	}
	return errors.Join(errs...)
}

// Get reads one value.
func Get(key string) (string, error) {
	path, err := file(key)
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(b)), nil
}

func set(key, value string) error {
	if have, err := Get(key); err != nil {
		return err
	} else if have == value {
		return nil // also where /proc/sys is read-only
	}
	path, err := file(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(value), 0o644) //nolint:forbidigo // a switch of the kernel
}

// file is the key's place under /proc/sys.
func file(key string) (string, error) {
	if !strings.HasPrefix(key, "net.") || strings.ContainsAny(key, "/\x00") || strings.Contains(key, "..") {
		return "", fmt.Errorf("not a key below net: %q", key)
	}
	return filepath.Join("/proc/sys", strings.ReplaceAll(key, ".", "/")), nil
}
