package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/auth"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// Kinds of servers.
const (
	chained = "chain" // all that a server has by default, an audit log, Secrets sealed
	bare    = "bare"  // without admission plugins and without an audit log
	opened  = "open"  // as chained, with Secrets stored as they are
)

// plugins are the admission plugins that are there by default.
const plugins = "NamespaceLifecycle,LimitRanger,ServiceAccount,NodeRestriction,TaintNodesByCondition,PodSecurity,Priority," +
	"DefaultTolerationSeconds,DefaultStorageClass,StorageObjectInUseProtection,PodGroupProtection,PersistentVolumeClaimResize," +
	"RuntimeClass,PodGroupWorkloadExists,CertificateApproval,CertificateSigning,PodCertificateSigning,ClusterTrustBundleAttest," +
	"CertificateSubjectRestriction,DefaultIngressClass,Expressions,Devices,MutatingAdmissionPolicy,MutatingAdmissionWebhook," +
	"ValidatingAdmissionPolicy,ValidatingAdmissionWebhook,ResourceQuota"

// auditPolicy notes who did what in two namespaces, so that the cost of the log can
// be told from that of the rest.
const auditPolicy = `{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],"rules":[
{"level":"Metadata","namespaces":["` + auditedNamespace + `","` + fullNamespace + `"]},{"level":"None"}]}`

// greeting is what a server's process says of itself on its standard output.
type greeting struct {
	Address string // of the API
	Control string // of collect and Go's profiles, without TLS
	CA      []byte
	Admin   pair // of system:masters
	User    pair // of userName
}

// pair is a certificate and its key, in PEM.
type pair struct{ Cert, Key []byte }

// collected is what a server's process knows of its memory after a collection.
type collected struct {
	Allocated uint64 // bytes since the start
	Live      uint64 // bytes
}

// serve is a server's process: the API server on a store of one member in dir, until
// the standard input ends.
func serve(kind, dir string) (err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	// Collections are made between blocks, where their cost can be counted.
	debug.SetGCPercent(-1)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	slog.SetDefault(log)
	klog.SetSlogLogger(log)
	store, err := openStore(ctx, filepath.Join(dir, kind), log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	config, g, serverCert, err := configure(kind, dir, store)
	if err != nil {
		return err
	}
	api, err := server.New(config)
	if err != nil {
		return err
	}
	ran := make(chan error, 1)
	go func() { ran <- api.Run(ctx) }()
	if err := waitReady(ctx, api); err != nil {
		return err
	}
	front := &http.Server{Handler: api.Handler(), ReadHeaderTimeout: time.Minute, TLSConfig: &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{serverCert}, ClientAuth: tls.RequestClientCert,
	}}
	control := &http.Server{Handler: controls(), ReadHeaderTimeout: time.Minute}
	var listeners [2]net.Listener
	for i, to := range []*string{&g.Address, &g.Control} {
		if listeners[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return err
		}
		*to = listeners[i].Addr().String()
	}
	go func() { _ = front.ServeTLS(listeners[0], "", "") }() // both end with Close
	go func() { _ = control.Serve(listeners[1]) }()
	if err := json.NewEncoder(os.Stdout).Encode(g); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // ends with the parent
	cancel()
	return errors.Join(<-ran, front.Close(), control.Close())
}

// openStore begins a store of one member and waits until it leads.
func openStore(ctx context.Context, dir string, log *slog.Logger) (*raftstore.Store, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	store, err := raftstore.Open(raftstore.Config{
		ID: "n1", Dir: dir, Listener: l, Logger: log,
		Dial: func(context.Context, string) (net.Conn, error) { return nil, errors.New("there is no other member") },
	})
	if err != nil {
		return nil, err
	}
	if err := store.Bootstrap(); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	err = poll(ctx, func() error {
		_, _, err := store.Get(ctx, "/", raftstore.ReadOptions{})
		return err
	})
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
}

// configure is a server's configuration, and the credentials of its clients and its
// own.
func configure(kind, dir string, store *raftstore.Store) (config server.Config, g greeting, own tls.Certificate, err error) {
	now := time.Now()
	ca, err := pki.NewCA("bench", now)
	if err != nil {
		return config, g, own, err
	}
	g.CA = pki.EncodeCert(ca.Cert)
	issue := func(name string, groups ...string) (p pair) {
		key, keyErr := pki.NewKey()
		if keyErr != nil {
			err = errors.Join(err, keyErr)
			return p
		}
		cert, certErr := ca.IssueClient(key.Public(), name, groups, 24*time.Hour, now)
		if name == "" {
			cert, certErr = ca.IssueServer(key.Public(), "server", []netip.Addr{netip.MustParseAddr("127.0.0.1")}, now)
		}
		encoded, keyErr := pki.EncodeKey(key)
		if err = errors.Join(err, certErr, keyErr); err != nil {
			return p
		}
		return pair{pki.EncodeCert(cert), encoded}
	}
	g.Admin, g.User = issue("admin", user.SystemPrivilegedGroup), issue(userName, userGroups()...)
	at := issue("")
	if err != nil {
		return config, g, own, err
	}
	if own, err = tls.X509KeyPair(at.Cert, at.Key); err != nil {
		return config, g, own, err
	}
	key, err := kubestore.DeriveSealKey("bench", []byte("of no worth"))
	if err != nil {
		return config, g, own, err
	}
	seal, err := kubestore.NewSeal([]kubestore.SealKey{key})
	if err != nil {
		return config, g, own, err
	}
	config = server.Config{
		Storage: kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: server.Caller, Transformer: func(r schema.GroupResource) value.Transformer {
			if kind != opened && r.Resource == "secrets" {
				return seal
			}
			return nil
		}}),
		Authenticator: auth.ClientCert(ca.Roots),
	}
	if kind == bare {
		config.Admission.Disable = strings.Split(plugins, ",")
		return config, g, own, nil
	}
	config.Access.AuditPolicy, config.Access.AuditLog = filepath.Join(dir, kind+"-audit.json"), filepath.Join(dir, kind+"-audit.log")
	return config, g, own, os.WriteFile(config.Access.AuditPolicy, []byte(auditPolicy), 0o600)
}

func waitReady(ctx context.Context, api *server.Server) error {
	client, err := kubernetes.NewForConfig(api.LoopbackConfig())
	if err != nil {
		return err
	}
	return poll(ctx, func() error {
		_, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
}

// controls are what the measuring process asks of a server's: a collection, and Go's
// profiles.
func controls() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /collect", func(w http.ResponseWriter, _ *http.Request) {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		_ = json.NewEncoder(w).Encode(collected{Allocated: m.TotalAlloc, Live: m.HeapAlloc})
	})
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	return mux
}

// poll asks again until it gets no error, for two minutes.
func poll(ctx context.Context, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}
