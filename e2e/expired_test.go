package e2e

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2EExpired lets every certificate of a cluster end at once: first while all
// machines sleep, then while they are off. It recovers by itself, and no container
// notices.
func TestE2EExpired(t *testing.T) {
	need(t)
	e := startBare(t, 3, func(c *cluster.Config) { c.Agents, c.Clocks = 1, true })
	e.ready(4)
	ns := e.namespace("expired")
	pods := podOnEach(e, ns)

	t.Run("asleep", func(t *testing.T) {
		const asleep = 400 * 24 * time.Hour // an administrator's of earlier versions lived a year
		for _, n := range e.Nodes() {
			if err := e.Pause(n.Name); err != nil {
				t.Fatal(err)
			}
		}
		setClocks(e, asleep)
		for _, n := range e.Nodes() {
			if err := e.Resume(n.Name); err != nil {
				t.Fatal(err)
			}
		}
		took := recovered(e, ns, pods, asleep, stalled)
		t.Logf("all certificates had ended; the whole cluster worked again %s after it woke", took)
	})
	t.Run("off", func(t *testing.T) {
		const off = 800 * 24 * time.Hour
		for _, n := range e.Nodes() {
			if err := e.Stop(t.Context(), n.Name); err != nil {
				t.Fatal(err)
			}
		}
		setClocks(e, off)
		for _, n := range e.Nodes() {
			if err := e.Start(t.Context(), n.Name); err != nil {
				t.Fatal(err)
			}
		}
		took := recovered(e, ns, pods, off, testTimeout)
		t.Logf("all certificates had ended; the whole cluster worked again %s after it was started", took)
	})
}

// podOnEach runs a pod on each node and returns their containers' ids by pod.
func podOnEach(e *env, ns string) map[string]string {
	ids := map[string]string{}
	for _, n := range e.Nodes() {
		p := pod("on-" + n.Name)
		p.Spec.NodeName = n.Name
		e.create(ns, p)
	}
	for _, n := range e.Nodes() {
		ids["on-"+n.Name] = e.podReady(ns, "on-"+n.Name).Status.ContainerStatuses[0].ContainerID
	}
	return ids
}

// setClocks sets those of all machines.
func setClocks(e *env, ahead time.Duration) {
	e.t.Helper()
	for _, n := range e.Nodes() {
		if err := e.SetClock(n.Name, ahead); err != nil {
			e.t.Fatal(err)
		}
	}
}

// clientAt is the administrator's of a server, in a program whose clock is that much
// ahead.
func clientAt(e *env, server string, ahead time.Duration) (kubernetes.Interface, error) {
	_, config, err := e.Client(server)
	if err != nil {
		return nil, err
	}
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	tlsConfig.Time = func() time.Time { return time.Now().Add(ahead) }
	way := &http.Transport{TLSClientConfig: tlsConfig, ForceAttemptHTTP2: true}
	plain := rest.CopyConfig(config)
	plain.TLSClientConfig = rest.TLSClientConfig{}
	plain.Host, plain.Transport = config.Host, way
	return kubernetes.NewForConfig(plain)
}

// recovered waits until every server of the cluster takes writes, every node is Ready by what it
// says now, and each server reaches the pod of each node; no container was started again.
func recovered(e *env, ns string, ids map[string]string, ahead, limit time.Duration) time.Duration {
	e.t.Helper()
	began := time.Now()
	for _, n := range e.Nodes() {
		e.within(limit, n.Name+" has a certificate of now", func(context.Context) error {
			if cert := certOf(e, n.Name); !cert.NotAfter.After(time.Now().Add(ahead)) {
				return fmt.Errorf("it ended %s", cert.NotAfter)
			}
			return nil
		})
	}
	for _, server := range e.Nodes() {
		if server.Agent {
			continue
		}
		var api kubernetes.Interface
		e.within(limit, server.Name+" takes writes", func(ctx context.Context) (err error) {
			if api, err = clientAt(e, server.Name, ahead); err != nil {
				return err
			}
			_, err = api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "after-"}}, metav1.CreateOptions{})
			return err
		})
		e.within(limit, "every node is Ready at "+server.Name, func(ctx context.Context) error {
			list, err := api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, n := range list.Items {
				lease, err := api.CoordinationV1().Leases("kube-node-lease").Get(ctx, n.Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				if !nodeReady(&n) || len(n.Spec.Taints) > 0 || lease.Spec.RenewTime.Before(&metav1.MicroTime{Time: began.Add(ahead)}) {
					return fmt.Errorf("%s: renewed %s, taints %v, conditions %+v", n.Name, lease.Spec.RenewTime, n.Spec.Taints, n.Status.Conditions)
				}
			}
			if len(list.Items) != len(e.Nodes()) {
				return fmt.Errorf("%d nodes", len(list.Items))
			}
			return nil
		})
		for name, id := range ids {
			e.within(limit, server.Name+" has the logs of "+name, func(ctx context.Context) error {
				b, err := api.CoreV1().Pods(ns).GetLogs(name, &corev1.PodLogOptions{}).Do(ctx).Raw()
				if err == nil && len(b) == 0 {
					err = errors.New("no logs")
				}
				return err
			})
			p, err := api.CoreV1().Pods(ns).Get(e.t.Context(), name, metav1.GetOptions{})
			if err != nil {
				e.t.Fatal(err)
			}
			if s := p.Status.ContainerStatuses[0]; s.ContainerID != id || s.RestartCount != 0 || p.DeletionTimestamp != nil {
				e.t.Errorf("the container of %s is another one: %+v, before %s", name, s, id)
			}
		}
	}
	took := time.Since(began)
	for name := range ids {
		node := strings.TrimPrefix(name, "on-")
		e.eventually("the token of "+name+" is good", func(context.Context) error {
			files, err := filepath.Glob(filepath.Join(e.data(node), "pods", "*", "volumes", "*", "*", "token"))
			if err != nil || len(files) != 1 {
				return fmt.Errorf("%q, %v", files, err)
			}
			end, err := tokenEnd(files[0])
			if err == nil && end.Before(time.Now().Add(ahead)) {
				err = fmt.Errorf("it ended %s", end)
			}
			return err
		})
	}
	return took
}

// tokenEnd is when a service account's token in a file ends.
func tokenEnd(file string) (time.Time, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return time.Time{}, err
	}
	parts := strings.Split(string(b), ".")
	if len(parts) != 3 {
		return time.Time{}, fmt.Errorf("%q is no token", b)
	}
	if b, err = base64.RawURLEncoding.DecodeString(parts[1]); err != nil {
		return time.Time{}, err
	}
	var claims struct {
		End int64 `json:"exp"`
	}
	err = json.Unmarshal(b, &claims)
	return time.Unix(claims.End, 0), err
}
