package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2EClocks sets the clocks of single machines wrong, by days and to 1970: the machine says
// that its clock is wrong, by name and time, ends nothing before its time, and is as before
// when the clock is right.
func TestE2EClocks(t *testing.T) {
	need(t)
	e := startBare(t, 3, func(c *cluster.Config) { c.Agents, c.Clocks = 1, true })
	e.ready(4)
	ns := e.namespace("clocks")
	pods := podOnEach(e, ns)
	kept := finishedJob(e, ns, "kept")
	in1970 := -time.Duration(time.Now().Unix()) * time.Second

	for name, ahead := range map[string]time.Duration{"two days ahead": 48 * time.Hour, "two days behind": -48 * time.Hour, "in 1970": in1970} {
		t.Run("leader "+name, func(t *testing.T) {
			leader := e.leader()
			asked := e.other(leader, "a1")
			e.use(asked)
			set(e, leader, ahead)
			for range 20 { // its loops look at it
				touch(e, ns, kept)
			}
			clockWrong(e, leader, ahead)
			e.eventually("another one leads", func(context.Context) error {
				if now := e.leader(); now == leader {
					return errors.New(now + " leads")
				}
				return nil
			})
			touch(e, ns, kept)
			finishedJob(e, ns, "after-"+strings.ReplaceAll(name, " ", "-")) // the loops have come behind that
			untouched(e, ns, pods, kept)
			set(e, leader, 0)
			clockRight(e, leader)
			untouched(e, ns, pods, kept)
		})
	}
	t.Run("server that starts", func(t *testing.T) {
		for _, ahead := range []time.Duration{in1970, 48 * time.Hour} {
			leader := e.leader()
			server := e.other(leader, "a1")
			e.use(leader)
			if err := e.Stop(t.Context(), server); err != nil {
				t.Fatal(err)
			}
			set(e, server, ahead)
			if err := e.Start(t.Context(), server); err != nil {
				t.Fatal(err)
			}
			clockWrong(e, server, ahead)
			e.eventually(server+" follows all the same", func(ctx context.Context) error {
				client, _, err := e.Client(server)
				if err != nil {
					return err
				}
				_, err = client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
				return err
			})
			untouched(e, ns, pods, kept)
			set(e, server, 0)
			clockRight(e, server)
		}
		untouched(e, ns, pods, kept)
	})
	t.Run("agent", func(t *testing.T) {
		for _, ahead := range []time.Duration{48 * time.Hour, in1970} {
			for _, again := range []bool{false, true} {
				if again {
					if err := e.Stop(t.Context(), "a1"); err != nil {
						t.Fatal(err)
					}
				}
				set(e, "a1", ahead)
				if again {
					if err := e.Start(t.Context(), "a1"); err != nil {
						t.Fatal(err)
					}
				}
				logged(e, "a1", "this machine's clock is wrong: it says "+time.Now().Add(ahead).UTC().Format("2006-01-02"), "agree on")
				var renewed *metav1.MicroTime
				e.eventually("a1 renews its lease", func(ctx context.Context) error {
					lease, err := e.api.CoordinationV1().Leases("kube-node-lease").Get(ctx, "a1", metav1.GetOptions{})
					if err != nil {
						return err
					}
					if renewed == nil {
						renewed = lease.Spec.RenewTime
					}
					if renewed.Equal(lease.Spec.RenewTime) {
						return fmt.Errorf("not since %s", renewed)
					}
					return nil
				})
				untouched(e, ns, pods, kept)
				set(e, "a1", 0)
				logged(e, "a1", "this machine's clock is right again")
				untouched(e, ns, pods, kept)
			}
		}
	})
	t.Run("init", func(t *testing.T) {
		out := runAt(t, e.Bin("clusterd"), in1970, "init", "--data", filepath.Join(t.TempDir(), "d"), "--advertise", "127.0.0.1")
		mustContain(t, "init in 1970", out, "this machine's clock is wrong: it says 1970-01-01", "before this clusterd was built", "timedatectl")
	})
	t.Run("join", func(t *testing.T) {
		leader := e.leader()
		e.use(leader)
		var token string
		for word := range strings.FieldsSeq(e.ctl("token", "create", "--role", "agent", "--kubeconfig", nodeOf(e, leader).Kubeconfig())) {
			if strings.HasPrefix(word, "cd1.") {
				token = word
			}
		}
		out := runAt(t, e.Bin("clusterd"), in1970, "join", addrOf(e, leader).String(), "--token", token, "--data", filepath.Join(t.TempDir(), "d"), "--advertise", "127.0.0.1", "--name", "late")
		mustContain(t, "join in 1970", out, "this machine's clock", "1970-01-01")
	})
}

