package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestFaultAllAtOnce ends clusterd on every node at the same time, by force
// and in order.
func TestFaultAllAtOnce(t *testing.T) {
	for _, f := range []Fault{
		{Name: "kill -9", Inject: kill, Heal: start},
		{Name: "stop in order", Inject: stop, Heal: start},
		{Name: "power off", Inject: powerOff, Heal: start},
		{Name: "each cut off", Inject: cut, Heal: mend, Holds: [2]time.Duration{*hold, *hold}},
	} {
		t.Run(f.Name, func(t *testing.T) {
			r := newRun(t, nil)
			r.prepare(t.Context())
			finish := r.load(t.Context(), false)
			defer finish()
			all := func(do func(context.Context, *run, string) error) {
				t.Helper()
				done := make(chan error)
				for _, n := range r.c.Nodes() {
					go func() { done <- do(t.Context(), r, n.Name) }()
				}
				for range r.c.Nodes() {
					if err := <-done; err != nil {
						t.Error(err)
					}
				}
			}
			all(f.Inject)
			select {
			case <-time.After(f.Holds[0]):
			case <-t.Context().Done():
			}
			all(f.Heal)
			before := r.acks.count()
			took := r.eventually(t.Context(), "writes go on", func(context.Context) error {
				if r.acks.count() == before {
					return errors.New("none was acknowledged")
				}
				return nil
			})
			t.Logf("after %s on all nodes the first write was acknowledged %s after the start", f.Name, took)
			finish()
		})
	}
}

// TestFaultAddressChanged starts a node on another address than it joined
// with: the others find it, its certificate and kubeconfig follow, and it is
// the same member.
func TestFaultAddressChanged(t *testing.T) {
	r := newRun(t, nil)
	r.prepare(t.Context())
	finish := r.load(t.Context(), false)
	defer finish()
	for _, role := range []string{"follower", "leader"} {
		i := r.leader(t.Context())
		if role == "follower" {
			i = (i + 1) % len(r.apis)
		}
		node := r.c.Nodes()[i].Name
		addr := netip.AddrFrom4([4]byte{10, 83, 0, byte(100 + i)})
		if err := r.c.Stop(t.Context(), node); err != nil {
			t.Fatal(err)
		}
		if err := r.c.Move(node, addr); err != nil {
			t.Fatal(err)
		}
		if err := r.c.Start(t.Context(), node); err != nil {
			t.Fatal(err)
		}
		// All follow but a client that has the old address.
		took := r.eventually(t.Context(), node+" answers at "+addr.String(), func(ctx context.Context) error {
			api, config, err := r.c.Client(node)
			if err != nil {
				return err
			}
			if !strings.Contains(config.Host, addr.String()) {
				return fmt.Errorf("its kubeconfig leads to %s", config.Host)
			}
			return api.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		})
		api, _, err := r.c.Client(node)
		if err != nil {
			t.Fatal(err)
		}
		r.use(i, api)
		t.Logf("the %s %s is back at %s after %s", role, node, addr, took)
		r.eventually(t.Context(), "the Node tells the address", func(ctx context.Context) error {
			n, err := r.api((i+1)%len(r.apis)).CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, a := range n.Status.Addresses {
				if a.Address == addr.String() {
					return nil
				}
			}
			return fmt.Errorf("addresses %v", n.Status.Addresses)
		})
		r.eventually(t.Context(), "the members tell the address", func(context.Context) error {
			out, err := r.ctl("members")
			if err == nil && !strings.Contains(out, addr.String()) {
				err = errors.New(out)
			}
			return err
		})
		// Work goes on there, and another node reaches it.
		r.eventually(t.Context(), "every node is Ready", r.nodesReady)
		probe := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "on-" + node, Namespace: namespace},
			Spec: corev1.PodSpec{
				NodeName:   node,
				Containers: []corev1.Container{{Name: "main", Image: "clusterd.local/hello:1"}},
			},
		}
		pods := r.api((i + 1) % len(r.apis)).CoreV1().Pods(namespace)
		r.made(t.Context(), "a pod there", func(ctx context.Context) error {
			_, err := pods.Create(ctx, probe, metav1.CreateOptions{})
			return err
		})
		r.eventually(t.Context(), "a new container's log can be read", func(context.Context) error {
			out, err := r.ctl("-n", namespace, "logs", probe.Name)
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
		// The checks at the end count the Deployment's containers only.
		r.eventually(t.Context(), "that pod is deleted", func(ctx context.Context) error {
			if err := pods.Delete(ctx, probe.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); !apierrors.IsNotFound(err) {
				return err
			}
			return nil
		})
	}
	finish()
}

