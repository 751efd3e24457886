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
