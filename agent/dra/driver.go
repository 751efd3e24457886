package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	drabeta "k8s.io/kubelet/pkg/apis/dra/v1beta1"

	"github.com/clusterd/clusterd/agent/plugin"
)

// drivers are those that have registered: a plugin.Handler. There may be several
// of a name while one takes the place of another.
type drivers struct {
	timeout time.Duration
	changed func() // called when one has come or gone, without mu
	wg      sync.WaitGroup

	mu     sync.Mutex // guards all below
	byName map[string][]*driver
	closed bool
}

// driver is a registered one.
type driver struct {
	plugin.Info
	conn  *grpc.ClientConn
	calls dra.DRAPluginClient
	slots chan struct{} // a token per call under way
	stop  context.CancelFunc

	connected bool // guarded by drivers.mu
	// since is when it was last seen to go, or when it came and has not answered
	// yet; guarded by drivers.mu.
	since time.Time
}

// get is the driver to call: the newest of those that answer, else the newest;
// nil: there is none.
func (d *drivers) get(name string) *driver {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.byName[name]
	for _, one := range slices.Backward(all) {
		if one.connected {
			return one
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[len(all)-1]
}

// absent reports since when no driver of the name answers; otherwise since start
// if none has ever come.
func (d *drivers) absent(name string, start time.Time) (since time.Time, absent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	since = start
	for _, one := range d.byName[name] {
		if one.connected {
			return since, false
		}
		if one.since.After(since) {
			since = one.since
		}
	}
	return since, true
}

// Register takes a driver, beside others of its name.
func (d *drivers) Register(ctx context.Context, p plugin.Info) error {
	if errs := validation.IsDNS1123Subdomain(p.Name); len(errs) > 0 {
		return fmt.Errorf("name %q: not the name of a driver of devices: %s", p.Name, errs[0])
	}
	conn, err := plugin.Dial(p.Endpoint, d.timeout)
	if err != nil {
		return err
	}
	one := &driver{Info: p, conn: conn, slots: make(chan struct{}, callsAtOnce), since: time.Now()}
	switch {
	case slices.Contains(p.Versions, dra.DRAPluginService):
		one.calls = dra.NewDRAPluginClient(conn)
	case slices.Contains(p.Versions, drabeta.DRAPluginService):
		one.calls = drabeta.V1Beta1ClientWrapper{DRAPluginClient: drabeta.NewDRAPluginClient(conn)}
	default:
		_ = conn.Close()
		return fmt.Errorf("driver %s serves %q, this node calls %q: use a version of the driver that serves one of them", p.Name, p.Versions, []string{dra.DRAPluginService, drabeta.DRAPluginService})
	}
	watch, stop := context.WithCancel(context.Background())
	one.stop = stop
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		stop()
		_ = conn.Close()
		return errStopped
	}
	d.byName[p.Name] = append(d.byName[p.Name], one)
	d.wg.Go(func() { d.watch(watch, one) })
	d.mu.Unlock()
	klog.FromContext(ctx).Info("Driver of devices has registered", "driver", p.Name, "services", p.Versions)
	d.changed()
	return nil
}

// watch keeps the connection to a driver and notes whether it stands.
func (d *drivers) watch(ctx context.Context, one *driver) {
	for {
		state := one.conn.GetState()
		if state == connectivity.Idle {
			one.conn.Connect()
		}
		d.mu.Lock()
		was := one.connected
		one.connected = state == connectivity.Ready
		if was && !one.connected {
			one.since = time.Now()
		}
		changed := was != one.connected
		d.mu.Unlock()
		if changed {
			d.changed()
		}
		if !one.conn.WaitForStateChange(ctx, state) {
			return
		}
	}
}

// Deregister forgets the driver that registered by the socket.
func (d *drivers) Deregister(p plugin.Info) {
	d.mu.Lock()
	all := d.byName[p.Name]
	i := slices.IndexFunc(all, func(one *driver) bool { return one.Socket == p.Socket })
	if i < 0 {
		d.mu.Unlock()
		return
	}
	one := all[i]
	if all = slices.Delete(slices.Clone(all), i, i+1); len(all) > 0 {
		d.byName[p.Name] = all
	} else {
		delete(d.byName, p.Name)
	}
	d.mu.Unlock()
	one.stop()
	_ = one.conn.Close()
	klog.Background().Info("Driver of devices has gone", "driver", p.Name)
	d.changed()
}

// Settled implements plugin.Handler.
func (d *drivers) Settled() {}

func (d *drivers) close() {
	d.mu.Lock()
	d.closed = true
	for _, all := range d.byName {
		for _, one := range all {
			one.stop()
			_ = one.conn.Close()
		}
	}
	d.byName = map[string][]*driver{}
	d.mu.Unlock()
	d.wg.Wait()
}

// slot waits for a turn to call the driver; release gives it back.
func (d *driver) slot(ctx context.Context) (release func(), err error) {
	select {
	case d.slots <- struct{}{}:
		return func() { <-d.slots }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("driver %s is busy with %d calls: %w", d.Name, callsAtOnce, ctx.Err())
	}
}

// fault names the driver and the call in an error.
func (d *driver) fault(call string, err error) error {
	switch st := status.Convert(err); st.Code() {
	case codes.Unavailable:
		return fmt.Errorf("driver %s does not answer %s (is its pod on this node running?): %w", d.Name, call, err)
	case codes.DeadlineExceeded:
		return fmt.Errorf("driver %s has not answered %s in time (its log says what it waits for): %w", d.Name, call, err)
	default:
		return fmt.Errorf("driver %s: %s: %w", d.Name, call, err)
	}
}

// notRegistered says of a claim that its driver is missing.
func notRegistered(claim, driver string) error {
	return fmt.Errorf("ResourceClaim %s: driver %s is not registered on this node: run its node plugin here (usually a DaemonSet); the pod goes on when it has registered", claim, driver)
}

// prepare asks the driver for claims and gives its answer for each.
func (d *driver) prepare(ctx context.Context, claims []*dra.Claim) (map[string]*dra.NodePrepareResourceResponse, error) {
	release, err := d.slot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	answer, err := d.calls.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return nil, d.fault("NodePrepareResources", err)
	}
	return answer.GetClaims(), nil
}

// unprepare has the driver take claims back. done are those that it has.
func (d *driver) unprepare(ctx context.Context, claims []*dra.Claim) (done []string, err error) {
	release, err := d.slot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	answer, err := d.calls.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil {
		return nil, d.fault("NodeUnprepareResources", err)
	}
	var errs []error
	for _, c := range claims {
		switch one, ok := answer.GetClaims()[c.Uid]; {
		case !ok:
			errs = append(errs, fmt.Errorf("driver %s: NodeUnprepareResources said nothing of ResourceClaim %s", d.Name, c.Name))
		case one.GetError() != "":
			errs = append(errs, fmt.Errorf("driver %s: NodeUnprepareResources of ResourceClaim %s: %s", d.Name, c.Name, one.GetError()))
		default:
			done = append(done, c.Uid)
		}
	}
	return done, errors.Join(errs...)
}
