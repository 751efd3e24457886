package watches

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// TestHolds: what is older than the API's, or was deleted there, is the past; what is
// newer, also where it is not listed, is not.
func TestHolds(t *testing.T) {
	node := func(name, version string) v1.Node {
		return v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version}}
	}
	list := &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "100"}, Items: []v1.Node{node("a", "9"), node("b", "95")}}
	for name, tt := range map[string]struct {
		held []v1.Node
		want bool
	}{
		"the same":          {[]v1.Node{node("a", "9"), node("b", "95")}, true},
		"newer":             {[]v1.Node{node("a", "101"), node("b", "95")}, true},
		"older":             {[]v1.Node{node("a", "9"), node("b", "94")}, false},
		"less":              {[]v1.Node{node("a", "9")}, false},
		"none":              {nil, false},
		"one was deleted":   {[]v1.Node{node("a", "9"), node("b", "95"), node("c", "50")}, false},
		"one is made since": {[]v1.Node{node("a", "9"), node("b", "95"), node("c", "101")}, true},
	} {
		held := cache.NewStore(cache.MetaNamespaceKeyFunc)
		for i := range tt.held {
			if err := held.Add(&tt.held[i]); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := holds(held, runtime.Object(list)); got != tt.want || err != nil {
			t.Errorf("%s: %t (%v)", name, got, err)
		}
	}
}
