package e2e

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/policy"
)

// dials says whether one pod reaches an address and port; an error: it could not be asked.
func (e *env) dials(ns, from, addr string) (bool, error) {
	_, errs, code := e.run("clusterctl", "", "-n", ns, "exec", from, "--", "/hello", "dial", addr)
	if code != 0 && !dialled.MatchString(errs) {
		return false, errors.New(errs)
	}
	return code == 0, nil
}

// dialled is in the error of a connection that was tried: a name was found for it, and the
// pod's program ran.
var dialled = regexp.MustCompile(`dial tcp [0-9a-f.:\[\]]+:\d+: `)

func (e *env) reaches(want bool, ns, from, addr string) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s reaches %s: %t", from, addr, want), func(context.Context) error {
		does, err := e.dials(ns, from, addr)
		if err == nil && does != want {
			err = errors.New("it does not hold")
		}
		return err
	})
}

// policies goes from everything open to everything shut and a few ways through,
// for a server, a client on its node and one on another.
func policies(t *testing.T, e *env) {
	ns := e.namespace("guarded")
	server := on("n1", pod("server"))
	server.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	server.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(8080)}}, PeriodSeconds: 1}
	e.create(ns, server)
	e.create(ns, on("n1", pod("near", "sleep")))
	e.create(ns, on("n2", pod("far", "sleep")))
	addr := e.podReady(ns, "server").Status.PodIP + ":8080"
	near := e.podReady(ns, "near").Status.PodIP
	e.podReady(ns, "far")
	apply := func(spec string) {
		e.ctlIn("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: "+ns+"}\nspec: "+spec, "apply", "-f", "-")
	}
	e.reaches(true, ns, "near", addr)
	e.reaches(true, ns, "far", addr)

	apply(`{podSelector: {matchLabels: {app: server}}, policyTypes: [Ingress]}`)
	e.reaches(false, ns, "near", addr)
	e.reaches(false, ns, "far", addr)
	// A pod that comes later is guarded from its first packet, and its own node
	// still asks after its health.
	late := on("n2", pod("late"))
	late.Labels = map[string]string{"app": "server"}
	late.Spec.Containers[0].ReadinessProbe = server.Spec.Containers[0].ReadinessProbe
	e.create(ns, late)
	lateAddr := e.podReady(ns, "late").Status.PodIP + ":8080"
	for _, from := range []string{"near", "far"} {
		e.eventually(from+" is asked", func(context.Context) error {
			does, err := e.dials(ns, from, lateAddr)
			if does {
				t.Fatal("a new pod is not guarded")
			}
			return err
		})
	}
	e.eventually("the node reaches its pod", func(context.Context) error {
		_, err := e.page("n1", e.get(ns, "server").Status.PodIP)
		return err
	})

	apply(`{podSelector: {matchLabels: {app: server}}, ingress: [{from: [{podSelector: {matchLabels: {app: near}}}], ports: [{port: http}]}]}`)
	e.reaches(true, ns, "near", addr)
	e.reaches(false, ns, "far", addr)
	apply(`{podSelector: {matchLabels: {app: server}}, ingress: [{from: [{ipBlock: {cidr: 10.244.0.0/16, except: [` + near + `/32]}}], ports: [{port: 8000, endPort: 8100}]}]}`)
	e.reaches(true, ns, "far", addr)
	e.reaches(false, ns, "near", addr)
	apply(`{podSelector: {matchLabels: {app: server}}, ingress: [{ports: [{port: 8081}]}]}`)
	e.reaches(false, ns, "far", addr)
	apply(`{podSelector: {matchLabels: {app: near}}, egress: [{to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: nosuch}}}]}], policyTypes: [Egress]}`)
	e.reaches(false, ns, "near", addr)
	e.reaches(true, ns, "far", addr)
	apply(`{podSelector: {matchLabels: {app: near}}, egress: [{to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: guarded}}, podSelector: {matchLabels: {app: server}}}]}], policyTypes: [Egress]}`)
	e.reaches(true, ns, "near", addr)

	// An administrator's flush is undone.
	apply(`{podSelector: {matchLabels: {app: server}}, policyTypes: [Ingress]}`)
	e.reaches(false, ns, "far", addr)
	err := e.Do("n1", func() error {
		tables, err := nft.OpenTables()
		if err != nil {
			return err
		}
		defer tables.Close()
		return tables.Delete(nft.Table{Name: policy.TableName})
	})
	if err != nil {
		t.Fatal(err)
	}
	e.reaches(false, ns, "far", addr)
	e.eventually("an event tells of it", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "reason=PacketFilterRepaired,involvedObject.name=n1"})
		if err == nil && (len(list.Items) == 0 || !strings.Contains(list.Items[0].Message, policy.TableName)) {
			err = fmt.Errorf("%d events: %+v", len(list.Items), list.Items)
		}
		return err
	})
	e.ctl("-n", ns, "delete", "networkpolicy", "p")
	e.reaches(true, ns, "far", addr)
}
