package kubectl

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXContainer goes through what a container is told and what is told of
// it: command, environment, files, last words.
func TestE2EXContainer(t *testing.T) {
	t.Parallel()
	k := start(t, "container")
	images := k.userImages("web") // with a CMD of its own
	of := func(manifest string) string { return strings.Replace(manifest, image, images[0], 1) }
	once := "restartPolicy: Never"

	k.sub("command and arguments", func(k *kit) {
		features.Conforms(k, 272, 273, 274, 275, 349, 350)
		none := func(manifest string) string { return strings.Replace(manifest, ", args: []", "", 1) }
		k.applyAll(
			of(none(simple("defaults", ""))),
			of(simple("args", "echo, of, args", once)),
			of(none(with("command", "", "command: [/hello, echo, of, command]", once))),
			of(with("both", "of, both", "command: [/hello, echo]", once)),
			with("expanded", "$(WHO), $$(WHO), $(NOBODY), '$(WHO', '$$$(WHO)'", `command: [/hello, "$(SUB)"], env: [{name: SUB, value: echo}, {name: WHO, value: world}]`, once),
			with("nowhere", "sleep", "workingDir: /made/for/it"),
			with("relative", "sleep", "workingDir: made/for/it"),
			with("nothing", "x", `command: ["/no/such"]`, once),
		)
		k.process(string(k.ready("defaults").UID), "/hello sleep 9876")
		for name, want := range map[string]string{"args": "of args\n", "command": "of command\n", "both": "of both\n", "expanded": "world $(WHO) $(NOBODY) $(WHO $world\n"} {
			k.phase(name, corev1.PodSucceeded)
			k.is(name, k.ok("logs", name), want)
		}
		if dir, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", k.process(string(k.ready("nowhere").UID), "/hello"))); err != nil || dir != "/made/for/it" {
			k.Errorf("working folder %q, %v", dir, err)
		}
		k.has(k.held("relative", "CreateContainerError"), `workingDir "made/for/it": must be an absolute path`)
		if s := k.phase("nothing", corev1.PodFailed).Status.ContainerStatuses[0].State.Terminated; s == nil || s.ExitCode != 128 || !strings.Contains(s.Message, "/no/such") {
			k.Errorf("a program that is not there: %+v", s)
		}
		k.ok("delete", "pod", "--all", "--wait=false")
	})
	k.sub("environment", func(k *kit) {
		features.Conforms(k, 257, 258, 259, 276, 277, 278, 279, 280, 281, 335, 336, 337, 348)
		k.applyAll("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: cm}\ndata: {data-1: one, data-2: two}",
			"apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {pass.word: hush}",
			with("env", "sleep", `resources: {requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 1250m, memory: 64Mi}},
    env: [
      {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}},
      {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}},
      {name: UID_, valueFrom: {fieldRef: {fieldPath: metadata.uid}}},
      {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}},
      {name: IPS, valueFrom: {fieldRef: {fieldPath: status.podIPs}}},
      {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}},
      {name: HOST_IPS, valueFrom: {fieldRef: {fieldPath: status.hostIPs}}},
      {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}},
      {name: ACCOUNT, valueFrom: {fieldRef: {fieldPath: spec.serviceAccountName}}},
      {name: APP, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}},
      {name: CPU_LIMIT, valueFrom: {resourceFieldRef: {resource: limits.cpu}}},
      {name: CPU_MILLI, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}},
      {name: MEMORY_LIMIT, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}},
      {name: CPU_REQUEST, valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: 1m}}},
      {name: MEMORY_REQUEST, valueFrom: {resourceFieldRef: {resource: requests.memory}}},
      {name: FROM_MAP, valueFrom: {configMapKeyRef: {name: cm, key: data-1}}},
      {name: FROM_SECRET, valueFrom: {secretKeyRef: {name: s, key: pass.word}}},
      {name: MISSING, valueFrom: {configMapKeyRef: {name: cm, key: none, optional: true}}},
      {name: NONE, valueFrom: {secretKeyRef: {name: none, key: none, optional: true}}},
      {name: COMPOSED, value: "$(NAME).$(NAMESPACE);;$(MISSING)"},
    ], envFrom: [
      {configMapRef: {name: cm}},
      {prefix: "1-$_ ~:", configMapRef: {name: cm}},
      {prefix: "p_", secretRef: {name: s}},
      {prefix: "#9.", secretRef: {name: s}},
      {configMapRef: {name: none, optional: true}},
      {secretRef: {name: none, optional: true}},
    ]`),
			with("unlimited", "sleep", `env: [{name: CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}}, {name: MEMORY, valueFrom: {resourceFieldRef: {resource: limits.memory}}}]`),
			with("unfound", "sleep", `env: [{name: X, valueFrom: {configMapKeyRef: {name: cm, key: none}}}]`),
		)
		p := k.ready("env")
		lines := strings.Split(k.exec("env", "main", "env"), "\n")
		set := map[string]string{}
		for _, l := range lines {
			key, value, _ := strings.Cut(l, "=")
			set[key] = value
		}
		host := k.c.Nodes()[0].Addr.String()
		for key, want := range map[string]string{
			"NAME": "env", "NAMESPACE": k.ns, "UID_": string(p.UID), "IP": p.Status.PodIP, "IPS": p.Status.PodIP, "HOST_IP": host, "HOST_IPS": host,
			"NODE": node, "ACCOUNT": p.Spec.ServiceAccountName, "APP": "env", "CPU_LIMIT": "2", "CPU_MILLI": "1250", "MEMORY_LIMIT": "64", "CPU_REQUEST": "250", "MEMORY_REQUEST": "33554432",
			"FROM_MAP": "one", "FROM_SECRET": "hush", "COMPOSED": "env.container;;$(MISSING)",
			"data-1": "one", "data-2": "two", "1-$_ ~:data-1": "one", "p_pass.word": "hush", "#9.pass.word": "hush", "HOSTNAME": "env",
		} {
			k.is(key, set[key], want)
		}
		for _, key := range []string{"MISSING", "NONE"} {
			if _, ok := set[key]; ok {
				k.Errorf("%s is set", key)
			}
		}
		k.ready("unlimited")
		n := k.node()
		k.has(k.exec("unlimited", "main", "env"), fmt.Sprintf("CPU=%d\n", n.Status.Allocatable.Cpu().MilliValue()), fmt.Sprintf("MEMORY=%d\n", n.Status.Allocatable.Memory().Value()))
		k.has(k.held("unfound", "CreateContainerConfigError"), "couldn't find key none in ConfigMap container/cm")
		k.ok("delete", "pod", "--all", "--wait=false")
	})
	k.sub("environment from a file", func(k *kit) {
		file := func(name, text, key string) string {
			return with(name, "sleep", `env: [{name: GOT, valueFrom: {fileKeyRef: {volumeName: v, path: app.env, key: `+key+`}}}]`, "volumes: [{name: v, emptyDir: {}}]",
				"initContainers:", `- {name: writes, image: "`+image+`", args: [write, /v/app.env, "`+text+`"], volumeMounts: [{name: v, mountPath: /v}]}`)
		}
		k.applyAll(file("filed", `# note\nA='1'\nB='two\nlines $(A)'`, "B"), file("unkeyed", `A='1'`, "B"), file("unquoted", `A=1`, "A"))
		k.ready("filed")
		k.has(k.exec("filed", "main", "env"), "GOT=two\nlines $(A)\n")
		k.has(k.held("unkeyed", "CreateContainerConfigError"), `couldn't find key B in file "app.env" of volume "v"`)
		k.has(k.held("unquoted", "CreateContainerConfigError"), "line 1: want NAME='value'")
		k.ok("delete", "pod", "--all", "--wait=false")
	})
	k.sub("names and addresses", func(k *kit) {
		features.Conforms(k, 219, 293, 294)
		k.applyAll(
			simple("aliases", "sleep", `hostAliases: [{ip: 123.45.67.89, hostnames: [foo, bar]}]`),
			simple("renamed", "sleep", "hostname: web-0", "subdomain: db"),
			simple("qualified", "sleep", "hostname: web-0", "subdomain: db", "setHostnameAsFQDN: true"),
			simple("override", "sleep", "subdomain: db", "hostnameOverride: a.b.example"),
			simple("onhost", "sleep", "hostNetwork: true", `hostAliases: [{ip: 123.45.67.89, hostnames: [foo]}]`),
			with("own", "sleep", `volumeMounts: [{name: h, mountPath: /etc/hosts}]`, `volumes: [{name: h, hostPath: {path: /etc/hosts, type: File}}]`),
			simple("nodns", "sleep", "dnsPolicy: None", "dnsConfig: {nameservers: [192.0.2.53], searches: [a.example], options: [{name: ndots, value: '3'}, {name: edns0}]}"),
		)
		const managed = "# Kubernetes-managed hosts file.\n"
		p := k.ready("aliases")
		k.has(k.exec("aliases", "main", "cat", "/etc/hosts"), managed, "123.45.67.89\tfoo\tbar\n", p.Status.PodIP+"\taliases\n")
		for name, want := range map[string]struct{ hostname, hosts string }{
			"renamed": {"web-0", "\tweb-0.db.container.svc.cluster.local\tweb-0\n"}, "qualified": {"web-0.db.container.svc.cluster.local", "\tweb-0\n"}, "override": {"a.b.example", "\ta.b.example\n"},
		} {
			p := k.ready(name)
			k.is("name of "+name, k.exec(name, "main", "cat", "/proc/sys/kernel/hostname"), want.hostname+"\n")
			k.has(k.exec(name, "main", "env"), "HOSTNAME="+want.hostname+"\n")
			k.has(k.exec(name, "main", "cat", "/etc/hosts"), managed, p.Status.PodIP, want.hosts)
		}
		nodes, err := os.ReadFile("/etc/hosts")
		if err != nil {
			k.Fatal(err)
		}
		k.ready("onhost")
		k.has(k.exec("onhost", "main", "cat", "/etc/hosts"), string(nodes), "123.45.67.89\tfoo\n")
		k.lacks(k.exec("onhost", "main", "cat", "/etc/hosts"), managed)
		k.ready("own")
		k.is("its own file", k.exec("own", "main", "cat", "/etc/hosts"), string(nodes))
		k.ready("nodns")
		k.is("resolv.conf", k.exec("nodns", "main", "cat", "/etc/resolv.conf"), "search a.example\nnameserver 192.0.2.53\noptions ndots:3 edns0\n")
		k.ok("delete", "pod", "--all", "--wait=false")
	})
	k.sub("last words", func(k *kit) {
		features.Conforms(k, 267, 268, 269, 270, 291)
		const fallback = "terminationMessagePolicy: FallbackToLogsOnError"
		shared := []string{}
		for i := range 4 {
			shared = append(shared, fmt.Sprintf(`- {name: more%d, image: %q, args: [write, /dev/termination-log, %q]}`, i, image, strings.Repeat("x", 5000)))
		}
		k.applyAll(
			with("well", "echo, said", fallback, once),
			with("file", "write, /dev/termination-log, DONE", "terminationMessagePolicy: File", once),
			with("failed", "exit, '3', '0.1'", fallback, once),
			with("path", "write, /dev/own-path, DONE", "terminationMessagePath: /dev/own-path, securityContext: {runAsUser: 10000}", once),
			simple("long", "write, /dev/termination-log, "+strings.Repeat("y", 5000), once),
			simple("shared", "write, /dev/termination-log, "+strings.Repeat("y", 5000), append(shared, once)...),
		)
		ended := func(name string, phase corev1.PodPhase) *corev1.ContainerStateTerminated {
			k.Helper()
			s := k.phase(name, phase).Status.ContainerStatuses[0].State.Terminated
			if s == nil {
				k.Fatalf("%s has not ended", name)
			}
			return s
		}
		k.is("message of success", ended("well", corev1.PodSucceeded).Message, "")
		k.is("message of the file", ended("file", corev1.PodSucceeded).Message, "DONE")
		f := ended("failed", corev1.PodFailed)
		k.is("message of the log", f.Message, "ending with 3 in 0.1 s\n")
		k.is("reason", f.Reason, "Error")
		k.is("message of another path", ended("path", corev1.PodSucceeded).Message, "DONE")
		k.is("bytes of a long message", fmt.Sprint(len(ended("long", corev1.PodSucceeded).Message)), "4096")
		for _, s := range k.phase("shared", corev1.PodSucceeded).Status.ContainerStatuses {
			k.is("bytes of one of five", fmt.Sprint(len(s.State.Terminated.Message)), fmt.Sprint(12<<10/5))
		}
		k.ok("delete", "pod", "--all", "--wait=false")
	})
	k.sub("init containers", func(k *kit) {
		features.Conforms(k, 286, 287, 290)
		k.applyAll(
			simple("initwell", "exit, '0'", once, "initContainers:", `- {name: i1, image: "`+image+`", args: [exit, "0"]}`, `- {name: i2, image: "`+image+`", args: [exit, "0"]}`),
			simple("initbad", "sleep", once, "initContainers:", `- {name: i1, image: "`+image+`", args: [exit, "0"]}`, `- {name: i2, image: "`+image+`", args: [exit, "5"]}`),
			simple("alwaysbad", "exit, '1'"),
		)
		well := k.phase("initwell", corev1.PodSucceeded)
		for _, s := range well.Status.InitContainerStatuses {
			if !s.Ready || s.State.Terminated == nil {
				k.Errorf("init container %+v", s)
			}
		}
		bad := k.phase("initbad", corev1.PodFailed)
		if s := bad.Status.ContainerStatuses[0]; s.ContainerID != "" || s.Started != nil && *s.Started {
			k.Errorf("the app was started: %+v", s)
		}
		k.podIs("alwaysbad", "failed twice", func(p *corev1.Pod) bool {
			return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
		})
		k.ok("delete", "pod", "--all", timeoutFlag)
	})
	k.sub("paths of subPathExpr", func(k *kit) {
		features.Conforms(k, 351, 352, 353, 354, 355)
		at := func(name, value, expr string) string {
			return strings.Replace(with(name, "sleep", `env: [{name: WHERE, `+value+`}], volumeMounts: [{name: v, mountPath: /sub, subPathExpr: "`+expr+`"}, {name: v, mountPath: /all}]`,
				"volumes: [{name: v, emptyDir: {}}]"), "labels:", "annotations: {note: here}, labels:", 1)
		}
		noted := func(key string) string {
			return `valueFrom: {fieldRef: {fieldPath: "metadata.annotations['` + key + `']"}}`
		}
		k.applyAll(at("expr", noted("note"), "$(WHERE)/deep"), at("absolute", "value: /tmp", "$(WHERE)"), at("backsteps", `value: ".."`, "$(WHERE)"), at("later", noted("missing"), "$(WHERE)/$(WHERE)"), at("unset", "value: x", "$(NOWHERE)"))
		k.ready("expr")
		k.ok("exec", "expr", "--", "/hello", "write", "/sub/file", "word")
		k.is("the file", k.exec("expr", "main", "cat", "/all/here/deep/file"), "word")
		k.has(k.held("absolute", "CreateContainerConfigError"), "/tmp")
		k.has(k.held("backsteps", "CreateContainerConfigError"), "..")
		k.has(k.held("unset", "CreateContainerConfigError"), `subPathExpr "$(NOWHERE)" names a variable that is not set`)
		k.held("later", "CreateContainerConfigError")
		k.ok("annotate", "pod", "later", "missing=found")
		k.ready("later")
		k.ok("exec", "later", "--", "/hello", "write", "/all/found/found/file", "word")
		// Neither is the path needed to take them down.
		k.ok("delete", "pod", "--all", timeoutFlag)
	})
	k.sub("exec and logs", func(k *kit) {
		features.Conforms(k, 283, 317, 318)
		k.apply(simple("talks", "serve"))
		k.ready("talks")
		out, errs := &bytes.Buffer{}, &bytes.Buffer{}
		url := k.api.CoreV1().RESTClient().Post().Resource("pods").Namespace(k.ns).Name("talks").SubResource("exec").
			VersionedParams(&corev1.PodExecOptions{Container: "main", Command: []string{"/hello", "echo", "over", "a", "socket"}, Stdout: true, Stderr: true}, scheme.ParameterCodec).URL()
		e, err := remotecommand.NewWebSocketExecutor(k.config, "GET", url.String())
		if err == nil {
			err = e.StreamWithContext(k.Context(), remotecommand.StreamOptions{Stdout: out, Stderr: errs})
		}
		if err != nil {
			k.Fatal(err)
		}
		k.is("exec over a websocket", out.String()+errs.String(), "over a socket\n")
		k.eventuallyHas([]string{"logs", "talks"}, "serving on :8080")
		k.has(k.websocketLog("talks"), "serving on :8080")
		k.ok("debug", "talks", "--image="+image, "-c", "beside", "--attach=false", "--", "/hello", "sleep")
		k.podIs("talks", "has its ephemeral container", func(p *corev1.Pod) bool {
			return len(p.Status.EphemeralContainerStatuses) > 0 && p.Status.EphemeralContainerStatuses[0].State.Running != nil
		})
		k.is("exec in it", k.exec("talks", "beside", "echo", "polo"), "polo\n")
		k.ok("delete", "pod", "talks", "--wait=false")
	})
}

