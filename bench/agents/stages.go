package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/admission/noderestriction"
	"github.com/clusterd/clusterd/bench/internal/proc"
	"github.com/clusterd/clusterd/e2e/cluster"
)

type bench struct {
	options
	cluster  *cluster.Netns
	settings *settings
	requests *requests
	log      *slog.Logger

	fleet    *fleet
	observer *observer
	witness  string // the server that the observer asks; it is not killed
	lead     string
	before   map[string]proc.Usage // of the servers without agents
}

// figure is one line of output; keys follow HOUSE.md, section 7.
type figure struct {
	Bench   string  `json:"bench"`
	Case    string  `json:"case"`
	Nodes   int     `json:"nodes"`
	Pods    int     `json:"pods"`
	Server  string  `json:"server,omitempty"`
	Role    string  `json:"role,omitempty"`
	Seconds float64 `json:"seconds"`
	PerS    float64 `json:"per_s,omitempty"`
	// Of a server's processes, or of the hollow agents' one.
	RSS     float64 `json:"rss_mib,omitempty"`
	CPU     float64 `json:"cpu_pct,omitempty"` // of one processor
	CPUSum  float64 `json:"cpu_s,omitempty"`
	Wakeups float64 `json:"wakeups_per_s,omitempty"`
	Written float64 `json:"written_mib_per_hour,omitempty"`
	// PerNode is what the server has more than without agents, for each of all.
	PerNode float64 `json:"rss_kib_per_node,omitempty"`
	Watches int     `json:"watches,omitempty"` // of all agents; of a server: at it
	Agents  int     `json:"agents,omitempty"`  // with watches at the server
	// After a server was killed: its agents have all their watches at others.
	BackP50  float64 `json:"back_p50_s,omitempty"`
	BackMax  float64 `json:"back_max_s,omitempty"`
	Requests int     `json:"requests,omitempty"`
	Peak     int     `json:"requests_busiest_s,omitempty"`
	// NotReady counts nodes that were Ready and then not, while their agent lived.
	NotReady int      `json:"false_not_ready"`
	Which    []string `json:"not_ready,omitempty"`
	Machine  string   `json:"machine,omitempty"`
}

func (b *bench) print(f figure) error {
	f.Bench, f.Nodes = "scale", b.nodes
	_, running, lost := b.observer.now()
	f.Pods, f.NotReady = running, len(lost)
	f.Which = lost[:min(len(lost), 5)]
	return json.NewEncoder(os.Stdout).Encode(f)
}

// stages are the cases in turn. The agents live as long as their context.
func (b *bench) stages(ctx, agents context.Context) error {
	client, err := apiOf(b.cluster, b.cluster.Nodes()[0].Name)
	if err != nil {
		return err
	}
	if b.lead, err = leader(ctx, client); err != nil {
		return err
	}
	for _, n := range b.cluster.Nodes() {
		if n.Name != b.lead {
			b.witness = n.Name
			break
		}
	}
	if client, err = apiOf(b.cluster, b.witness); err != nil {
		return err
	}
	if b.observer, err = observe(ctx, client); err != nil {
		return err
	}
	if err := sleep(ctx, b.settle); err != nil {
		return err
	}
	if b.before, err = b.usage(); err != nil {
		return err
	}
	if err := b.rest(ctx, "rest without agents", b.span/4); err != nil {
		return err
	}
	if err := b.join(ctx, agents); err != nil {
		return err
	}
	if err := sleep(ctx, b.settle); err != nil {
		return err
	}
	if err := b.rest(ctx, "rest", b.span); err != nil {
		return err
	}
	if b.podsEach > 0 {
		if err := b.deploy(ctx); err != nil {
			return err
		}
		if err := sleep(ctx, b.settle); err != nil {
			return err
		}
		if err := b.rest(ctx, "rest with pods", b.span); err != nil {
			return err
		}
	}
	if !b.kill {
		return nil
	}
	for _, n := range b.cluster.Nodes() {
		if n.Name != b.lead && n.Name != b.witness {
			if err := b.lose(ctx, n.Name, "follower"); err != nil {
				return err
			}
		}
	}
	return b.lose(ctx, b.lead, "leader")
}

