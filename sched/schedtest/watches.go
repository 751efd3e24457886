package schedtest

import (
	"strconv"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
)

// init gives fake watches room for the events of a whole test: one whose reader is
// kept from running while a hundred come panics.
func init() { watch.DefaultChanSize = 4096 }

// firstVersion is above the resource versions that fakes give objects.
const firstVersion = 1 << 40

// SeeAll has the watches of a fake client begin with the list before them, as a
// server's do. A fake forgets what was deleted between a reflector's list and its
// watch, so that an informer keeps the object for ever.
func SeeAll(client *clienttesting.Fake, tracker clienttesting.ObjectTracker) {
	// The fake client calls one reactor at a time.
	version, begun := firstVersion, map[string]watch.Interface{}
	react := clienttesting.ObjectReaction(tracker)
	client.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if a, ok := action.(clienttesting.ListActionImpl); !ok || a.ListOptions.ResourceVersion != "0" {
			return false, nil, nil // no reflector's
		}
		w, err := tracker.Watch(action.GetResource(), action.GetNamespace())
		if err != nil {
			return true, nil, err
		}
		handled, list, err := react(action)
		if err != nil || !handled {
			w.Stop()
			return handled, list, err
		}
		version++
		m, err := meta.ListAccessor(list)
		if err != nil {
			w.Stop()
			return true, nil, err
		}
		m.SetResourceVersion(strconv.Itoa(version))
		begun[m.GetResourceVersion()] = w
		return true, list, nil
	})
	client.PrependWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		a, ok := action.(clienttesting.WatchActionImpl)
		if !ok {
			return false, nil, nil
		}
		w, ok := begun[a.ListOptions.ResourceVersion]
		delete(begun, a.ListOptions.ResourceVersion)
		return ok, w, nil
	})
}
