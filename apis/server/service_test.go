package server_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

func service(name string, change func(*corev1.ServiceSpec)) *corev1.Service {
	s := &corev1.Service{ObjectMeta: meta(name), Spec: corev1.ServiceSpec{
		Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Port: 80}},
	}}
	if change != nil {
		change(&s.Spec)
	}
	return s
}

func TestClusterAddresses(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) { c.ServiceCIDR = "10.96.0.0/29" }) // .1 to .6
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	create := func(name string, change func(*corev1.ServiceSpec)) (*corev1.Service, error) {
		return services.Create(ctx, service(name, change), metav1.CreateOptions{})
	}
	at := func(address string) func(*corev1.ServiceSpec) {
		return func(spec *corev1.ServiceSpec) { spec.ClusterIP = address }
	}

	chosen := must[*corev1.Service](t)(create("chosen", at("10.96.0.3")))
	if chosen.Spec.ClusterIP != "10.96.0.3" || *chosen.Spec.IPFamilyPolicy != corev1.IPFamilyPolicySingleStack || len(chosen.Spec.IPFamilies) != 1 {
		t.Errorf("chosen: %+v", chosen.Spec)
	}
	for address, want := range map[string]string{
		"10.96.0.3": "provided IP is already allocated",
		"10.97.0.1": "provided IP is not in the valid range: the range of valid IPs is 10.96.0.0/29",
		"10.96.0.0": "provided IP is not in the valid range",
		"10.96.0.7": "provided IP is not in the valid range",
		"10.96.0":   "must be a valid IP address",
	} {
		if _, err := create("bad", at(address)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want Invalid: %s", address, err, want)
		}
	}
	if headless := must[*corev1.Service](t)(create("headless", at("None"))); headless.Spec.ClusterIP != "None" {
		t.Errorf("headless: %s", headless.Spec.ClusterIP)
	}
	external := must[*corev1.Service](t)(create("external", func(spec *corev1.ServiceSpec) {
		*spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.com"}
	}))
	if external.Spec.ClusterIP != "" {
		t.Errorf("external: %s", external.Spec.ClusterIP)
	}
	must[*corev1.Service](t)(services.Create(ctx, service("ghost", nil), metav1.CreateOptions{DryRun: []string{"All"}}))

	seen := map[string]bool{"10.96.0.3": true}
	for i := range 5 {
		any := must[*corev1.Service](t)(create(fmt.Sprint("any-", i), nil))
		if address, err := netip.ParseAddr(any.Spec.ClusterIP); err != nil || seen[any.Spec.ClusterIP] || !netip.MustParsePrefix("10.96.0.0/29").Contains(address) {
			t.Errorf("any-%d got %q", i, any.Spec.ClusterIP)
		}
		seen[any.Spec.ClusterIP] = true
	}
	if _, err := create("one-too-many", nil); !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "range is full") {
		t.Errorf("%v, want: range is full", err)
	}
	// A refused Service gives its address back, a deleted one too.
	if err := services.Delete(ctx, "any-2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := create("bad", func(spec *corev1.ServiceSpec) { spec.Ports[0].Port = 0 }); !apierrors.IsInvalid(err) {
		t.Errorf("%v, want Invalid", err)
	}
	must[*corev1.Service](t)(create("last", nil))

	// An update that says nothing of the address keeps it.
	chosen.Spec.ClusterIP, chosen.Spec.ClusterIPs = "", nil
	chosen.Spec.Ports[0].Port = 81
	if kept := must[*corev1.Service](t)(services.Update(ctx, chosen, metav1.UpdateOptions{})); kept.Spec.ClusterIP != "10.96.0.3" {
		t.Errorf("kept: %q", kept.Spec.ClusterIP)
	}
}

func TestBadServiceRange(t *testing.T) {
	for _, cidr := range []string{"nonsense", "10.0.0.0/31", "10.0.0.0/24,10.1.0.0/24", "10.0.0.0/24,fd00::/112,10.1.0.0/24"} {
		if _, err := server.New(server.Config{Storage: servertest.NewMemory().Decorator(), ServiceCIDR: cidr}); err == nil || !strings.Contains(err.Error(), "ServiceCIDR") {
			t.Errorf("%s: %v", cidr, err)
		}
	}
}

