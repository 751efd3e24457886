package server_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"

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

// BenchmarkStart is the time from nothing to ready.
func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		servertest.Start(b, nil)
	}
}
