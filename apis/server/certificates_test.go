package server_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
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

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

type signingRequest = certificatesv1.CertificateSigningRequest

func newSigningRequest(t *testing.T, name, signer string, subject pkix.Name) *signingRequest {
	t.Helper()
	key := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	der := must[[]byte](t)(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key))
	return &signingRequest{
		ObjectMeta: meta(name),
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: signer,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}
}

func someCertificate(t *testing.T) []byte {
	t.Helper()
	key := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// authority is a certificate of an authority.
func authority(t *testing.T, name string) string {
	t.Helper()
	key := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true}
	der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func decided(r *signingRequest, kind certificatesv1.RequestConditionType) *signingRequest {
	r = r.DeepCopy()
	r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "Test"})
	return r
}

// TestSigningRequestVerbs: the kind answers every verb, and its two parts.
func TestSigningRequestVerbs(t *testing.T) {
	features.Conforms(t, 162)
	s := servertest.Start(t, nil)
	found := must[*metav1.APIResourceList](t)(s.Client.Discovery().ServerResourcesForGroupVersion("certificates.k8s.io/v1"))
	for _, name := range []string{"certificatesigningrequests", "certificatesigningrequests/status", "certificatesigningrequests/approval"} {
		if !slices.ContainsFunc(found.APIResources, func(r metav1.APIResource) bool { return r.Name == name }) {
			t.Errorf("%s is not discovered", name)
		}
	}
	c := s.Client.CertificatesV1().CertificateSigningRequests()
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
	asked := newSigningRequest(t, "a", "example.com/people", pkix.Name{CommonName: "jane"})
	asked.Labels = map[string]string{"test": "verbs"}
	asked.Spec.Username = "another-user"
	made := must[*signingRequest](t)(c.Create(t.Context(), asked, metav1.CreateOptions{}))
	next(watch.Added)
	if made.Spec.Username == "another-user" || made.Spec.Username == "" {
		t.Errorf("asked by %q", made.Spec.Username)
	}
	must[*signingRequest](t)(c.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"metadata":{"annotations":{"patched":"yes"}},"spec":{"signerName":"example.com/others"}}`), metav1.PatchOptions{}))
	next(watch.Modified)
	read := must[*signingRequest](t)(c.Get(t.Context(), "a", metav1.GetOptions{}))
	if read.Annotations["patched"] != "yes" || read.Spec.SignerName != "example.com/people" {
		t.Errorf("patched: %v, signer %s: want the annotation and nothing of the spec", read.Annotations, read.Spec.SignerName)
	}
	read.Annotations["updated"] = "yes"
	read = must[*signingRequest](t)(c.Update(t.Context(), read, metav1.UpdateOptions{}))
	next(watch.Modified)

	read = must[*signingRequest](t)(c.UpdateApproval(t.Context(), "a", decided(read, certificatesv1.CertificateApproved), metav1.UpdateOptions{}))
	next(watch.Modified)
	if len(read.Status.Conditions) != 1 || read.Status.Conditions[0].LastUpdateTime.IsZero() {
		t.Errorf("approved: %+v", read.Status)
	}
	must[*signingRequest](t)(c.Patch(t.Context(), "a", types.StrategicMergePatchType, []byte(`{"status":{"conditions":[{"type":"Approved","status":"True","reason":"Patched"}]}}`), metav1.PatchOptions{}, "approval"))
	next(watch.Modified)
	read = must[*signingRequest](t)(c.Get(t.Context(), "a", metav1.GetOptions{}))
	read.Status.Certificate = someCertificate(t)
	must[*signingRequest](t)(c.UpdateStatus(t.Context(), read, metav1.UpdateOptions{}))
	next(watch.Modified)
	must[*signingRequest](t)(c.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"metadata":{"annotations":{"status":"patched"}}}`), metav1.PatchOptions{}, "status"))
	next(watch.Modified)
	if list := must[*certificatesv1.CertificateSigningRequestList](t)(c.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.signerName=example.com/people"})); len(list.Items) != 1 || len(list.Items[0].Status.Certificate) == 0 {
		t.Errorf("listed %+v", list.Items)
	}
	if err := c.Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	next(watch.Deleted)
	for _, name := range []string{"b", "c"} {
		r := newSigningRequest(t, name, "example.com/people", pkix.Name{CommonName: "jane"})
		r.Labels = map[string]string{"test": "verbs"}
		must[*signingRequest](t)(c.Create(t.Context(), r, metav1.CreateOptions{}))
	}
	if err := c.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "test=verbs"}); err != nil {
		t.Fatal(err)
	}
	if list := must[*certificatesv1.CertificateSigningRequestList](t)(c.List(t.Context(), metav1.ListOptions{})); len(list.Items) != 0 {
		t.Errorf("%d are left", len(list.Items))
	}
}

