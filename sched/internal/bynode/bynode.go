// Package bynode finds pods by the node they are bound to.
package bynode

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
)

const indexName = "clusterd-node"

// Index makes the informer's pods findable by node. Call it before the informer
// starts; calling it again is harmless.
func Index(informer cache.SharedIndexInformer) error {
	if _, ok := informer.GetIndexer().GetIndexers()[indexName]; ok {
		return nil
	}
	return informer.AddIndexers(cache.Indexers{indexName: func(obj any) ([]string, error) {
		pod, ok := obj.(*corev1.Pod)
		if !ok || pod.Spec.NodeName == "" {
			return nil, nil
		}
		return []string{pod.Spec.NodeName}, nil
	}})
}

// Pods returns the pods bound to the node.
func Pods(indexer cache.Indexer, node string) ([]*corev1.Pod, error) {
	objs, err := indexer.ByIndex(indexName, node)
	if err != nil {
		return nil, err
	}
	out := make([]*corev1.Pod, 0, len(objs))
	for _, obj := range objs {
		if pod, ok := obj.(*corev1.Pod); ok {
			out = append(out, pod)
		}
	}
	return out, nil
}
