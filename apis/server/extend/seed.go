package extend

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"k8s.io/apiserver/pkg/registry/rest"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	registry "k8s.io/kube-aggregator/pkg/registry/apiservice"
)

// seeds are the APIServices of a new cluster and where they are stored.
type seeds struct {
	store apistorage.Interface
	wants []*apiregistrationv1.APIService
	// complete is set once all of them are stored.
	complete atomic.Bool
}

// SeedServices creates the APIServices of our own groups by their storage, for a new
// cluster, before Seeded is closed: what registers them finds nothing to do then.
// Those that are there stay as they are.
func (o *Options) SeedServices(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	strategy := registry.NewStrategy(aggregatorscheme.Scheme)
	resource := apiregistration.Resource("apiservices")
	prefix := strings.TrimSuffix(o.Prefix(resource.Group, resource.Resource), "/") + "/"
	for _, want := range o.seeds.wants {
		group.Go(func() error {
			obj := &apiregistration.APIService{}
			if err := aggregatorscheme.Scheme.Convert(want, obj, nil); err != nil {
				return fmt.Errorf("create APIService %s: %w", want.Name, err)
			}
			if err := rest.BeforeCreate(strategy, ctx, obj); err != nil {
				return fmt.Errorf("create APIService %s: %w", want.Name, err)
			}
			err := o.seeds.store.Create(ctx, prefix+obj.Name, obj, &apiregistration.APIService{}, 0)
			if err != nil && !apistorage.IsExist(err) {
				return fmt.Errorf("create APIService %s: %w", want.Name, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	o.seeds.complete.Store(true)
	return nil
}
