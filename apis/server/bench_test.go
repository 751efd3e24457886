package server_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// BenchmarkStart is the time from nothing to ready.
func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		servertest.Start(b, nil)
	}
}
