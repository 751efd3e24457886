package netpol

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/netsetup/policy"
)

// refusing is an Enforcer that refuses with err.
type refusing struct {
	mu  sync.Mutex
	err error
}

func (r *refusing) Set([]policy.Group) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (*refusing) Run(ctx context.Context) { <-ctx.Done() }

func (r *refusing) refuse(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

// TestFault: which policies are not in force is told, and when they are.
func TestFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var told []string
		rules := &refusing{}
		_, api := running(t, Config{Enforcer: rules, Fault: func(changed []string, err error) {
			mu.Lock()
			defer mu.Unlock()
			if text := fmt.Sprint(changed, err); len(told) == 0 || told[len(told)-1] != text {
				told = append(told, text)
			}
		}}, pod("a", "web", "n1", "10.244.0.7"))
		policies := api.NetworkingV1().NetworkPolicies("a")
		before, err := policies.List(t.Context(), metav1.ListOptions{})
		if err != nil || len(before.Items) == 0 {
			t.Fatal(before, err)
		}
		rules.refuse(errors.New("no buffer space available"))
		for _, name := range []string{"later", "last"} {
			if _, err := policies.Create(t.Context(), &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}}, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
		}
		if err := policies.Delete(t.Context(), before.Items[0].Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		rules.refuse(nil)
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		gone := "a/" + before.Items[0].Name
		all := []string{gone, "a/last", "a/later"}
		slices.Sort(all)
		want := []string{
			"[a/later] no buffer space available", "[a/last a/later] no buffer space available",
			fmt.Sprint(all) + " no buffer space available", "[] <nil>",
		}
		if !slices.Equal(told, want) {
			t.Errorf("told were\n%q, want\n%q", told, want)
		}
	})
}
