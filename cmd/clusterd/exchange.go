package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/slack"
)

// exchange is what this server does of an exchange of the authority: it follows
// the cluster's state, and says so when it has what that asks.
//
// The new authority's key is never in the store. Its maker has it on disk
// before the state names it; the other servers ask each other for it, over
// connections that prove keys of the records, which the old authority's key does
// not help to forge.
type exchange struct {
	main *Main
	// reported is the last line of the log.
	reported string
	// sealsOf are the authorities, in PEM, that the seal keys in use follow from.
	sealsOf []byte
	// making is held while the keys of successors lie on disk and no state names them yet.
	making sync.Mutex
}

const (
	exchangePeriod = time.Second
	// keysTimeout is how long another server may take to tell its keys.
	keysTimeout = 5 * time.Second
)

// run follows the state until ctx ends.
func (x *exchange) run(ctx context.Context) error {
	m := x.main
	x.sealsOf = m.trust.Load().For(pki.ForSecrets).Bundle()
	follower := authority.Follower{
		Store: m.store, ID: m.id.nodeID(), Trust: m.trust.Load, Key: x.withKey,
		Adopt:  func(next *pki.Trust) error { return x.adopt(next, m.clock.Now()) },
		Settle: func(ctx context.Context) error { return x.settle(ctx, m.clock.Now()) },
		May:    func() bool { return m.store.Leader() != "" },
	}
	for {
		state, err := follower.Follow(ctx)
		if state != nil {
			m.log.Info("this server follows the exchange of the authority", "phase", state.Phase, "number", state.Number)
		}
		if err != nil && ctx.Err() == nil && err.Error() != x.reported {
			x.reported = err.Error()
			m.log.Warn("the exchange of the authority cannot be followed yet, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(exchangePeriod):
		}
	}
}

// withKey finds the authority's key: here, in what this server made, or with
// another server.
func (x *exchange) withKey(ctx context.Context, ca *pki.CA) (*pki.CA, error) {
	m := x.main
	if known := m.trust.Load().FindAny(ca.ID()); known != nil && known.HasKey() {
		return known, nil
	}
	if made, err := m.dir.readSuccessor(ca.ID()); err != nil || made != nil {
		return made, err
	}
	records, err := join.Records(ctx, m.store, true)
	if err != nil {
		return nil, err
	}
	for _, rec := range join.Servers(records) {
		if rec.ID == m.id.nodeID() {
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, keysTimeout)
		keys, err := join.FetchKeys(attempt, func(ctx context.Context) (net.Conn, error) {
			return m.tid.Dial(ctx, m.serverAddr(rec.ID), rec.ID, transport.Member)
		})
		cancel()
		if err != nil || keys.Trust == nil {
			m.log.Debug("ask a server for the authority's key", "node", rec.Name, "err", err)
			continue
		}
		theirs, err := keys.Whole(m.trust.Load())
		if err != nil {
			return nil, fmt.Errorf("the keys of %s: %w", rec.Name, err)
		}
		if found := theirs.FindAny(ca.ID()); found != nil {
			return found, nil
		}
	}
	return nil, fmt.Errorf("no server that answers holds the key of authority %s yet", ca.ID())
}

// adopt makes a state this server's: on disk in one step, then in use.
func (x *exchange) adopt(next *pki.Trust, now time.Time) error {
	m := x.main
	had := m.trust.Load()
	if err := x.write(next, now); err != nil {
		return err
	}
	if !bytes.Equal(had.Bundle(), next.Bundle()) {
		m.trustChanged.tell()
	}
	if had.DropsAny(next) {
		// Keys that have a record are the members', no matter which authority signed for them.
		m.port.CloseUntrusted(m.rights.recordedKey)
	}
	return nil
}

// settle does what follows from the trust of this server. Each step may be repeated.
func (x *exchange) settle(ctx context.Context, now time.Time) error {
	m := x.main
	errs := []error{m.renewFront(now), m.writeKubeconfig(), x.newSealKeys()}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return x.dropSuccessors(ctx, now)
}

// newSealKeys seals with what follows from the authorities of now.
func (x *exchange) newSealKeys() error {
	seals := x.main.trust.Load().For(pki.ForSecrets).Bundle()
	if bytes.Equal(seals, x.sealsOf) {
		return nil
	}
	if err := x.main.newSealKeys(); err != nil {
		return err
	}
	x.sealsOf = seals
	return nil
}

// successorTimeout is how long after its key was written a successor may still be named by
// a state: no write to the store takes as long.
const successorTimeout = 10 * time.Minute

// dropSuccessors removes the keys of successors that are of no use any more.
func (x *exchange) dropSuccessors(ctx context.Context, now time.Time) error {
	m := x.main
	if made, err := m.dir.successors(); err != nil || len(made) == 0 {
		return err
	}
	if !x.making.TryLock() {
		return errors.New("this server is beginning another exchange")
	}
	defer x.making.Unlock()
	here := map[string]bool{}
	for _, ca := range m.trust.Load().Whole() {
		here[ca.ID()] = true
	}
	named, err := x.named(ctx)
	if err != nil {
		named = nil
	}
	return m.dir.dropUnnamed(here, named, now)
}

// named are the authorities of the state, as the leader has it.
func (x *exchange) named(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	state, err := authority.Get(ctx, x.main.store, false)
	if err != nil {
		return nil, err
	}
	named := map[string]bool{}
	if state.Number == 0 {
		return named, nil
	}
	trust, err := state.Trust()
	if err != nil {
		return nil, err
	}
	for _, ca := range trust.Whole() {
		named[ca.ID()] = true
	}
	return named, nil
}

func (x *exchange) write(next *pki.Trust, now time.Time) error {
	m := x.main
	m.idMu.Lock()
	defer m.idMu.Unlock()
	id := *m.id
	id.trust = next
	for _, ca := range m.id.trust.Dropped(next, pki.ForSecrets) {
		key, err := sealKeyOf(ca)
		if err != nil {
			return err
		}
		id.retiredSeals = append(slices.Clone(id.retiredSeals), sealLine(key)...)
	}
	if !next.Signer().Signed(id.cert) {
		cert, err := next.Signer().IssueServer(id.key.Public(), m.cfg.Name, certAddrs(m.cfg), now, certNames(m.cfg)...)
		if err != nil {
			return err
		}
		id.cert = cert
	}
	if err := m.dir.replaceIdentity(&id); err != nil {
		return err
	}
	m.id.trust, m.id.cert, m.id.retiredSeals = id.trust, id.cert, id.retiredSeals
	return m.useIdentity(now)
}

// useIdentity shows the certificate of m.id and trusts its authorities from now on. idMu is held.
func (m *Main) useIdentity(now time.Time) error {
	shown, err := m.shownNow(now)
	if err != nil {
		return err
	}
	m.cert.Store(m.id.tlsCertificate())
	m.shown.Store(shown)
	m.trust.Store(m.id.trust)
	return nil
}

// shownCertificates are what clients of the API and joiners are shown, by the id
// of the authority that signed it.
type shownCertificates struct {
	of        map[string]*tls.Certificate
	otherwise *tls.Certificate
}

// shownNow makes them. The API's clients know the older authority and may not know
// the newer one yet. idMu is held.
func (m *Main) shownNow(now time.Time) (*shownCertificates, error) {
	own, signer := m.id.tlsCertificate(), m.id.trust.Signer()
	shown := &shownCertificates{of: map[string]*tls.Certificate{signer.ID(): own}, otherwise: own}
	if elder := m.id.trust.Elder(); elder != signer {
		cert, err := elder.IssueServer(m.id.key.Public(), m.cfg.Name, certAddrs(m.cfg), now, certNames(m.cfg)...)
		if err != nil {
			return nil, err
		}
		shown.otherwise = tlsCertificate(elder, cert, m.id.key)
		shown.of[elder.ID()] = shown.otherwise
	}
	return shown, nil
}

// showCert is transport.Identity's Shown.
func (m *Main) showCert(authority string) *tls.Certificate {
	shown := m.shown.Load()
	if cert, ok := shown.of[authority]; ok {
		return cert
	}
	return shown.otherwise
}

// writeKubeconfig keeps the administrator's kubeconfig of this machine.
func (m *Main) writeKubeconfig() error {
	if _, err := os.Stat(m.dir.inClear(kubeconfigName)); err == nil && !m.mayRenew() {
		return m.dir.linkInClear(kubeconfigName)
	}
	return writeKubeconfig(m.dir, m.trust.Load(), "https://"+m.cfg.addr().String(), "clusterd", &m.rights)
}

// make makes successors of the authorities for these purposes, or those that are their
// first own ones, and has begin name them to the cluster. Their keys are on disk before.
func (x *exchange) make(of []pki.Purpose, begin func(authority.Request) error) error {
	m := x.main
	x.making.Lock()
	defer x.making.Unlock()
	now, trust := m.clock.Now(), m.trust.Load()
	wish := authority.Request{Now: trust, Successors: map[pki.Purpose][]byte{}, Maker: m.id.nodeID()}
	var made []string
	drop := func(err error) error {
		for _, id := range made {
			err = errors.Join(err, m.dir.dropSuccessor(id))
		}
		return err
	}
	for _, p := range of {
		make := func() (*pki.CA, error) { return trust.Signer().NewFor(p, now) }
		if trust.Owns(p) {
			make = func() (*pki.CA, error) { return trust.For(p).Signer().NewSuccessor(now) }
		}
		successor, err := make()
		if err == nil {
			err = m.dir.writeSuccessor(successor)
		}
		if err != nil {
			return drop(err)
		}
		made = append(made, successor.ID())
		wish.Successors[p] = pki.EncodeCert(successor.Cert)
	}
	err := begin(wish)
	if errors.Is(err, authority.ErrUnderWay) || errors.Is(err, authority.ErrBehind) { // after any other error it may have begun
		return drop(err)
	}
	return err
}

// begin begins an exchange.
func (x *exchange) begin(ctx context.Context, of []pki.Purpose, grace time.Duration, finish bool) error {
	return x.make(of, func(w authority.Request) error {
		w.Grace, w.Finish = grace, finish
		return authority.Begin(ctx, x.main.store, w, x.main.clock.Now())
	})
}

// leadExchange takes exchanges from step to step while this node leads.
func (m *Main) leadExchange(ctx context.Context) error {
	var poking sync.WaitGroup
	defer poking.Wait()
	leader := authority.Leader{
		Store: m.store,
		Log:   room(m.log, "authority"),
		Now:   m.clock.Now,
		Make: func(ctx context.Context, of []pki.Purpose) error {
			err := m.exchange.make(of, func(w authority.Request) error {
				return authority.RetryWithNewKeys(ctx, m.store, w, m.clock.Now())
			})
			if errors.Is(err, authority.ErrUnderWay) {
				return nil // one that has its key
			}
			return err
		},
		Refresh: func(name string) {
			poking.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, progressTimeout)
				defer cancel()
				_ = m.peers.call(ctx, name, http.MethodPost, v1.Members, nil, nil) // it asks by itself, later
			})
		},
	}
	return leader.Run(ctx)
}