// TestNodePorts: ports are given, kept, refused and taken back.
func TestNodePorts(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) { c.ServiceCIDR = "10.96.0.0/16" })
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	create := func(name string, change func(*corev1.ServiceSpec)) (*corev1.Service, error) {
		return services.Create(ctx, service(name, func(spec *corev1.ServiceSpec) {
			spec.Type = corev1.ServiceTypeNodePort
			if change != nil {
				change(spec)
			}
		}), metav1.CreateOptions{})
	}
	at := func(port int32) func(*corev1.ServiceSpec) {
		return func(spec *corev1.ServiceSpec) { spec.Ports[0].NodePort = port }
	}
	one := must[*corev1.Service](t)(create("one", at(30080)))
	for port, want := range map[int32]string{
		30080: `spec.ports[0].nodePort: Invalid value: 30080: provided port is already allocated`,
		80:    `spec.ports[0].nodePort: Invalid value: 80: provided port is not in the valid range. The range of valid ports is 30000-32767`,
		32768: `spec.ports[0].nodePort: Invalid value: 32768: provided port is not in the valid range`,
	} {
		if _, err := create("bad", at(port)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v, want Invalid: %s", port, err, want)
		}
	}
	dns := must[*corev1.Service](t)(create("dns", func(spec *corev1.ServiceSpec) {
		spec.Ports = []corev1.ServicePort{{Name: "tcp", Port: 53}, {Name: "udp", Port: 53, Protocol: corev1.ProtocolUDP}, {Name: "metrics", Port: 9153}}
	}))
	p := dns.Spec.Ports
	if p[0].NodePort < 30000 || p[0].NodePort > 32767 || p[0].NodePort != p[1].NodePort || p[2].NodePort == p[0].NodePort || p[2].NodePort == 0 {
		t.Errorf("given ports: %+v", p)
	}
	// Another Service may have what a change or an end frees, and not what it keeps.
	one.Spec.Ports[0].NodePort = 30081
	one = must[*corev1.Service](t)(services.Update(ctx, one, metav1.UpdateOptions{}))
	must[*corev1.Service](t)(create("two", at(30080)))
	if _, err := create("three", at(30081)); !apierrors.IsInvalid(err) {
		t.Errorf("a port that an update took: %v", err)
	}
	one.Spec.Ports[0].NodePort = 30080
	if _, err := services.Update(ctx, one, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("an update to another's port: %v", err)
	}
	if err := services.Delete(ctx, "two", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	must[*corev1.Service](t)(create("four", at(30080)))
	one.Spec.Type, one.Spec.Ports[0].NodePort, one.ResourceVersion = corev1.ServiceTypeClusterIP, 0, ""
	if one = must[*corev1.Service](t)(services.Update(ctx, one, metav1.UpdateOptions{})); one.Spec.Ports[0].NodePort != 0 {
		t.Errorf("a Service without node ports has one: %+v", one.Spec.Ports)
	}
	must[*corev1.Service](t)(create("five", at(30081)))
	lb := must[*corev1.Service](t)(create("lb", func(spec *corev1.ServiceSpec) {
		spec.Type, spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
	}))
	// A writer that says no more than the type leaves the port to be taken off.
	typed, err := create("typed", at(30095))
	if err != nil {
		t.Fatal(err)
	}
	typed = must[*corev1.Service](t)(services.Patch(ctx, typed.Name, types.StrategicMergePatchType, []byte(`{"spec":{"type":"ClusterIP"}}`), metav1.PatchOptions{}))
	if n := typed.Spec.Ports[0].NodePort; n != 0 {
		t.Errorf("a ClusterIP has the node port %d", n)
	}
	if _, err := create("takes", at(30095)); err != nil {
		t.Errorf("the port that was taken off: %v", err)
	}
	if n := lb.Spec.HealthCheckNodePort; n < 30000 || n == lb.Spec.Ports[0].NodePort {
		t.Errorf("healthCheckNodePort: %d beside %d", n, lb.Spec.Ports[0].NodePort)
	}
	if _, err := create("six", at(lb.Spec.HealthCheckNodePort)); !apierrors.IsInvalid(err) {
		t.Errorf("a health check's port was given twice: %v", err)
	}
	must[*corev1.Service](t)(services.Create(ctx, service("dry", func(spec *corev1.ServiceSpec) { spec.Type, spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30090 }), metav1.CreateOptions{DryRun: []string{"All"}}))
	must[*corev1.Service](t)(create("seven", at(30090)))
}

