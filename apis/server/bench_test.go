package server_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// BenchmarkRequests is what a request costs beside the store and, for the
// in-process client, the network: the store is a map in memory.
func BenchmarkRequests(b *testing.B) {
	s := servertest.Start(b, nil)
	config := s.Listen(b)
	config.ContentType = "application/vnd.kubernetes.protobuf"
	network, err := kubernetes.NewForConfig(config)
	if err != nil {
		b.Fatal(err)
	}
	var n atomic.Int64
	for name, client := range map[string]kubernetes.Interface{"in-process": s.Client, "tls": network} {
		maps := client.CoreV1().ConfigMaps("default")
		b.Run("create/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				m := configMap(fmt.Sprint("m", n.Add(1)), map[string]string{"k": "v"})
				if _, err := maps.Create(b.Context(), m, metav1.CreateOptions{}); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("get/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := maps.Get(b.Context(), "m1", metav1.GetOptions{}); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("pod/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p := pod(fmt.Sprint("p", n.Add(1)))
				if _, err := client.CoreV1().Pods("default").Create(b.Context(), p, metav1.CreateOptions{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPodStatus is a status patch as an agent sends it, for a pod that a
// user made and for one that a controller made.
func BenchmarkPodStatus(b *testing.B) {
	s := servertest.Start(b, nil)
	for name, maker := range map[string]kubernetes.Interface{"user": s.Client, "controller": s.ClientFor(b, user.KubeControllerManager, user.SystemPrivilegedGroup)} {
		if _, err := maker.CoreV1().Pods("default").Create(b.Context(), pod(name), metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
		n := 0
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				n++
				patch := fmt.Appendf(nil, `{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True","message":"%d"}]}}`, n)
				if _, err := s.Client.CoreV1().Pods("default").Patch(b.Context(), name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPodLine is what a pod of a controller costs until it runs, in writes of this
// process: it is made, bound, spoken of, and its status is reported. Each is measured
// by itself, too.
func BenchmarkPodLine(b *testing.B) {
	s := servertest.Start(b, nil)
	loops := s.ClientFor(b, user.KubeControllerManager, user.SystemPrivilegedGroup)
	pods := loops.CoreV1().Pods("default")
	n := 0
	create := func(b *testing.B) *corev1.Pod {
		n++
		made, err := pods.Create(b.Context(), pod(fmt.Sprint("p", n)), metav1.CreateOptions{})
		if err != nil {
			b.Fatal(err)
		}
		return made
	}
	bind := func(b *testing.B, p *corev1.Pod) {
		if err := pods.Bind(b.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: "n1"}}, metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	event := func(b *testing.B, p *corev1.Pod) {
		n++
		now := metav1.Now()
		if _, err := loops.CoreV1().Events("default").Create(b.Context(), &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("e", n)}, Type: "Normal", Reason: "Scheduled", Message: "Successfully assigned",
			InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: p.Name, UID: p.UID}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
			Source: corev1.EventSource{Component: "scheduler"}, ReportingController: "scheduler",
		}, metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	status := func(b *testing.B, p *corev1.Pod) {
		n++
		patch := fmt.Appendf(nil, `{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True","message":"%d"}]}}`, n)
		if _, err := s.Client.CoreV1().Pods("default").Patch(b.Context(), p.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("all", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p := create(b)
			bind(b, p)
			event(b, p)
			status(b, p)
		}
	})
	b.Run("create", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			create(b)
		}
	})
	b.Run("create and bind", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			bind(b, create(b))
		}
	})
	one := create(b)
	b.Run("event", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			event(b, one)
		}
	})
	b.Run("status", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			status(b, one)
		}
	})
}

// BenchmarkLease is a renewal as an agent sends it, of a node's Lease and of another.
func BenchmarkLease(b *testing.B) {
	s := servertest.Start(b, nil)
	for _, namespace := range []string{corev1.NamespaceNodeLease, metav1.NamespaceDefault} {
		leases := s.Client.CoordinationV1().Leases(namespace)
		at := metav1.NowMicro()
		l, err := leases.Create(b.Context(), &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: "n1"},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("n1"), LeaseDurationSeconds: ptr.To[int32](40), RenewTime: &at},
		}, metav1.CreateOptions{})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(namespace, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				now := metav1.NewMicroTime(l.Spec.RenewTime.Add(time.Second))
				l.Spec.RenewTime = &now
				if l, err = leases.Update(b.Context(), l, metav1.UpdateOptions{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkStart is the time from nothing to ready.
func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		servertest.Start(b, nil)
	}
}
