package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXEndpoints looks at what stands behind a Service, and asks it from a pod.
func TestE2EXEndpoints(t *testing.T) {
	t.Parallel()
	k := start(t, "behind")
	k.apply(simple("asker", "sleep"))
	// Two servers with ports of their own, and one with two.
	k.apply(server("one", "in: both, is: one", "8080", "from-one") + "---\n" + server("two", "in: both, is: two", "9090", "from-two"))
	for _, name := range []string{"asker", "one", "two"} {
		k.ready(name)
	}
	k.sub("the API's own", apiEndpoints)
	k.sub("names of a pod's own", ownNames)
	k.sub("pods", podEndpoints)
	k.sub("nobody", noEndpoints)
	k.sub("named ports", namedPorts)
	k.sub("made by hand", handMade)
	k.sub("mirrored", mirrored)
	k.sub("Endpoints through a watch", endpointsLife)
	k.sub("another type", otherTypes)
	k.sub("one backend for a client", nodePortAffinity)
}

// server is a pod that serves on a port, which is named web-PORT, with a message.
func server(name, labels, port, message string) string {
	return strings.Replace(strings.Replace(simple(name, "serve"), "app: "+name, labels, 1), "args:",
		fmt.Sprintf("ports: [{name: web-%[1]s, containerPort: %[1]s}], env: [{name: PORT, value: %[1]q}, {name: MESSAGE, value: %[2]q}], args:", port, message), 1)
}

// service is a Service; spec is its spec in braces.
func service(name, spec string) string {
	return "apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec: " + spec + "\n---\n"
}

// fetches waits until the pages of a URL, asked for from a pod, hold all words.
func (k *kit) fetches(url string, words ...string) {
	k.Helper()
	missing := slices.Clone(words)
	k.eventually(url+" answers", func(context.Context) error {
		for range 8 {
			out, errs, code := k.in("", "exec", "asker", "--", "/hello", "fetch", url)
			if code != 0 {
				return errors.New(errs)
			}
			missing = slices.DeleteFunc(missing, func(w string) bool { return strings.Contains(out, w) })
			if len(missing) == 0 {
				return nil
			}
		}
		return fmt.Errorf("not seen: %q", missing)
	})
}

// slicesOf are the EndpointSlices of a Service.
func (k *kit) slicesOf(ctx context.Context, service string) []discoveryv1.EndpointSlice {
	k.Helper()
	list, err := k.api.DiscoveryV1().EndpointSlices(k.ns).List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
	if err != nil {
		return nil
	}
	return list.Items
}

