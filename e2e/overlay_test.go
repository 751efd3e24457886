package e2e

import (
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
	"github.com/clusterd/clusterd/netsetup/overlay"
)

// TestE2EOverlay puts a router between two nodes: pods, Services, names, ports of
// nodes and policies work across it.
func TestE2EOverlay(t *testing.T) {
	e := startBare(t, 1, func(c *cluster.Config) { c.Agents, c.Far = 1, 1 })
	e.ready(2)
	near, far := e.Nodes()[0], e.Nodes()[1]
	ns := e.namespace("segments")
	server := on(far.Name, pod("web"))
	e.create(ns, server)
	e.create(ns, on(near.Name, pod("near", "sleep")))
	e.create(ns, on(far.Name, pod("far", "sleep")))
	web := e.service(ns, "web", func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort })
	addr := e.podReady(ns, "web").Status.PodIP + ":8080"
	e.podReady(ns, "near")
	e.podReady(ns, "far")
	features.Shows(t, 289)
	e.reaches(true, ns, "near", addr)
	port := ":" + strconv.Itoa(int(web.Spec.Ports[0].NodePort))
	e.answers("by the cluster address and ports of both nodes", "http://"+web.Spec.ClusterIP+"/", []string{near.Name, far.Name}, "web")
	for _, n := range []cluster.Node{near, far} {
		e.answers("by a port of "+n.Name, "http://"+n.Addr.String()+port+"/", []string{near.Name, far.Name}, "web")
	}
	e.resolves(ns, "near", "host", "web", web.Spec.ClusterIP)
	var sent uint64
	err := e.Do(near.Name, func() error {
		link, err := netlink.LinkByName(overlay.DefaultTunnel)
		if err == nil {
			sent = link.Attrs().Statistics.TxPackets
		}
		return err
	})
	if err != nil || sent == 0 {
		t.Errorf("the tunnel carried %d packets: %v", sent, err)
	}
	e.ctlIn(strings.ReplaceAll(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: p, namespace: NS}
spec: {podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: far}}}]}]}`, "NS", ns), "apply", "-f", "-")
	e.reaches(false, ns, "near", addr)
	e.reaches(true, ns, "far", addr)
	e.ctl("-n", ns, "delete", "networkpolicy", "p")
	e.reaches(true, ns, "near", addr)
}
