package fault

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

var (
	seed   = flag.Uint64("seed", 1, "what the faults and their order are drawn from")
	length = flag.Duration("for", 45*time.Second, "how long faults befall the cluster")
	hold   = flag.Duration("hold", 10*time.Second, "how long all nodes are cut off from each other")
	only   = flag.String("only", "", "only faults whose name contains this")
)

const replicas = 12

// TestMain makes this process's clients notice a dead connection soon: a node
// that is cut off and killed cannot say goodbye.
func TestMain(m *testing.M) {
	for _, env := range []string{"HTTP2_READ_IDLE_TIMEOUT_SECONDS", "HTTP2_PING_TIMEOUT_SECONDS"} {
		if err := os.Setenv(env, "3"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// run is one cluster, the load on it and what is known of both.
type run struct {
	mu       sync.RWMutex // guards the elements of apis
	t        *testing.T
	c        *cluster.Netns
	rand     *rand.Rand
	apis     []kubernetes.Interface // of n1, n2, n3; see api and use
	acks     acks
	watchers []*watcher
}

// TestFaultRandom lets faults befall a cluster in use, in an order drawn from
// the seed.
func TestFaultRandom(t *testing.T) {
	r := newRun(t, nil)
	t.Logf("seed %d for %s", *seed, *length)
	t.Cleanup(func() { t.Logf("seed %d for %s", *seed, *length) })
	ctx := t.Context()
	r.prepare(ctx)
	finish := r.load(ctx, true)
	defer finish()
	for end := time.Now().Add(*length); time.Now().Before(end) && !t.Failed(); {
		r.befall(ctx)
	}
	finish()
	t.Logf("%d writes were acknowledged, %d were not", r.acks.count(), r.acks.failed.Load())
	for _, w := range r.watchers {
		t.Logf("the watcher of n%d received %d revisions over %d connections, and had to list again %d times", w.node+1, len(w.heard), w.resumed, len(w.gaps))
	}
}

// load writes and watches, and scales and rolls the Deployment if churn is
// set, until finish is called, which then checks everything.
func (r *run) load(ctx context.Context, churn bool) (finish func()) {
	loaded, unload := context.WithCancel(ctx)
	watched, unwatch := context.WithCancel(ctx)
	var load, watching sync.WaitGroup
	for _, w := range r.watchers {
		watching.Go(func() { w.run(watched) })
	}
	for i := range writers {
		load.Go(func() { r.write(loaded, key(i)) })
	}
	if churn {
		load.Go(func() { r.churn(loaded) })
	}
	var once sync.Once // sync.OnceFunc would make a panic of a failed check
	return func() {
		once.Do(func() { r.finish(ctx, unload, &load, unwatch, &watching) })
	}
}

// finish ends load and watching and checks everything.
func (r *run) finish(ctx context.Context, unload func(), load *sync.WaitGroup, unwatch func(), watching *sync.WaitGroup) {
	unload()
	load.Wait()
	defer watching.Wait()
	defer unwatch()
	if r.t.Failed() {
		return
	}
	began := time.Now()
	r.check(ctx)
	r.t.Logf("all was well %s after the load", time.Since(began).Round(time.Millisecond))
}

func key(writer int) string { return fmt.Sprintf("count-%d", writer) }

// newRun makes a cluster, which is taken down when the test ends.
// prepared, which may be nil, is done to its directory before.
func newRun(t *testing.T, prepared func(dir string)) *run {
	t.Helper()
	if os.Getenv("CLUSTERD_E2E") != "netns" {
		t.Skip("needs root and built programs: make build image && CLUSTERD_E2E=netns go test ./e2e/fault")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_E2E is set, but this is not root")
	}
	bin := os.Getenv("CLUSTERD_BIN")
	if bin == "" {
		bin = "../../bin"
	}
	bin, err := filepath.Abs(bin)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "c")
	if prepared != nil {
		prepared(dir)
	}
	c, err := cluster.Up(t.Context(), cluster.Config{
		Dir: dir, Bin: bin, Bridge: "cdfault", Subnet: netip.MustParsePrefix("10.83.0.0/24"),
		// Pods of a node that is away are replaced while it is.
		Args: []string{"--eviction-delay=2s"},
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &run{t: t, c: c, rand: rand.New(rand.NewPCG(*seed, 0)), acks: acks{all: map[string][]ack{}}}
	t.Cleanup(func() { r.down(append(c.Marks(), dir)) })
	for _, n := range c.Nodes() {
		api, _, err := c.Client(n.Name)
		if err != nil {
			t.Fatal(err)
		}
		r.apis = append(r.apis, api)
	}
	return r
}

// down takes the cluster down; nothing of it may be left.
func (r *run) down(marks []string) {
	ctx := context.WithoutCancel(r.t.Context())
	if r.t.Failed() {
		r.keep(ctx)
	}
	for _, n := range r.c.Nodes() {
		_ = r.c.Resume(n.Name) // the error is that it does not run
		if err := r.c.Heal(n.Name); err != nil {
			r.t.Error(err)
		}
	}
	marks = append(marks, r.c.Marks()...)
	if err := r.c.Down(ctx); err != nil {
		r.t.Errorf("take the cluster down: %v", err)
	}
	gone, cancel := context.WithTimeout(ctx, 10*time.Second) // what was killed takes a moment
	defer cancel()
	if err := clustertest.Poll(gone, func(context.Context) error {
		left, err := cluster.Remains(marks...)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left behind: %q", left)
		}
		return err
	}); err != nil {
		r.t.Error(err)
	}
}

// keep prints what there is and keeps the logs, which are about to go.
func (r *run) keep(ctx context.Context) {
	for _, args := range [][]string{{"members"}, {"get", "nodes,deployments,replicasets,pods", "-A", "-o", "wide"}} {
		out, err := r.ctl(args...)
		r.t.Logf("$ clusterctl %s\n%s%v", strings.Join(args, " "), out, err)
	}
	dir, err := os.MkdirTemp("", "clusterd-fault-")
	if err != nil {
		r.t.Error(err)
		return
	}
	for _, n := range r.c.Nodes() {
		for _, log := range []string{filepath.Dir(n.Data) + "/" + n.Name + ".log", n.Data + "/podmon/podmon.log"} {
			if err := copyFile(filepath.Join(dir, n.Name+"-"+filepath.Base(log)), log); err != nil {
				r.t.Log(err)
			}
		}
	}
	r.t.Logf("the nodes' logs are kept in %s", dir)
}

func copyFile(to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	dst, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err := io.Copy(dst, src); err != nil {
		_ = dst.Close()
		return err
	}
	return dst.Close()
}

// ctl runs clusterctl as the administrator, through a node that runs.
func (r *run) ctl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.t.Context()), time.Minute)
	defer cancel()
	n := r.c.Nodes()[0]
	for _, other := range r.c.Nodes() {
		if _, err := r.c.Pid(other.Name); err == nil {
			n = other
			break
		}
	}
	cmd := exec.CommandContext(ctx, r.c.Bin("clusterctl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+n.Kubeconfig(), "HOME="+filepath.Dir(n.Data))
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// prepare makes what the load works on.
func (r *run) prepare(ctx context.Context) {
	r.eventually(ctx, "every node is Ready", r.nodesReady)
	r.eventually(ctx, "the image is loaded", func(context.Context) error { // a new cluster may elect another leader on a busy machine
		out, err := r.ctl("image", "load", filepath.Join(filepath.Dir(r.c.Bin("clusterctl")), "hello.tar"))
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	api := r.api(0)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	r.made(ctx, "the namespace", func(ctx context.Context) error {
		_, err := api.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
		return err
	})
	var at int64
	for i := range writers {
		r.made(ctx, key(i), func(ctx context.Context) error {
			_, err := api.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: key(i)}, Data: map[string]string{"n": "0"},
			}, metav1.CreateOptions{})
			return err
		})
		r.eventually(ctx, key(i)+" is read", func(ctx context.Context) error {
			cm, err := api.CoreV1().ConfigMaps(namespace).Get(ctx, key(i), metav1.GetOptions{})
			if err == nil {
				_, at, err = counted(cm)
			}
			return err
		})
	}
	for i := range r.apis {
		r.watchers = append(r.watchers, &watcher{r: r, node: i, from: at})
	}
	labels := map[string]string{"app": "web"}
	web := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](replicas),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: ptr.To[int64](1),
					Containers:                    []corev1.Container{{Name: "main", Image: "clusterd.local/hello:1"}},
				},
			},
		},
	}
	r.made(ctx, "the Deployment", func(ctx context.Context) error {
		_, err := api.AppsV1().Deployments(namespace).Create(ctx, web, metav1.CreateOptions{})
		return err
	})
	r.eventually(ctx, "the Deployment's pods run", r.podsRun)
}

