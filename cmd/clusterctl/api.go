package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// api speaks to paths of the API server that are not Kubernetes objects.
type api struct {
	http   *http.Client
	server *url.URL
}

func newAPI(f cmdutil.Factory) (*api, error) {
	config, err := f.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("address of the server: %w", err)
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	return &api{http: client, server: server}, nil
}

// body is what a request carries.
type body struct {
	io.Reader
	contentType string
	size        int64 // -1: not known
	header      http.Header
}

func jsonBody(v any) (*body, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return &body{Reader: bytes.NewReader(b), contentType: "application/json", size: int64(len(b))}, nil
}

// do sends one request to path, which is already escaped, and decodes the
// answer into out unless that is nil.
func (a *api) do(ctx context.Context, method, path string, in *body, out any) error {
	target, err := a.server.Parse(strings.TrimSuffix(a.server.Path, "/") + path)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, target.String(), nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	if in != nil {
		req.Body, req.ContentLength = io.NopCloser(in.Reader), in.size
		maps.Copy(req.Header, in.header)
		req.Header.Set("Content-Type", in.contentType)
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return refusal(req, resp)
	}
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("the answer of %s %s cannot be read: %w", method, path, err)
	}
	return nil
}

// maxRefusal bounds how much of an error's text is read.
const maxRefusal = 64 << 10

// refusal turns an answer other than success into an error: a Kubernetes
// Status as such, anything else by its own words.
func refusal(req *http.Request, resp *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxRefusal))
	if err != nil {
		return fmt.Errorf("%s %s: %s, and its reason cannot be read: %w", req.Method, req.URL.Path, resp.Status, err)
	}
	var status metav1.Status
	if json.Unmarshal(text, &status) == nil && status.Kind == "Status" {
		return &apierrors.StatusError{ErrStatus: status}
	}
	message := strings.TrimSpace(string(text))
	if status.Message != "" {
		message = status.Message
	}
	return &refused{code: resp.StatusCode, status: resp.Status, path: req.URL.Path, message: message}
}

// refused is an answer of the server that says no.
type refused struct {
	code          int
	status        string
	path, message string
}

func (r *refused) Error() string {
	switch {
	case r.code == http.StatusNotFound && (r.message == "" || strings.HasPrefix(r.message, "404")):
		return fmt.Sprintf("the server does not know %s: it is not a clusterd server, or an older one than this clusterctl (compare with: clusterctl version)", r.path)
	case r.message != "":
		return r.message
	}
	return "the server answered " + r.status
}

// isCode reports whether err is an answer with this status code.
func isCode(err error, code int) bool {
	var r *refused
	if errors.As(err, &r) {
		return r.code == code
	}
	var s apierrors.APIStatus
	return errors.As(err, &s) && int(s.Status().Code) == code
}

// clusterPath is where clusterd's own part of the API is.
const clusterPath = "/clusterd/v1/"

// pathOf joins and escapes the elements of a path under clusterPath.
func pathOf(elements ...string) string {
	escaped := make([]string, len(elements))
	for i, e := range elements {
		escaped[i] = url.PathEscape(e)
	}
	return clusterPath + strings.Join(escaped, "/")
}
