package static

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Once is a set of static pods that are to run to completion. The sources are read
// once, the pods are delivered once, and they are removed when Release is called.
type Once struct {
	pods     []*v1.Pod
	released chan struct{}
}

// ReadOnce reads the sources of cfg. It fails if a source has a fault, if a pod would
// never end, or if there is no pod.
func ReadOnce(ctx context.Context, cfg Config) (*Once, error) {
	var faults []error
	cfg.OnFault = func(where string, err error) { faults = append(faults, fmt.Errorf("%s: %w", where, err)) }
	r, err := New(cfg)
	if err != nil {
		return nil, err
	}
	if cfg.Dir != "" && cfg.URL != "" { // the directory may be the default, which is optional then
		if _, err := os.Stat(cfg.Dir); errors.Is(err, os.ErrNotExist) {
			r.cfg.Dir = ""
		}
	}
	r.readDir()
	r.readURL(ctx)
	pods := r.pods()
	if err := errors.Join(faults...); err != nil {
		return nil, fmt.Errorf("static pods: %w", err)
	}
	if len(pods) == 0 {
		return nil, fmt.Errorf("static pods: there is none in %s", strings.Join(slices.DeleteFunc([]string{cfg.Dir, cfg.URL}, func(s string) bool { return s == "" }), " and "))
	}
	for _, p := range pods {
		if why := endless(p); why != "" {
			return nil, fmt.Errorf("static pods: pod %s: %s: it would never end; use restartPolicy Never or OnFailure", p.Name, why)
		}
	}
	return &Once{pods: pods, released: make(chan struct{})}, nil
}

// endless says why a pod does not end by itself, "": it does.
func endless(p *v1.Pod) string {
	if p.Spec.RestartPolicy == v1.RestartPolicyAlways {
		return "restartPolicy is Always"
	}
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == v1.ContainerRestartPolicyAlways {
			return "restartPolicy of container " + c.Name + " is Always"
		}
	}
	return ""
}

// Pods are those that were read.
func (o *Once) Pods() []*v1.Pod { return o.pods }

// Release takes the pods away: what is left of them is torn down, and what is
// remembered of them forgotten. It is called once.
func (o *Once) Release() { close(o.released) }

// Run tells the pods, and that there is none once they are released, until ctx
// ends.
func (o *Once) Run(ctx context.Context, set func(pods []*v1.Pod, complete bool)) error {
	set(o.pods, true)
	select {
	case <-o.released:
		set(nil, true)
	case <-ctx.Done():
		return nil
	}
	<-ctx.Done()
	return nil
}
