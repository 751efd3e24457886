package e2e

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// notNow is in the answer of a cluster that elects a leader or of a server that starts:
// nothing was changed, and the same command passes a moment later.
var notNow = regexp.MustCompile(`no leader|No leader|connection refused|was refused - did you specify|the server is starting`)

// patience is how long such an answer is taken for one.
const patience = time.Minute

// runNow is run of clusterctl, again as long as the answer says "not now".
func (e *env) runNow(stdin string, args ...string) (stdout, stderr string, code int) {
	for began := time.Now(); ; time.Sleep(250 * time.Millisecond) {
		stdout, stderr, code = e.run("clusterctl", stdin, args...)
		if code == 0 || !notNow.MatchString(stdout+stderr) || time.Since(began) > patience {
			return stdout, stderr, code
		}
		e.t.Logf("clusterctl %s, not now: %s", strings.Join(args, " "), strings.TrimSpace(stderr))
	}
}

// laterErr reports whether an error of the API is one of an election or a start, after
// which the request is made again. Whether a timeout has changed anything is not known.
func laterErr(err error) bool {
	return apierrors.IsServiceUnavailable(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || utilnet.IsConnectionRefused(err)
}

// made creates an object; where an answer was lost, what was created counts.
func made[T any](e *env, create, get func(context.Context) (T, error)) T {
	e.t.Helper()
	for began, lost := time.Now(), false; ; time.Sleep(250 * time.Millisecond) {
		out, err := create(e.t.Context())
		if lost && apierrors.IsAlreadyExists(err) {
			out, err = get(e.t.Context())
		}
		if err == nil {
			return out
		}
		if !laterErr(err) || time.Since(began) > patience {
			e.t.Fatal(err)
		}
		lost = true
	}
}

// backSince waits until nodes that were started again after a time have renewed their
// Leases since and are Ready: what their status says may be from before.
func (e *env) backSince(began time.Time, nodes ...string) {
	e.t.Helper()
	for _, name := range nodes {
		e.eventually(name+" is back", func(ctx context.Context) error {
			lease, err := e.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if at := lease.Spec.RenewTime; at == nil || !at.After(began) {
				return fmt.Errorf("its Lease was renewed at %v", at)
			}
			n, err := e.api.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err == nil && !nodeReady(n) {
				err = fmt.Errorf("conditions %+v", n.Status.Conditions)
			}
			return err
		})
	}
}

// cordoned cordons a node, and waits until the scheduler keeps pods off it: it may see a
// pod before the change of the node that came before it.
func (e *env) cordoned(ns, node string) {
	e.t.Helper()
	e.ctl("cordon", node)
	e.eventually("the scheduler knows that "+node+" is cordoned", func(context.Context) error {
		name := e.create(ns, on(node, pod("probes-"+node, "sleep"))).Name
		p := e.podIs(ns, name, "decided on", func(p *corev1.Pod) error {
			if c := podCondition(p, corev1.PodScheduled); c == nil {
				return errors.New("no condition")
			}
			return nil
		})
		e.ctl("-n", ns, "delete", "pod", name, "--grace-period=0", "--force")
		if p.Spec.NodeName != "" {
			return errors.New("a pod was placed there")
		}
		return nil
	})
}

func TestNotNow(t *testing.T) {
	for said, want := range map[string]bool{
		"Error from server (ServiceUnavailable): the cluster has no leader at the moment, nothing was changed: raftstore: no leader": true,
		"The connection to the server 10.90.0.2:6443 was refused - did you specify the right host or port?":                          true,
		"Error from server (ServiceUnavailable): the server is starting: it does not know all kinds yet":                             true,
		`Error from server (NotFound): namespaces "nowhere" not found`:                                                               false,
		`Error from server (AlreadyExists): configmaps "c" already exists`:                                                           false,
		"removing n4 would stop the cluster: n3 does not answer":                                                                     false,
	} {
		if notNow.MatchString(said) != want {
			t.Errorf("%q says \"not now\": %t, want %t", said, !want, want)
		}
	}
}
