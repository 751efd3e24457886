package rights

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
)

// TestNotify: each agent that is connected is notified of each removed server until it has
// confirmed it, and not again.
func TestNotify(t *testing.T) {
	var ids []string
	agents := map[string]string{"id1": "a1", "id2": "a2"}
	fails := map[string]error{}
	var mu sync.Mutex
	sent := map[string][]string{}
	n := &Notifier{
		Agents: func() map[string]string { return agents },
		Send: func(_ context.Context, name string, ids []string) error {
			mu.Lock()
			defer mu.Unlock()
			if fails[name] == nil {
				sent[name] = ids
			}
			return fails[name]
		},
	}
	step := func(what string, all bool, want map[string][]string) {
		t.Helper()
		clear(sent)
		if got := n.notify(t.Context(), ids); got != all {
			t.Errorf("%s: all know it: %v", what, got)
		}
		if !maps.EqualFunc(sent, want, slices.Equal) {
			t.Errorf("%s: sent %v, want %v", what, sent, want)
		}
	}
	step("none was removed", true, nil)
	ids = []string{"s3"}
	fails["a2"] = errors.New("the connection broke")
	step("one was", false, map[string][]string{"a1": ids})
	fails["a2"] = nil
	step("the second answers again", true, map[string][]string{"a2": ids})
	step("all know it", true, nil)
	fails["a1"] = ErrUnsupported // an older agent, which asks by itself
	ids = []string{"s2", "s3"}
	step("another one", true, map[string][]string{"a2": ids})
	step("an older agent is not asked again", true, nil)
	fails["a1"] = fmt.Errorf("%w: node a1 answered 403 Forbidden", ErrUnsupported) // a still older one
	ids = []string{"s1", "s2", "s3"}
	step("a third one", true, map[string][]string{"a2": ids})
	step("an agent that refuses is not asked again", true, nil)
	agents = map[string]string{"id2": "a2"}
	step("one has left", true, nil)
	fails["a1"] = nil
	agents = map[string]string{"id1": "a1", "id2": "a2"}
	step("and comes back", true, map[string][]string{"a1": ids})
	ids = []string{"s3"} // what is old is not said any more
	step("fewer than known", true, nil)
}

// TestNotifyBackoff: an agent that never answers is asked ever less often.
func TestNotifyBackoff(t *testing.T) {
	retry := notifyBackoff()
	if d := retry.Step(); d < notifyRetry || d > 2*notifyRetry {
		t.Errorf("first after %s", d)
	}
	for range 10 {
		retry.Step()
	}
	if d := retry.Step(); d < notifyRetryMost || d > notifyRetryMost+notifyRetryMost/5 {
		t.Errorf("at last after %s, want about %s", d, notifyRetryMost)
	}
}
