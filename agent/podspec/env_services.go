package podspec

import (
	"context"
	"fmt"
	"net"
	"sort"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Services lists the Services of a namespace as last known. Until the API's
// list has been seen it waits for a moment, and fails then. It may be called
// concurrently, and what it returns is read-only.
type Services func(ctx context.Context, namespace string) ([]*v1.Service, error)

// apiService is the Service that every pod has variables of.
const (
	apiServiceNamespace = v1.NamespaceDefault
	apiServiceName      = "kubernetes"
)

// serviceEnv are the variables by which a pod finds the Services that were
// there before it: those of its namespace if it wants links to them, and the
// API's in any case. The API's Services of one name, if there are two, are
// those of the pod's own namespace.
func serviceEnv(ctx context.Context, pod *v1.Pod, services Services) ([][2]string, error) {
	if services == nil {
		return nil, nil
	}
	byName := map[string]*v1.Service{}
	if pod.Namespace != apiServiceNamespace {
		all, err := services(ctx, apiServiceNamespace)
		if err != nil {
			return nil, err
		}
		for _, s := range all {
			if s.Name == apiServiceName {
				byName[s.Name] = s
			}
		}
	}
	own, err := services(ctx, pod.Namespace)
	if err != nil {
		return nil, err
	}
	links := pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks
	for _, s := range own {
		if links || pod.Namespace == apiServiceNamespace && s.Name == apiServiceName {
			byName[s.Name] = s
		}
	}
	names := make([]string, 0, len(byName))
	for name, s := range byName {
		if ip := s.Spec.ClusterIP; ip != "" && ip != v1.ClusterIPNone && len(s.Spec.Ports) > 0 {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	var out [][2]string
	for _, name := range names {
		out = append(out, linkVars(byName[name])...)
	}
	return out, nil
}

// linkVars are the variables of one Service: those of Kubernetes, and those
// that Docker's links once had.
func linkVars(s *v1.Service) [][2]string {
	prefix, ip := envName(s.Name), s.Spec.ClusterIP
	var out [][2]string
	add := func(name, value string) { out = append(out, [2]string{prefix + name, value}) }
	add("_SERVICE_HOST", ip)
	add("_SERVICE_PORT", strconv.Itoa(int(s.Spec.Ports[0].Port)))
	for _, p := range s.Spec.Ports {
		if p.Name != "" {
			add("_SERVICE_PORT_"+envName(p.Name), strconv.Itoa(int(p.Port)))
		}
	}
	for i, p := range s.Spec.Ports {
		port, protocol := strconv.Itoa(int(p.Port)), "TCP"
		if p.Protocol != "" {
			protocol = string(p.Protocol)
		}
		url := strings.ToLower(protocol) + "://" + net.JoinHostPort(ip, port)
		if i == 0 {
			add("_PORT", url)
		}
		at := fmt.Sprintf("_PORT_%s_%s", port, protocol)
		add(at, url)
		add(at+"_PROTO", strings.ToLower(protocol))
		add(at+"_PORT", port)
		add(at+"_ADDR", ip)
	}
	return out
}

func envName(s string) string { return strings.ToUpper(strings.ReplaceAll(s, "-", "_")) }
