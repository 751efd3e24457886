package server_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

type podRequest = certificatesv1.PodCertificateRequest

// podKey asks for the certificates of a test, and signs them.
func podKey(t *testing.T) *ecdsa.PrivateKey {
	return must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
}

func newPodRequest(t *testing.T, name string, key *ecdsa.PrivateKey) *podRequest {
	t.Helper()
	return &podRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{"test": "verbs"}},
		Spec: certificatesv1.PodCertificateRequestSpec{
			SignerName: "example.com/lab", PodName: "p", PodUID: "p1", ServiceAccountName: "default", ServiceAccountUID: "a1", NodeName: "n1", NodeUID: "n",
			StubPKCS10Request: must[[]byte](t)(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)),
		},
	}
}

// issued is a request with a certificate of an hour.
func issued(t *testing.T, r *podRequest, key *ecdsa.PrivateKey) *podRequest {
	t.Helper()
	begin := time.Now().Truncate(time.Second)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: begin, NotAfter: begin.Add(time.Hour)}
	der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	r = r.DeepCopy()
	r.Status = certificatesv1.PodCertificateRequestStatus{
		Conditions:       []metav1.Condition{{Type: certificatesv1.PodCertificateRequestConditionTypeIssued, Status: metav1.ConditionTrue, Reason: "Test"}},
		CertificateChain: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		NotBefore:        ptr.To(metav1.NewTime(template.NotBefore)), NotAfter: ptr.To(metav1.NewTime(template.NotAfter)), BeginRefreshAt: ptr.To(metav1.NewTime(begin.Add(40 * time.Minute))),
	}
	return r
}

