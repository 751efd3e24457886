package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/features"
)

const examples = "../examples/apps/"

// TestE2EExamples applies the everyday examples to one cluster, all at once and
// each in a namespace of its own, and sees each do what its first lines promise;
// what CONFORMANCE says of workloads is tried beside them.
// When they are done, the leader is lost in the middle of a Job.
func TestE2EExamples(t *testing.T) {
	features.Shows(t, 304)
	e := start(t)
	e.ctl("image", "load", filepath.Join(e.binDir(), "operator.tar"))
	var minutely string // the CronJob's namespace, once it is there
	t.Run("at once", func(t *testing.T) {
		for name, try := range map[string]func(e *env, ns string){
			"hello": helloExample, "web": webExample, "statefulset": statefulSetExample, "daemonset": daemonSetExample,
			"cronjob": func(e *env, ns string) { cronJobExample(e, ns); minutely = ns },
			"hpa":     hpaExample, "networkpolicy": networkPolicyExample, "pdb": budgetExample, "claim": claimExample,
			"operator": operatorExample, "gateway": gatewayExample, "rbac": accountExample, "reload": reloadExample, "late-job": lateJobStops,
			"jobs": jobCases, "sets": setCases, "order": orderCases,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				mine := *e
				mine.t = t
				try(&mine, mine.namespace(name))
			})
		}
	})
	if !t.Failed() {
		e.jobThroughLeaderLoss(e.namespace("job"))
	}
	if minutely != "" {
		e.jobAtItsMinute(minutely)
	}
}

// TestExamplesAreListed compares examples/README.md with the files there are and
// the tests it names.
func TestExamplesAreListed(t *testing.T) {
	readme, err := os.ReadFile("../examples/README.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(examples + "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, f := range files {
		want = append(want, filepath.Base(f))
	}
	for _, m := range regexp.MustCompile(`\(apps/([a-z-]+\.yaml)\)`).FindAllStringSubmatch(string(readme), -1) {
		got = append(got, m[1])
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("examples/README.md lists %v, examples/apps holds %v", got, want)
	}
}

// example applies one of the files.
func (e *env) example(ns, name string) {
	e.t.Helper()
	e.ctl("-n", ns, "apply", "-f", examples+name+".yaml")
}

// rolledOut waits for a workload.
func (e *env) rolledOut(ns string, what ...string) {
	e.t.Helper()
	for _, w := range what {
		e.within(3*testTimeout, w+" is rolled out", func(context.Context) error { // many at a time take a busy machine long
			if out, errs, code := e.run("clusterctl", "", "-n", ns, "rollout", "status", w, "--timeout=110s"); code != 0 {
				return errors.New(out + errs)
			}
			return nil
		})
	}
}

// hello runs the program of the image in a running container, and returns "" if
// it does not succeed.
func (e *env) hello(ns, in string, args ...string) string {
	out, _, code := e.run("clusterctl", "", append([]string{"-n", ns, "exec", in, "--", "/hello"}, args...)...)
	if code != 0 {
		return ""
	}
	return out
}

// shows waits until a page that is fetched from within a workload holds the words.
func (e *env) shows(ns, from, url, words string) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s shows %q", url, words), func(context.Context) error {
		if page := e.hello(ns, from, "fetch", url); !strings.Contains(page, words) {
			return fmt.Errorf("it shows %q", page)
		}
		return nil
	})
}

// renewed waits until a pod of that name or label is another than before, and Ready.
func (e *env) renewed(ns, selector string, before types.UID) *corev1.Pod {
	e.t.Helper()
	var now *corev1.Pod
	e.eventually("another pod "+selector+" is Ready", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return err
		}
		for i := range list.Items {
			if p := &list.Items[i]; p.UID != before && p.DeletionTimestamp == nil && podReady(p) {
				now = p
				return nil
			}
		}
		return fmt.Errorf("%d pods", len(list.Items))
	})
	return now
}

func webExample(e *env, ns string) {
	e.example(ns, "web")
	e.rolledOut(ns, "deployment/web")
	answered := map[string]bool{}
	e.eventually("both pods answer under the Service's name", func(context.Context) error {
		page := e.hello(ns, "deploy/web", "fetch", "http://web")
		if m := regexp.MustCompile(`I am pod (\S+)`).FindStringSubmatch(page); m != nil {
			answered[m[1]] = true
		}
		if len(answered) < 2 {
			return fmt.Errorf("only %v answered", answered)
		}
		return nil
	})
	e.shows(ns, "deploy/web", "http://web."+ns+".svc", "Hello from clusterd!")
	e.ingressSays("http://web.example/", "Hello from clusterd!")
}

