package tools

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/ptr"
)

// TestE2EOperator runs an operator of controller-runtime: two pods of which one
// leads, and webhooks behind their Service that fill in, judge and convert.
func TestE2EOperator(t *testing.T) {
	k := start(t, "tools-operator")
	k.ok("clusterctl", "image", "load", filepath.Join(k.peers, "operator.tar"))
	crt, key, err := cert.GenerateSelfSignedCertKey("operator."+k.ns+".svc", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile("testdata/operator.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.api.CoreV1().Secrets(k.ns).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "certs"}, Type: corev1.SecretTypeTLS, Data: map[string][]byte{"tls.crt": crt, "tls.key": key},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The webhooks go before the pods that answer for them.
		k.ok("clusterctl", "delete", "mutatingwebhookconfiguration/pages", "validatingwebhookconfiguration/pages", "--ignore-not-found")
		k.ok("clusterctl", "delete", "crd", "pages.peers.clusterd.local", "--ignore-not-found", "--timeout="+testTimeout.String())
	})
	k.okIn(strings.ReplaceAll(string(manifest), "${CA}", base64.StdEncoding.EncodeToString(crt)), "clusterctl", "apply", "-f", "-")
	k.ok("clusterctl", "rollout", "status", "deployment/operator", "--timeout="+testTimeout.String())
	first := k.leader("")

	page := func(name, version, rest string) string {
		return fmt.Sprintf("{apiVersion: peers.clusterd.local/%s, kind: Page, metadata: {name: %s}, %s}", version, name, rest)
	}
	// Defaulted, created, reported.
	// The server learns of the webhooks' endpoints a moment after the pods are ready.
	k.eventuallyHas([]string{"page.peers.clusterd.local/one"}, page("one", "v1", "spec: {message: first}"), "clusterctl", "apply", "-f", "-")
	k.is("what the webhook filled in", k.field("page/one", "{.spec.replicas}"), "2")
	k.eventuallyIs("page/one", "{.status.ready} {.status.by}", "2 "+first)
	k.is("the finalizer", k.field("page/one", "{.metadata.finalizers}"), `["peers.clusterd.local/record"]`)
	k.is("the Deployment's owner", k.field("deployment/one", "{.metadata.ownerReferences[0].kind}"), "Page")
	k.eventuallyHas([]string{"first"}, "", "clusterctl", "exec", "deploy/one", "--", "/hello", "fetch", "http://one:8080/")

	// The other version, both ways; applied with the field names it has.
	k.has(k.ok("clusterctl", "get", "pages.v1alpha1.peers.clusterd.local", "one", "-o", "jsonpath={.apiVersion} {.text} {.servers}"), "peers.clusterd.local/v1alpha1 first 2")
	k.okIn(page("old", "v1alpha1", "text: older, servers: 1"), "clusterctl", "apply", "--server-side", "-f", "-")
	k.is("what was written in the old version", k.field("pages.v1.peers.clusterd.local/old", "{.spec.message} {.spec.replicas}"), "older 1")
	k.eventuallyIs("pages.v1alpha1.peers.clusterd.local/old", "{.status.ready}", "1")

	// Validated: the webhook's warning reaches the client. In whichever version: the
	// rules name v1, and are asked about what is equal to it.
	_, errs, code := k.run(page("big", "v1", "spec: {message: big, replicas: 6}"), "clusterctl", "apply", "-f", "-")
	if code == 0 || !strings.Contains(errs, "spec.replicas: 6 servers are more than 5") {
		t.Errorf("six servers: exit %d %s", code, errs)
	}
	_, errs, code = k.run(page("big", "v1alpha1", "text: big, servers: 7"), "clusterctl", "apply", "-f", "-")
	if code == 0 || !strings.Contains(errs, "spec.replicas: 7 servers are more than 5") {
		t.Errorf("seven in the old version: exit %d %s", code, errs)
	}
	_, errs, code = k.run(page("none", "v1", "spec: {message: quiet, replicas: 0}"), "clusterctl", "apply", "-f", "-")
	if code != 0 || !strings.Contains(errs, "spec.replicas: no pod will answer") {
		t.Errorf("no servers: exit %d, %s; want a warning", code, errs)
	}
	k.ok("clusterctl", "label", "page/one", "keep=yes")
	k.has(k.fails("clusterctl", "delete", "page/one"), "page one is to be kept")
	k.ok("clusterctl", "label", "page/one", "keep-")

	// The leader is killed, and the other leads.
	if err := k.api.CoreV1().Pods(k.ns).Delete(t.Context(), first, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	second := k.leader(first)
	k.okIn(page("two", "v1", "spec: {message: second, replicas: 1}"), "clusterctl", "apply", "-f", "-")
	k.eventuallyIs("page/two", "{.status.ready} {.status.by}", "1 "+second)
	k.ok("clusterctl", "patch", "page/one", "--type=merge", "-p", `{"spec":{"replicas":1,"message":"changed"}}`)
	k.eventuallyIs("deployment/one", "{.status.readyReplicas} {.spec.template.spec.containers[0].env[0].value}", "1 changed")

	// clusterd is killed as well; the operator goes on with the one that comes.
	if err := k.c.Kill(node); err != nil {
		t.Fatal(err)
	}
	if err := k.c.Start(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	k.eventually("a Page is written after the restart", func(context.Context) error {
		out, errs, code := k.run(page("three", "v1", "spec: {message: third, replicas: 1}"), "clusterctl", "apply", "-f", "-")
		if code != 0 {
			return fmt.Errorf("%s%s", out, errs)
		}
		return nil
	})
	k.eventuallyIs("page/three", "{.status.ready}", "1")

	// Deleted: the finalizer takes what has no owner, the collector the rest.
	k.is("the record", k.field("configmap/record-one", "{.data.message}"), "changed")
	k.ok("clusterctl", "delete", "page", "--all", "--timeout="+testTimeout.String())
	for _, name := range []string{"one", "two", "three", "old", "none"} {
		if _, err := k.api.CoreV1().ConfigMaps(k.ns).Get(t.Context(), "record-"+name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("the record of %s: %v", name, err)
		}
	}
	k.eventually("the servers are gone", func(ctx context.Context) error {
		list, err := k.api.AppsV1().Deployments(k.ns).List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) != 1 {
			err = fmt.Errorf("%d Deployments", len(list.Items))
		}
		return err
	})
}

// leader waits for a pod of the operator that leads and is not the one before.
func (k *kit) leader(before string) (pod string) {
	k.Helper()
	k.eventually("a pod other than "+before+" leads", func(ctx context.Context) error {
		lease, err := k.api.CoordinationV1().Leases(k.ns).Get(ctx, "pages.peers.clusterd.local", metav1.GetOptions{})
		if err != nil {
			return err
		}
		// The holder is the host's name and a number of its own.
		pod, _, _ = strings.Cut(ptr.Deref(lease.Spec.HolderIdentity, ""), "_")
		if pod == "" || pod == before {
			return fmt.Errorf("%q leads", pod)
		}
		return nil
	})
	return pod
}
