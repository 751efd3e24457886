package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/ingress/kinds"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/silence"
	"github.com/clusterd/clusterd/sched"
)

// lead runs what only the leader may run, each time this node becomes it, and
// waits for all of it to end before it can lead again.
func (m *Main) lead(ctx context.Context) error {
	leaderCh := m.store.LeaderCh()
	for waitLeadership(ctx, leaderCh, true) {
		m.log.Info("this node leads the cluster")
		since := time.Now()
		m.parts.leading(&since)
		term, over := context.WithCancel(ctx)
		var listener sync.WaitGroup
		listener.Go(func() {
			waitLeadership(ctx, leaderCh, false)
			over()
		})
		for term.Err() == nil {
			if v := m.clock.Verdict(); v.Wrong() {
				m.log.Warn("the leader's work waits until the clock is right", "why", v.Why)
				m.clock.WaitUntilRight(term)
				continue
			}
			if err := m.clock.RunWhileRight(term, m.runTerm); term.Err() == nil && !m.clock.Verdict().Wrong() {
				m.log.Error("the leader's work ended, beginning it again", "err", err)
				select {
				case <-term.Done():
				case <-time.After(time.Second):
				}
			}
		}
		over()
		listener.Wait()
		m.parts.leading(nil)
		m.log.Info("this node no longer leads the cluster")
	}
	return nil
}

// waitLeadership waits for the store's message that this node leads, or does not any more. It
// returns false when there will be no such message.
func waitLeadership(ctx context.Context, leaderCh <-chan bool, want bool) bool {
	for {
		select {
		case leads, open := <-leaderCh:
			if !open {
				return false
			}
			if leads == want {
				return true
			}
		case <-ctx.Done():
			return false
		}
	}
}

// runTerm runs the leader's work until ctx ends or a part of it fails.
func (m *Main) runTerm(ctx context.Context) error {
	if err := m.recordCluster(ctx); err != nil {
		return err
	}
	if err := join.Widen(ctx, m.store, m.cfg.podRanges(), m.cfg.serviceRanges()); err != nil {
		m.log.Warn("the ranges of addresses are not those of the cluster", "err", err)
	}
	switch was, err := join.SetPodEncryption(ctx, m.store, m.cfg.PodEncryption); {
	case err != nil:
		m.log.Warn("whether pod traffic is encrypted could not be recorded for nodes that join", "err", err)
	case m.cfg.PodEncryption == join.PodEncryptionOff && was != m.cfg.PodEncryption:
		m.log.Warn("nodes that join do not encrypt pod traffic any more: this node, which leads now, is set not to", "before", was, "key", "podEncryption")
	}
	if err := m.api.WaitAuthorized(ctx); err != nil {
		return nil // the term is over
	}
	hints := silence.NewSuspects(silence.Sources{
		Self: m.id.NodeID(), Members: m.members, Agents: m.peers.agents, Record: m.peers.record, Answered: m.store.Answered,
		Ask: m.peers.confirm, AskVia: m.peers.askReach,
	})
	cfg, err := m.schedConfig(hints)
	if err != nil {
		return err
	}
	members := join.Reconciler{
		ID: m.id.NodeID(), Store: m.store, Raft: m.store, Gossip: m.members, Log: room(m.log, "join"),
		Warn: func(w string) { m.warnEvent(ctx, cfg.EventClient, "FewVoters", w) },
	}
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return members.Run(ctx) })
	work.Go(func() error { return hints.Run(ctx) })
	work.Go(func() error { return m.schedule(ctx, hints) })
	work.Go(func() error { return m.rotation.Lead(ctx) })
	work.Go(func() error { return m.gossipKeys.Lead(ctx) })
	work.Go(func() error { return m.reseal(ctx) })
	work.Go(func() error { return m.keepTokenKeys(ctx) })
	work.Go(func() error { return m.forgetNodes(ctx, cfg.Client) })
	work.Go(func() error { return m.takeSnapshots(ctx, cfg.EventClient) })
	return work.Wait()
}

// schedule runs the controllers, and restarts them when the authorities that pods
// trust have changed.
func (m *Main) schedule(ctx context.Context, hints sched.Liveness) error {
	for ctx.Err() == nil {
		changed := m.trustChanged.Next()
		cfg, err := m.schedConfig(hints)
		if err != nil {
			return err
		}
		round, over := context.WithCancel(ctx)
		var listener sync.WaitGroup
		listener.Go(func() {
			select {
			case <-changed:
			case <-round.Done():
			}
			over()
		})
		m.parts.loops.Store(true)
		err = sched.Run(round, cfg)
		m.parts.loops.Store(false)
		ended := round.Err() != nil
		over()
		listener.Wait()
		if err != nil || !ended {
			return err
		}
	}
	return nil
}

