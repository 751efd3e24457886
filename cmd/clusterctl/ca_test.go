package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

// TestFinish: ca finish ends the rotation that is under way and begins none; rotate and split
// end none.
func TestFinish(t *testing.T) {
	rotation := v1.AuthorityStatus{Phase: v1.AuthorityReissue, Of: []string{"peer"}}
	for _, test := range []struct {
		name    string
		now     v1.AuthorityStatus
		run     func(*rotateOptions, *api) error
		posted  string // the end of the path; "": nothing is asked for
		refused string
	}{
		{"finish", rotation, func(o *rotateOptions, a *api) error { return o.runFinish(t.Context(), a) }, "/authority/finish", ""},
		{"finish what has ended", v1.AuthorityStatus{Phase: v1.AuthorityStable}, func(o *rotateOptions, a *api) error { return o.runFinish(t.Context(), a) }, "", "no CA rotation in progress"},
		{"rotate another", rotation, func(o *rotateOptions, a *api) error { o.purpose = "client"; return o.run(t.Context(), a, false) }, "", "(of peer); nothing was changed. clusterctl ca finish"},
		{"rotate all", rotation, func(o *rotateOptions, a *api) error { return o.run(t.Context(), a, false) }, "", "CA rotation in progress"},
		{"split", rotation, func(o *rotateOptions, a *api) error { o.split = true; return o.run(t.Context(), a, false) }, "", "CA rotation in progress"},
		{"rotate", v1.AuthorityStatus{Phase: v1.AuthorityStable}, func(o *rotateOptions, a *api) error { return o.run(t.Context(), a, false) }, "/authority", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.now.Authorities = []v1.AuthorityInfo{{ID: "a", Purposes: []string{"peer"}}}
			var posted []string
			var sent v1.AuthorityRequest
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodPost {
					posted = append(posted, r.URL.Path)
					if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
						t.Error(err)
					}
				}
				w.Header().Set("Content-Type", "application/json")
				_ = json.NewEncoder(w).Encode(test.now)
			}))
			defer srv.Close()
			u, err := url.Parse(srv.URL)
			if err != nil {
				t.Fatal(err)
			}
			streams, _, _, _ := genericiooptions.NewTestIOStreams()
			o := rotateOptions{IOStreams: streams, finish: true, yes: true, timeout: time.Minute}
			err = test.run(&o, &api{http: srv.Client(), server: u})
			if test.posted == "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) || len(posted) > 0 {
					t.Errorf("posted %v, %v; want a refusal that says %q", posted, err, test.refused)
				}
				return
			}
			if err != nil || len(posted) != 1 || !strings.HasSuffix(posted[0], test.posted) || !slices.Equal(sent.Of, test.now.Of) {
				t.Errorf("posted %v %+v, %v", posted, sent, err)
			}
		})
	}
}
