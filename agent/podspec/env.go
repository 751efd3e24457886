package podspec

import (
	"context"
	"fmt"
	"net/netip"
	"sort"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/clusterd/clusterd/agent/internal/fieldref"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/volume"
)

// envInput is what the environment of a container is made of.
type envInput struct {
	pod         *v1.Pod
	container   *v1.Container
	image       []string // the image's own KEY=VALUE lines
	objects     volume.Objects
	services    Services // nil: no variables of Services
	podIPs      []netip.Addr
	nodeIPs     []netip.Addr
	nodeName    string
	hostname    string // the pod's own name, as the kernel tells it
	allocatable v1.ResourceList
	tty         bool
	// volumeDir is where a volume of the pod is, for fileKeyRef.
	volumeDir func(volume string) (string, error)
}

// environ is an ordered set of variables: a later one replaces an earlier one
// of the same name and keeps its place.
type environ struct {
	order []string
	value map[string]string
	bytes int // of all, as the kernel counts them
}

// set refuses what no program could be started with.
func (e *environ) set(k, v string) error {
	n := len(k) + 1 + len(v) + 1
	if n > maxString {
		return fmt.Errorf("environment variable %.64q has %d bytes, Linux takes %d of one variable with its name: use a volume instead", k, n-1, maxString-1)
	}
	old, have := e.value[k]
	if have {
		n = len(v) - len(old)
	}
	if e.bytes+n > maxStrings {
		return fmt.Errorf("environment: with the variable %.64q it has more than %d bytes, which is all that Linux takes of arguments and environment together: use volumes instead", k, maxStrings)
	}
	if !have {
		e.order = append(e.order, k)
	}
	e.value[k], e.bytes = v, e.bytes+n
	return nil
}

// What a program can be started with, by execve(2): a string of the arguments or
// the environment, and all of them, with the 0 byte at the end of each.
const (
	maxString  = 128 << 10
	maxStrings = 2 << 20
)

// Startable says what is wrong with a container's arguments and environment if no
// program can be started with them.
func Startable(c *api.Container) error {
	total := 0
	for what, list := range map[string][]string{"command and args": c.Args, "environment": c.Env} {
		for i, s := range list {
			if len(s)+1 > maxString {
				return createError{fmt.Errorf("%s: string %d (%.64q…) has %d bytes, Linux takes %d: use a volume instead", what, i+1, s, len(s), maxString-1)}
			}
			total += len(s) + 1
		}
	}
	if total > maxStrings {
		return createError{fmt.Errorf("command, args and environment have %d bytes, Linux takes %d: use volumes instead", total, maxStrings)}
	}
	return nil
}

func (e *environ) lines() []string {
	out := make([]string, 0, len(e.order))
	for _, k := range e.order {
		out = append(out, k+"="+e.value[k])
	}
	return out
}