// helloExample applies the demo and the ways into it, which name their namespace.
func helloExample(e *env, _ string) {
	e.gatewayClass()
	e.ctl("apply", "-f", "../examples/hello.yaml", "-f", "../examples/ingress.yaml", "-f", "../examples/gateway.yaml")
	e.rolledOut("hello", "deployment/hello")
	e.ingressSays("http://hello.example/", "clusterd")
	var address string // in the cluster, which has no addresses for load balancers here
	e.eventually("the Gateway has its Service", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Services("kube-system").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, s := range list.Items {
			if strings.HasPrefix(s.Name, "gateway-hello-hello-") {
				address = s.Spec.ClusterIP
				return nil
			}
		}
		return errors.New("no Service gateway-hello-hello-…")
	})
	wayIn{e: e, vip: address}.says("http://hello.example/", http.StatusOK, "clusterd")
}

// ingressSays waits until the proxies of Ingresses answer a URL with words. They are
// asked at their Service's address in the cluster, whatever the URL's host.
func (e *env) ingressSays(url, words string) {
	e.t.Helper()
	var address string
	e.eventually("Ingresses are served", func(ctx context.Context) error {
		s, err := e.api.CoreV1().Services("kube-system").Get(ctx, "clusterd-ingress", metav1.GetOptions{})
		if err == nil {
			address = s.Spec.ClusterIP
		}
		return err
	})
	wayIn{e: e, vip: address}.says(url, http.StatusOK, words)
}

func gatewayExample(e *env, ns string) {
	e.gatewayClass()
	e.example(ns, "gateway")
	e.rolledOut(ns, "deployment/blue", "deployment/green")
	answered := map[string]bool{}
	e.eventually("both versions answer through the Gateway", func(context.Context) error {
		page := e.hello(ns, "deploy/blue", "fetch", "http://clusterd-ingress.kube-system.svc:8000/old")
		version, _, _ := strings.Cut(answerer(page), "-")
		answered[version] = true
		if !answered["blue"] || !answered["green"] {
			return fmt.Errorf("only %v answered", answered)
		}
		return nil
	})
}

func statefulSetExample(e *env, ns string) {
	e.example(ns, "statefulset")
	e.rolledOut(ns, "statefulset/db")
	members := map[string]corev1.Pod{}
	for _, p := range e.podsReady(ns, "app=db", 3) {
		members[p.Name] = p
	}
	for i := 1; i < 3; i++ {
		before, after := members[fmt.Sprintf("db-%d", i-1)], members[fmt.Sprintf("db-%d", i)]
		if after.CreationTimestamp.Time.Before(before.CreationTimestamp.Time) {
			e.t.Errorf("%s was made before %s", after.Name, before.Name)
		}
	}
	e.shows(ns, "db-2", "http://db-0.db:8080", "I am pod db-0")
	e.ctl("-n", ns, "set", "env", "statefulset/db", "MESSAGE=second")
	e.rolledOut(ns, "statefulset/db")
	e.shows(ns, "db-2", "http://db-0.db:8080", "second")
}

func claimExample(e *env, ns string) {
	e.example(ns, "claim")
	e.rolledOut(ns, "deployment/diary")
	before := e.podsReady(ns, "app=diary", 1)[0]
	e.ctl("-n", ns, "exec", before.Name, "--", "/hello", "write", "/data/message", "Dear diary")
	e.ctl("-n", ns, "delete", "pod", before.Name)
	after := e.renewed(ns, "app=diary", before.UID)
	e.shows(ns, after.Name, "http://127.0.0.1:8080", "Dear diary")

	// A volume is full, and says so: the file systems here have no project quotas.
	claim := strings.Fields(e.ctl("-n", ns, "get", "pvc", "-o", "custom-columns=N:.metadata.name,S:.status.capacity.storage", "--no-headers"))
	size := resource.MustParse(claim[1])
	e.ctl("-n", ns, "exec", after.Name, "--", "/hello", "fill", "/data/much", strconv.FormatInt(size.Value()>>20+3, 10))
	e.eventually("the claim says that its volume is full", func(context.Context) error {
		if said := e.ctl("-n", ns, "get", "events", "--field-selector", "involvedObject.kind=PersistentVolumeClaim,reason=VolumeFull"); !strings.Contains(said, "more than its "+claim[1]) {
			return errors.New(said)
		}
		return nil
	})
	e.eventuallyHas([]string{"get", "--raw", "/api/v1/nodes/" + after.Spec.NodeName + "/proxy/metrics"},
		fmt.Sprintf(`kubelet_volume_stats_available_bytes{namespace="%s",persistentvolumeclaim="%s"} 0`, ns, claim[0]))
}

