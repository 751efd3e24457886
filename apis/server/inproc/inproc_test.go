package inproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const testTimeout = time.Minute

func client(t *testing.T, handler http.HandlerFunc) (*http.Client, *HandlerTransport) {
	t.Helper()
	transport := NewHandlerTransport(handler)
	t.Cleanup(transport.Close)
	return &http.Client{Transport: transport.As(&user.DefaultInfo{Name: "me"})}, transport
}

func do(t *testing.T, c *http.Client, ctx context.Context, body io.Reader) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", "https://host/path?q=1", body)
	if err != nil {
		t.Fatal(err)
	}
	return c.Do(req)
}

func TestRequestAndResponse(t *testing.T) {
	type leak struct{}
	c, _ := client(t, func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		who, ok, err := Authenticator().AuthenticateRequest(req)
		if !ok || err != nil {
			t.Errorf("not recognised: %v", err)
		}
		if req.Context().Value(leak{}) != nil {
			t.Error("a value of the caller's context came through")
		}
		w.Header().Set("X", "y")
		w.WriteHeader(http.StatusTeapot)
		w.Header().Set("X", "too late")
		fmt.Fprintf(w, "%s %s %s %s %s", who.User.GetName(), req.Host, req.URL, req.RequestURI, body)
	})
	resp, err := do(t, c, context.WithValue(t.Context(), leak{}, 1), strings.NewReader("in"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || string(body) != "me host /path?q=1 /path?q=1 in" {
		t.Errorf("%q %v", body, err)
	}
	if resp.StatusCode != http.StatusTeapot || resp.Header.Get("X") != "y" {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
}

func TestNobodyElseIsRecognised(t *testing.T) {
	req, err := http.NewRequest("GET", "https://host/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := Authenticator().AuthenticateRequest(req); ok || err != nil {
		t.Errorf("a request from outside: %t %v", ok, err)
	}
}

func TestStreamsBeforeTheHandlerReturns(t *testing.T) {
	release := make(chan struct{})
	c, _ := client(t, func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
		fmt.Fprint(w, "one")
		<-release
		fmt.Fprint(w, "two")
	})
	resp, err := do(t, c, t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := make([]byte, 3)
	if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "one" {
		t.Fatalf("%q %v", first, err)
	}
	close(release)
	if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "two" {
		t.Errorf("%q %v", rest, err)
	}
}

// ends waits for a handler to say that it has returned.
func ends(t *testing.T, ended <-chan struct{}) {
	t.Helper()
	select {
	case <-ended:
	case <-time.After(testTimeout):
		t.Error("the handler did not end")
	}
}

func TestClosingTheBodyEndsTheHandler(t *testing.T) {
	ended := make(chan struct{})
	c, _ := client(t, func(w http.ResponseWriter, req *http.Request) {
		defer close(ended)
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	})
	resp, err := do(t, c, t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	ends(t, ended)
}

func TestCancellingFreesBothEnds(t *testing.T) {
	t.Run("before the status", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		c, _ := client(t, func(_ http.ResponseWriter, req *http.Request) {
			defer close(ended)
			cancel()
			<-req.Context().Done()
		})
		if _, err := do(t, c, ctx, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want Canceled", err)
		}
		ends(t, ended)
	})
	t.Run("with a full buffer", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		c, _ := client(t, func(w http.ResponseWriter, _ *http.Request) {
			defer close(ended)
			for {
				if _, err := w.Write(make([]byte, maxBuffered)); err != nil {
					return
				}
			}
		})
		resp, err := do(t, c, ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		cancel()
		ends(t, ended)
	})
	t.Run("with an empty buffer", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		release := make(chan struct{})
		c, _ := client(t, func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			<-release // deaf to its context
		})
		defer close(release)
		resp, err := do(t, c, ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		cancel()
		if _, err := io.ReadAll(resp.Body); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want Canceled", err)
		}
	})
}

func TestAPanicEndsTheRequestOnly(t *testing.T) {
	c, _ := client(t, func(w http.ResponseWriter, req *http.Request) {
		if req.ContentLength > 0 {
			fmt.Fprint(w, "half")
		}
		panic(http.ErrAbortHandler)
	})
	if _, err := do(t, c, t.Context(), nil); err == nil {
		t.Error("no error from a handler that panicked")
	}
	resp, err := do(t, c, t.Context(), strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err == nil || string(body) != "half" {
		t.Errorf("%q %v, want half of it and an error", body, err)
	}
}

func TestCloseEndsAllAndRefusesMore(t *testing.T) {
	c, transport := client(t, func(w http.ResponseWriter, req *http.Request) {
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	})
	resp, err := do(t, c, t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	transport.Close()
	if _, err := do(t, c, t.Context(), nil); !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}