// TestPodCertificateRequestVerbs: the kind answers every verb, and its status.
func TestPodCertificateRequestVerbs(t *testing.T) {
	features.Conforms(t, 163)
	s := servertest.Start(t, nil)
	found := must[*metav1.APIResourceList](t)(s.Client.Discovery().ServerResourcesForGroupVersion("certificates.k8s.io/v1"))
	for _, name := range []string{"podcertificaterequests", "podcertificaterequests/status"} {
		if !slices.ContainsFunc(found.APIResources, func(r metav1.APIResource) bool { return r.Name == name && r.Namespaced }) {
			t.Errorf("%s is not discovered", name)
		}
	}
	key := podKey(t)
	c := s.Client.CertificatesV1().PodCertificateRequests("default")
	seen := must[watch.Interface](t)(c.Watch(t.Context(), metav1.ListOptions{LabelSelector: "test=verbs"}))
	defer seen.Stop()
	next := func(want watch.EventType) {
		t.Helper()
		select {
		case event := <-seen.ResultChan():
			if event.Type != want {
				t.Errorf("watched %s, want %s", event.Type, want)
			}
		case <-waitContext(t).Done():
			t.Fatalf("no %s was watched", want)
		}
	}
	asked := newPodRequest(t, "a", key)
	asked.Status.CertificateChain = "forged"
	made := must[*podRequest](t)(c.Create(t.Context(), asked, metav1.CreateOptions{}))
	next(watch.Added)
	if made.Status.CertificateChain != "" || *made.Spec.MaxExpirationSeconds != 86400 {
		t.Errorf("made %+v", made)
	}
	must[*podRequest](t)(c.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"metadata":{"annotations":{"patched":"yes"}}}`), metav1.PatchOptions{}))
	next(watch.Modified)
	if _, err := c.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"spec":{"signerName":"example.com/others"}}`), metav1.PatchOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "field is immutable") {
		t.Errorf("another signer: %v", err)
	}
	read := must[*podRequest](t)(c.Get(t.Context(), "a", metav1.GetOptions{}))
	if read.Annotations["patched"] != "yes" {
		t.Errorf("patched: %v", read.Annotations)
	}
	read.Annotations["updated"] = "yes"
	read = must[*podRequest](t)(c.Update(t.Context(), read, metav1.UpdateOptions{}))
	next(watch.Modified)
	read = must[*podRequest](t)(c.UpdateStatus(t.Context(), issued(t, read, key), metav1.UpdateOptions{}))
	next(watch.Modified)
	if read.Status.CertificateChain == "" || read.Status.Conditions[0].LastTransitionTime.IsZero() {
		t.Errorf("issued: %+v", read.Status)
	}
	if _, err := c.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"status":{"certificateChain":""}}`), metav1.PatchOptions{}, "status"); !apierrors.IsInvalid(err) {
		t.Errorf("an answer that is taken back: %v", err)
	}
	must[*podRequest](t)(c.Create(t.Context(), newPodRequest(t, "b", key), metav1.CreateOptions{}))
	next(watch.Added)
	must[*podRequest](t)(c.Patch(t.Context(), "b", types.MergePatchType, []byte(`{"status":{"conditions":[{"type":"Denied","status":"True","reason":"Patched","message":"no","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`), metav1.PatchOptions{}, "status"))
	next(watch.Modified)
	for selector, want := range map[string]int{"spec.signerName=example.com/lab": 2, "spec.nodeName=n1,spec.podName=p": 2, "spec.nodeName=n2": 0} {
		if list := must[*certificatesv1.PodCertificateRequestList](t)(c.List(t.Context(), metav1.ListOptions{FieldSelector: selector})); len(list.Items) != want {
			t.Errorf("%s: listed %d, want %d", selector, len(list.Items), want)
		}
	}
	if err := c.Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	next(watch.Deleted)
	if err := c.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "test=verbs"}); err != nil {
		t.Fatal(err)
	}
	if list := must[*certificatesv1.PodCertificateRequestList](t)(s.Client.CertificatesV1().PodCertificateRequests("").List(t.Context(), metav1.ListOptions{})); len(list.Items) != 0 {
		t.Errorf("%d are left", len(list.Items))
	}
}

// TestPodSigners: who answers needs the right for the signer beside that to
// write the status.
func TestPodSigners(t *testing.T) {
	s := servertest.Start(t, nil)
	const group = "certificates.k8s.io"
	grant := func(user string, signers ...string) kubernetes.Interface {
		t.Helper()
		rules := []rbacv1.PolicyRule{{APIGroups: []string{group}, Verbs: []string{"*"}, Resources: []string{"podcertificaterequests", "podcertificaterequests/status"}}}
		if len(signers) > 0 {
			rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group}, Verbs: []string{"sign"}, Resources: []string{"signers"}, ResourceNames: signers})
		}
		must[*rbacv1.ClusterRole](t)(s.Client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta(user), Rules: rules}, metav1.CreateOptions{}))
		must[*rbacv1.ClusterRoleBinding](t)(s.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta(user), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		}, metav1.CreateOptions{}))
		client := s.ClientFor(t, user)
		comesTrue(t, "the rights of "+user, func(ctx context.Context) bool {
			_, err := client.CertificatesV1().PodCertificateRequests("default").List(ctx, metav1.ListOptions{})
			return err == nil
		})
		return client
	}
	key := podKey(t)
	n := 0
	for who, signers := range map[string][]string{"without": nil, "another": {"example.com/others"}, "signer": {"example.com/lab"}, "domain": {"example.com/*"}} {
		client := grant(who, signers...)
		may := who == "signer" || who == "domain"
		for answer, change := range map[string]func(*podRequest) *podRequest{
			"issued": func(r *podRequest) *podRequest { return issued(t, r, key) },
			"denied": func(r *podRequest) *podRequest {
				r = issued(t, r, key)
				r.Status = certificatesv1.PodCertificateRequestStatus{Conditions: r.Status.Conditions}
				r.Status.Conditions[0].Type = certificatesv1.PodCertificateRequestConditionTypeDenied
				return r
			},
		} {
			n++
			asked := must[*podRequest](t)(s.Client.CertificatesV1().PodCertificateRequests("default").Create(t.Context(), newPodRequest(t, strings.Repeat("r", n), key), metav1.CreateOptions{}))
			requests := client.CertificatesV1().PodCertificateRequests("default")
			if _, err := requests.UpdateStatus(t.Context(), asked, metav1.UpdateOptions{}); err != nil {
				t.Errorf("%s: a status that stays as it is: %v", who, err)
			}
			_, err := requests.UpdateStatus(t.Context(), change(asked), metav1.UpdateOptions{})
			if may && err != nil || !may && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `User "`+who+`" is not permitted to "sign" for signer "example.com/lab"`)) {
				t.Errorf("%s by %s: %v", answer, who, err)
			}
		}
	}
}

