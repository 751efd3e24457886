package agent

import (
	"errors"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
)

type refusing struct {
	record.EventSink
	err error
}

func (r refusing) Create(*v1.Event) (*v1.Event, error) { return nil, r.err }

// TestEventsOfTheStart: what a server that has just begun refuses is written later;
// client-go's recorder tries again unless the error is a Status.
func TestEventsOfTheStart(t *testing.T) {
	none, forbidden := apierrors.NewNotFound(v1.Resource("namespaces"), "x"), apierrors.NewForbidden(v1.Resource("events"), "e", errors.New("no role"))
	for _, tt := range []struct {
		name, namespace string
		err             error
		again           bool
	}{
		{"no namespace yet", metav1.NamespaceDefault, none, true},
		{"no role yet", metav1.NamespaceDefault, forbidden, true},
		{"a namespace that is gone", "x", none, false},
		{"a namespace that ends", "x", forbidden, false},
		{"no leader", "x", apierrors.NewServiceUnavailable("no leader"), true},
		{"too many", "x", apierrors.NewTooManyRequests("later", 1), true},
		{"it is no event", metav1.NamespaceDefault, apierrors.NewBadRequest("no"), false},
	} {
		_, err := eventSink{refusing{err: tt.err}}.Create(&v1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: tt.namespace}})
		if _, status := err.(*apierrors.StatusError); err == nil || status == tt.again { //nolint:errorlint // as client-go asks
			t.Errorf("%s: %T %v; tried again: want %t", tt.name, err, err, tt.again)
		}
	}
}