// TestFaultAllMoved starts all nodes on other addresses than they ever had. One
// address is given to the others; the rest they learn by gossip.
func TestFaultAllMoved(t *testing.T) {
	r := newRun(t, nil)
	r.prepare(t.Context())
	finish := r.load(t.Context(), false)
	defer finish()
	nodes := r.c.Nodes()
	for _, n := range nodes {
		if err := r.c.Kill(n.Name); err != nil {
			t.Fatal(err)
		}
	}
	var first []string
	for i, n := range nodes {
		addr := netip.AddrFrom4([4]byte{10, 83, 0, byte(150 + i)})
		if err := r.c.Move(n.Name, addr); err != nil {
			t.Fatal(err)
		}
		if err := r.c.StartWith(t.Context(), n.Name, first...); err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = []string{"--peer", addr.String()}
		}
	}
	took := r.eventually(t.Context(), "every node answers at its address", func(ctx context.Context) error {
		for i, n := range r.c.Nodes() {
			api, config, err := r.c.Client(n.Name)
			if err != nil {
				return err
			}
			if !strings.Contains(config.Host, n.Addr.String()) {
				return fmt.Errorf("the kubeconfig of %s leads to %s", n.Name, config.Host)
			}
			if err := api.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
				return err
			}
			r.use(i, api)
		}
		return nil
	})
	t.Logf("all are back at other addresses after %s", took)
	r.eventually(t.Context(), "every node is Ready", r.nodesReady)
	finish()
}

// TestFaultMemberRemoved removes a node that runs, and one that is down: they
// lose their rights, and the others go on.
func TestFaultMemberRemoved(t *testing.T) {
	t.Run("running", func(t *testing.T) {
		r := newRun(t, nil)
		r.prepare(t.Context())
		_, key := r.nodeConfig("n3")
		if out, err := r.ctl("members", "rm", "--yes", "n3"); err != nil {
			t.Fatalf("members rm: %v: %s", err, out)
		}
		r.removed("n3", key)
		r.eventually(t.Context(), "clusterd ends on n3", func(context.Context) error {
			if _, err := r.c.Pid("n3"); !errors.Is(err, cluster.ErrNotRunning) {
				return fmt.Errorf("it runs (%v)", err)
			}
			return nil
		})
		if err := r.c.Start(t.Context(), "n3"); err != nil {
			t.Fatal(err)
		}
		r.eventually(t.Context(), "it says why it does not start", func(context.Context) error {
			_, err := r.c.Pid("n3")
			if log := r.log("n3"); err == nil || strings.Count(log, "was removed from the cluster") < 2 || !strings.Contains(log, "clusterd reset --data") {
				return fmt.Errorf("it runs (%v), and says\n%s", err, log)
			}
			return nil
		})
	})
	t.Run("while it is down", func(t *testing.T) {
		r := newRun(t, nil)
		r.prepare(t.Context())
		_, key := r.nodeConfig("n3")
		if err := r.c.Kill("n3"); err != nil {
			t.Fatal(err)
		}
		if out, err := r.ctl("members", "rm", "--yes", "n3"); err != nil {
			t.Fatalf("members rm: %v: %s", err, out)
		}
		r.removed("n3", key)
		if err := r.c.Start(t.Context(), "n3"); err != nil {
			t.Fatal(err)
		}
		r.eventually(t.Context(), "it ends and says why", func(context.Context) error {
			_, err := r.c.Pid("n3")
			if log := r.log("n3"); !errors.Is(err, cluster.ErrNotRunning) || !strings.Contains(log, "this machine was removed from the cluster") || !strings.Contains(log, "clusterd reset --data") {
				return fmt.Errorf("it runs (%v), and says\n%s", err, log)
			}
			return nil
		})
		r.removed("n3", key)
	})
}

// removed waits until the others know nothing of a node, and its certificate
// opens nothing.
func (r *run) removed(node string, key *rest.Config) {
	r.t.Helper()
	r.eventually(r.t.Context(), node+" is no member, no voter and no Node", func(ctx context.Context) error {
		for i := range 2 {
			b, err := r.api(i).Discovery().RESTClient().Get().AbsPath("/clusterd/v1/members").Do(ctx).Raw()
			if err != nil {
				return err
			}
			if strings.Contains(string(b), `"`+node+`"`) {
				return fmt.Errorf("n%d lists it: %s", i+1, b)
			}
			s, err := r.status(ctx, i)
			if err != nil {
				return err
			}
			if len(s.Members) != 2 {
				return fmt.Errorf("n%d counts %d members in the store", i+1, len(s.Members))
			}
		}
		if _, err := r.api(0).CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the Node: %v", err)
		}
		client, err := kubernetes.NewForConfig(key)
		if err != nil {
			return err
		}
		if _, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("its certificate opens n1's API: %v", err)
		}
		return nil
	})
}