func (b *bench) usage() (map[string]proc.Usage, error) {
	all := map[string]proc.Usage{}
	for _, n := range b.cluster.Nodes() {
		var err error
		if all[n.Name], err = proc.Of(b.cluster, n.Name); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// join starts the agents and waits until all are Ready.
func (b *bench) join(ctx, agents context.Context) (err error) {
	done := b.profile("join")
	defer done()
	before, err := b.usage()
	if err != nil {
		return err
	}
	began := time.Now()
	if b.fleet, err = startFleet(agents, b.settings, 0, b.nodes, b.atOnce); err != nil {
		return err
	}
	joined := time.Since(began)
	if err := b.observer.await(ctx, b.nodes, 0, 15*time.Minute); err != nil {
		return err
	}
	took := time.Since(began)
	after, err := b.usage()
	if err != nil {
		return err
	}
	if err := b.print(figure{Case: "joined", Seconds: round(joined.Seconds()), PerS: round(float64(b.nodes) / joined.Seconds())}); err != nil {
		return err
	}
	return b.print(figure{Case: "ready", Seconds: round(took.Seconds()), PerS: round(float64(b.nodes) / took.Seconds()), CPUSum: round(spent(before, after)), Machine: machine()})
}

// spent is the processor time of all servers between two readings, in seconds.
func spent(before, after map[string]proc.Usage) (sum float64) {
	for name, u := range after {
		sum += (u.CPU - before[name].CPU).Seconds()
	}
	return sum
}

// rest leaves all alone and prints what the servers take.
func (b *bench) rest(ctx context.Context, name string, span time.Duration) error {
	done := b.profile(name)
	before, err := b.usage()
	if err != nil {
		return err
	}
	mine, err := proc.One(os.Getpid())
	if err != nil {
		return err
	}
	began := time.Now()
	if err := sleep(ctx, span); err != nil {
		return err
	}
	after, err := b.usage()
	if err != nil {
		return err
	}
	seconds := time.Since(began).Seconds()
	of := func(was, now proc.Usage) figure {
		return figure{
			Case: name, Seconds: round(seconds), RSS: round(now.RSS / (1 << 20)), CPU: round(100 * (now.CPU - was.CPU).Seconds() / seconds),
			Wakeups: round((now.Wakeups - was.Wakeups) / seconds), Written: round((now.Written - was.Written) / (1 << 20) / seconds * 3600),
		}
	}
	for _, n := range b.cluster.Nodes() {
		f := of(before[n.Name], after[n.Name])
		f.Server, f.Role = n.Name, "follower"
		if n.Name == b.lead {
			f.Role = "leader"
		}
		if b.fleet != nil {
			f.PerNode = round((after[n.Name].RSS - b.before[n.Name].RSS) / (1 << 10) / float64(b.nodes))
			for _, h := range b.fleet.agents {
				if _, there := h.contact.count(n.Name); there > 0 {
					f.Agents++
					f.Watches += there
				}
			}
		}
		if err := b.print(f); err != nil {
			return err
		}
	}
	now, err := proc.One(os.Getpid())
	if err != nil {
		return err
	}
	f := of(mine, now)
	f.Server, f.Role = "all hollow agents", "agents"
	f.Requests, f.Peak = b.requests.since(began)
	f.PerS = round(float64(f.Requests) / seconds)
	done()
	return b.print(f)
}

// perDeployment is how many pods one Deployment with its Service has.
const perDeployment = 1000

// deploy runs pods on all hollow nodes, by Deployments with a Service each.
func (b *bench) deploy(ctx context.Context) error {
	done := b.profile("pods")
	defer done()
	before, err := b.usage()
	if err != nil {
		return err
	}
	mine, err := proc.One(os.Getpid())
	if err != nil {
		return err
	}
	began := time.Now()
	pods := b.nodes * b.podsEach
	for i, left := 0, pods; left > 0; i++ {
		n := min(left, perDeployment)
		left -= n
		if err := b.deployment(ctx, fmt.Sprintf("hollow-%d", i), n); err != nil {
			return err
		}
	}
	if err := b.observer.await(ctx, b.nodes, pods, 30*time.Minute); err != nil {
		return err
	}
	took := time.Since(began)
	after, err := b.usage()
	if err != nil {
		return err
	}
	now, err := proc.One(os.Getpid())
	if err != nil {
		return err
	}
	sum, peak := b.requests.since(began)
	if err := b.print(figure{Case: "pods running", Seconds: round(took.Seconds()), PerS: round(float64(pods) / took.Seconds()), CPUSum: round(spent(before, after)), Requests: sum, Peak: peak, Machine: machine()}); err != nil {
		return err
	}
	return b.print(figure{Case: "pods running", Role: "agents", Server: "all hollow agents", Seconds: round(took.Seconds()), CPUSum: round((now.CPU - mine.CPU).Seconds())})
}

func (b *bench) deployment(ctx context.Context, name string, replicas int) error {
	labels := map[string]string{"app": name}
	_, err := b.observer.client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = b.observer.client.AppsV1().Deployments(metav1.NamespaceDefault).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To(int32(replicas)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
				NodeSelector: map[string]string{noderestriction.AgentLabel: ""}, // servers' own nodes are real
				Containers: []corev1.Container{{Name: "app", Image: "hollow", Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("16Mi")},
				}}},
			}},
		},
	}, metav1.CreateOptions{})
	return err
}