// forgetNodes deletes the Nodes of members that are removed. The server that
// removed one has done so already, unless it was the member itself, or ended
// meanwhile.
func (m *Main) forgetNodes(ctx context.Context, client kubernetes.Interface) error {
	err := join.Removals(ctx, m.store, func(_ string, r join.Removal) error {
		for ctx.Err() == nil {
			err := m.forgetNode(ctx, client, r.Name)
			if err == nil {
				break
			}
			m.log.Warn("the Node of a removed member is not deleted yet", "node", r.Name, "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
		return ctx.Err()
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// forgetNode deletes the Node, unless a member has that name again.
func (m *Main) forgetNode(ctx context.Context, client kubernetes.Interface, name string) error {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return ignoreNotFound(err)
	}
	if _, err := join.MemberNamed(ctx, m.store, name); !errors.Is(err, join.ErrNotMember) {
		return err
	}
	return ignoreNotFound(client.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &node.UID}}))
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// warnEvent makes an Event of a problem of the cluster, on this node
// since it is the one that noticed.
func (m *Main) warnEvent(ctx context.Context, client kubernetes.Interface, reason, warning string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	now := metav1.Now()
	_, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: m.cfg.Name + "-"},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: m.cfg.Name, UID: types.UID(m.cfg.Name)},
		Type:           corev1.EventTypeWarning,
		Reason:         reason,
		Message:        warning,
		Source:         corev1.EventSource{Component: "clusterd", Host: m.cfg.Name},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil {
		m.log.Warn("the warning could not be made an Event", "err", err)
	}
}

func (m *Main) schedConfig(hints sched.Liveness) (sched.Config, error) {
	user, groups := server.LoopIdentity("")
	rest := m.api.ClientConfigFor(user, groups...)
	rest.Transport = newLoopTransport(m.api)
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return sched.Config{}, fmt.Errorf("make the controllers' client: %w", err)
	}
	events, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return sched.Config{}, fmt.Errorf("make the controllers' client: %w", err)
	}
	meta, err := metadata.NewForConfig(rest)
	if err != nil {
		return sched.Config{}, fmt.Errorf("make the controllers' client: %w", err)
	}
	custom, err := dynamic.NewForConfig(rest)
	if err != nil {
		return sched.Config{}, fmt.Errorf("make the controllers' client: %w", err)
	}
	return sched.Config{
		Client:      client,
		EventClient: events,
		Metadata:    meta,
		Dynamic:     custom,
		Gateways:    kinds.New(custom, client.Discovery()),
		ClusterCIDR: m.cfg.podRanges(),
		ServiceCIDR: m.cfg.serviceRanges(),
		ClusterDNS:  m.cfg.nodeDNS(),
		RootCA:      m.trust.Load().Bundle(),
		TokenKeys:   m.api.TokenKeyIDs,
		SignClient:  m.signClient,
		Liveness:    hints,
		Hold:        m.clock.WaitUntilRight,
		Scheduler:   m.scheduler,
		Rebalance:   m.cfg.RebalanceInterval.Duration,

		RebalanceSettled: debugDuration(settledEnv),
	}, nil
}

// signClient signs with the cluster's authority for users.
func (m *Main) signClient(request *x509.CertificateRequest, lifetime time.Duration) (*x509.Certificate, error) {
	user := request.Subject.CommonName
	return m.trust.Load().For(pki.ForClients).Signer().IssueClient(request.PublicKey, user, request.Subject.Organization, lifetime, m.rights.SignAt(user))
}

// loopTransport sends what a loop asks under the loop's own identity, and names
// the loop, so that loops which share an identity can be distinguished.
type loopTransport struct {
	api *server.Server

	mu   sync.Mutex // guards ways
	ways map[string]http.RoundTripper
}

func newLoopTransport(api *server.Server) *loopTransport {
	return &loopTransport{api: api, ways: map[string]http.RoundTripper{}}
}

// RoundTrip implements http.RoundTripper.
func (l *loopTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	name := sched.LoopOf(req.Context())
	if name != "" {
		req = req.Clone(req.Context())
		req.Header.Set("User-Agent", server.PartAgent(name))
	}
	return l.way(name).RoundTrip(req)
}

func (l *loopTransport) way(loop string) http.RoundTripper {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ways[loop] == nil {
		user, groups := server.LoopIdentity(loop)
		l.ways[loop] = l.api.ClientConfigFor(user, groups...).Transport
	}
	return l.ways[loop]
}
