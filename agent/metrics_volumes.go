package agent

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/stats"
)

// volumeSeries are what the volumes of claims hold, by the names that a kubelet
// has for them. Of each claim there is one series, though several pods mount it.
type volumeSeries struct{ a *Agent }

// Drivers are asked at each scrape: some at a time, and for no longer than a
// scrape may take, so that one that hangs hides its own volumes alone.
const (
	volumesAtOnce = 16
	volumesWithin = 5 * time.Second
)

var (
	volumeCapacity   = volumeDesc("capacity_bytes", "Capacity in bytes of the volume")
	volumeAvailable  = volumeDesc("available_bytes", "Number of available bytes in the volume")
	volumeUsed       = volumeDesc("used_bytes", "Number of used bytes in the volume")
	volumeInodes     = volumeDesc("inodes", "Maximum number of inodes in the volume")
	volumeInodesFree = volumeDesc("inodes_free", "Number of free inodes in the volume")
	volumeInodesUsed = volumeDesc("inodes_used", "Number of used inodes in the volume")
)

func volumeDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kubelet_volume_stats_"+name, help, []string{"namespace", "persistentvolumeclaim"}, nil)
}

// Describe implements prometheus.Collector: which series there are, the answer
// tells.
func (volumeSeries) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (s volumeSeries) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), volumesWithin)
	defer cancel()
	var (
		mu    sync.Mutex
		found = map[types.NamespacedName]stats.Volume{}
		asked errgroup.Group
	)
	asked.SetLimit(volumesAtOnce)
	for _, v := range s.a.pods.Views() {
		asked.Go(func() error {
			for _, u := range s.a.volumeUse(ctx, v.Pod) {
				if u.Claim != "" {
					mu.Lock()
					found[types.NamespacedName{Namespace: v.Pod.Namespace, Name: u.Claim}] = u
					mu.Unlock()
				}
			}
			return nil
		})
	}
	_ = asked.Wait()
	for claim, u := range found {
		send := func(d *prometheus.Desc, n int64) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), claim.Namespace, claim.Name)
		}
		if u.Total > 0 {
			send(volumeCapacity, u.Total)
			send(volumeAvailable, max(u.Available, 0))
			send(volumeUsed, u.Used)
		}
		if u.InodesTotal > 0 {
			send(volumeInodes, u.InodesTotal)
			send(volumeInodesFree, max(u.InodesAvailable, 0))
			send(volumeInodesUsed, u.InodesUsed)
		}
	}
}