// made calls create until the object is there: the answer of one may be lost.
func (r *run) made(ctx context.Context, what string, create func(context.Context) error) {
	r.t.Helper()
	r.eventually(ctx, what+" is made", func(ctx context.Context) error {
		if err := create(ctx); !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	})
}

// befall lets one fault befall one node and waits until the node is back, so
// that a majority of the voters always is.
func (r *run) befall(ctx context.Context) {
	f, node, ok := r.draw(ctx)
	if !ok {
		return
	}
	hold := between(r.rand, f.Holds)
	before := r.acks.count()
	began := time.Now()
	err := f.Inject(ctx, r, node)
	if err == nil {
		select {
		case <-time.After(hold):
		case <-ctx.Done():
		}
	}
	during := r.acks.count() - before
	if f.Heal != nil {
		if healErr := f.Heal(ctx, r, node); healErr != nil {
			r.t.Fatalf("%s, %s: heal: %v (after %v)", node, f.Name, healErr, err)
		}
	}
	if err != nil {
		r.t.Fatalf("%s, %s: inject: %v", node, f.Name, err)
	}
	healed := time.Now()
	r.eventually(ctx, fmt.Sprintf("%s is back after %s (%s)", node, f.Name, hold), func(ctx context.Context) error {
		return r.api(r.index(node)).Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	back := time.Since(healed)
	r.eventually(ctx, "writes go on", func(context.Context) error {
		if r.acks.count() == before+during {
			return fmt.Errorf("none was acknowledged since %s was healed of %s", node, f.Name)
		}
		return nil
	})
	r.t.Logf("%s %s: %s for %s; %d writes meanwhile; back after %s", began.UTC().Format("15:04:05.000"), node, f.Name, hold.Round(time.Millisecond), during, back.Round(time.Millisecond))
}

// draw draws a fault and its victim.
func (r *run) draw(ctx context.Context) (Fault, string, bool) {
	f := faults[r.rand.IntN(len(faults))]
	i := r.rand.IntN(len(r.apis))
	if !strings.Contains(f.Name, *only) {
		return f, "", false
	}
	if f.Role != "" {
		leader := r.leader(ctx)
		if f.Role == "leader" {
			i = leader
		} else if i == leader {
			i = (i + 1) % len(r.apis)
		}
	}
	node := r.c.Nodes()[i].Name
	return f, node, f.Available == nil || f.Available(r, node)
}

// leader is the index of the node that leads.
func (r *run) leader(ctx context.Context) int {
	leader := -1
	r.eventually(ctx, "there is a leader", func(ctx context.Context) error {
		for i := range r.apis {
			if s, err := r.status(ctx, i); err == nil && s.Ready {
				leader = i
				return nil
			}
		}
		return fmt.Errorf("no node says it leads")
	})
	return leader
}

func (r *run) index(node string) int {
	for i, n := range r.c.Nodes() {
		if n.Name == node {
			return i
		}
	}
	r.t.Fatalf("no node %s", node)
	return 0
}

// api is the client of the node with that index.
func (r *run) api(i int) kubernetes.Interface {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.apis[i]
}

// use replaces the client of a node, under load as well.
func (r *run) use(i int, api kubernetes.Interface) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.apis[i] = api
}
