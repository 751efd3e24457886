package security

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/client-go/rest"
)

// call is one request to the API that the attacker may not make.
type call struct {
	name   string
	method string
	path   string // $NS stands for the namespace of the victims
	body   string
	kind   string            // of the body; default application/json, of a PATCH application/merge-patch+json
	header map[string]string // beside

	// refused are the answers that are a refusal; default 401 and 403.
	refused []int
	// right are the answers that an administrator may get beside 2xx. He asks with
	// dryRun. alone: there is nothing that he could try.
	right []int
	alone bool
}

// send makes a request with a configuration's credentials, and returns the beginning of the answer.
func (s *suite) send(config *rest.Config, c call, dryRun bool) (code int, body string, err error) {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return 0, "", err
	}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(s.t.Context(), opens)
	defer cancel()
	path := strings.ReplaceAll(c.path, "$NS", ns)
	if dryRun && c.method != http.MethodGet {
		sep := "?"
		if strings.Contains(path, "?") {
			sep = "&"
		}
		path += sep + "dryRun=All"
	}
	req, err := http.NewRequestWithContext(ctx, c.method, config.Host+path, strings.NewReader(strings.ReplaceAll(c.body, "$NS", ns)))
	if err != nil {
		return 0, "", err
	}
	kind := c.kind
	if kind == "" {
		kind = "application/json"
		if c.method == http.MethodPatch {
			kind = "application/merge-patch+json"
		}
	}
	req.Header.Set("Content-Type", kind)
	for key, value := range c.header {
		req.Header.Set(key, value)
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(res.Body, 2048)) // a stream may end in the middle
	return res.StatusCode, string(b), nil
}

// calls makes attacks of calls, each as somebody.
func calls(as *rest.Config, list []call) []attack {
	var out []attack
	for _, c := range list {
		a := attack{name: c.name, try: func(s *suite) verdict {
			code, body, err := s.send(as, c, false)
			refused := c.refused
			if refused == nil {
				refused = []int{http.StatusUnauthorized, http.StatusForbidden}
			}
			switch {
			case err != nil:
				return broken(err)
			case slices.Contains(refused, code):
				return shut("%d %s", code, message(body))
			case code < 300:
				return open("%d %.300s", code, body)
			}
			return broken(fmt.Errorf("neither done nor refused: %d %.300s", code, body))
		}}
		if !c.alone {
			a.control = func(s *suite) error {
				code, body, err := s.send(s.admin, c, true)
				if err == nil && code >= 300 && code != http.StatusSwitchingProtocols && !slices.Contains(c.right, code) {
					err = fmt.Errorf("%s %s as the administrator: %d %.500s", c.method, c.path, code, body)
				}
				return err
			}
		}
		out = append(out, a)
	}
	return out
}

// message is the sentence of a Status, or the whole.
func message(body string) string {
	if _, rest, ok := strings.Cut(body, `"message":"`); ok {
		said, _, _ := strings.Cut(rest, `","`)
		return said
	}
	return strings.TrimSpace(body)
}

// asNode shows the API the certificate of a node.
func (s *suite) asNode(node, server string) *rest.Config {
	pki := filepath.Join(s.node(node).Data, "pki")
	return &rest.Config{Host: "https://" + s.addr(server).String(), TLSClientConfig: rest.TLSClientConfig{
		CertFile: filepath.Join(pki, "node.crt"), KeyFile: filepath.Join(pki, "node.key"), CAFile: filepath.Join(pki, "ca.crt"),
	}}
}

// asBearer shows it a token.
func (s *suite) asBearer(token string) *rest.Config {
	config := rest.AnonymousClientConfig(s.admin)
	config.BearerToken = token
	return config
}
