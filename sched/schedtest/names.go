package schedtest

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// RefuseNames makes the client answer the first n creations of the resource as if
// the names they chose were taken. refused says how many it has answered so.
func RefuseNames(client *fake.Clientset, resource string, n int) (refused func() int) {
	done := 0 // the fake client calls one reactor at a time
	client.PrependReactor("create", resource, func(a clienttesting.Action) (bool, runtime.Object, error) {
		if done == n {
			return false, nil, nil
		}
		done++
		name := a.(clienttesting.CreateAction).GetObject().(metav1.Object).GetName()
		return true, nil, apierrors.NewAlreadyExists(a.GetResource().GroupResource(), name)
	})
	return func() int { return done }
}