// behind waits until the EndpointSlices and the Endpoints of a Service have these
// addresses and ports, as ADDRESS:PORT.
func (k *kit) behind(service string, want ...string) {
	k.Helper()
	slices.Sort(want)
	k.eventually(fmt.Sprintf("%s has %q", service, want), func(ctx context.Context) error {
		var inSlices, inEndpoints []string
		for _, s := range k.slicesOf(ctx, service) {
			for _, e := range s.Endpoints {
				for _, p := range s.Ports {
					inSlices = append(inSlices, fmt.Sprintf("%s:%d", e.Addresses[0], *p.Port))
				}
			}
		}
		endpoints, err := k.api.CoreV1().Endpoints(k.ns).Get(ctx, service, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, s := range endpoints.Subsets {
			for _, a := range s.Addresses {
				for _, p := range s.Ports {
					inEndpoints = append(inEndpoints, fmt.Sprintf("%s:%d", a.IP, p.Port))
				}
			}
		}
		slices.Sort(inSlices)
		slices.Sort(inEndpoints)
		if !slices.Equal(inSlices, want) || !slices.Equal(inEndpoints, want) {
			return fmt.Errorf("slices have %q, Endpoints %q", inSlices, inEndpoints)
		}
		return nil
	})
}

// vanish deletes a Service and waits until nothing is left of it.
func (k *kit) vanish(service string) {
	k.Helper()
	k.ok("delete", "service", service)
	k.eventually("nothing is left of "+service, func(ctx context.Context) error {
		_, err := k.api.CoreV1().Endpoints(k.ns).Get(ctx, service, metav1.GetOptions{})
		if n := len(k.slicesOf(ctx, service)); n > 0 || !apierrors.IsNotFound(err) {
			return fmt.Errorf("%d slices, Endpoints: %v", n, err)
		}
		return nil
	})
}

func apiEndpoints(k *kit) {
	features.Conforms(k, 210)
	server, err := url.Parse(k.config.Host)
	k.must(err)
	at := netip.MustParseAddrPort(server.Host) // the one server of this cluster
	k.ns = "default"
	k.behind("kubernetes", at.String())
}

func ownNames(k *kit) {
	features.Conforms(k, 212)
	k.apply(simple("named", "sleep", "hostname: host", "subdomain: domain"))
	p := k.ready("named")
	hosts := k.exec("named", "main", "cat", "/etc/hosts")
	k.has(hosts, "# Kubernetes-managed hosts file.", p.Status.PodIP+"\thost.domain."+k.ns+".svc.cluster.local\thost")
	// No Service is named "domain": the file alone knows.
	for _, name := range []string{"host", "host.domain." + k.ns + ".svc.cluster.local"} {
		k.is(name, strings.TrimSpace(k.exec("named", "main", "lookup", "host", name)), p.Status.PodIP)
	}
	k.ok("delete", "pod", "named", "--wait=false")
}

func podEndpoints(k *kit) {
	features.Conforms(k, 220, 227, 254)
	k.apply(service("follows", "{selector: {in: crowd}, ports: [{port: 80, targetPort: 8080}]}"))
	k.behind("follows")
	var addresses []string
	for _, name := range []string{"crowd-1", "crowd-2"} {
		k.apply(server(name, "in: crowd", "8080", name))
		addresses = append(addresses, k.ready(name).Status.PodIP+":8080")
		k.behind("follows", slices.Clone(addresses)...)
	}
	k.fetches("http://follows/", "crowd-1", "crowd-2")
	for i, name := range []string{"crowd-1", "crowd-2"} {
		k.ok("delete", "pod", name)
		k.behind("follows", slices.Clone(addresses[i+1:])...)
	}
	k.vanish("follows")
}

func noEndpoints(k *kit) {
	features.Conforms(k, 221, 228)
	k.apply(service("empty", "{selector: {in: nobody}, ports: [{port: 80}]}"))
	k.eventually("an empty slice is there", func(ctx context.Context) error {
		if list := k.slicesOf(ctx, "empty"); len(list) != 1 || len(list[0].Endpoints) > 0 {
			return fmt.Errorf("%+v", list)
		}
		return nil
	})
	k.behind("empty")
	k.vanish("empty")
}

func namedPorts(k *kit) {
	features.Conforms(k, 256)
	one, two := k.pod("one").Status.PodIP, k.pod("two").Status.PodIP
	k.apply(service("ports", "{selector: {in: both}, ports: [{name: first, port: 80, targetPort: web-8080}, {name: second, port: 81, targetPort: web-9090}]}"))
	k.behind("ports", one+":8080", two+":9090")
	k.eventually("each port has the pod that has it", func(ctx context.Context) error {
		seen := map[string]string{}
		for _, s := range k.slicesOf(ctx, "ports") {
			for _, p := range s.Ports {
				for _, e := range s.Endpoints {
					seen[*p.Name] += e.Addresses[0]
				}
			}
		}
		if seen["first"] != one || seen["second"] != two {
			return fmt.Errorf("%v", seen)
		}
		return nil
	})
	k.fetches("http://ports:80/", "from-one")
	k.fetches("http://ports:81/", "from-two")
	// A pod that goes takes its port's endpoint with it, and no other's.
	k.ok("label", "pod", "one", "in-")
	k.behind("ports", two+":9090")
	k.ok("label", "pod", "one", "in=both")
	k.behind("ports", one+":8080", two+":9090")
	k.vanish("ports")
}

// slice is a hand-made EndpointSlice; ports are in brackets.
func slice(name, service, address, ports string) string {
	return fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s, labels: {kubernetes.io/service-name: %s}}\naddressType: IPv4\nendpoints: [{addresses: [%s], conditions: {ready: true}}]\nports: %s\n---\n", name, service, address, ports)
}

