package main

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestUnknownKindIsNotAskedToBeInstalled(t *testing.T) {
	// As apply puts it, for two objects.
	unknown := (&meta.NoKindMatchError{GroupKind: schema.GroupKind{Group: "example.com", Kind: "Oven"}, SearchedVersions: []string{"v1"}}).Error()
	message := plainly("error: resource mapping not found: " + unknown + "\n" + hint + "\nerror: " + unknown + "\n" + hint)
	if strings.Contains(message, hint) || strings.Count(message, "clusterd does not serve this kind") != 2 || !strings.Contains(message, `"Oven"`) {
		t.Errorf("says: %s", message)
	}
}
