package bootstraptoken

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

// TestExpired: a token goes when its time has come, and nothing else does.
func TestExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		secret := func(name string, of corev1.SecretType, expiration string) *corev1.Secret {
			s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name, UID: "u", ResourceVersion: "1"}, Type: of, Data: map[string][]byte{}}
			if expiration != "" {
				s.Data[bootstrapapi.BootstrapTokenExpirationKey] = []byte(expiration)
			}
			return s
		}
		in := func(d time.Duration) string { return time.Now().Add(d).UTC().Format(time.RFC3339) }
		const token = bootstrapapi.SecretTypeBootstrapToken
		client := fake.NewClientset(secret("past", token, in(-time.Hour)), secret("hour", token, in(time.Hour)), secret("for-ever", token, ""),
			secret("no-time", token, "tomorrow"), secret("another-type", corev1.SecretTypeOpaque, in(-time.Hour)))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		l := New(loop.Env{Client: client, Clock: clock.RealClock{}})
		go func() { done <- l.Run(ctx) }()
		check := func(when string, want ...string) {
			t.Helper()
			list, err := client.CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range list.Items {
				got = append(got, s.Name)
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v", when, got, want)
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		check("a minute later", "another-type", "for-ever", "hour")
		time.Sleep(time.Hour)
		synctest.Wait()
		check("an hour later", "another-type", "for-ever")
		cancel()
		<-done
	})
}
