package podcertificate

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

// TestOver: a request goes a quarter of an hour after it was made, answered or
// not.
func TestOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		request := func(name string, age time.Duration, condition string) *certificatesv1.PodCertificateRequest {
			r := &certificatesv1.PodCertificateRequest{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name, UID: "u", CreationTimestamp: metav1.NewTime(time.Now().Add(-age))}}
			if condition != "" {
				r.Status.Conditions = []metav1.Condition{{Type: condition, Status: metav1.ConditionTrue}}
			}
			return r
		}
		client := fake.NewClientset(request("old", time.Hour, ""), request("old-issued", time.Hour, "Issued"), request("new", 0, ""), request("new-denied", 0, "Denied"), request("half", 10*time.Minute, "Issued"))
		env := loop.Env{Client: client, Clock: clock.RealClock{}, Informers: informers.NewSharedInformerFactory(client, 0)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		l := New(env)
		env.Informers.StartWithContext(ctx)
		go func() { done <- l.Run(ctx) }()
		check := func(when string, want ...string) {
			t.Helper()
			list, err := client.CertificatesV1().PodCertificateRequests("d").List(ctx, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for i := range list.Items {
				got = append(got, list.Items[i].Name)
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v", when, got, want)
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		check("a minute later", "half", "new", "new-denied")
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		check("six minutes later", "new", "new-denied")
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		check("sixteen minutes later")
		cancel()
		<-done
		env.Informers.Shutdown()
	})
}