// watchFor is how long requests are counted after a server was killed.
const watchFor = 30 * time.Second

// lose kills a server, waits until its agents are at others, and starts it again.
func (b *bench) lose(ctx context.Context, server, role string) error {
	done := b.profile("kill " + role)
	defer done()
	type want struct {
		h    *hollow
		open int
	}
	var affected []want
	for _, h := range b.fleet.agents {
		if open, there := h.contact.count(server); there > 0 {
			affected = append(affected, want{h, open})
		}
	}
	agents := len(affected)
	at := time.Now()
	if err := b.cluster.Kill(server); err != nil {
		return err
	}
	var back []time.Duration
	for len(affected) > 0 && time.Since(at) < 5*time.Minute {
		affected = slices.DeleteFunc(affected, func(w want) bool {
			open, there := w.h.contact.count(server)
			if there > 0 || open < w.open {
				return false
			}
			back = append(back, time.Since(at))
			return true
		})
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	if len(affected) > 0 {
		return fmt.Errorf("%d of %d agents of the killed server %s do not have all of their watches after %s", len(affected), agents, server, time.Since(at))
	}
	if err := sleep(ctx, watchFor-time.Since(at)); err != nil {
		return err
	}
	f := figure{Case: "kill", Server: server, Role: role, Agents: agents, Seconds: round(time.Since(at).Seconds())}
	if len(back) > 0 {
		f.BackP50, f.BackMax = round(back[len(back)/2].Seconds()), round(back[len(back)-1].Seconds())
	}
	f.Requests, f.Peak = b.requests.since(at)
	// A node that is taken for dead is so after its Lease at the latest.
	if err := sleep(ctx, 50*time.Second-time.Since(at)); err != nil {
		return err
	}
	if err := b.print(f); err != nil {
		return err
	}
	if err := b.cluster.Start(ctx, server); err != nil {
		return err
	}
	return b.serves(ctx, server)
}

// serves waits until a server that was started again is ready.
func (b *bench) serves(ctx context.Context, server string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		client, err := apiOf(b.cluster, server)
		if err == nil {
			err = client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		}
		if err == nil {
			return nil
		}
		if sleep(ctx, 100*time.Millisecond) != nil {
			return fmt.Errorf("wait for %s to be ready again: %w", server, err)
		}
	}
}

// profilePort is where servers that were built with -tags profile answer.
const profilePort = 6060

// profileFor is how long processor time is profiled from the start of a stage.
const profileFor = 20 * time.Second

// profile begins profiles of a stage; the function returned waits for them, and
// takes those of memory.
func (b *bench) profile(stage string) (done func()) {
	if b.profiles == "" {
		return func() {}
	}
	file := func(parts ...string) string {
		name := stage
		for _, p := range parts {
			name += "." + p
		}
		return filepath.Join(b.profiles, name)
	}
	get := func(server, addr, what, query string) {
		if err := fetch(fmt.Sprintf("http://%s:%d/debug/pprof/%s?%s", addr, profilePort, what, query), file(server, what)); err != nil {
			b.log.Warn("no profile", "server", server, "err", err)
		}
	}
	var wg sync.WaitGroup
	for _, n := range b.cluster.Nodes() {
		wg.Go(func() { get(n.Name, n.Addr.String(), "profile", fmt.Sprintf("seconds=%d", int(profileFor.Seconds()))) })
	}
	if f, err := os.Create(file("agents", "profile")); err == nil && pprof.StartCPUProfile(f) == nil {
		wg.Go(func() { time.Sleep(profileFor); pprof.StopCPUProfile(); _ = f.Close() })
	}
	return func() {
		wg.Wait()
		for _, n := range b.cluster.Nodes() {
			get(n.Name, n.Addr.String(), "heap", "gc=1")
			get(n.Name, n.Addr.String(), "goroutine", "")
		}
		if f, err := os.Create(file("agents", "heap")); err == nil {
			_ = pprof.WriteHeapProfile(f)
			_ = f.Close()
		}
	}
}

func fetch(url, file string) error {
	res, err := http.Get(url)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, res.Body)
	return errOr(err, f.Close())
}
