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

func authorities(purposes ...string) (infos []v1.AuthorityInfo) {
	for _, p := range purposes {
		infos = append(infos, v1.AuthorityInfo{ID: p, Purposes: strings.Split(p, ",")})
	}
	return infos
}

// TestFinishOfTheExchangeThatIsMeant: --finish ends the exchange that the command line
// names, and no other one.
func TestFinishOfTheExchangeThatIsMeant(t *testing.T) {
	all := authorities("peer", "client", "front", "node", "secrets")
	one := authorities("peer,client,front,node,secrets")
	for _, test := range []struct {
		name    string
		now     v1.AuthorityStatus
		purpose string
		split   bool
		refused string // what the error names; "": it is finished
	}{
		{"peer's grace, client is meant", v1.AuthorityStatus{Of: []string{"peer"}, Authorities: all}, "client", false, "clusterctl ca rotate peer --finish --wait"},
		{"front's grace, all are meant", v1.AuthorityStatus{Of: []string{"front"}, Authorities: all}, "", false, "clusterctl ca rotate front --finish --wait"},
		{"all's grace, client is meant", v1.AuthorityStatus{Of: v1.AuthorityPurposes, Authorities: all}, "client", false, "clusterctl ca rotate --finish --wait"},
		{"a split, all are meant", v1.AuthorityStatus{Of: []string{"client", "front", "node", "secrets"}, Split: true, Authorities: all}, "", false, "clusterctl ca split --finish --wait"},
		{"all's grace, a split is meant", v1.AuthorityStatus{Of: v1.AuthorityPurposes, Authorities: all}, "", true, "clusterctl ca rotate --finish --wait"},
		{"client's", v1.AuthorityStatus{Of: []string{"client"}, Authorities: all}, "client", false, ""},
		{"all's", v1.AuthorityStatus{Of: v1.AuthorityPurposes, Authorities: all}, "", false, ""},
		{"the split", v1.AuthorityStatus{Of: []string{"client", "front", "node", "secrets"}, Split: true, Authorities: all}, "", true, ""},
		{"the one there is", v1.AuthorityStatus{Of: []string{"peer"}, Authorities: one}, "", false, ""},
		{"the one there is, by name", v1.AuthorityStatus{Of: []string{"peer"}, Authorities: one}, "peer", false, ""},
		{"of a server that knows no purposes", v1.AuthorityStatus{Authorities: []v1.AuthorityInfo{{ID: "old"}}}, "", false, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.now.Phase = v1.AuthorityReissue
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
			a := &api{http: srv.Client(), server: u}
			streams, _, _, _ := genericiooptions.NewTestIOStreams()
			o := rotateOptions{IOStreams: streams, purpose: test.purpose, split: test.split, finish: true, yes: true, timeout: time.Minute}
			err = o.run(t.Context(), a, false)
			if test.refused != "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) || len(posted) > 0 {
					t.Errorf("posted %v, %v; want a refusal that names %q", posted, err, test.refused)
				}
				return
			}
			if err != nil || len(posted) != 1 || !strings.HasSuffix(posted[0], "/authority/finish") || !slices.Equal(sent.Of, test.now.Of) {
				t.Errorf("posted %v %+v, %v", posted, sent, err)
			}
		})
	}
}
