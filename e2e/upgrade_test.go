package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2EUpgrade takes a cluster from the programs of another commit to the
// present ones, node by node, and back. All the while pods answer by their
// addresses and by a Service, and the API takes writes. No container may be
// restarted, no request may fail, no acknowledged write may be lost.
func TestE2EUpgrade(t *testing.T) {
	need(t)
	old := os.Getenv("CLUSTERD_OLD_BIN")
	if old == "" {
		t.Skip("needs the programs of another commit: make upgrade-test")
	}
	current := bin(t)
	// The nodes' programs are replaced in a directory of their own, as a package does
	// it: the new file takes the old one's name.
	dir := t.TempDir()
	for name, from := range map[string]string{"clusterd": old, "clusterctl": current, "hello.tar": current} {
		install(t, filepath.Join(from, name), filepath.Join(dir, name))
	}
	t.Setenv("CLUSTERD_BIN", dir)
	e := start(t)
	versions := map[string]string{old: versionOf(t, e, old), current: versionOf(t, e, current)}
	if versions[old] == versions[current] {
		t.Fatalf("both are %s: there is nothing to upgrade", versions[old])
	}
	t.Logf("from %s to %s and back", versions[old], versions[current])

	ns := e.namespace("upgrade")
	e.createDeployment(ns, deployment("web", 3))
	web := e.service(ns, "web", nil)
	pods := e.podsReady(ns, "app=web", 3)
	urls := []string{"http://" + web.Spec.ClusterIP + "/"}
	for _, p := range pods {
		urls = append(urls, "http://"+net.JoinHostPort(p.Status.PodIP, "8080")+"/")
	}
	for _, url := range urls {
		for _, n := range e.Nodes() {
			e.eventually(n.Name+" reaches "+url, func(context.Context) error { _, err := e.fetch(n.Name, url); return err })
		}
	}
	var was format
	e.eventually("the store says its format", func(context.Context) (err error) {
		was, err = e.format()
		return err
	})
	was.InUse = max(was.InUse, 1) // of programs from before there was a second one
	before := e.runs(ns)
	load := e.load(ns, urls)
	for _, to := range []string{current, old} {
		install(t, filepath.Join(to, "clusterd"), filepath.Join(dir, "clusterd"))
		for _, n := range e.Nodes() {
			e.replace(n, versions[to])
			load.goesOn()
		}
		e.eventually("the stores agree", func(context.Context) error {
			out, errs, code := e.run("clusterctl", "", "store", "status", "-o", "json")
			var status struct{ Warnings []string }
			if code != 0 || json.Unmarshal([]byte(out), &status) != nil || len(status.Warnings) > 0 {
				return fmt.Errorf("%v %s", status.Warnings, errs)
			}
			return nil
		})
		if to == current {
			e.keepsTheWayBack(ns, was)
		}
	}
	load.end()
	if after := e.runs(ns); !maps.Equal(before, after) {
		t.Errorf("containers are not the same:\nbefore %v\nafter  %v", before, after)
	}
}

// format is what the store says of its format.
type format struct {
	InUse, Newest int
	Note          string
}

func (e *env) format() (format, error) {
	out, errs, code := e.run("clusterctl", "", "store", "status", "-o", "json")
	var status struct{ Format format }
	if code != 0 {
		return format{}, fmt.Errorf("clusterctl store status: exit %d: %s", code, errs)
	}
	err := json.Unmarshal([]byte(out), &status)
	return status.Format, err
}

// keepsTheWayBack deletes many objects at once, which all servers could by a
// command that the version before may not be able to read, and checks that the store
// is still in that version's format. Its servers then have to read all of the log.
func (e *env) keepsTheWayBack(ns string, before format) {
	e.t.Helper()
	e.eventually("many objects are deleted at once", func(ctx context.Context) error {
		objects := e.api.CoreV1().ConfigMaps(ns)
		for i := range 20 {
			m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("gone-", i), Labels: map[string]string{"goes": "at-once"}}}
			if _, err := objects.Create(ctx, m, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
		which := metav1.ListOptions{LabelSelector: "goes=at-once"}
		if err := objects.DeleteCollection(ctx, metav1.DeleteOptions{}, which); err != nil {
			return err
		}
		left, err := objects.List(ctx, which)
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("%d of them are left", len(left.Items))
		}
		return err
	})
	e.eventually("the servers have asked each other for their formats", func(context.Context) error {
		now, err := e.format()
		if err != nil {
			return err
		}
		if now.InUse != before.InUse {
			e.t.Fatalf("the store was in format %d, and right after the upgrade it is in another: %+v", before.InUse, now)
		}
		// Where the version before knew the newest one, there is nothing to wait for.
		if known := fmt.Sprintf("all members know format %d", now.Newest); now.InUse < now.Newest && !strings.HasPrefix(now.Note, known) {
			return fmt.Errorf("%+v", now)
		}
		return nil
	})
}

// install puts a copy of a program in another's place, at once.
func install(t *testing.T, from, to string) {
	t.Helper()
	src, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = src.Close() }()
	dst, err := os.OpenFile(to+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(dst, src)
	if err := errors.Join(err, dst.Close(), os.Rename(to+".new", to)); err != nil {
		t.Fatal(err)
	}
}

// versionOf is what members call a clusterd of that directory.
func versionOf(t *testing.T, e *env, bin string) string {
	t.Helper()
	out, err := e.Exec(t.Context(), e.Nodes()[0].Name, filepath.Join(bin, "clusterd"), "version").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimPrefix(strings.TrimSpace(string(out)), "clusterd ")
}

