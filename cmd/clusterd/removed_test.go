package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
)

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
