package podcertificate

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/volume"
)

var begin = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// bench is a Keeper without its watch, over an API in memory that signs.
type bench struct {
	*testing.T
	client *fake.Clientset
	clock  *clocktesting.FakePassiveClock
	events *record.FakeRecorder
	keeper *Keeper
	names  int
}

func newBench(t *testing.T) *bench {
	b := &bench{T: t, client: fake.NewClientset(&v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "a1"}}), clock: clocktesting.NewFakePassiveClock(begin), events: record.NewFakeRecorder(20)}
	b.client.PrependReactor("create", "podcertificaterequests", func(a k8stesting.Action) (bool, runtime.Object, error) {
		b.names++
		r := a.(k8stesting.CreateAction).GetObject().(*certificatesv1.PodCertificateRequest)
		r.Name = r.GenerateName + strings.Repeat("x", b.names)
		return false, nil, nil
	})
	b.keeper = New(Config{Client: b.client, NodeName: "n1", Node: func() *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{UID: "n"}} }, Recorder: b.events, Changed: func(types.UID) {}, Clock: b.clock})
	return b
}

var (
	pod  = &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p1"}, Spec: v1.PodSpec{ServiceAccountName: "web"}}
	from = volume.CertificateSource{Volume: "v", PodCertificateProjection: &v1.PodCertificateProjection{
		SignerName: "example.com/lab", KeyType: "ECDSAP256", MaxExpirationSeconds: ptr.To[int32](7200), UserAnnotations: map[string]string{"example.com/a": "b"},
	}}
)

// pending is the one request that has no answer.
func (b *bench) pending() *certificatesv1.PodCertificateRequest {
	b.Helper()
	list, err := b.client.CertificatesV1().PodCertificateRequests("ns").List(b.Context(), metav1.ListOptions{})
	if err != nil {
		b.Fatal(err)
	}
	var found *certificatesv1.PodCertificateRequest
	for i := range list.Items {
		if len(list.Items[i].Status.Conditions) > 0 {
			continue
		}
		if found != nil {
			b.Fatalf("two requests are pending: %s and %s", found.Name, list.Items[i].Name)
		}
		found = &list.Items[i]
	}
	return found
}

// decide answers the pending request.
func (b *bench) decide(condition string) {
	b.Helper()
	r := b.pending()
	if r == nil {
		b.Fatal("nothing was asked for")
	}
	r.Status.Conditions = []metav1.Condition{{Type: condition, Status: metav1.ConditionTrue, Reason: "Test", Message: "so be it"}}
	if condition == "Issued" {
		request, err := x509.ParseCertificateRequest(r.Spec.StubPKCS10Request)
		if err != nil {
			b.Fatal(err)
		}
		text, _, err := newKey("ECDSAP256")
		if err != nil {
			b.Fatal(err)
		}
		block, _ := pem.Decode(text)
		authority, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		if err != nil {
			b.Fatal(err)
		}
		now := b.clock.Now()
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: r.Name}, NotBefore: now, NotAfter: now.Add(2 * time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, request.PublicKey, authority)
		if err != nil {
			b.Fatal(err)
		}
		r.Status.CertificateChain = "words\n" + string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
		r.Status.NotBefore, r.Status.NotAfter, r.Status.BeginRefreshAt = ptr.To(metav1.NewTime(now)), ptr.To(metav1.NewTime(now.Add(2*time.Hour))), ptr.To(metav1.NewTime(now.Add(time.Hour)))
	}
	if _, err := b.client.CertificatesV1().PodCertificateRequests("ns").UpdateStatus(b.Context(), r, metav1.UpdateOptions{}); err != nil {
		b.Fatal(err)
	}
}

// has wants a certificate that fits its key, and returns whose it is.
func (b *bench) has() string {
	b.Helper()
	key, chain, err := b.keeper.Certificate(b.Context(), pod, from)
	if err != nil {
		b.Fatal(err)
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		b.Fatalf("the certificate is not of the key: %v\n%s", err, chain)
	}
	if !bytes.HasPrefix(chain, []byte("-----BEGIN CERTIFICATE")) {
		b.Errorf("a chain with words: %s", chain)
	}
	return pair.Leaf.Subject.CommonName
}

