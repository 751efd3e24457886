// Package ui is the web page of a cluster: files that a browser runs, which
// ask the API with the rights of the page's user. It knows no object, no store
// and no user; it only serves its files. See DESIGN.md.
package ui

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"time"
)

// Path is where the page is served.
const Path = "/ui/"

//go:embed assets
var assets embed.FS

// policy lets the page load its own files and ask its own server, and nothing
// else: no code in attributes, no styles from elsewhere, no frames, no forms
// that leave. Trusted types forbid every way of making HTML from text.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Over serves the page at Path and leaves all else to api, but for what other
// sites make a browser ask.
//
// The page's files are the same for all users and hold nothing of the cluster:
// they are served to every client. What they show they fetch from api, which
// authenticates and authorizes each request.
func Over(api http.Handler) http.Handler {
	files := load()
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.URL.Path == strings.TrimSuffix(Path, "/"), req.URL.Path == "/" && visits(req):
			http.Redirect(w, req, Path, http.StatusFound)
		case strings.HasPrefix(req.URL.Path, Path):
			serve(w, req, files)
		case foreign(req):
			http.Error(w, "the request comes from another site's page (Sec-Fetch-Site: "+req.Header.Get("Sec-Fetch-Site")+"): the API answers its own page and programs only", http.StatusForbidden)
		default:
			api.ServeHTTP(w, req)
		}
	})
}

// visits reports whether a person opens an address, rather than a program.
func visits(req *http.Request) bool {
	return req.Method == http.MethodGet && req.Header.Get("Sec-Fetch-Dest") == "document"
}

// foreign reports whether a browser was made to ask by a page of another site.
// A browser sends a client certificate along with requests from any page, so such a page
// could act as its visitor. Following a link to here is no such thing, and who
// sends a token means to: no browser adds one by itself. Programs do not send
// the header; scripts cannot change it.
func foreign(req *http.Request) bool {
	if req.Header.Get("Authorization") != "" {
		return false
	}
	switch req.Header.Get("Sec-Fetch-Site") {
	case "cross-site", "same-site":
		return !visits(req)
	}
	return false
}

// file is one file of the page, ready to be sent.
type file struct {
	body []byte
	kind string // Content-Type
	etag string
}

// load reads the files that are built in. It panics if one cannot be read: the
// program would be damaged.
func load() map[string]file {
	files := map[string]file{}
	err := fs.WalkDir(assets, "assets", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		body, err := assets.ReadFile(name)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(body)
		served := Path + strings.TrimPrefix(name, "assets/")
		if path.Base(name) == "index.html" {
			served = strings.TrimSuffix(served, "index.html")
		}
		files[served] = file{body: body, kind: kindOf(name), etag: `"` + hex.EncodeToString(sum[:12]) + `"`}
		return nil
	})
	if err != nil {
		panic("ui: " + err.Error())
	}
	return files
}

// kindOf does not ask the machine's tables, which may say anything.
func kindOf(name string) string {
	switch path.Ext(name) {
	case ".html":
		return "text/html; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	}
	return "application/octet-stream"
}

func serve(w http.ResponseWriter, req *http.Request, files map[string]file) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
	h.Set("Cache-Control", "no-cache") // ask each time; the etag makes it cheap
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD are served at "+Path, http.StatusMethodNotAllowed)
		return
	}
	f, ok := files[req.URL.Path]
	if !ok {
		http.Error(w, "no such file: the page is at "+Path, http.StatusNotFound)
		return
	}
	h.Set("Content-Type", f.kind)
	h.Set("ETag", f.etag)
	http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(f.body))
}
