package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// account is the folder with the token and the certificate of a pod's account.
const account = "/var/run/secrets/kubernetes.io/serviceaccount"

// askAPI prints what the API answers to a GET by the pod's own account.
func askAPI(ctx context.Context, path string) error {
	host := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
	token, err := os.ReadFile(filepath.Join(account, "token"))
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(filepath.Join(account, "ca.crt"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return fmt.Errorf("%s/ca.crt holds no certificate", account)
	}
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+host+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	return show(resp)
}

// show prints a page; a status other than 2xx is an error.
func show(resp *http.Response) error {
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s answered %s", resp.Request.URL, resp.Status)
	}
	return nil
}

// follow keeps a copy of a file: made at once, and again when the file changes.
// It looks once a second, as a file of a ConfigMap is replaced through links.
func follow(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("two files are needed\n%s", usage)
	}
	from, to := args[0], args[1]
	var copied []byte
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		now, err := os.ReadFile(from)
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			return err
		case copied == nil || !bytes.Equal(now, copied):
			// Beside and renamed: a reader finds the old or the new one.
			if err := os.WriteFile(to+".new", now, 0o644); err != nil {
				return err
			}
			if err := os.Rename(to+".new", to); err != nil {
				return err
			}
			copied = append([]byte{}, now...)
			fmt.Printf("copied %s to %s\n", from, to)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// busy keeps a processor at work for as long as ?for= says: a second when it says
// nothing, ten at most.
func busy(w http.ResponseWriter, r *http.Request) {
	wanted := time.Second
	if s := r.URL.Query().Get("for"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		wanted = d
	}
	rounds := 0
	for end := time.Now().Add(min(wanted, 10*time.Second)); time.Now().Before(end) && r.Context().Err() == nil; rounds++ {
	}
	fmt.Fprintf(w, "%s looked at the clock %d times\n", podName(), rounds)
}

// sign adds lines to a file, so that a reader can tell who wrote when.
func sign(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("a file and a word are needed\n%s", usage)
	}
	f, err := os.OpenFile(args[0], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := fmt.Fprintln(f, args[1]); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}