// waits wants no certificate, for a reason.
func (b *bench) waits(why string) {
	b.Helper()
	if _, _, err := b.keeper.Certificate(b.Context(), pod, from); err == nil || !strings.Contains(err.Error(), why) {
		b.Errorf("%v, want %s", err, why)
	}
}

func (b *bench) event(want string) {
	b.Helper()
	select {
	case got := <-b.events.Events:
		if !strings.Contains(got, want) {
			b.Errorf("event %s, want %s", got, want)
		}
	default:
		b.Errorf("no event %s", want)
	}
}

func TestCertificateIsRenewed(t *testing.T) {
	b := newBench(t)
	b.waits(`certificate of signer "example.com/lab" is not issued yet: PodCertificateRequest ns/req-x is pending`)
	b.waits("ns/req-x is pending") // and no second one
	if s := b.pending().Spec; s.PodName != "p" || s.PodUID != "p1" || s.ServiceAccountName != "web" || s.ServiceAccountUID != "a1" || s.NodeName != "n1" || s.NodeUID != "n" ||
		*s.MaxExpirationSeconds != 7200 || s.UnverifiedUserAnnotations["example.com/a"] != "b" {
		t.Errorf("asked %+v", s)
	}
	b.decide("Issued")
	first := b.has()
	b.clock.SetTime(begin.Add(time.Hour - time.Second))
	if again := b.has(); again != first || b.pending() != nil {
		t.Errorf("%s, then %s before its time", first, again)
	}
	b.clock.SetTime(begin.Add(time.Hour))
	if again := b.has(); again != first || b.pending() == nil {
		t.Errorf("%s, then %s while the next is pending", first, again)
	}
	b.decide("Issued")
	if next := b.has(); next == first {
		t.Errorf("still %s", next)
	}
	b.keeper.Forget(pod.UID)
	b.waits("is pending")
}

func TestSignerRefuses(t *testing.T) {
	for _, condition := range []string{"Denied", "Failed"} {
		b := newBench(t)
		b.waits("is pending")
		b.decide(condition)
		b.waits(condition + `, reason="Test", message="so be it"`)
		b.event("Warning " + condition + ` signer "example.com/lab"`)
		b.clock.SetTime(begin.Add(refusedFor - time.Second))
		b.waits(condition)
		b.clock.SetTime(begin.Add(refusedFor))
		b.waits("ns/req-xx is pending")
		b.decide("Issued")
		first := b.has()
		// A pod keeps what it has when the next is refused, to its end and beyond.
		b.clock.SetTime(begin.Add(2*refusedFor + time.Minute))
		b.has()
		b.decide(condition)
		if b.has() != first {
			t.Error("the pod's certificate is gone")
		}
		b.event("Warning " + condition)
		b.clock.SetTime(begin.Add(3*refusedFor + time.Second))
		b.has()
		b.event("CertificateExpired")
		b.has()
		if len(b.events.Events) > 0 {
			t.Errorf("one more event: %s", <-b.events.Events)
		}
	}
}

func TestRequestIsDeleted(t *testing.T) {
	b := newBench(t)
	b.waits("ns/req-x is pending")
	if err := b.client.CertificatesV1().PodCertificateRequests("ns").Delete(t.Context(), "req-x", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.waits("ns/req-xx is pending")
}

func TestKeys(t *testing.T) {
	for _, kind := range []string{"ED25519", "ECDSAP256", "ECDSAP384", "ECDSAP521", "RSA3072"} {
		_, stub, err := newKey(kind)
		if err != nil {
			t.Fatal(err)
		}
		if r, err := x509.ParseCertificateRequest(stub); err != nil || r.CheckSignature() != nil || len(r.Subject.Names) > 0 {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if _, _, err := newKey("DSA"); err == nil || !strings.Contains(err.Error(), `"DSA"`) {
		t.Errorf("DSA: %v", err)
	}
}
