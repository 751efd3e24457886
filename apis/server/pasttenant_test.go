package server

import (
	"net/url"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
)

// TestBegins: what a request shows is told from its parameters as the library reads them.
func TestBegins(t *testing.T) {
	token, err := storage.EncodeContinue("/pods/t/p\x00", "/pods/", 7)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		verb, query string
		want        int64
	}{
		{"list", "", 0},
		{"list", "resourceVersion=5", 0}, // or newer
		{"list", "resourceVersion=5&limit=0", 0},
		{"list", "resourceVersion=5&limit=00", 0},
		{"list", "resourceVersion=5&limit=%2B0", 0},
		{"list", "resourceVersion=5&limit=-1", 0},
		{"list", "resourceVersion=5&limit=1", 5},
		{"list", "resourceVersion=5&limit=01", 5},
		{"list", "resourceVersion=5&limit=%2B1", 5},
		{"list", "resourceVersion=5&limit=9223372036854775808", 5}, // which the library refuses
		{"list", "resourceVersion=5&limit=1&limit=0", 5},
		{"list", "resourceVersion=5&limit=1&resourceVersionMatch=NotOlderThan", 0},
		{"list", "resourceVersion=5&resourceVersionMatch=Exact", 5},
		{"list", "limit=1&continue=" + url.QueryEscape(token), 7},
		{"deletecollection", "resourceVersion=5", 5},
		{"watch", "resourceVersion=5", 5},
		{"get", "resourceVersion=5", 0},
	} {
		query, err := url.ParseQuery(test.query)
		if err != nil {
			t.Fatal(err)
		}
		if got := begins(&request.RequestInfo{Verb: test.verb}, query); got != test.want {
			t.Errorf("%s ?%s: %d, want %d", test.verb, test.query, got, test.want)
		}
	}
}
