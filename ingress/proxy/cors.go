package proxy

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/clusterd/clusterd/ingress/route"
)

// The headers of CORS that a backend's answer may have, too: where the route says
// who may, they are the proxy's.
var corsHeaders = []string{
	"Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Access-Control-Allow-Methods",
	"Access-Control-Allow-Headers", "Access-Control-Expose-Headers", "Access-Control-Max-Age",
}

// isPreflight: a browser asks whether a page of another origin may send a request.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}

// preflight answers a browser's question. An origin that may not gets the same
// answer without the headers, which is a refusal to the browser.
func preflight(h http.Header, c *route.CORS, ask http.Header) {
	for _, name := range []string{"Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers"} {
		h.Add("Vary", name) // no cache gives one origin the answer to another
	}
	if !allowOrigin(h, c, ask.Get("Origin")) {
		return
	}
	list := func(name string, allowed []string, asked string) {
		switch {
		case len(allowed) == 0:
		case !slices.Contains(allowed, "*"):
			h.Set(name, strings.Join(allowed, ", "))
		case asked != "":
			h.Set(name, asked) // with credentials "*" would be a name
		}
	}
	list("Access-Control-Allow-Methods", c.Methods, ask.Get("Access-Control-Request-Method"))
	list("Access-Control-Allow-Headers", c.Headers, strings.Join(ask.Values("Access-Control-Request-Headers"), ", "))
	h.Set("Access-Control-Max-Age", strconv.Itoa(c.MaxAge))
	expose(h, c) // of no use to a browser here; the conformance suite asks for it
}

// expose names the headers of answers that pages may read.
func expose(h http.Header, c *route.CORS) {
	names := c.Expose
	if c.Credentials { // "*" would be a name
		names = slices.DeleteFunc(slices.Clone(names), func(s string) bool { return s == "*" })
	}
	if len(names) > 0 {
		h.Set("Access-Control-Expose-Headers", strings.Join(names, ", "))
	}
}

// shareWith replaces the headers of an answer by what the route says.
func shareWith(h http.Header, c *route.CORS, origin string) {
	for _, name := range corsHeaders {
		h.Del(name)
	}
	h.Add("Vary", "Origin")
	if origin == "" || !allowOrigin(h, c, origin) {
		return
	}
	expose(h, c)
}

func allowOrigin(h http.Header, c *route.CORS, origin string) bool {
	if !slices.ContainsFunc(c.Origins, func(allowed string) bool { return matchesOrigin(allowed, origin) }) {
		return false
	}
	h.Set("Access-Control-Allow-Origin", origin)
	if c.Credentials {
		h.Set("Access-Control-Allow-Credentials", "true")
	}
	return true
}

// matchesOrigin compares by scheme, host and port, which may be the scheme's own.
func matchesOrigin(allowed, origin string) bool {
	if allowed == "*" {
		return true
	}
	aScheme, aHost, aPort := splitOrigin(allowed)
	scheme, host, port := splitOrigin(origin)
	if scheme == "" || aScheme != scheme || aPort != port {
		return false
	}
	if before, after, wild := strings.Cut(aHost, "*"); wild {
		return len(host) >= len(before)+len(after) && strings.HasPrefix(host, before) && strings.HasSuffix(host, after)
	}
	return aHost == host
}

// splitOrigin takes "SCHEME://HOST[:PORT]" apart; no scheme: it is none.
func splitOrigin(s string) (scheme, host, port string) {
	scheme, rest, ok := strings.Cut(strings.ToLower(s), "://")
	if !ok {
		return "", "", ""
	}
	host = rest
	if at := strings.LastIndexByte(rest, ':'); at > strings.LastIndexByte(rest, ']') {
		host, port = rest[:at], rest[at+1:]
	}
	if scheme == "http" && port == "" {
		port = "80"
	}
	if scheme == "https" && port == "" {
		port = "443"
	}
	return scheme, host, port
}
