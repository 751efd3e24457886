package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/auth"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// storeLimits are the parts of the store's configuration that have a flag or a
// line in the file.
type storeLimits struct {
	quota, historyBytes int64
	historyAge          time.Duration
	writerWindow        time.Duration // 0: writers are not bounded
	folders             map[string]int64
	engine              raftstore.LogEngine
	formatAfter         time.Duration
}

// Least values with which a cluster still works.
const (
	minStoreQuota   = 64 << 20
	minHistoryBytes = 1 << 20
	minHistoryAge   = time.Minute
	minWriterWindow = time.Second
	minFormatAfter  = time.Second
)

func (c *Config) storeLimits() (l storeLimits, err error) {
	if l.engine = raftstore.LogEngine(c.RaftLog); !slices.Contains(raftstore.LogEngines, l.engine) {
		return l, fmt.Errorf("--raft-log %q: give one of %q", c.RaftLog, raftstore.LogEngines)
	}
	if l.quota, err = bytesOf("--store-quota", c.StoreQuota, minStoreQuota); err != nil {
		return l, err
	}
	if l.historyBytes, err = bytesOf("--store-history-size", c.StoreHistorySize, minHistoryBytes); err != nil {
		return l, err
	}
	if l.historyAge = c.StoreHistoryAge.Duration; l.historyAge < minHistoryAge {
		return l, fmt.Errorf("--store-history-age %s: give at least %s, which watches need to go on after a pause", l.historyAge, minHistoryAge)
	}
	if l.writerWindow = c.StoreWriterWindow.Duration; l.writerWindow != 0 && l.writerWindow < minWriterWindow {
		return l, fmt.Errorf("--store-writer-window %s: give at least %s, or 0 for no bound", l.writerWindow, minWriterWindow)
	}
	if l.formatAfter = c.StoreFormatAfter.Duration; l.formatAfter < minFormatAfter {
		return l, fmt.Errorf("--store-format-after %s: give at least %s", l.formatAfter, minFormatAfter)
	}
	l.folders = make(map[string]int64, len(c.StoreQuotas))
	for what, size := range c.StoreQuotas {
		folder, err := quotaFolder(what)
		if err != nil {
			return l, err
		}
		if l.folders[folder], err = bytesOf("storeQuotas: "+what, size, 1); err != nil {
			return l, err
		}
	}
	return l, nil
}

func bytesOf(name, text string, least int64) (int64, error) {
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, fmt.Errorf("%s %q: give a size such as 512Mi or 8Gi", name, text)
	}
	if q.Value() < least {
		return 0, fmt.Errorf("%s %s: give at least %s", name, text, resource.NewQuantity(least, resource.BinarySI))
	}
	return q.Value(), nil
}

// quotaFolder is where the store keeps what a line of storeQuotas is about.
func quotaFolder(what string) (string, error) {
	name, namespace, inOne := strings.Cut(what, "/")
	resource, group, _ := strings.Cut(name, ".")
	if inOne && len(validation.IsDNS1123Label(namespace)) > 0 {
		return "", fmt.Errorf("storeQuotas: %q: %q is no namespace", what, namespace)
	}
	for _, kind := range apis.Kinds() {
		if kind.Resource != resource || kind.GVK.Group != group {
			continue
		}
		if inOne && !kind.Namespaced {
			return "", fmt.Errorf("storeQuotas: %q: %s are in no namespace", what, resource)
		}
		return kubestore.Folder(server.StoragePrefix(group, resource), namespace), nil
	}
	if group == "" || len(validation.IsDNS1123Subdomain(group)) > 0 || resource == "" {
		return "", fmt.Errorf("storeQuotas: %q: no such resource; give RESOURCE (secrets), RESOURCE.GROUP (deployments.apps), or either with /NAMESPACE", what)
	}
	// A custom kind, which is known only once the cluster runs.
	return kubestore.Folder(server.StoragePrefix(group, resource), namespace), nil
}

// vitalPrefixes begin the keys that a full store still takes: who is a member,
// who is alive, and what a cluster needs to know of its nodes.
var vitalPrefixes = []string{
	"/clusterd/",
	kubestore.Folder(server.StoragePrefix("coordination.k8s.io", "leases"), ""),
	kubestore.Folder(server.StoragePrefix("", "nodes"), ""),
}

// nodeLeases begin the keys of the leases by which nodes say that they live.
var nodeLeases = []byte(kubestore.Folder(server.StoragePrefix("coordination.k8s.io", "leases"), corev1.NamespaceNodeLease))

// nodeUsers begin the names of nodes.
var nodeUsers = []byte(auth.NodeUserPrefix)

// mayWait says which writes the store gathers for a moment: renewals of nodes'
// leases, the most frequent writes of a cluster at rest. They come every quarter of a
// lease's duration. A lease that the leader takes or gives is none of them.
func mayWait(origin, key []byte) bool {
	return bytes.HasPrefix(key, nodeLeases) && bytes.HasPrefix(origin, nodeUsers)
}

// maxObjectBytes is how large an object may be as it is stored: what clients of
// Kubernetes are used to.
const maxObjectBytes = 3 << 19

// apply puts the limits into a store's configuration.
func (l storeLimits) apply(c *raftstore.Config) {
	c.QuotaBytes, c.FolderQuotas, c.VitalPrefixes = l.quota, l.folders, vitalPrefixes
	c.MaxValueBytes, c.LogEngine, c.MayWait = maxObjectBytes, l.engine, mayWait
	c.HistoryAge, c.HistoryBytes, c.FormatAfter = l.historyAge, l.historyBytes, l.formatAfter
}