// nodeConfig asks n1's API with a node's own certificate.
func (r *run) nodeConfig(node string) (id string, config *rest.Config) {
	r.t.Helper()
	for _, n := range r.c.Nodes() {
		if n.Name != node {
			continue
		}
		pki := filepath.Join(n.Data, "pki")
		return n.Name, &rest.Config{
			Host: "https://" + r.c.Nodes()[0].Addr.String() + ":6443",
			TLSClientConfig: rest.TLSClientConfig{
				CAFile: filepath.Join(pki, "ca.crt"), CertFile: filepath.Join(pki, "node.crt"), KeyFile: filepath.Join(pki, "node.key"),
			},
		}
	}
	r.t.Fatalf("no node %s", node)
	return "", nil
}

func (r *run) log(node string) string {
	f, err := r.c.Logs(node)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// TestFaultFullDisk fills the file system that one node's data directory is on:
// the others go on, the node says what is wrong, and recovers by itself once
// there is space.
func TestFaultFullDisk(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "disk")
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=96m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the cluster was taken down
		if left, err := os.ReadDir(disk); err != nil || len(left) > 0 {
			t.Errorf("left on the disk: %v (%v)", left, err)
		}
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	r := newRun(t, func(dir string) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(disk, filepath.Join(dir, "n3")); err != nil {
			t.Fatal(err)
		}
	})
	r.prepare(t.Context())
	finish := r.load(t.Context(), false)
	defer finish()
	fill := filepath.Join(disk, "fill")
	f, err := os.Create(fill)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(f, zeros{}); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	r.eventually(t.Context(), "n3 says that its disk is full", func(context.Context) error {
		if !strings.Contains(r.log("n3"), "no space left on device") {
			return errors.New("it does not")
		}
		return nil
	})
	before := r.acks.count()
	r.eventually(t.Context(), "the others go on", func(context.Context) error {
		if n := r.acks.count() - before; n < 100 {
			return fmt.Errorf("%d writes were acknowledged", n)
		}
		return nil
	})
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	r.eventually(t.Context(), "n3 answers", func(ctx context.Context) error { // it may be about to end
		if _, err := r.c.Pid("n3"); err != nil {
			t.Logf("clusterd ended on n3: starting it, as systemd would")
			if err := r.c.Start(t.Context(), "n3"); err != nil {
				return err
			}
		}
		return r.api(r.index("n3")).Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	finish()
}

// TestFaultDamagedStore flips a byte in the log of a follower that was killed:
// the node names file and offset, the others go on, and it is filled again by
// itself. (member/join gives it its vote again when it has been steady.)
func TestFaultDamagedStore(t *testing.T) {
	r := newRun(t, nil)
	r.prepare(t.Context())
	finish := r.load(t.Context(), false)
	defer finish()
	leader := r.leader(t.Context())
	other := (leader + 1) % len(r.apis)
	node := r.c.Nodes()[other]
	r.eventually(t.Context(), node.Name+" knows of the other voters", func(ctx context.Context) error {
		b, err := os.ReadFile(filepath.Join(node.Data, "store", "members.json"))
		if err == nil && strings.Count(string(b), `"voter": true`) < 3 {
			err = fmt.Errorf("only %s", b)
		}
		return err
	})
	if err := r.c.Kill(node.Name); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(node.Data, "store", "log", "*.seg"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no log in %s: %v", node.Data, err)
	}
	damaged := files[len(files)-1]
	if err := flip(damaged, 200); err != nil { // in its first entry
		t.Fatal(err)
	}
	if err := r.c.Start(t.Context(), node.Name); err != nil {
		t.Fatal(err)
	}
	took := r.eventually(t.Context(), node.Name+" is a member again", func(ctx context.Context) error {
		if text := damaged + " is damaged at offset"; !strings.Contains(r.log(node.Name), text) {
			return fmt.Errorf("it does not say %q", text)
		}
		st, err := r.status(ctx, other)
		if err == nil && (st.LostState || len(st.Members) != len(r.apis) || st.Leader == "") {
			err = fmt.Errorf("it is not: %+v", st)
		}
		return err
	})
	t.Logf("%s was filled again %s after its start", node.Name, took)
	finish()
}

func flip(file string, at int64) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	b := make([]byte, 1)
	_, err = f.ReadAt(b, at)
	b[0] ^= 0x10
	if err == nil {
		_, err = f.WriteAt(b, at)
	}
	return errors.Join(err, f.Close())
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