// TestNodesAskForTheirPods: a node asks for certificates of its own pods as they
// are, and sees its own requests.
func TestNodesAskForTheirPods(t *testing.T) {
	s := servertest.Start(t, nil)
	key := podKey(t)
	for _, name := range []string{"n1", "n2"} {
		must[*corev1.Node](t)(s.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: meta(name)}, metav1.CreateOptions{}))
	}
	own := must[*corev1.Node](t)(s.Client.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{}))
	account := must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: meta("web")}, metav1.CreateOptions{}))
	pod := func(name, node string) *corev1.Pod {
		return must[*corev1.Pod](t)(s.Client.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{ObjectMeta: meta(name), Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: "web", Containers: []corev1.Container{{Name: "c", Image: "i"}},
			Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
				PodCertificate: &corev1.PodCertificateProjection{SignerName: "example.com/lab", KeyType: "ECDSAP256", CredentialBundlePath: "b"},
			}}}}}},
		}}, metav1.CreateOptions{}))
	}
	mine, theirs := pod("mine", "n1"), pod("theirs", "n2")
	n1, n2 := s.ClientFor(t, "system:node:n1", "system:nodes"), s.ClientFor(t, "system:node:n2", "system:nodes")
	asks := func(name string, change func(*certificatesv1.PodCertificateRequestSpec)) error {
		r := newPodRequest(t, name, key)
		r.Spec.PodName, r.Spec.PodUID = mine.Name, mine.UID
		r.Spec.ServiceAccountName, r.Spec.ServiceAccountUID = account.Name, account.UID
		r.Spec.NodeName, r.Spec.NodeUID = "n1", own.UID
		change(&r.Spec)
		_, err := n1.CertificatesV1().PodCertificateRequests("default").Create(t.Context(), r, metav1.CreateOptions{})
		return err
	}
	type spec = certificatesv1.PodCertificateRequestSpec
	comesTrue(t, "a node asks for its pod", func(context.Context) bool { return asks("good", func(*spec) {}) == nil })
	for name, c := range map[string]struct {
		change func(*spec)
		refuse func(error) bool
		says   string
	}{
		"another node":           {func(r *spec) { r.NodeName = "n2" }, apierrors.IsForbidden, `which is not the requesting node "n1"`},
		"another node's uid":     {func(r *spec) { r.NodeUID = "x" }, apierrors.IsConflict, `names node UID "x"`},
		"another node's pod":     {func(r *spec) { r.PodName, r.PodUID = theirs.Name, theirs.UID }, apierrors.IsForbidden, `is not running on node "n1"`},
		"no pod":                 {func(r *spec) { r.PodName = "none" }, apierrors.IsNotFound, `"none" not found`},
		"a former pod":           {func(r *spec) { r.PodUID = "x" }, apierrors.IsConflict, `contains pod UID ("x")`},
		"another account":        {func(r *spec) { r.ServiceAccountName = "default" }, apierrors.IsForbidden, `contains serviceAccountName ("default") that differs`},
		"a former account":       {func(r *spec) { r.ServiceAccountUID = "x" }, apierrors.IsConflict, `names service account UID "x"`},
		"a signer of no volume":  {func(r *spec) { r.SignerName = "example.com/admins" }, apierrors.IsForbidden, `signer "example.com/admins" not found in pod spec volume`},
		"a certificate by force": {func(r *spec) { r.StubPKCS10Request = nil }, apierrors.IsInvalid, "stubPKCS10Request"},
	} {
		if err := asks("bad", c.change); !c.refuse(err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for who, c := range map[string]struct {
		client kubernetes.Interface
		own    bool
	}{"its own": {n1, true}, "another's": {n2, false}} {
		requests := c.client.CertificatesV1().PodCertificateRequests("default")
		if _, err := requests.Get(t.Context(), "good", metav1.GetOptions{}); c.own != (err == nil) || !c.own && !apierrors.IsForbidden(err) {
			t.Errorf("get %s: %v", who, err)
		}
		if _, err := requests.List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("list all: %v", err)
		}
		if _, err := requests.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=n1"}); c.own != (err == nil) {
			t.Errorf("list %s: %v", who, err)
		}
		if err := requests.Delete(t.Context(), "good", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("delete %s: %v", who, err)
		}
		r := must[*podRequest](t)(s.Client.CertificatesV1().PodCertificateRequests("default").Get(t.Context(), "good", metav1.GetOptions{}))
		if _, err := requests.UpdateStatus(t.Context(), issued(t, r, key), metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("sign %s: %v", who, err)
		}
	}
}
