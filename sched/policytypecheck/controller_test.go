package policytypecheck

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func policy(name string, generation, observed int64, expression string) *admissionv1.ValidatingAdmissionPolicy {
	p := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: generation}}
	p.Spec.Validations = []admissionv1.Validation{{Expression: expression}}
	if observed > 0 {
		p.Status.ObservedGeneration, p.Status.TypeChecking = observed, &admissionv1.TypeChecking{}
	}
	return p
}

// TestChecked: each spec is checked once, again where the check failed, and again when
// it has changed.
func TestChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(policy("wrong", 1, 0, "wrong"), policy("right", 2, 1, "right"), policy("done", 3, 3, "wrong"), policy("later", 1, 0, "right"))
		factory := informers.NewSharedInformerFactory(client, 0)
		var checks, failed atomic.Int32
		c := newController(loop.Env{Client: client, Informers: factory, Clock: clock.RealClock{}}, func(p *admissionv1.ValidatingAdmissionPolicy) ([]admissionv1.ExpressionWarning, error) {
			checks.Add(1)
			if p.Name == "later" && failed.Add(1) == 1 {
				return nil, errors.New("the kinds cannot be asked for")
			}
			if p.Spec.Validations[0].Expression == "wrong" {
				return slices.Repeat([]admissionv1.ExpressionWarning{{FieldRef: "spec.validations[0].expression", Warning: strings.Repeat("ü", 1<<20)}}, 100), nil
			}
			return nil, nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		factory.Start(ctx.Done())
		is := func(name string, generation int64, warnings int, count int32) {
			t.Helper()
			p, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if s := p.Status; s.ObservedGeneration != generation || s.TypeChecking == nil || len(s.TypeChecking.ExpressionWarnings) != warnings {
				t.Errorf("%s: %+v, want generation %d and %d warnings", name, s, generation, warnings)
			} else if warnings > 0 && len(s.TypeChecking.ExpressionWarnings[0].Warning) > mostWarningText+8 {
				t.Errorf("%s: a warning of %d bytes", name, len(s.TypeChecking.ExpressionWarnings[0].Warning))
			}
			if n := checks.Load(); n != count {
				t.Errorf("%d checks, want %d", n, count)
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		is("wrong", 1, mostWarnings, 4)
		is("right", 2, 0, 4)
		is("done", 3, 0, 4)
		is("later", 1, 0, 4)

		p, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, "wrong", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		p.Generation, p.Spec.Validations[0].Expression = 2, "right"
		if _, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Update(ctx, p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		is("wrong", 2, 0, 5)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		factory.Shutdown()
	})
}
