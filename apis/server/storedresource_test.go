package server

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// TestStoredResource: what StoragePrefix made of a resource is found again in a key.
func TestStoredResource(t *testing.T) {
	for _, r := range []schema.GroupResource{{Resource: "secrets"}, {Group: "kitchen.example.com", Resource: "ovens"}, TokenKeys} {
		if got := StoredResource(StoragePrefix(r.Group, r.Resource) + "/namespace/name"); got != r {
			t.Errorf("%v: %v", r, got)
		}
	}
	if got := StoredResource("/odd"); !got.Empty() {
		t.Errorf("a key of no resource: %v", got)
	}
}