// TestE2EClockAlone is a cluster of one server without a clock that counts while it is off.
func TestE2EClockAlone(t *testing.T) {
	need(t)
	e := startBare(t, 1, func(c *cluster.Config) { c.Clocks = true })
	e.ready(1)
	ns := e.namespace("alone")
	pods := podOnEach(e, ns)
	kept := finishedJob(e, ns, "kept")
	if err := e.Stop(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	in1970 := -time.Duration(time.Now().Unix()) * time.Second
	set(e, "n1", in1970)
	if err := e.Start(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	clockWrong(e, "n1", in1970)
	untouched(e, ns, pods, kept)
	set(e, "n1", 0)
	clockRight(e, "n1")
	untouched(e, ns, pods, kept)
	e.createDeployment(ns, deployment("after", 1))
	e.podsReady(ns, "app=after", 1)
}

// finishedJob is a Job that has finished and is to be deleted in an hour.
func finishedJob(e *env, ns, name string) *batchv1.Job {
	p := pod("done", "echo", "done")
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: batchv1.JobSpec{
		TTLSecondsAfterFinished: ptr.To[int32](3600), Template: corev1.PodTemplateSpec{Spec: p.Spec},
	}}
	if _, err := e.api.BatchV1().Jobs(ns).Create(e.t.Context(), job, metav1.CreateOptions{}); err != nil {
		e.t.Fatal(err)
	}
	e.eventually("the Job finishes", func(ctx context.Context) (err error) {
		if job, err = e.api.BatchV1().Jobs(ns).Get(ctx, name, metav1.GetOptions{}); err == nil && job.Status.Succeeded != 1 {
			err = fmt.Errorf("%+v", job.Status)
		}
		return err
	})
	return job
}

// touch changes a Job, so that the leader looks at it again.
func touch(e *env, ns string, job *batchv1.Job) {
	e.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{"touched":"%d"}}}`, time.Now().UnixNano())
	e.eventually("the Job is changed", func(ctx context.Context) error { // also while another is elected
		_, err := e.api.BatchV1().Jobs(ns).Patch(ctx, job.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	})
}

// set sets the clock of one machine.
func set(e *env, node string, ahead time.Duration) {
	e.t.Helper()
	if err := e.SetClock(node, ahead); err != nil {
		e.t.Fatal(err)
	}
}

// clockWrong waits until a server says that its clock is, in its readiness and its log.
func clockWrong(e *env, server string, ahead time.Duration) {
	e.t.Helper()
	took := e.eventually(server+" says that its clock is wrong", func(ctx context.Context) error {
		text := readyz(ctx, e, server)
		if !strings.Contains(text, "[-]clock failed") {
			return errors.New(text)
		}
		return nil
	})
	logged(e, server, "this machine's clock is wrong: it says "+time.Now().Add(ahead).UTC().Format("2006-01-02"), "timedatectl")
	e.t.Logf("%s said so after %s", server, took)
}

// clockRight waits until a server is ready.
func clockRight(e *env, server string) {
	e.t.Helper()
	took := e.eventually(server+" is ready", func(ctx context.Context) error {
		if text := readyz(ctx, e, server); !strings.Contains(text, "readyz check passed") {
			return errors.New(text)
		}
		return nil
	})
	logged(e, server, "this machine's clock is right again")
	if cert := certOf(e, server); cert.NotBefore.After(time.Now()) || cert.NotAfter.Before(time.Now()) {
		e.t.Errorf("%s shows a certificate from %s to %s", server, cert.NotBefore, cert.NotAfter)
	}
	e.t.Logf("%s was right again after %s", server, took)
}

func readyz(ctx context.Context, e *env, server string) string {
	client, _, err := e.Client(server)
	if err != nil {
		return err.Error()
	}
	b, err := client.(*kubernetes.Clientset).RESTClient().Get().AbsPath("/readyz").Param("verbose", "").Do(ctx).Raw()
	return fmt.Sprintf("%s %v", b, err)
}

// logged waits until the last line of a node's log about its clock has all the words.
func logged(e *env, node string, words ...string) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%q in the log of %s", words, node), func(context.Context) error {
		r, err := e.Logs(node)
		if err != nil {
			return err
		}
		defer func() { _ = r.Close() }()
		b, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		last := ""
		for line := range strings.Lines(string(b)) {
			if strings.Contains(line, "this machine's clock is") {
				last = line
			}
		}
		for _, word := range words {
			if !strings.Contains(last, word) {
				return fmt.Errorf("the last line is %q", last)
			}
		}
		return nil
	})
}

// untouched: the containers are those that were, every node counts as Ready, and what is to be
// kept for an hour is there.
func untouched(e *env, ns string, ids map[string]string, kept *batchv1.Job) {
	e.t.Helper()
	for name, id := range ids {
		p := e.podReady(ns, name)
		if s := p.Status.ContainerStatuses[0]; s.ContainerID != id || s.RestartCount != 0 || p.DeletionTimestamp != nil {
			e.t.Errorf("the container of %s is another one: %+v, before %s", name, s, id)
		}
	}
	e.eventually("every node is Ready", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range list.Items {
			if !nodeReady(&n) || len(n.Spec.Taints) > 0 {
				return fmt.Errorf("%s: %v, %+v", n.Name, n.Spec.Taints, n.Status.Conditions)
			}
		}
		return nil
	})
	job, err := e.api.BatchV1().Jobs(ns).Get(e.t.Context(), kept.Name, metav1.GetOptions{})
	if err != nil || job.UID != kept.UID || job.DeletionTimestamp != nil {
		e.t.Errorf("a Job that is to be kept for an hour: %+v, %v", job, err)
	}
}

// runAt runs a program, which must fail, with a clock of its own.
func runAt(t *testing.T, program string, ahead time.Duration, args ...string) string {
	t.Helper()
	cmd := exec.Command(program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cluster.StartAt(cmd, "/proc/self/ns/net", ahead); err != nil {
		t.Fatal(err)
	}
	end := time.AfterFunc(testTimeout, func() { _ = cmd.Process.Signal(os.Kill) })
	defer end.Stop()
	if err := cmd.Wait(); err == nil {
		t.Fatalf("%s: passed: %s", args, out.String())
	}
	return out.String()
}