// TestSigners: who writes a decision or a certificate needs the right for its
// signer beside that to write the object.
func TestSigners(t *testing.T) {
	s := servertest.Start(t, nil)
	const csr = "certificates.k8s.io"
	grant := func(user string, rules ...rbacv1.PolicyRule) kubernetes.Interface {
		t.Helper()
		rules = append(rules, rbacv1.PolicyRule{
			APIGroups: []string{csr}, Verbs: []string{"*"},
			Resources: []string{"certificatesigningrequests", "certificatesigningrequests/approval", "certificatesigningrequests/status", "clustertrustbundles"},
		})
		must[*rbacv1.ClusterRole](t)(s.Client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta(user), Rules: rules}, metav1.CreateOptions{}))
		must[*rbacv1.ClusterRoleBinding](t)(s.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta(user), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		}, metav1.CreateOptions{}))
		client := s.ClientFor(t, user)
		comesTrue(t, "the rights of "+user, func(ctx context.Context) bool {
			_, err := client.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
			return err == nil
		})
		return client
	}
	on := func(verb string, names ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{csr}, Resources: []string{"signers"}, Verbs: []string{verb}, ResourceNames: names}
	}
	plain := grant("plain")
	attester := grant("attester", on("attest", "example.com/people"))
	approver := grant("approver", on("approve", "example.com/people"))
	all := grant("all", on("approve", "example.com/*"))
	signer := grant("signer", on("sign", "example.com/people"))
	n := 0
	asked := func(signer string) *signingRequest {
		n++
		return must[*signingRequest](t)(plain.CertificatesV1().CertificateSigningRequests().Create(t.Context(),
			newSigningRequest(t, strings.Repeat("r", n), signer, pkix.Name{CommonName: "jane"}), metav1.CreateOptions{}))
	}
	people := asked("example.com/people")
	if people.Spec.Username != "plain" {
		t.Errorf("asked by %q, want plain", people.Spec.Username)
	}
	approve := func(c kubernetes.Interface, r *signingRequest) error {
		r = decided(r, certificatesv1.CertificateApproved)
		r.Spec.SignerName = "example.com/people" // whatever is said here
		_, err := c.CertificatesV1().CertificateSigningRequests().UpdateApproval(t.Context(), r.Name, r, metav1.UpdateOptions{})
		return err
	}
	for _, test := range []struct {
		name   string
		who    kubernetes.Interface
		signer string
		ok     bool
	}{
		{"no right", plain, "example.com/people", false},
		{"the signer's", signer, "example.com/people", false},
		{"the approver's", approver, "example.com/people", true},
		{"the approver's, of another signer", approver, "example.com/others", false},
		{"the domain's", all, "example.com/others", true},
		{"the domain's, of another domain", all, "example.org/people", false},
	} {
		err := approve(test.who, asked(test.signer))
		if test.ok && err != nil || !test.ok && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "user not permitted to approve requests with signerName")) {
			t.Errorf("approved with %s right: %v", test.name, err)
		}
	}

	if err := approve(approver, people); err != nil {
		t.Fatal(err)
	}
	requests := func(c kubernetes.Interface) func(*signingRequest) error {
		return func(r *signingRequest) error {
			_, err := c.CertificatesV1().CertificateSigningRequests().UpdateStatus(t.Context(), r, metav1.UpdateOptions{})
			return err
		}
	}
	people = must[*signingRequest](t)(plain.CertificatesV1().CertificateSigningRequests().Get(t.Context(), people.Name, metav1.GetOptions{}))
	people.Labels = map[string]string{"a": "b"}
	if err := requests(approver)(people); err != nil {
		t.Errorf("a status that stays as it is: %v", err)
	}
	people = must[*signingRequest](t)(plain.CertificatesV1().CertificateSigningRequests().Get(t.Context(), people.Name, metav1.GetOptions{}))
	people.Status.Certificate = someCertificate(t)
	if err := requests(approver)(people); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "user not permitted to sign") {
		t.Errorf("signed by an approver: %v", err)
	}
	if err := requests(signer)(people); err != nil {
		t.Errorf("signed by a signer: %v", err)
	}

	bundle := &certificatesv1.ClusterTrustBundle{ObjectMeta: meta("example.com:people:v1"), Spec: certificatesv1.ClusterTrustBundleSpec{SignerName: "example.com/people", TrustBundle: authority(t, "one")}}
	if _, err := plain.CertificatesV1().ClusterTrustBundles().Create(t.Context(), bundle, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "user not permitted to attest") {
		t.Errorf("a bundle without the right for its signer: %v", err)
	}
	bundle = must[*certificatesv1.ClusterTrustBundle](t)(attester.CertificatesV1().ClusterTrustBundles().Create(t.Context(), bundle, metav1.CreateOptions{}))
	bundle.Labels = map[string]string{"a": "b"}
	bundle = must[*certificatesv1.ClusterTrustBundle](t)(plain.CertificatesV1().ClusterTrustBundles().Update(t.Context(), bundle, metav1.UpdateOptions{}))
	bundle.Spec.TrustBundle = authority(t, "two")
	if _, err := plain.CertificatesV1().ClusterTrustBundles().Update(t.Context(), bundle, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("another anchor without the right: %v", err)
	}
	ofSigner := must[*certificatesv1.ClusterTrustBundleList](t)(plain.CertificatesV1().ClusterTrustBundles().List(t.Context(), metav1.ListOptions{FieldSelector: "spec.signerName=example.com/people"}))
	if len(ofSigner.Items) != 1 {
		t.Errorf("%d bundles of the signer, want 1", len(ofSigner.Items))
	}

	for _, subject := range []pkix.Name{
		{CommonName: "jane", Organization: []string{"system:masters"}},
		{CommonName: "system:node:n1", Organization: []string{"system:nodes"}},
		{CommonName: "n1", Organization: []string{"clusterd:servers"}},
	} {
		r := newSigningRequest(t, "forbidden", certificatesv1.KubeAPIServerClientSignerName, subject)
		if _, err := s.Client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), r, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s was asked for: %v", subject, err)
		}
		// Another signer's certificates are no business of ours.
		r.Spec.SignerName = "example.com/people"
		if _, err := s.Client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), r, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
			t.Errorf("%s of another signer: %v", subject, err)
		}
	}
}