// node is the cluster's only one.
func (k *kit) node() *corev1.Node {
	k.Helper()
	var n corev1.Node
	k.decode(k.ok("get", "node", node, "-o", "json"), &n)
	return &n
}

// TestE2EXProbes: probes that pass restart nothing, and those that fail do,
// each sort of them; hooks run before the end.
func TestE2EXProbes(t *testing.T) {
	t.Parallel()
	k := start(t, "probes")
	asked := k.healthServer()
	port := asked.port
	const fast = "periodSeconds: 1, timeoutSeconds: 30, failureThreshold: "
	live := func(name, args, probe string, more ...string) string { // a server may be slow to listen
		return with(name, args, "livenessProbe: {"+probe+", "+fast+"30}", more...)
	}
	counted := k.countRestarts("badhttp", 5)
	k.applyAll(
		live("http", "serve", "httpGet: {path: /live, port: 8080}"),
		live("tcp", "serve", "tcpSocket: {port: 8080}"),
		live("exec", "sleep", "exec: {command: [/hello, cat, /dev/termination-log]}"),
		live("grpc", "sleep", fmt.Sprintf("grpc: {port: %d, service: live}", port), "hostNetwork: true"),
		with("badhttp", "serve", "livenessProbe: {httpGet: {path: /, port: 9}, "+fast+"1}"),
		with("badgrpc", "sleep", "livenessProbe: {grpc: {port: 9}, "+fast+"1}"),
		with("badexec", "sleep", "livenessProbe: {exec: {command: [/hello, cat, /tmp/health]}, "+fast+"1}, volumeMounts: [{name: v, mountPath: /tmp}]", "volumes: [{name: v, emptyDir: {}}]",
			"initContainers:", "- {name: first, image: '"+image+"', args: [write, /tmp/health, ok], volumeMounts: [{name: v, mountPath: /tmp}]}"),
		with("delayed", "serve", "readinessProbe: {httpGet: {path: /, port: 8080}, initialDelaySeconds: 5, periodSeconds: 1}"),
		with("never", "sleep", "readinessProbe: {exec: {command: [/hello, exit, '1']}, periodSeconds: 1, failureThreshold: 1}"),
		simple("tester", "serve"),
	)
	k.sub("those that fail", func(k *kit) {
		features.Conforms(k, 324, 325, 326)
		p := k.ready("badexec")
		k.is("restarts", fmt.Sprint(p.Status.ContainerStatuses[0].RestartCount), "0")
		if err := os.Remove(filepath.Join(k.c.Nodes()[0].Data, "pods", string(p.UID), "volumes", "kubernetes.io~empty-dir", "v", "health")); err != nil {
			k.Fatal(err)
		}
		for _, name := range []string{"badhttp", "badgrpc", "badexec"} {
			k.podIs(name, "was started again", func(p *corev1.Pod) bool {
				return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
			})
		}
	})
	k.sub("readiness", func(k *kit) {
		features.Conforms(k, 328, 329)
		p := k.ready("delayed")
		began := p.Status.ContainerStatuses[0].State.Running.StartedAt
		if after := transition(p, corev1.PodReady).Sub(began.Time); after < 4*time.Second { // the API tells whole seconds
			k.Errorf("ready %s after its start, before the delay of 5 s was over", after)
		}
		k.eventually("the probe has failed often", func(context.Context) error {
			n := int32(0)
			for _, e := range k.events("never") {
				if e.Reason == "Unhealthy" {
					n += max(e.Count, 1)
				}
			}
			if n < 3 {
				return fmt.Errorf("%d times", n)
			}
			return nil
		})
		if s := k.pod("never").Status.ContainerStatuses[0]; s.Ready || s.RestartCount != 0 {
			k.Errorf("status %+v", s)
		}
	})
	k.sub("those that pass", func(k *kit) {
		features.Conforms(k, 320, 321, 322, 323)
		k.eventually("each was asked several times", func(context.Context) error {
			if n := strings.Count(k.ok("logs", "http"), "GET /live"); n < 5 {
				return fmt.Errorf("HTTP %d times", n)
			}
			if n := asked.n.Load(); n < 5 {
				return fmt.Errorf("gRPC %d times", n)
			}
			return nil
		})
		for _, name := range []string{"http", "tcp", "exec", "grpc"} {
			p := k.ready(name)
			k.is(name+"'s restarts", fmt.Sprint(p.Status.ContainerStatuses[0].RestartCount), "0")
		}
	})
	k.sub("hooks before the end", func(k *kit) {
		features.Conforms(k, 265, 266, 305, 319)
		ip := k.ready("tester").Status.PodIP
		url := "http://" + ip + ":8080/"
		k.applyAll(
			with("byexec", "sleep", "lifecycle: {preStop: {exec: {command: [/hello, fetch, '"+url+"by-exec']}}}"),
			with("byhttp", "sleep", "lifecycle: {preStop: {httpGet: {host: "+ip+", port: 8080, path: /by-http}}}"),
			strings.Replace(with("bysleep", "sleep", "lifecycle: {preStop: {sleep: {seconds: 2}}}"), "GracePeriodSeconds: 1", "GracePeriodSeconds: 30", 1),
			strings.Replace(with("bysignal", "serve", "lifecycle: {stopSignal: SIGINT}", "os: {name: linux}"), "GracePeriodSeconds: 1", "GracePeriodSeconds: 30", 1),
		)
		for _, name := range []string{"byexec", "byhttp", "bysleep", "bysignal"} {
			k.ready(name)
		}
		if got := k.pod("bysignal").Status.ContainerStatuses[0].StopSignal; got == nil || *got != corev1.SIGINT {
			k.Errorf("stop signal %v", got)
		}
		before := k.pod("bysleep").Generation
		var p corev1.Pod // as the answer tells: its hook may be over in a moment
		_, body := k.ask(http.MethodDelete, "/api/v1/namespaces/"+k.ns+"/pods/bysleep", `{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":20}`)
		k.decode(body, &p)
		if p.DeletionTimestamp == nil || p.Generation != before+1 {
			k.Errorf("generation %d, was %d; deletion %v", p.Generation, before, p.DeletionTimestamp)
		}
		k.ok("delete", "pod", "byexec", "byhttp", "bysignal", "--wait=false", "--grace-period=20")
		for _, name := range []string{"byexec", "byhttp", "bysleep", "bysignal"} {
			k.gone(name)
		}
		k.eventuallyHas([]string{"logs", "tester"}, "GET /by-exec", "GET /by-http")
	})
	k.sub("restarts are counted", func(k *kit) { k.growing(counted, 5) })
	k.ok("delete", "pod", "--all", "--wait=false")
}

