package podspec

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// What a pod's resolv.conf may hold: resolvers of today read more search
// domains than those of resolv.conf(5), and three name servers as ever
// (KEP-2595).
const (
	maxNameservers = 3
	maxSearches    = 32
	maxSearchChars = 2048 // of the line, spaces included
	maxSearchName  = 255  // of one domain; glibc refuses the whole file beyond it
)

// resolv is the parts of a resolv.conf.
type resolv struct {
	servers, search, options []string
}

func parseResolv(text string) resolv {
	var r resolv
	for l := range strings.Lines(text) {
		f := strings.Fields(l)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") || strings.HasPrefix(f[0], ";") {
			continue
		}
		switch f[0] {
		case "nameserver":
			if len(f) > 1 {
				r.servers = append(r.servers, f[1])
			}
		case "domain", "search": // the last of them counts, resolv.conf(5)
			r.search = searches(f[1:])
		case "options":
			r.options = append(r.options, f[1:]...)
		}
	}
	return r
}

// searches are the domains without the root, which systemd writes for "none" and
// musl fails at, and without the dot that an absolute name ends with. What a pod
// itself asks for stays as it is written.
func searches(list []string) []string {
	var out []string
	for _, s := range list {
		if s = strings.TrimSuffix(s, "."); s != "" {
			out = append(out, s)
		}
	}
	return out
}

func (r resolv) String() string {
	var b strings.Builder
	if len(r.search) > 0 {
		b.WriteString("search " + strings.Join(r.search, " ") + "\n")
	}
	for _, s := range r.servers {
		b.WriteString("nameserver " + s + "\n")
	}
	if len(r.options) > 0 {
		b.WriteString("options " + strings.Join(r.options, " ") + "\n")
	}
	return b.String()
}

// Files of the host's resolver.
const (
	etcResolv     = "/etc/resolv.conf"
	systemdResolv = "/run/systemd/resolve/resolv.conf"
)

// hostResolv reads the host's resolv.conf; path "": the one in use.
func hostResolv(path string) (resolv, error) {
	if path != "" {
		b, err := os.ReadFile(path)
		return parseResolv(string(b)), err
	}
	return resolvInUse(etcResolv, systemdResolv)
}

// resolvInUse reads etc, a file that may be missing. If all servers in it are
// addresses of the machine itself, as systemd-resolved's 127.0.0.53, no pod
// can reach them: then behind, which has the servers that are asked in the
// end, is read if it is there.
func resolvInUse(etc, behind string) (resolv, error) {
	b, err := os.ReadFile(etc)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return resolv{}, err
	}
	r := parseResolv(string(b))
	if slices.ContainsFunc(r.servers, func(s string) bool { return !loopback(s) }) {
		return r, nil
	}
	b, err = os.ReadFile(behind)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	return parseResolv(string(b)), err
}

// HostNameservers are the name servers of the host; path as in Config.ResolvConf.
func HostNameservers(path string) ([]string, error) {
	r, err := hostResolv(path)
	return r.servers, err
}

func loopback(server string) bool {
	a, err := netip.ParseAddr(server)
	return err == nil && a.IsLoopback()
}

// podResolv is a pod's /etc/resolv.conf, by its dnsPolicy and dnsConfig. warn
// is called for what the pod asks for and does not get.
func podResolv(pod *v1.Pod, host resolv, dns []netip.Addr, domain string, warn func(reason, message string)) resolv {
	policy := pod.Spec.DNSPolicy
	if policy == "" {
		policy = v1.DNSClusterFirst
	}
	cluster := policy == v1.DNSClusterFirstWithHostNet || policy == v1.DNSClusterFirst && !pod.Spec.HostNetwork
	if cluster && len(dns) == 0 {
		// ClusterFirst is what every pod has that says nothing: on a node without
		// cluster DNS a warning for each pod would be noise.
		if policy == v1.DNSClusterFirstWithHostNet {
			warn("MissingClusterDNS", fmt.Sprintf(
				"The node knows no cluster DNS (--cluster-dns) and cannot create the pod using %q policy. Falling back to %q policy.", policy, v1.DNSDefault))
		}
		cluster = false
	}
	var r resolv
	switch {
	case policy == v1.DNSNone:
	case cluster:
		for _, a := range dns {
			r.servers = append(r.servers, a.String())
		}
		r.search = append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, host.search...)
		r.options = []string{"ndots:5"}
	default:
		r = resolv{slices.Clone(host.servers), slices.Clone(host.search), slices.Clone(host.options)}
		if !pod.Spec.HostNetwork {
			r.servers = reached(host.servers, dns, warn)
		}
	}
	if c := pod.Spec.DNSConfig; c != nil {
		r.servers = append(r.servers, c.Nameservers...)
		r.search = append(r.search, c.Searches...)
		for _, o := range c.Options {
			r.setOption(o)
		}
	}
	r.servers, r.search, r.options = unique(r.servers), unique(r.search), unique(r.options)
	r.bound(warn)
	return r
}

// reached are the host's servers without those at link-local addresses, as routers of
// IPv6 announce them: they are on the host's link, and pods are on another. Where there is
// no other server, the cluster's ask them.
func reached(servers []string, dns []netip.Addr, warn func(reason, message string)) []string {
	out := slices.DeleteFunc(slices.Clone(servers), func(s string) bool {
		a, err := netip.ParseAddr(s)
		return err == nil && a.Is6() && a.IsLinkLocalUnicast()
	})
	if len(out) > 0 || len(servers) == 0 {
		return out
	}
	for _, a := range dns {
		out = append(out, a.String())
	}
	if len(out) == 0 {
		warn("DNSConfigForming", "The node's name servers have link-local addresses, which pods do not reach, and there is no cluster DNS; the pod has no name server: "+strings.Join(servers, " "))
	}
	return out
}

// setOption adds an option, in the place of one of that name.
func (r *resolv) setOption(o v1.PodDNSConfigOption) {
	r.options = slices.DeleteFunc(r.options, func(have string) bool {
		name, _, _ := strings.Cut(have, ":")
		return name == o.Name
	})
	option := o.Name
	if o.Value != nil && *o.Value != "" {
		option += ":" + *o.Value
	}
	r.options = append(r.options, option)
}

// bound leaves out what resolvers would not read.
func (r *resolv) bound(warn func(reason, message string)) {
	kept, chars := []string{}, -1 // no space before the first
	for _, s := range r.search {
		if len(kept) == maxSearches || chars+1+len(s) > maxSearchChars {
			break
		}
		if len(s) <= maxSearchName {
			kept = append(kept, s)
			chars += 1 + len(s)
		}
	}
	if len(kept) < len(r.search) {
		r.search = kept
		warn("DNSConfigForming", "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: "+strings.Join(kept, " "))
	}
	if len(r.servers) > maxNameservers {
		r.servers = r.servers[:maxNameservers]
		warn("DNSConfigForming", "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: "+strings.Join(r.servers, " "))
	}
}

func unique(in []string) []string {
	var out []string
	for _, s := range in {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
