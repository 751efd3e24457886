package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"sync"
	"testing"
)

// TestPushRemovals: each agent that is connected is told of each removed server until it has
// confirmed it, and not again.
func TestPushRemovals(t *testing.T) {
	var ids []string
	agents := map[string]string{"id1": "a1", "id2": "a2"}
	fails := map[string]error{}
	var mu sync.Mutex
	told := map[string][]string{}
	p := &removalPush{
		ids: func() []string { return ids }, agents: func() map[string]string { return agents },
		tell: func(_ context.Context, name string, ids []string) error {
			mu.Lock()
			defer mu.Unlock()
			if fails[name] == nil {
				told[name] = ids
			}
			return fails[name]
		},
	}
	step := func(what string, all bool, want map[string][]string) {
		t.Helper()
		clear(told)
		if got := p.push(t.Context()); got != all {
			t.Errorf("%s: all know it: %v", what, got)
		}
		if !maps.EqualFunc(told, want, slices.Equal) {
			t.Errorf("%s: told %v, want %v", what, told, want)
		}
	}
	step("none was removed", true, nil)
	ids = []string{"s3"}
	fails["a2"] = errors.New("the connection broke")
	step("one was", false, map[string][]string{"a1": ids})
	fails["a2"] = nil
	step("the second answers again", true, map[string][]string{"a2": ids})
	step("all know it", true, nil)
	fails["a1"] = errNoSuchCall // an older agent, which asks by itself
	ids = []string{"s2", "s3"}
	step("another one", true, map[string][]string{"a2": ids})
	step("an older agent is not asked again", true, nil)
	fails["a1"] = fmt.Errorf("%w: node a1 answered 403 Forbidden", errCallRefused) // a still older one
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

// TestCallRefused: an older agent answers a call that it does not know with 403, which says no more
// of a member than silence does.
func TestCallRefused(t *testing.T) {
	old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "node a1: Forbidden", http.StatusForbidden)
	}))
	defer old.Close()
	base, err := url.Parse(old.URL)
	if err != nil {
		t.Fatal(err)
	}
	err = callOver(t.Context(), http.DefaultTransport, base, http.MethodPut, removedPath, []string{"s3"}, nil)
	if !errors.Is(err, errCallRefused) || errors.Is(err, errNoSuchCall) {
		t.Errorf("%v", err)
	}
}

// TestPushBackoff: an agent that never answers is asked ever less often.
func TestPushBackoff(t *testing.T) {
	retry := pushBackoff()
	if d := retry.Step(); d < pushRetry || d > 2*pushRetry {
		t.Errorf("first after %s", d)
	}
	for range 10 {
		retry.Step()
	}
	if d := retry.Step(); d < pushRetryMost || d > pushRetryMost+pushRetryMost/5 {
		t.Errorf("at last after %s, want about %s", d, pushRetryMost)
	}
}
