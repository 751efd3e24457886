package bucket

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/go-ini/ini"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Access is what this node authenticates to a store with, and its limits.
type Access struct {
	// Credentials is a file in the form of Amazon's tools; empty: the variables
	// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.
	Credentials string
	// CA is a file with the certificates that the store's is signed by; empty: the system's.
	CA string
	// Region; empty: the store is asked.
	Region string
	// Timeout is how long one snapshot may take to be uploaded and read back; 0: any time.
	Timeout time.Duration
	// Stall is how long no byte may move in either direction; default 2 min.
	Stall time.Duration
}

const (
	defaultStall = 2 * time.Minute
	dialTimeout  = 15 * time.Second
	// retries are those of one request, within seconds; the whole is retried by the Taker.
	retries = 4
)

// client is what talks to a store for one operation. Files of keys and certificates are
// read for each, so that they may change.
func (a Access) client(l Location) (_ minio.Core, done func(), err error) {
	keys, err := a.keys()
	if err != nil {
		return minio.Core{}, nil, err
	}
	stall := a.Stall
	if stall <= 0 {
		stall = defaultStall
	}
	dial := &net.Dialer{Timeout: dialTimeout}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &moving{Conn: c, stall: stall}, nil
		},
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: stall,
		DisableCompression:    true, // a length that is not the object's would go unnoticed
	}
	if !l.Plain {
		pool, err := a.pool()
		if err != nil {
			return minio.Core{}, nil, err
		}
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	}
	c, err := minio.NewCore(l.Endpoint, &minio.Options{
		Creds: keys, Secure: !l.Plain, Region: a.Region, Transport: transport, MaxRetries: retries,
	})
	if err != nil {
		return minio.Core{}, nil, err
	}
	return *c, transport.CloseIdleConnections, nil
}

// Check reports what can be seen of the files without asking the store.
func (a Access) Check() error {
	if _, err := a.keys(); err != nil {
		return err
	}
	_, err := a.pool()
	return err
}

// pool are the CAs; nil: the system's.
func (a Access) pool() (*x509.CertPool, error) {
	if a.CA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(a.CA)
	if err != nil {
		return nil, fmt.Errorf("--snapshot-store-ca: %w: name a file with the CA of the store's certificate", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--snapshot-store-ca %s: it holds no certificate in PEM: name a file with the CA of the store's", a.CA)
	}
	return pool, nil
}

// keys are those of the file, or else of the environment.
func (a Access) keys() (*credentials.Credentials, error) {
	if a.Credentials == "" {
		id, secret := os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY")
		if id == "" || secret == "" {
			return nil, errors.New("--snapshot-store-credentials: name a file with aws_access_key_id and aws_secret_access_key, or set the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for clusterd")
		}
		return credentials.NewStaticV4(id, secret, os.Getenv("AWS_SESSION_TOKEN")), nil
	}
	st, err := os.Stat(a.Credentials)
	if err != nil {
		return nil, fmt.Errorf("--snapshot-store-credentials: %w: name a file in the form of ~/.aws/credentials", err)
	}
	if st.Mode().Perm()&0o007 != 0 {
		return nil, fmt.Errorf("--snapshot-store-credentials %s: every user of the machine may read it (mode %04o): chmod 600", a.Credentials, st.Mode().Perm())
	}
	file, err := ini.LoadSources(ini.LoadOptions{IgnoreInlineComment: true, IgnoreContinuation: true}, a.Credentials)
	if err != nil {
		return nil, fmt.Errorf("--snapshot-store-credentials %s: it is not of the form of ~/.aws/credentials, with the lines [default], aws_access_key_id=… and aws_secret_access_key=…", a.Credentials)
	}
	s := file.Section("default")
	id, secret := s.Key("aws_access_key_id").String(), s.Key("aws_secret_access_key").String()
	if id == "" || secret == "" {
		return nil, fmt.Errorf("--snapshot-store-credentials %s: its section [default] lacks aws_access_key_id or aws_secret_access_key", a.Credentials)
	}
	return credentials.NewStaticV4(id, secret, s.Key("aws_session_token").String()), nil
}

// moving is a connection that breaks when no byte moves in either direction. It is
// used by one reader and one writer at a time.
type moving struct {
	net.Conn
	stall time.Duration
}

func (m *moving) Read(p []byte) (int, error) {
	if err := m.SetDeadline(time.Now().Add(m.stall)); err != nil {
		return 0, err
	}
	return m.Conn.Read(p)
}

// Write moves the deadline of a Read that waits meanwhile as well.
func (m *moving) Write(p []byte) (int, error) {
	if err := m.SetDeadline(time.Now().Add(m.stall)); err != nil {
		return 0, err
	}
	return m.Conn.Write(p)
}
