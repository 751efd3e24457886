package route

import "time"

// Action is what is done with the requests of a Gateway's rule.
type Action struct {
	// Redirect answers at once; nil: the request goes to one of the Shares.
	Redirect *Redirect
	Rewrite  Rewrite
	Headers  Changes
	// CORS answers what browsers ask before requests of other origins; nil: that
	// is the backend's to do.
	CORS *CORS
	// Mirrors get copies of the requests.
	Mirrors []Mirror
	// Retry is when another endpoint is asked; nil: as without a Gateway.
	Retry *Retry
	// Shares are drawn from by their weights. Without one that has a weight
	// there is no backend.
	Shares []Share
	// Timeout bounds the time from the request to the end of its answer, and Try
	// the same of one endpoint; 0: nothing does.
	Timeout, Try time.Duration
	// NoResponseTimeout: the proxy's own ResponseTimeout does not apply, as the route
	// sets timeouts of its own.
	NoResponseTimeout bool
}

// Share is the part of a rule's requests that one backend has.
type Share struct {
	Backend *Backend
	Weight  int
	// Broken is why the backend can never answer; "": it may.
	Broken  string
	Headers Changes
}

// Changes are those of headers, of the request and of its answer.
type Changes struct{ Request, Response Edit }

// Edit changes headers: what is set replaces what was there.
type Edit struct {
	Set, Add []Field
	Remove   []string
}

// Field is a header.
type Field struct{ Name, Value string }

// Path is how a path is changed.
type Path struct {
	// Value takes the place of the whole path or, if Prefix, of the prefix that
	// the rule was found by.
	Value  string
	Prefix bool
}

// Rewrite is how a request is changed on its way to a backend.
type Rewrite struct {
	Host string // "": it stays
	Path *Path  // nil: it stays
}

// Redirect is where a request is sent on to. What is empty stays as it is.
type Redirect struct {
	Scheme, Host string
	Port         uint16
	Path         *Path
	Code         int
}

// Mirror is a backend that gets a copy of Of in each In requests; its answers are
// dropped.
type Mirror struct {
	Backend *Backend
	Of, In  int
}

// Retry says which answers of an endpoint have the request sent again, at most
// Attempts times, Backoff later or more.
type Retry struct {
	Codes    []int // of answers; a connection that fails counts without being here
	Attempts int
	Backoff  time.Duration
}

// CORS is what pages of other origins may do (https://fetch.spec.whatwg.org, 3.3).
type CORS struct {
	// Origins are those that may, each "SCHEME://HOST[:PORT]", where a "*" in the
	// host stands for any of its beginning; "*" alone is every origin.
	Origins []string
	// Methods, Headers and Expose may be "*" alone.
	Methods, Headers, Expose []string
	Credentials              bool
	MaxAge                   int // seconds
}

// Total is the sum of the weights.
func (a *Action) Total() (n int) {
	for i := range a.Shares {
		n += a.Shares[i].Weight
	}
	return n
}

// Draw is the share that holds the n-th unit of the weights, from 0 to Total
// less one.
func (a *Action) Draw(n int) *Share {
	for i := range a.Shares {
		if n -= a.Shares[i].Weight; n < 0 {
			return &a.Shares[i]
		}
	}
	return nil
}
