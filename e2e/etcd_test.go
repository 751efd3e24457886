package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// etcdSet is an etcd of three members, each on a node of its own with a claim of the
// default class. Members find each other before they are ready.
const etcdSet = `
apiVersion: v1
kind: Service
metadata: {name: etcd}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {app: etcd}
  ports: [{name: client, port: 2379}, {name: peer, port: 2380}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: etcd}
spec: {maxUnavailable: 1, selector: {matchLabels: {app: etcd}}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: etcd}
spec:
  serviceName: etcd
  replicas: 3
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: etcd}}
  template:
    metadata: {labels: {app: etcd}}
    spec:
      terminationGracePeriodSeconds: 10
      securityContext: {fsGroup: 65532}
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: etcd}}}
      tolerations:
      - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 1}
      - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 1}
      containers:
      - name: etcd
        image: clusterd.local/etcdpod:1
        args: [serve]
        env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: SERVICE, value: etcd}
        - {name: REPLICAS, value: "3"}
        readinessProbe: {httpGet: {path: /health, port: 2379}, periodSeconds: 1, timeoutSeconds: 5}
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 512Mi}}}
`

// TestE2EEtcd runs a real replicated store as a StatefulSet through the loss of a node:
// two members go on, the third comes back with its node and its data and catches up, and
// a rolling restart loses nothing. Every write that was acknowledged is read again.
func TestE2EEtcd(t *testing.T) {
	archive := os.Getenv("CLUSTERD_ETCD")
	if archive == "" {
		t.Skip("it needs an image of etcd: make etcd-test")
	}
	e := start(t)
	e.ctl("image", "load", archive)
	ns := e.namespace("etcd")
	if _, errs, code := e.run("clusterctl", etcdSet, "-n", ns, "apply", "-f", "-"); code != 0 {
		t.Fatalf("apply: exit %d: %s", code, errs)
	}
	const all = "app=etcd"
	written := 0
	// ask runs the program in a member until it succeeds.
	ask := func(member string, args ...any) {
		t.Helper()
		words := strings.Fields(fmt.Sprintln(args...))
		e.eventually(member+": "+strings.Join(words, " "), func(context.Context) error {
			out, errs, code := e.run("clusterctl", "", append([]string{"-n", ns, "exec", member, "--", "/etcdpod"}, words...)...)
			if code != 0 {
				return fmt.Errorf("exit %d: %s%s", code, out, errs)
			}
			return nil
		})
	}
	put := func(member string, n int) {
		t.Helper()
		ask(member, "put", written, written+n)
		written += n
	}
	on := map[string]string{}
	claims := map[string]string{}
	for _, p := range e.podsReady(ns, all, 3) {
		on[p.Spec.NodeName] = p.Name
		c, err := e.api.CoreV1().PersistentVolumeClaims(ns).Get(t.Context(), "data-"+p.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		claims[c.Name] = c.Spec.VolumeName
	}
	if len(on) != 3 {
		t.Fatalf("the members are on %v", on)
	}
	put("etcd-0", 1000)

	lost := e.other(e.leader(), "n1") // n1 is asked
	if err := e.PowerOff(lost); err != nil {
		t.Fatal(err)
	}
	if err := e.Partition(lost); err != nil { // its kernel is this one, and would answer on
		t.Fatal(err)
	}
	var survivor string
	for node, member := range on {
		if node != lost {
			survivor = member
		}
	}
	put(survivor, 500)
	ask(survivor, "check", written)
	e.eventually(on[lost]+" waits for its node", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: all})
		if err != nil {
			return err
		}
		for i := range list.Items {
			if p := &list.Items[i]; p.Name == on[lost] && (p.DeletionTimestamp != nil || p.Spec.NodeName == "") {
				return nil
			}
		}
		return fmt.Errorf("%d pods", len(list.Items))
	})

	if err := e.Heal(lost); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	for _, p := range e.podsReady(ns, all, 3) {
		if on[p.Spec.NodeName] != p.Name {
			t.Errorf("%s is on %s, its data elsewhere", p.Name, p.Spec.NodeName)
		}
	}
	ask(on[lost], "local", written) // it has caught up
	put(on[lost], 100)

	before := map[string]bool{}
	for _, p := range e.podsReady(ns, all, 3) {
		before[string(p.UID)] = true
	}
	e.ctl("-n", ns, "rollout", "restart", "statefulset/etcd")
	e.ctl("-n", ns, "rollout", "status", "statefulset/etcd", "--timeout=110s")
	for _, p := range e.podsReady(ns, all, 3) {
		if before[string(p.UID)] {
			t.Errorf("%s was not restarted", p.Name)
		}
		ask(p.Name, "local", written)
	}
	list, err := e.api.CoreV1().PersistentVolumeClaims(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		if c := &list.Items[i]; c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != claims[c.Name] {
			t.Errorf("claim %s is %s with volume %s, was %s", c.Name, c.Status.Phase, c.Spec.VolumeName, claims[c.Name])
		}
	}
	t.Logf("%d acknowledged writes were read from each member after the loss of %s and a rolling restart", written, lost)
}