// health counts how often it is asked how it is.
type health struct {
	grpc_health_v1.UnimplementedHealthServer
	n    atomic.Int32
	port int
}

func (h *health) Check(_ context.Context, r *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	h.n.Add(1)
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

// healthServer answers gRPC health checks at the node's address, for a pod on
// the node's network.
func (k *kit) healthServer() *health {
	k.Helper()
	var l net.Listener
	if err := k.c.Do(node, func() (err error) {
		l, err = net.Listen("tcp", k.c.Nodes()[0].Addr.String()+":0")
		return err
	}); err != nil {
		k.Fatal(err)
	}
	h := &health{port: l.Addr().(*net.TCPAddr).Port}
	srv := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(srv, h)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	k.Cleanup(func() { srv.Stop(); <-done })
	return h
}

// websocketLog reads a pod's log over a websocket.
func (k *kit) websocketLog(pod string) string {
	k.Helper()
	url := k.api.CoreV1().RESTClient().Get().Resource("pods").Namespace(k.ns).Name(pod).SubResource("log").URL()
	url.Scheme = "wss"
	cfg, err := websocket.NewConfig(url.String(), "http://localhost")
	if err != nil {
		k.Fatal(err)
	}
	cfg.Protocol = []string{"binary.k8s.io"}
	if cfg.TlsConfig, err = rest.TLSConfigFor(k.config); err != nil {
		k.Fatal(err)
	}
	conn, err := cfg.DialContext(k.Context())
	if err != nil {
		k.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(testTimeout)); err != nil {
		k.Fatal(err)
	}
	b, err := io.ReadAll(conn)
	if err != nil {
		k.Fatal(err)
	}
	return string(b)
}