func handMade(k *kit) {
	one, two := k.pod("one").Status.PodIP, k.pod("two").Status.PodIP
	k.sub("addresses and ports of their own", func(k *kit) {
		features.Conforms(k, 222)
		k.apply(service("hand", "{ports: [{name: http, port: 80}]}") + slice("hand-1", "hand", one, "[{name: http, port: 8080}]") + slice("hand-2", "hand", two, "[{name: http, port: 9090}]"))
		k.fetches("http://hand/", "from-one", "from-two")
		k.ok("delete", "service/hand", "endpointslice/hand-1", "endpointslice/hand-2")
	})
	k.sub("two ports of one address", func(k *kit) {
		features.Conforms(k, 223)
		double := server("double", "is: double", "8080", "first of two")
		second := strings.Replace(server("second", "is: none", "9090", "second of two"), "name: main", "name: second", 1)
		k.apply(double + second[strings.Index(second, "  - {name: second"):])
		p := k.ready("double")
		k.apply(service("pair", "{ports: [{name: first, port: 80}, {name: second, port: 81}]}") + slice("pair-1", "pair", p.Status.PodIP, "[{name: first, port: 8080}, {name: second, port: 9090}]"))
		k.fetches("http://pair:80/", "first of two")
		k.fetches("http://pair:81/", "second of two")
		k.ok("delete", "service/pair", "endpointslice/pair-1")
		k.ok("delete", "pod", "double", "--wait=false")
	})
}

func endpoints(name, labels, address string, port int) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Endpoints\nmetadata: {name: %s, labels: {%s}}\nsubsets: [{addresses: [{ip: %s}], ports: [{name: http, port: %d}]}]\n", name, labels, address, port)
}

func mirrored(k *kit) {
	features.Conforms(k, 225)
	k.apply(service("mirror", "{ports: [{name: http, port: 80, targetPort: 8080}]}"))
	one, two := k.pod("one").Status.PodIP, k.pod("two").Status.PodIP
	shows := func(want ...string) {
		k.Helper()
		k.eventually(fmt.Sprintf("the mirror shows %q", want), func(ctx context.Context) error {
			var got []string
			for _, s := range k.slicesOf(ctx, "mirror") {
				if by := s.Labels[discoveryv1.LabelManagedBy]; by != "endpointslicemirroring-controller.k8s.io" {
					return fmt.Errorf("a slice of %q", by)
				}
				for _, e := range s.Endpoints {
					got = append(got, fmt.Sprintf("%s:%d", e.Addresses[0], *s.Ports[0].Port))
				}
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("%q", got)
			}
			return nil
		})
	}
	k.apply(endpoints("mirror", "", one, 8080))
	shows(one + ":8080")
	k.fetches("http://mirror/", "from-one")
	k.apply(endpoints("mirror", "", two, 9090))
	shows(two + ":9090")
	k.fetches("http://mirror/", "from-two")
	k.ok("delete", "endpoints", "mirror")
	shows()
	k.ok("delete", "service", "mirror")
}

func endpointsLife(k *kit) {
	features.Conforms(k, 226)
	api, ctx := k.api.CoreV1().Endpoints(k.ns), k.Context()
	w, err := api.Watch(ctx, metav1.ListOptions{LabelSelector: "life=endpoints"})
	k.must(err)
	defer w.Stop()
	sees := func(kind watch.EventType, words ...string) {
		k.Helper()
		select {
		case e := <-w.ResultChan():
			b, err := json.Marshal(e.Object)
			k.must(err)
			k.is("event", string(e.Type), string(kind))
			k.has(string(b), words...)
		case <-time.After(testTimeout):
			k.Fatalf("no event came, want %s", kind)
		}
	}
	k.okIn(endpoints("by-hand", "life: endpoints", "192.0.2.7", 80), "create", "-f", "-")
	sees(watch.Added, `"ip":"192.0.2.7"`, `"port":80`)
	k.ok("label", "endpoints", "by-hand", "more=yes")
	sees(watch.Modified, `"more":"yes"`)
	k.ok("patch", "endpoints", "by-hand", "--type=merge", "-p", `{"subsets":[{"addresses":[{"ip":"192.0.2.8"}],"ports":[{"name":"http","port":8080}]}]}`)
	sees(watch.Modified, `"ip":"192.0.2.8"`, `"port":8080`)
	k.must(api.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "life=endpoints"}))
	sees(watch.Deleted, "by-hand")
}