// recordedKey reports whether the key with that id is a member's.
func (r *rights) recordedKey(id string) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	_, err := join.Member(context.Background(), s, id)
	return err == nil
}

// sealKeyOf is the key for secrets at rest that follows from an authority's.
func sealKeyOf(ca *pki.CA) (kubestore.SealKey, error) {
	master, err := ca.EncodeCAKey()
	if err != nil {
		return kubestore.SealKey{}, err
	}
	id := backup.AuthoritySeal
	if !ca.First() {
		id += "-" + ca.ID()[:12]
	}
	return kubestore.DeriveSealKey(id, master)
}

// sealLine is the key's line in a list of them.
func sealLine(key kubestore.SealKey) []byte {
	return fmt.Appendf(nil, "%s %s\n", key.ID, base64.StdEncoding.EncodeToString(key.Secret))
}

// sealKeys are the keys for secrets at rest that follow from authorities, which are those for
// that purpose: of the first one, then of those beside it and of the past, which only read.
func (x *exchange) sealKeys() ([]kubestore.SealKey, error) {
	m := x.main
	m.idMu.Lock()
	trust, retired := m.id.trust, m.id.retiredSeals
	m.idMu.Unlock()
	var keys []kubestore.SealKey
	for _, ca := range trust.For(pki.ForSecrets).All() {
		key, err := sealKeyOf(ca)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	past, err := kubestore.ParseSealKeys(string(retired))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.dir.path("pki", "retired-seal.keys"), err)
	}
	for _, key := range past {
		if !slices.ContainsFunc(keys, func(k kubestore.SealKey) bool { return k.ID == key.ID }) {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// ownSeals is the list of keys of the file seal.keys.
func (x *exchange) ownSeals() ([]byte, error) {
	_, keys, err := x.main.dir.ownSealKeys()
	return sealLines(keys), err
}

// retired is the list of keys of authorities of the past.
func (x *exchange) retired() []byte {
	x.main.idMu.Lock()
	defer x.main.idMu.Unlock()
	return x.main.id.retiredSeals
}

// secrets are what a snapshot of the state needs beside it.
func (x *exchange) secrets() (backup.Secrets, error) {
	keys, err := x.main.sealKeys()
	if err != nil {
		return backup.Secrets{}, err
	}
	trust := x.main.trust.Load()
	secrets := backup.Secrets{CACert: pki.EncodeCert(trust.Signer().Cert), Own: map[string]backup.Authority{}}
	own, err := sealKeyOf(trust.For(pki.ForSecrets).Signer())
	if err != nil {
		return secrets, err
	}
	for _, key := range keys {
		if key.ID != own.ID {
			secrets.SealKeys = append(secrets.SealKeys, sealLine(key)...)
		}
	}
	for _, p := range pki.OwnPurposes {
		ca := trust.For(p).Signer()
		if ca.ID() == trust.Signer().ID() {
			continue // it has none of its own, or none that signs yet
		}
		key, err := ca.EncodeCAKey()
		if err != nil {
			return secrets, err
		}
		secrets.Own[string(p)] = backup.Authority{Cert: pki.EncodeCert(ca.Cert), Key: key}
	}
	secrets.CAKey, err = trust.Signer().EncodeCAKey()
	return secrets, err
}

// successor is the file of an authority that this server made and that the
// cluster's state may name; it is in pki/ once this server follows that.
func (d dataDir) successor(id string) string { return d.path("authority-" + id + ".pem") }

func (d keyDir) writeSuccessor(ca *pki.CA) error {
	key, err := ca.EncodeCAKey()
	if err != nil {
		return err
	}
	return d.writeKey(d.successor(ca.ID()), append(pki.EncodeCert(ca.Cert), key...))
}

// readSuccessor returns nil if there is none.
func (d keyDir) readSuccessor(id string) (*pki.CA, error) {
	b, err := d.readKey(d.successor(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	cert, key := pki.CutPEM(b)
	ca, err := pki.LoadCA(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.successor(id), err)
	}
	return ca, nil
}

// successors are the ids of those files, and when each was written.
func (d dataDir) successors() (map[string]time.Time, error) {
	files, err := filepath.Glob(d.successor("*"))
	if err != nil {
		return nil, err
	}
	made := map[string]time.Time{}
	for _, file := range files {
		info, err := os.Stat(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		id := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "authority-"), ".pem")
		made[id] = info.ModTime()
	}
	return made, nil
}

// dropUnnamed removes those that lie in pki/ as well, and those that no state names and
// none will. named nil: it is not known what the state names.
func (d dataDir) dropUnnamed(here, named map[string]bool, now time.Time) error {
	made, err := d.successors()
	if err != nil {
		return err
	}
	for id, written := range made {
		if here[id] || named != nil && !named[id] && now.Sub(written) > successorTimeout {
			if err := d.dropSuccessor(id); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d dataDir) dropSuccessor(id string) error {
	err := os.Remove(d.successor(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// notice wakes those who wait for a change. Its zero value is ready.
type notice struct {
	mu sync.Mutex
	ch chan struct{}
}

// next is closed by the next tell.
func (n *notice) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *notice) tell() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
	}
	n.ch = nil
}
