package server

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/union"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/server/auth"
	"github.com/clusterd/clusterd/apis/server/chain"
	"github.com/clusterd/clusterd/apis/server/rbac"
)

// authorization is who may do what: the chain that is asked on every request,
// and what keeps it current.
type authorization struct {
	chain authorizer.Authorizer
	rules authorizer.RuleResolver
	// configured is chain, unless the caller brought an authorizer of its own.
	configured *chain.Chain
	// rbac decides by the stored roles; it is a part of chain unless the
	// caller brought an authorizer of its own.
	rbac      *rbac.Authorizer
	stored    *rbac.Stored
	bootstrap *rbac.Bootstrap
	// complete is set once the default bindings have been seen to count.
	complete atomic.Bool
}

func newAuthorization(config Config, stores *stores, s *Server) (*authorization, error) {
	client, err := kubernetes.NewForConfig(s.libraryConfig())
	if err != nil {
		return nil, fmt.Errorf("client for the stored roles: %w", err)
	}
	z := &authorization{bootstrap: rbac.NewBootstrap(client)}
	if z.stored, err = rbac.NewStored(client); err != nil {
		return nil, err
	}
	z.rbac = rbac.NewAuthorizer(z.stored)
	if config.Authorizer != nil {
		z.chain = config.Authorizer
		z.rules, _ = config.Authorizer.(authorizer.RuleResolver)
		return z, nil
	}
	z.configured, err = chain.New(config.Access.Authorization, chain.Parts{
		First: []union.NamedAuthorizer{
			{AuthorizerName: "system:masters", Authorizer: auth.Masters{}},
			{AuthorizerName: "system:controllers", Authorizer: rbac.NewLoops(z.rbac)},
		},
		Node: auth.NewNodeAuthorizer(stores), RBAC: z.rbac,
	})
	if err != nil {
		return nil, err
	}
	z.chain, z.rules = z.configured, z.configured
	return z, nil
}

var errNoPolicy = errors.New("the default roles are not in force yet")

// run keeps what decisions are made by current, until ctx ends. later delays what
// creates the default roles.
func (z *authorization) run(ctx context.Context, later func(func(context.Context) error) func(context.Context) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return z.stored.Run(ctx) })
	group.Go(func() error { return later(z.bootstrap.Run)(ctx) })
	if z.configured != nil {
		group.Go(func() error {
			z.configured.Run(ctx)
			return nil
		})
	}
	return group.Wait()
}

// check is nil once the default roles and bindings are in force here.
func (z *authorization) check() error {
	if z.complete.Load() {
		return nil
	}
	if !z.bootstrap.Done() || !z.stored.Synced() || !z.stored.Has(rbac.ClusterRoles(), rbac.ClusterRoleBindings()) {
		return errNoPolicy
	}
	z.complete.Store(true)
	return nil
}

// WaitAuthorized blocks until the default roles are in force, so that a client that
// is not a member of system:masters may work, or until ctx ends.
func (s *Server) WaitAuthorized(ctx context.Context) error {
	return wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(context.Context) (bool, error) {
		return s.authorization.check() == nil, nil
	})
}

// LoopIdentity is who a loop of the leader is: for ClientConfigFor. The roles
// of these identities are among the default ones.
func LoopIdentity(loop string) (name string, groups []string) { return rbac.LoopIdentity(loop) }
