package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/past"
)

// lookBack makes the reads of a command show the state as of --at. The first
// answer says which revision that is, and all further reads ask for it, so that
// everything one command shows is of one moment by the server's clock.
type lookBack struct {
	moment string // as given; "": the present

	mu       sync.Mutex
	revision string // once it is known
}

// addFlag gives cmd the flag --at.
func (l *lookBack) addFlag(cmd *cobra.Command) {
	cmd.Flags().StringVar(&l.moment, "at", l.moment, "Show the state as of a point in time of the store's history: a revision (1234), a relative time (-10m) or an absolute time (2006-01-02T15:04:05Z)")
	run := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if cmd.Flags().Changed("at") {
			if _, err := past.ParseMoment(l.moment); err != nil {
				return fmt.Errorf("--at %w", err)
			}
			for _, flag := range []string{"watch", "watch-only"} {
				if f := cmd.Flags().Lookup(flag); f != nil && f.Value.String() == "true" {
					return fmt.Errorf("--at cannot be combined with --%s: the past does not change", flag)
				}
			}
		}
		if run != nil {
			return run(cmd, args)
		}
		return nil
	}
}

// apply puts the moment into the requests of all clients made from flags.
func (l *lookBack) apply(flags *genericclioptions.ConfigFlags) {
	if l.moment == "" {
		return
	}
	before := flags.WrapConfigFn
	flags.WithWrapConfigFn(func(config *rest.Config) *rest.Config {
		if before != nil {
			config = before(config)
		}
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &lookingBack{l, next} })
		return config
	})
}

type lookingBack struct {
	*lookBack
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (l *lookingBack) RoundTrip(req *http.Request) (*http.Response, error) {
	query := req.URL.Query()
	if req.Method != http.MethodGet || !namesObjects(req.URL.Path) || query.Has("continue") {
		return l.next.RoundTrip(req)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	moment := l.moment
	if l.revision != "" {
		moment = l.revision
	}
	query.Set(past.AtParameter, moment)
	req = req.Clone(req.Context())
	req.URL.RawQuery = query.Encode()
	resp, err := l.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	revision := resp.Header.Get(past.RevisionHeader)
	if revision == "" && resp.StatusCode == http.StatusOK {
		resp.Body.Close()
		return nil, errors.New("--at: the server shows only the present: it is not a clusterd server, or an older one than this clusterctl (compare with: clusterctl version)")
	}
	if revision != "" {
		l.revision = revision
	}
	return resp, nil
}

// namesObjects reports whether a path is one of objects, not of discovery.
func namesObjects(path string) bool {
	if _, rest, ok := strings.Cut(path, "/apis/"); ok {
		return strings.Count(strings.Trim(rest, "/"), "/") >= 2 // GROUP/VERSION/RESOURCE
	}
	if _, rest, ok := strings.Cut(path, "/api/"); ok {
		return strings.Contains(strings.Trim(rest, "/"), "/") // VERSION/RESOURCE
	}
	return false
}