// TestTwoFamilies: addresses of both families are given, refused, kept and taken
// back, each out of its own range.
func TestTwoFamilies(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) { c.ServiceCIDR = "10.96.0.0/29,fd00:96::/125" }) // six and seven
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	dual := func(ips ...string) func(*corev1.ServiceSpec) {
		return func(spec *corev1.ServiceSpec) {
			policy := corev1.IPFamilyPolicyRequireDualStack
			spec.IPFamilyPolicy, spec.ClusterIPs = &policy, ips
			if len(ips) > 0 {
				spec.ClusterIP = ips[0]
			}
		}
	}
	create := func(name string, change func(*corev1.ServiceSpec)) (*corev1.Service, error) {
		return services.Create(ctx, service(name, change), metav1.CreateOptions{})
	}
	named := must[*corev1.Service](t)(create("named", dual("fd00:96::3", "10.96.0.3")))
	if f := named.Spec.IPFamilies; len(f) != 2 || f[0] != corev1.IPv6Protocol || named.Spec.ClusterIP != "fd00:96::3" {
		t.Errorf("named: %+v", named.Spec)
	}
	// The second address is another's: the first one is not left reserved.
	if _, err := create("bad", dual("10.96.0.4", "fd00:96::3")); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "fd00:96::3: provided IP is already allocated") {
		t.Errorf("another's address: %v", err)
	}
	must[*corev1.Service](t)(create("four", func(spec *corev1.ServiceSpec) { spec.ClusterIP = "10.96.0.4" }))

	up := must[*corev1.Service](t)(services.Patch(ctx, "four", types.MergePatchType, []byte(`{"spec":{"ipFamilyPolicy":"PreferDualStack","clusterIPs":["10.96.0.4","fd00:96::4"]}}`), metav1.PatchOptions{}))
	if len(up.Spec.ClusterIPs) != 2 || up.Spec.ClusterIPs[1] != "fd00:96::4" || len(up.Spec.IPFamilies) != 2 {
		t.Errorf("up: %+v", up.Spec)
	}
	// A writer that says nothing of the addresses keeps them.
	sent := up.DeepCopy()
	sent.Spec.ClusterIP, sent.Spec.ClusterIPs, sent.Spec.IPFamilies, sent.Spec.IPFamilyPolicy = "", nil, nil, nil
	if kept := must[*corev1.Service](t)(services.Update(ctx, sent, metav1.UpdateOptions{})); strings.Join(kept.Spec.ClusterIPs, " ") != "10.96.0.4 fd00:96::4" {
		t.Errorf("kept: %+v", kept.Spec)
	}
	for patch, want := range map[string]string{
		`{"spec":{"clusterIPs":["10.96.0.4","fd00:96::5"]}}`: "spec.clusterIPs[1]: Invalid value",
		`{"spec":{"clusterIPs":["10.96.0.4"]}}`:              "must be 'SingleStack' to release the secondary cluster IP",
		`{"spec":{"ipFamilies":["IPv6","IPv4"]}}`:            "spec.clusterIPs[0]: Invalid value",
	} {
		if _, err := services.Patch(ctx, "four", types.MergePatchType, []byte(patch), metav1.PatchOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", patch, err, want)
		}
	}
	down := must[*corev1.Service](t)(services.Patch(ctx, "four", types.MergePatchType, []byte(`{"spec":{"ipFamilyPolicy":"SingleStack"}}`), metav1.PatchOptions{}))
	if len(down.Spec.ClusterIPs) != 1 || len(down.Spec.IPFamilies) != 1 {
		t.Errorf("down: %+v", down.Spec)
	}
	must[*corev1.Service](t)(create("takes", func(spec *corev1.ServiceSpec) { spec.ClusterIP = "fd00:96::4" }))

	// Both are free again with their Service.
	if err := services.Delete(ctx, "named", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	must[*corev1.Service](t)(create("heir", dual("10.96.0.3", "fd00:96::3")))
	if _, err := create("nowhere", func(spec *corev1.ServiceSpec) { spec.ClusterIP = "fd00:97::1" }); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "the range of valid IPs is fd00:96::/125") {
		t.Errorf("outside: %v", err)
	}
	// An update without a node port keeps it.
	port := must[*corev1.Service](t)(create("port", func(spec *corev1.ServiceSpec) { spec.Type = corev1.ServiceTypeNodePort }))
	had := port.Spec.Ports[0].NodePort
	port.Spec.Ports[0].NodePort = 0
	if port = must[*corev1.Service](t)(services.Update(ctx, port, metav1.UpdateOptions{})); port.Spec.Ports[0].NodePort != had {
		t.Errorf("the node port went from %d to %d", had, port.Spec.Ports[0].NodePort)
	}
}

