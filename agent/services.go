package agent

import (
	"context"
	"errors"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/clusterd/clusterd/agent/dns"
	"github.com/clusterd/clusterd/agent/podspec"
)

// serviceTimeout is how long a container waits for the first list of Services.
const serviceTimeout = 5 * time.Second

// serviceLister gives the way to ask for Services; nil: there is no API.
func (a *Agent) serviceLister() podspec.Services {
	if a.cfg.Client == nil {
		return nil
	}
	a.services = a.cfg.Watches.Services
	lister := corelisters.NewServiceLister(a.services.GetIndexer())
	return func(ctx context.Context, namespace string) ([]*v1.Service, error) {
		timer := time.NewTimer(serviceTimeout)
		defer timer.Stop()
		select {
		case <-a.services.HasSyncedChecker().Done():
		case <-timer.C:
			return nil, errors.New("services have not yet been read at least once, cannot construct envvars")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return lister.Services(namespace).List(labels.Everything())
	}
}

// newDNS makes the node's name server, if it is to have one.
func (a *Agent) newDNS() (*dns.Server, error) {
	if a.cfg.DNS == nil || a.cfg.Client == nil {
		return nil, nil
	}
	cfg := *a.cfg.DNS
	cfg.Domain, cfg.Client, cfg.Services, cfg.Slices = a.cfg.ClusterDomain, a.cfg.Client, a.cfg.Watches.Services, a.cfg.Watches.Slices
	cfg.Upstreams = func() ([]string, error) { return podspec.HostNameservers(a.cfg.ResolvConf) }
	return dns.New(cfg)
}