// buildEnv resolves the environment: the image's, then Services, envFrom, env, in
// which $(VAR) names any variable set before (not the image's own). vars is
// the part that command and args may name.
func buildEnv(ctx context.Context, in envInput) (lines []string, vars map[string]string, err error) {
	base := &environ{value: map[string]string{}}
	own := &environ{value: map[string]string{}}
	for _, l := range in.image {
		k, v, _ := strings.Cut(l, "=")
		if err := base.set(k, v); err != nil {
			return nil, nil, createError{fmt.Errorf("image %q: %w", in.container.Image, err)}
		}
	}
	more := [][2]string{{"HOSTNAME", in.hostname}}
	if _, ok := base.value["PATH"]; !ok {
		more = append(more, [2]string{"PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
	}
	if in.tty {
		more = append(more, [2]string{"TERM", "xterm"})
	}
	for _, v := range more {
		if err := base.set(v[0], v[1]); err != nil {
			return nil, nil, err
		}
	}
	links, err := serviceEnv(ctx, in.pod, in.services)
	if err != nil {
		return nil, nil, err
	}
	for _, v := range links {
		if err := own.set(v[0], v[1]); err != nil {
			return nil, nil, err
		}
	}
	for _, f := range in.container.EnvFrom {
		if err := envFrom(ctx, in, f, own); err != nil {
			return nil, nil, err
		}
	}
	for _, e := range in.container.Env {
		v, ok, err := envValue(ctx, in, e, own.value)
		if err != nil {
			return nil, nil, err
		}
		if !ok {
			continue
		}
		if err := own.set(e.Name, v); err != nil {
			return nil, nil, err
		}
	}
	for _, k := range own.order {
		if err := base.set(k, own.value[k]); err != nil {
			return nil, nil, err
		}
	}
	return base.lines(), own.value, nil
}

func envFrom(ctx context.Context, in envInput, f v1.EnvFromSource, into *environ) error {
	data := map[string]string{}
	switch {
	case f.ConfigMapRef != nil:
		o, err := in.objects.ConfigMap(ctx, in.pod.Namespace, f.ConfigMapRef.Name)
		if err != nil {
			if apierrors.IsNotFound(err) && isTrue(f.ConfigMapRef.Optional) {
				return nil
			}
			return err
		}
		data = o.Data
	case f.SecretRef != nil:
		o, err := in.objects.Secret(ctx, in.pod.Namespace, f.SecretRef.Name)
		if err != nil {
			if apierrors.IsNotFound(err) && isTrue(f.SecretRef.Optional) {
				return nil
			}
			return err
		}
		for k, v := range o.Data {
			data[k] = string(v)
		}
	}
	keys := make([]string, 0, len(data))
	for k := range data {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for _, k := range keys {
		if name := f.Prefix + k; !strings.ContainsAny(name, "=\x00") {
			if err := into.set(name, data[k]); err != nil {
				return fmt.Errorf("envFrom: %w", err)
			}
		}
	}
	return nil
}

// envValue resolves one variable; ok is false for one that is left out.
func envValue(ctx context.Context, in envInput, e v1.EnvVar, vars map[string]string) (value string, ok bool, err error) {
	if e.ValueFrom == nil {
		return Expand(e.Value, vars), true, nil
	}
	src := e.ValueFrom
	switch {
	case src.FieldRef != nil:
		v, err := fieldValue(in, src.FieldRef.FieldPath)
		return v, true, err
	case src.ResourceFieldRef != nil:
		v, err := fieldref.Resource(in.pod, src.ResourceFieldRef, in.container.Name, in.allocatable)
		return v, true, err
	case src.ConfigMapKeyRef != nil:
		r := src.ConfigMapKeyRef
		o, err := in.objects.ConfigMap(ctx, in.pod.Namespace, r.Name)
		if err != nil {
			if apierrors.IsNotFound(err) && isTrue(r.Optional) {
				return "", false, nil
			}
			return "", false, err
		}
		v, have := o.Data[r.Key]
		if !have && !isTrue(r.Optional) {
			return "", false, fmt.Errorf("couldn't find key %v in ConfigMap %v/%v", r.Key, in.pod.Namespace, r.Name)
		}
		return v, have, nil
	case src.SecretKeyRef != nil:
		r := src.SecretKeyRef
		o, err := in.objects.Secret(ctx, in.pod.Namespace, r.Name)
		if err != nil {
			if apierrors.IsNotFound(err) && isTrue(r.Optional) {
				return "", false, nil
			}
			return "", false, err
		}
		v, have := o.Data[r.Key]
		if !have && !isTrue(r.Optional) {
			return "", false, fmt.Errorf("couldn't find key %v in Secret %v/%v", r.Key, in.pod.Namespace, r.Name)
		}
		return string(v), have, nil
	case src.FileKeyRef != nil:
		return fileValue(in, src.FileKeyRef)
	}
	return "", false, fmt.Errorf("environment variable %s: source is not supported", e.Name)
}

// fieldValue reads a field for an environment variable.
func fieldValue(in envInput, path string) (string, error) {
	if v, ok := fieldref.Metadata(in.pod, path); ok {
		return v, nil
	}
	switch path {
	case "spec.nodeName":
		return in.pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return in.pod.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return list(in.nodeIPs[:min(1, len(in.nodeIPs))]), nil
	case "status.hostIPs":
		return list(in.nodeIPs), nil
	case "status.podIP":
		return list(in.podIPs[:min(1, len(in.podIPs))]), nil
	case "status.podIPs":
		return list(in.podIPs), nil
	}
	return "", fmt.Errorf("unsupported fieldPath: %s", path)
}

// list joins addresses by commas.
func list(addrs []netip.Addr) string {
	texts := make([]string, len(addrs))
	for i, a := range addrs {
		texts[i] = a.String()
	}
	return strings.Join(texts, ",")
}

// Expand replaces $(NAME) by the variable's value. A name that is not set
// stays as it is written; $$ is a plain $. What becomes longer than any string
// that a program can be started with is cut off behind that length.
func Expand(s string, vars map[string]string) string {
	if !strings.Contains(s, "$") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s) && b.Len() <= maxString; i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		switch s[i+1] {
		case '$':
			b.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(s[i:], ')')
			if end < 0 {
				b.WriteString("$(")
				i++
				continue
			}
			if v, ok := vars[s[i+2:i+end]]; ok {
				b.WriteString(v)
			} else {
				b.WriteString(s[i : i+end+1])
			}
			i += end
		default:
			b.WriteByte('$')
		}
	}
	return b.String()
}

func isTrue(b *bool) bool { return b != nil && *b }

// hostname is what the pod calls itself.
func hostname(pod *v1.Pod, nodeName string) string {
	if h := pod.Spec.HostnameOverride; h != nil && *h != "" {
		return *h
	}
	if pod.Spec.HostNetwork {
		return nodeName
	}
	h := pod.Name
	if pod.Spec.Hostname != "" {
		h = pod.Spec.Hostname
	}
	if len(h) > 63 {
		h = strings.TrimRight(h[:63], "-.")
	}
	return h
}

// maxHostname is HOST_NAME_MAX of Linux.
const maxHostname = 64

// Hostname is what the kernel calls the pod: its host name, or its full name if
// it asks for that.
func Hostname(pod *v1.Pod, nodeName, domain string) (string, error) {
	f := fqdn(pod, domain)
	if f == "" || !isTrue(pod.Spec.SetHostnameAsFQDN) {
		return hostname(pod, nodeName), nil
	}
	if len(f) > maxHostname {
		return "", fmt.Errorf("setHostnameAsFQDN: the name %q has %d characters, the kernel takes %d: shorten hostname, subdomain or namespace", f, len(f), maxHostname)
	}
	return f, nil
}

// fqdn is the pod's full name when it has a subdomain, else "". A host name
// that overrides stands alone (PodSpec.hostnameOverride).
func fqdn(pod *v1.Pod, domain string) string {
	if pod.Spec.Subdomain == "" || pod.Spec.HostNetwork || pod.Spec.HostnameOverride != nil && *pod.Spec.HostnameOverride != "" {
		return ""
	}
	return hostname(pod, "") + "." + pod.Spec.Subdomain + "." + pod.Namespace + ".svc." + domain
}