// The bug: a dry run passed with what another Service has, and the request failed.
func TestDryRunSeesClashes(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) { c.ServiceCIDR = "10.96.0.0/16" })
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	with := func(name, ip string, port int32) *corev1.Service {
		return service(name, func(spec *corev1.ServiceSpec) {
			spec.Type, spec.ClusterIP, spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, ip, port
		})
	}
	has := must[*corev1.Service](t)(services.Create(ctx, with("has", "10.96.0.9", 30080), metav1.CreateOptions{}))
	for _, tt := range []struct {
		ip   string
		port int32
		want string
	}{
		{"10.96.0.9", 30081, "10.96.0.9: provided IP is already allocated"},
		{"10.96.0.8", 30080, "spec.ports[0].nodePort: Invalid value: 30080: provided port is already allocated"},
	} {
		if _, err := services.Create(ctx, with("dry", tt.ip, tt.port), dry); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s and %d: %v, want Invalid: %s", tt.ip, tt.port, err, tt.want)
		}
	}
	other := must[*corev1.Service](t)(services.Create(ctx, with("other", "10.96.0.7", 30082), metav1.CreateOptions{}))
	other.Spec.Ports[0].NodePort = 30080
	if _, err := services.Update(ctx, other, metav1.UpdateOptions{DryRun: dry.DryRun}); !apierrors.IsInvalid(err) {
		t.Errorf("an update to another's port: %v", err)
	}
	has.Labels = map[string]string{"a": "b"}
	must[*corev1.Service](t)(services.Update(ctx, has, metav1.UpdateOptions{DryRun: dry.DryRun})) // its own
	must[*corev1.Service](t)(services.Create(ctx, with("dry", "10.96.0.8", 30081), dry))
	must[*corev1.Service](t)(services.Create(ctx, with("free", "10.96.0.8", 30081), metav1.CreateOptions{}))
}

// TestNodePortRange: ports are given out of the range that the server is given, and a
// Service keeps what it has of another.
func TestNodePortRange(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) {
		c.ServiceCIDR, c.NodePorts = "10.96.0.0/16", utilnet.PortRange{Base: 20000, Size: 2}
	})
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	create := func(name string, port int32) (*corev1.Service, error) {
		return services.Create(ctx, service(name, func(spec *corev1.ServiceSpec) {
			spec.Type, spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, port
		}), metav1.CreateOptions{})
	}
	one, two := must[*corev1.Service](t)(create("one", 0)), must[*corev1.Service](t)(create("two", 0))
	if a, b := one.Spec.Ports[0].NodePort, two.Spec.Ports[0].NodePort; a == b || a < 20000 || a > 20001 || b < 20000 || b > 20001 {
		t.Errorf("given are %d and %d", a, b)
	}
	const want = "provided port is not in the valid range. The range of valid ports is 20000-20001"
	if _, err := create("outside", 30080); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want Invalid: %s", err, want)
	}
	if _, err := create("full", 0); err == nil || !strings.Contains(err.Error(), "range is full") {
		t.Errorf("a third one: %v", err)
	}
}
