package kubedns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/loop"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var (
	address = netip.MustParseAddr("10.96.0.10")
	addrs   = []netip.Addr{address}
)

func TestFix(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*corev1.Service)
		want   func(*corev1.Service) error // of what is written; nil: nothing is
	}{
		"as it is":     {func(*corev1.Service) {}, nil},
		"other labels": {func(s *corev1.Service) { s.Labels["team"] = "a" }, nil},
		"no label": {func(s *corev1.Service) { delete(s.Labels, labelProxyName) }, func(s *corev1.Service) error {
			if s.Labels[labelProxyName] != own {
				return errors.New("nodes would refuse questions")
			}
			return nil
		}},
		"a selector and other ports": {func(s *corev1.Service) {
			s.Spec.Selector = map[string]string{"a": "b"}
			s.Spec.Ports = s.Spec.Ports[:1]
		}, func(s *corev1.Service) error {
			if s.Spec.Selector != nil || len(s.Spec.Ports) != 2 {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		"an administrator's, elsewhere": {func(s *corev1.Service) { s.Labels, s.Spec.ClusterIP = nil, "10.96.0.99" }, nil},
		"an administrator's, at our address": {func(s *corev1.Service) {
			s.Labels, s.Spec.Ports = nil, s.Spec.Ports[:1]
		}, func(s *corev1.Service) error {
			if s.Labels[labelProxyName] != own || len(s.Spec.Ports) != 1 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		}},
	} {
		s := newService(addrs)
		tt.change(s)
		got := fix(s, addrs)
		switch {
		case (got == nil) != (tt.want == nil):
			t.Errorf("%s: %+v", name, got)
		case got != nil:
			if err := tt.want(got); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if again := fix(got, addrs); again != nil {
				t.Errorf("%s: not right after it was corrected: %+v", name, again)
			}
		}
	}
}

// TestSecondFamily: the Service gets the second address when the cluster has one.
func TestSecondFamily(t *testing.T) {
	both := []netip.Addr{address, netip.MustParseAddr("fd00:96::a")}
	had := newService(addrs)
	had.Spec.ClusterIPs, had.Spec.IPFamilies = []string{address.String()}, []corev1.IPFamily{corev1.IPv4Protocol}
	got := fix(had, both)
	if got == nil || len(got.Spec.ClusterIPs) != 2 || got.Spec.ClusterIPs[1] != "fd00:96::a" || *got.Spec.IPFamilyPolicy != corev1.IPFamilyPolicyPreferDualStack {
		t.Fatalf("%+v", got)
	}
	if again := fix(got, both); again != nil {
		t.Errorf("not right after it was corrected: %+v", again)
	}
	made, k := newService(both), core.Service()
	k.Default(made)
	if errs := k.Validate(made); len(errs) > 0 {
		t.Error(errs)
	}
}

func TestWhatIsMadeIsValid(t *testing.T) {
	s, k := newService(addrs), core.Service()
	k.Default(s)
	k.PrepareCreate(s)
	if errs := k.Validate(s); len(errs) > 0 {
		t.Error(errs)
	}
}

// TestLoop: the Service is made, and comes back.
func TestLoop(t *testing.T) {
	client := fake.NewClientset()
	ctx, cancel := context.WithCancel(t.Context())
	env := loop.Env{Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Events: loop.NewEvents(client, clock.RealClock{}), Clock: clock.RealClock{}}
	l := New(env, addrs)
	env.Informers.StartWithContext(ctx)
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		env.Informers.Shutdown()
	}()
	api := client.CoreV1().Services(the.Namespace)
	for range 2 {
		err := errors.New("not asked yet")
		for end := time.Now().Add(time.Minute); err != nil && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			var s *corev1.Service
			if s, err = api.Get(ctx, the.Name, metav1.GetOptions{}); err == nil && s.Spec.ClusterIP != address.String() {
				err = fmt.Errorf("%+v", s.Spec)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := api.Delete(ctx, the.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}