func daemonSetExample(e *env, ns string) {
	e.example(ns, "daemonset")
	e.rolledOut(ns, "daemonset/logs")
	e.ctl("-n", ns, "set", "env", "daemonset/logs", "MESSAGE=second")
	e.rolledOut(ns, "daemonset/logs")
	nodes := map[string]bool{}
	for _, p := range e.podsReady(ns, "app=logs", 3) {
		nodes[p.Spec.NodeName] = true
	}
	if len(nodes) != 3 {
		e.t.Errorf("the daemons are on %v", nodes)
	}
}

func cronJobExample(e *env, ns string) {
	e.example(ns, "cronjob")
	e.ctl("-n", ns, "create", "job", "by-hand", "--from=cronjob/minutely")
	e.ctl("-n", ns, "wait", "--for=condition=complete", "job/by-hand", "--timeout=110s")
}

// jobAtItsMinute waits for what the CronJob makes by itself. It is the last to be
// looked at: its minute may pass while the others are tried.
func (e *env) jobAtItsMinute(ns string) {
	e.t.Helper()
	e.eventually("a Job ran when its minute came", func(ctx context.Context) error {
		jobs, err := e.api.BatchV1().Jobs(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, j := range jobs.Items {
			if strings.HasPrefix(j.Name, "minutely-") && j.Status.Succeeded == 1 {
				return nil
			}
		}
		return fmt.Errorf("%d Jobs", len(jobs.Items))
	})
}

func hpaExample(e *env, ns string) {
	e.example(ns, "hpa")
	e.rolledOut(ns, "deployment/busy")
	e.eventually("the busy server got help", func(context.Context) error {
		e.hello(ns, "deploy/busy", "fetch", "http://busy/busy?for=3s")
		d, err := e.api.AppsV1().Deployments(ns).Get(e.t.Context(), "busy", metav1.GetOptions{})
		if err == nil && d.Status.ReadyReplicas < 2 {
			err = fmt.Errorf("%d ready; %s", d.Status.ReadyReplicas, e.ctl("-n", ns, "get", "hpa", "busy"))
		}
		return err
	})
}

func networkPolicyExample(e *env, ns string) {
	e.example(ns, "networkpolicy")
	e.rolledOut(ns, "deployment/vault")
	e.podReady(ns, "friend")
	e.podReady(ns, "stranger")
	e.reaches(true, ns, "friend", "vault:80")
	e.reaches(false, ns, "stranger", "vault:80")
	e.ctl("-n", ns, "label", "pod", "stranger", "role=friend")
	e.reaches(true, ns, "stranger", "vault:80")
}

func budgetExample(e *env, ns string) {
	e.example(ns, "pdb")
	e.rolledOut(ns, "deployment/quorum")
	allowed := func(n int32) {
		e.eventually(fmt.Sprintf("the budget allows %d evictions", n), func(ctx context.Context) error {
			b, err := e.api.PolicyV1().PodDisruptionBudgets(ns).Get(ctx, "quorum", metav1.GetOptions{})
			if err == nil && (b.Status.DisruptionsAllowed != n || b.Status.ObservedGeneration != b.Generation) {
				err = fmt.Errorf("status %+v", b.Status)
			}
			return err
		})
	}
	evict := func(pod string) (string, int) {
		_, words, code := e.run("clusterctl", `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"`+pod+`"}}`,
			"create", "--raw", "/api/v1/namespaces/"+ns+"/pods/"+pod+"/eviction", "-f", "-")
		return words, code
	}
	allowed(1)
	first := e.podsReady(ns, "app=quorum", 3)[0]
	e.eventually("the first of three is evicted", func(context.Context) error { // a pod that is not Ready for a moment takes its place
		if words, code := evict(first.Name); code != 0 && !strings.Contains(words, "not found") {
			return errors.New(words)
		}
		return nil
	})
	e.renewed(ns, "app=quorum", first.UID)
	allowed(1) // so that the next status is not the one from right after the eviction
	e.ctl("-n", ns, "scale", "deployment/quorum", "--replicas=2")
	pods := e.podsReady(ns, "app=quorum", 2)
	allowed(0)
	words, code := evict(pods[0].Name)
	if code == 0 {
		e.t.Error("one of two was evicted")
	}
	mustContain(e.t, "eviction", words, "disruption budget")
}

func operatorExample(e *env, ns string) {
	e.example(ns, "operator")
	// Before there is a condition, wait ends at once.
	e.eventuallyHas([]string{"wait", "--for=condition=established", "crd/sites.example.clusterd.local", "--timeout=110s"}, "condition met")
	e.rolledOut(ns, "deployment/site-operator")
	e.eventually("a Site is made", func(context.Context) error { // the server may learn of the kind a moment later
		if out, errs, code := e.run("clusterctl", "", "-n", ns, "apply", "-f", examples+"site.yaml"); code != 0 {
			return errors.New(out + errs)
		}
		return nil
	})
	ready := func(n string) {
		e.ctl("-n", ns, "wait", "--for=jsonpath={.status.ready}="+n, "site/shop", "--timeout=110s")
	}
	ready("2")
	e.shows(ns, "deploy/shop", "http://shop", "Come in, we are open.")
	mustContain(e.t, "the Site", e.ctl("-n", ns, "get", "sites"), "WANTED", "READY", "shop")
	e.ctl("-n", ns, "patch", "site", "shop", "--type=merge", "-p", `{"spec":{"replicas":1}}`)
	ready("1")
	mustContain(e.t, "a wrong Site", e.refused("", "-n", ns, "patch", "site", "shop", "--type=merge", "-p", `{"spec":{"replicas":11}}`), "spec.replicas")
	e.ctl("-n", ns, "delete", "site", "shop")
	e.eventually("what the Site owned is gone", func(ctx context.Context) error {
		left, err := e.api.AppsV1().Deployments(ns).List(ctx, metav1.ListOptions{})
		if err == nil && len(left.Items) != 1 {
			err = fmt.Errorf("%d Deployments", len(left.Items))
		}
		return err
	})
}

func accountExample(e *env, ns string) {
	manifest, err := os.ReadFile(examples + "rbac.yaml")
	if err != nil {
		e.t.Fatal(err)
	}
	e.example(ns, "rbac")
	e.ctl("-n", ns, "wait", "--for=condition=complete", "job/ask", "--timeout=110s")
	mustContain(e.t, "the program's answer", e.ctl("-n", ns, "logs", "job/ask"), `"kind":"PodList"`, `"ask-`)

	// The same program and account, another question.
	other := strings.NewReplacer("name: ask}", "name: pry}", "$(NAMESPACE)/pods]", "$(NAMESPACE)/secrets]").Replace(string(manifest))
	e.ctlIn(other, "-n", ns, "apply", "-f", "-")
	e.ctl("-n", ns, "wait", "--for=condition=failed", "job/pry", "--timeout=110s")
	mustContain(e.t, "the refusal", e.ctl("-n", ns, "logs", "job/pry"), "403 Forbidden", `cannot list resource \"secrets\"`, "system:serviceaccount:"+ns+":pod-reader")
}

func reloadExample(e *env, ns string) {
	e.example(ns, "reload")
	e.rolledOut(ns, "deployment/page")
	before := e.podsReady(ns, "app=page", 1)[0]
	e.shows(ns, before.Name, "http://127.0.0.1:8080", "Good morning.")
	e.ctl("-n", ns, "patch", "configmap", "page", "-p", `{"data":{"message":"Good evening."}}`)
	e.shows(ns, before.Name, "http://127.0.0.1:8080", "Good evening.")
	after := e.get(ns, before.Name)
	for _, s := range slices.Concat(after.Status.InitContainerStatuses, after.Status.ContainerStatuses) {
		if s.RestartCount != 0 {
			e.t.Errorf("%s was restarted %d times", s.Name, s.RestartCount)
		}
	}
}