// replace starts a node with the program that is installed now, and waits until
// all others see it as such and it is Ready.
func (e *env) replace(n cluster.Node, version string) {
	e.t.Helper()
	if err := e.Stop(e.t.Context(), n.Name); err != nil {
		e.t.Fatal(err)
	}
	if err := e.Start(e.t.Context(), n.Name); err != nil {
		e.t.Fatal(err)
	}
	e.use(n.Name)
	e.eventually(n.Name+" is a Ready member of version "+version, func(ctx context.Context) error {
		b, err := e.api.Discovery().RESTClient().Get().AbsPath("/clusterd/v1/members").DoRaw(ctx)
		if err != nil {
			return err
		}
		var list struct {
			Leader  string
			Members []struct{ Name, Version, Gossip string }
		}
		if err := json.Unmarshal(b, &list); err != nil {
			return err
		}
		for _, m := range list.Members {
			if m.Gossip != "alive" || m.Name == n.Name && m.Version != version {
				return fmt.Errorf("%+v", list)
			}
		}
		node, err := e.api.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err == nil && (list.Leader == "" || !nodeReady(node)) {
			err = fmt.Errorf("leader %q, conditions %+v", list.Leader, node.Status.Conditions)
		}
		return err
	})
}

// runs are the containers of a namespace's pods, and how often each was
// restarted.
func (e *env) runs(ns string) map[string]string {
	e.t.Helper()
	runs := map[string]string{}
	e.eventually("the pods are listed", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, p := range list.Items {
			for _, s := range p.Status.ContainerStatuses {
				runs[p.Name+"/"+s.Name] = fmt.Sprintf("%s restarted %d times", s.ContainerID, s.RestartCount)
			}
		}
		return nil
	})
	return runs
}

// upgradeLoad is what goes on during an upgrade: pages fetched from every node
// and ConfigMaps written to whichever server answers.
type upgradeLoad struct {
	e    *env
	ns   string
	stop context.CancelFunc
	done sync.WaitGroup

	mu      sync.Mutex
	pages   int
	failed  []string // pages that were not had
	written []string // ConfigMaps whose creation was acknowledged
	gap     time.Duration
}

// stalledWrite is how long the API may take no write: an election and a busy
// machine are within it.
const stalledWrite = 30 * time.Second

func (e *env) load(ns string, urls []string) *upgradeLoad {
	e.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	l := &upgradeLoad{e: e, ns: ns, stop: cancel}
	e.t.Cleanup(func() { cancel(); l.done.Wait() })
	for _, n := range e.Nodes() {
		l.done.Go(func() { l.fetch(ctx, n.Name, urls) })
	}
	var clients []kubernetes.Interface
	for _, n := range e.Nodes() {
		c, _, err := e.Client(n.Name)
		if err != nil {
			e.t.Fatal(err)
		}
		clients = append(clients, c)
	}
	l.done.Go(func() { l.write(ctx, clients) })
	l.goesOn()
	return l
}

func (l *upgradeLoad) fetch(ctx context.Context, node string, urls []string) {
	for i := 0; ctx.Err() == nil; i++ {
		url := urls[i%len(urls)]
		_, err := l.e.fetch(node, url)
		l.mu.Lock()
		l.pages++
		if err != nil {
			l.failed = append(l.failed, fmt.Sprintf("%s from %s at %s: %v", url, node, time.Now().Format(time.TimeOnly), err))
		}
		l.mu.Unlock()
		pause(ctx, 20*time.Millisecond) // a machine that tests have for themselves could drown in connections
	}
}

func (l *upgradeLoad) write(ctx context.Context, clients []kubernetes.Interface) {
	last := time.Now()
	for i := 0; ctx.Err() == nil; i++ {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("w-%d", i), Namespace: l.ns}}
		ask, cancel := context.WithTimeout(ctx, 5*time.Second)
		_, err := clients[i%len(clients)].CoreV1().ConfigMaps(l.ns).Create(ask, cm, metav1.CreateOptions{})
		cancel()
		if err == nil {
			l.mu.Lock()
			l.written = append(l.written, cm.Name)
			l.gap = max(l.gap, time.Since(last))
			l.mu.Unlock()
			last = time.Now()
		}
		pause(ctx, 20*time.Millisecond)
	}
}

// pause sleeps, or ends early.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// goesOn waits until more pages were had and more was written.
func (l *upgradeLoad) goesOn() {
	l.e.t.Helper()
	l.mu.Lock()
	pages, written := l.pages, len(l.written)
	l.mu.Unlock()
	l.e.eventually("pages are served and writes taken", func(context.Context) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.pages < pages+20 || len(l.written) < written+10 {
			return fmt.Errorf("%d pages, %d writes since", l.pages-pages, len(l.written)-written)
		}
		return nil
	})
}

// end stops the load and judges it.
func (l *upgradeLoad) end() {
	l.e.t.Helper()
	l.stop()
	l.done.Wait()
	t := l.e.t
	t.Logf("%d pages, %d failed; %d writes, the longest wait between two %s", l.pages, len(l.failed), len(l.written), l.gap.Round(time.Millisecond))
	for _, f := range l.failed[:min(10, len(l.failed))] {
		t.Errorf("a page was not had: %s", f)
	}
	if l.gap > stalledWrite {
		t.Errorf("no write was taken for %s", l.gap)
	}
	list, err := l.e.api.CoreV1().ConfigMaps(l.ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var there []string
	for _, cm := range list.Items {
		there = append(there, cm.Name)
	}
	for _, name := range l.written {
		if !slices.Contains(there, name) {
			t.Errorf("%s was acknowledged and is lost", name)
		}
	}
}