func otherTypes(k *kit) {
	alias := "one-behind." + k.ns + ".svc.cluster.local"
	k.apply(service("one-behind", "{selector: {is: one}, ports: [{port: 80, targetPort: 8080}]}"))
	named := func(name string) {
		k.Helper()
		k.eventually(name+" is an alias", func(context.Context) error {
			out, errs, code := k.in("", "exec", "asker", "--", "/hello", "lookup", "cname", name+"."+k.ns+".svc.cluster.local")
			if code != 0 || strings.TrimSpace(out) != alias+"." {
				return errors.New(out + errs)
			}
			return nil
		})
		k.is("the address of "+name, k.field("service/"+name, "{.spec.clusterIP}{.spec.clusterIPs}"), "")
		k.fetches("http://"+name+"/", "from-one")
	}
	external := fmt.Sprintf(`{"spec":{"type":"ExternalName","externalName":%q}}`, alias)
	internal := `{"spec":{"type":"%s","externalName":null,"selector":{"is":"two"},"ports":[{"port":80,"targetPort":9090}]}}`
	node := k.pod("asker").Status.HostIP
	k.sub("from a ClusterIP to a name and back", func(k *kit) {
		features.Conforms(k, 242, 243)
		k.apply(service("turns", "{selector: {is: two}, ports: [{port: 80, targetPort: 9090}]}"))
		k.fetches("http://turns/", "from-two")
		k.ok("patch", "service", "turns", "-p", external)
		named("turns")
		k.ok("patch", "service", "turns", "-p", fmt.Sprintf(internal, "ClusterIP"))
		k.fetches("http://"+k.field("service/turns", "{.spec.clusterIP}")+"/", "from-two")
		k.fetches("http://turns/", "from-two")
		k.ok("delete", "service", "turns")
	})
	k.sub("from a name to a port of the node and back", func(k *kit) {
		features.Conforms(k, 244, 245)
		k.apply(service("moves", "{type: ExternalName, externalName: "+alias+"}"))
		named("moves")
		k.ok("patch", "service", "moves", "-p", fmt.Sprintf(internal, "NodePort"))
		port := k.field("service/moves", "{.spec.ports[0].nodePort}")
		k.fetches("http://"+k.field("service/moves", "{.spec.clusterIP}")+"/", "from-two")
		k.fetches("http://"+node+":"+port+"/", "from-two")
		k.fetches("http://moves/", "from-two")
		k.ok("patch", "service", "moves", "-p", external)
		named("moves")
		k.is("the port", k.field("service/moves", "{.spec.ports[0].nodePort}"), "")
		// It is free again.
		k.eventually("another takes the port", func(context.Context) error {
			_, errs, code := k.in(service("takes", "{type: NodePort, selector: {is: one}, ports: [{port: 80, targetPort: 8080, nodePort: "+port+"}]}"), "create", "-f", "-")
			return complaint(code, errs)
		})
		k.fetches("http://"+node+":"+port+"/", "from-one")
		k.ok("delete", "service", "moves", "takes", "one-behind")
	})
}

func nodePortAffinity(k *kit) {
	features.Conforms(k, 247, 252)
	k.apply(server("three", "in: sticky", "8080", "from-three") + "---\n" + server("four", "in: sticky", "8080", "from-four"))
	k.ready("three")
	k.ready("four")
	node := k.pod("asker").Status.HostIP
	sticks := func(url string) {
		k.Helper()
		k.eventually("one pod answers", func(context.Context) error {
			seen := map[string]bool{}
			for range 12 {
				out, errs, code := k.in("", "exec", "asker", "--", "/hello", "fetch", url)
				if code != 0 {
					return errors.New(errs)
				}
				seen[strings.SplitN(out, "\n", 2)[0]] = true
			}
			if len(seen) != 1 {
				return fmt.Errorf("%v", seen)
			}
			return nil
		})
	}
	spec := func(affinity string) string {
		return "{type: NodePort, sessionAffinity: " + affinity + ", selector: {in: sticky}, ports: [{port: 80, targetPort: 8080}]}"
	}
	k.apply(service("sticky", spec("ClientIP")))
	url := "http://" + node + ":" + k.field("service/sticky", "{.spec.ports[0].nodePort}") + "/"
	k.fetches(url)
	sticks(url)
	k.apply(service("switch", spec("None")))
	url = "http://" + node + ":" + k.field("service/switch", "{.spec.ports[0].nodePort}") + "/"
	k.fetches(url, "from-three", "from-four")
	k.ok("patch", "service", "switch", "-p", `{"spec":{"sessionAffinity":"ClientIP"}}`)
	sticks(url)
	k.ok("patch", "service", "switch", "-p", `{"spec":{"sessionAffinity":"None"}}`)
	k.fetches(url, "from-three", "from-four")
	k.ok("delete", "service", "sticky", "switch")
	k.ok("delete", "pod", "three", "four", "--wait=false")
}
