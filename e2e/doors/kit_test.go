package doors

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

const (
	servers = 3
	// ns is where the account robot edits, others where it may nothing.
	ns, others = "doors", "others"
	robotName  = "system:serviceaccount:" + ns + ":robot"
)

var shared = clustertest.Shared{Name: "clusterd-doors", Bridge: "cddoors", Subnet: netip.MustParsePrefix("10.84.0.0/24"), Servers: servers, Agents: 2}

func TestMain(m *testing.M) {
	policy, err := os.CreateTemp("", "clusterd-doors-audit-*.yaml")
	if err == nil {
		_, err = policy.WriteString("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n" +
			"- {level: None, users: ['system:kube-scheduler', 'system:kube-controller-manager']}\n- {level: Metadata}\n")
		err = errors.Join(err, policy.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	shared.Args = []string{"--audit-policy-file", policy.Name()}
	code := shared.Main(m)
	_ = os.Remove(policy.Name())
	os.Exit(code)
}

// suite is the cluster whose doors are tried.
type suite struct {
	*cluster.Netns
	t     *testing.T // of the group
	api   kubernetes.Interface
	admin identity
	robot identity
	log   *auditLogs
	turn  int
	lines map[string]bool // of kubectl, that there were
	out   *outside
}

// identity is somebody at the API.
type identity struct {
	name   string // as the audit log has it
	config *rest.Config
}

// at is its configuration for a server.
func (i identity) at(s *suite, server string) *rest.Config {
	config := rest.CopyConfig(i.config)
	config.Host = "https://" + s.addr(server).String()
	config.QPS = -1
	return config
}

func start(t *testing.T) *suite {
	t.Helper()
	bin := os.Getenv("CLUSTERD_DOORS")
	if bin == "" {
		t.Skip("it needs root and built programs: make doors-test")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_DOORS is set, but this is not root")
	}
	if err := shared.Start(bin); err != nil {
		t.Fatal(err)
	}
	s := &suite{Netns: shared.Cluster, t: t, api: shared.API, admin: identity{"admin", shared.Config}, lines: map[string]bool{}}
	s.log = &auditLogs{nodes: s.Nodes()[:servers], offsets: map[string]int64{}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(shared.LastLog(40))
		}
	})
	s.out = newOutside(s)
	for _, name := range []string{ns, others} {
		s.ctl("create", "namespace", name)
		for _, object := range []string{"own", "gold"} {
			s.ctl("create", "secret", "generic", object, "-n", name, "--from-literal=key=value")
			s.ctl("create", "configmap", object, "-n", name, "--from-literal=key=value")
		}
	}
	s.ctl("create", "serviceaccount", "robot", "-n", ns)
	s.ctl("create", "rolebinding", "robot", "-n", ns, "--clusterrole=edit", "--serviceaccount="+ns+":robot")
	s.robot = s.bearer(robotName, s.token("robot", authenticationv1.TokenRequestSpec{}))
	s.soon("the account's role counts", get("", s.robot, "/api/v1/namespaces/"+ns+"/secrets/own", ok, ""))
	return s
}

// next is the server that is asked next, and the id of the request.
func (s *suite) next() (server, id string) {
	s.turn++
	return s.Nodes()[s.turn%servers].Name, newID()
}

// mark begins the ids of the suite's requests in the audit log.
const mark = "door-"

func newID() string { return mark + string(uuid.NewUUID()) }

func (s *suite) node(name string) cluster.Node {
	return s.Nodes()[slices.IndexFunc(s.Nodes(), func(n cluster.Node) bool { return n.Name == name })]
}

func (s *suite) addr(node string) netip.AddrPort {
	return netip.AddrPortFrom(s.node(node).Addr, 6443)
}

func (s *suite) within(limit time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(s.t.Context(), limit)
	defer cancel()
	return clustertest.Poll(ctx, check)
}

// run runs clusterctl, which is kubectl with verbs of its own.
func (s *suite) run(stdin string, args ...string) (stdout, stderr string, code int, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), waitLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.Bin("clusterctl"), args...)
	cmd.Env = append(os.Environ(), "HOME="+shared.Dir, "KUBECONFIG="+s.node("n1").Kubeconfig())
	cmd.WaitDelay = 5 * time.Second
	return clustertest.Finish(cmd, stdin)
}

// ctl runs it as the administrator; it must succeed.
func (s *suite) ctl(args ...string) string {
	s.t.Helper()
	out, errs, code, err := s.run("", args...)
	if err != nil || code != 0 {
		s.t.Fatalf("clusterctl %s: exit %d, %v: %s%s", strings.Join(args, " "), code, err, out, errs)
	}
	return out
}

// apply applies manifests as the administrator.
func (s *suite) apply(manifests string) {
	s.t.Helper()
	if out, errs, code, err := s.run(manifests, "apply", "-f", "-"); err != nil || code != 0 {
		s.t.Fatalf("clusterctl apply: exit %d, %v: %s%s", code, err, out, errs)
	}
}

// token is one of an account of ns.
func (s *suite) token(account string, spec authenticationv1.TokenRequestSpec) string {
	s.t.Helper()
	out, err := s.api.CoreV1().ServiceAccounts(ns).CreateToken(s.t.Context(), account, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return out.Status.Token
}

// bearer is who shows a token.
func (s *suite) bearer(name, token string) identity {
	config := rest.AnonymousClientConfig(s.admin.config)
	config.BearerToken = token
	return identity{name, config}
}

// anonymous is who shows nothing.
func (s *suite) anonymous() identity {
	return identity{"", rest.AnonymousClientConfig(s.admin.config)}
}

// nodeOf is who shows a node's certificate, as its disk has it.
func (s *suite) nodeOf(name string) identity {
	pki := filepath.Join(s.node(name).Data, "pki")
	config := rest.AnonymousClientConfig(s.admin.config)
	config.CertFile, config.KeyFile = filepath.Join(pki, "node.crt"), filepath.Join(pki, "node.key")
	return identity{"system:node:" + name, config}
}

// message is the sentence of a Status, or the whole.
func message(body []byte) string {
	var status metav1.Status
	if json.Unmarshal(body, &status) == nil && status.Message != "" {
		return status.Message
	}
	return strings.TrimSpace(string(body))
}

// call is a door of raw HTTP.
func call(name string, as identity, method, path, body string, code int, says string, header ...string) door {
	return door{name: name, by: raw, code: code, says: says, try: func(s *suite, server, id string) (answer, error) {
		config := as.at(s, server)
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			return answer{}, err
		}
		defer client.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(s.t.Context(), waitLimit)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, method, config.Host+path, strings.NewReader(body))
		if err != nil {
			return answer{}, err
		}
		req.Header.Set("Audit-ID", id)
		switch {
		case method == http.MethodPatch:
			req.Header.Set("Content-Type", "application/merge-patch+json")
		case body != "":
			req.Header.Set("Content-Type", "application/json")
		}
		for i := 0; i+1 < len(header); i += 2 {
			req.Header.Add(header[i], header[i+1])
		}
		res, err := client.Do(req)
		if err != nil {
			return answer{}, err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
		return answer{res.StatusCode, message(b)}, err
	}}
}

func get(name string, as identity, path string, code int, says string, header ...string) door {
	return call(name, as, http.MethodGet, path, "", code, says, header...)
}

// roundTripper is a function that is one.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// inGo is a door of client-go.
func inGo(name string, as identity, do func(context.Context, kubernetes.Interface) error, code int, says string) door {
	return door{name: name, by: clientGo, code: code, says: says, try: func(s *suite, server, id string) (answer, error) {
		config := as.at(s, server)
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(req *http.Request) (*http.Response, error) {
				req = req.Clone(req.Context())
				req.Header.Set("Audit-ID", id)
				return next.RoundTrip(req)
			})
		})
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return answer{}, err
		}
		err = do(s.t.Context(), client)
		var refused apierrors.APIStatus
		switch {
		case errors.As(err, &refused):
			return answer{int(refused.Status().Code), refused.Status().Message}, nil
		case err == nil && code < 300:
			return answer{code, ""}, nil
		case err == nil:
			return answer{ok, errNotRefused.Error()}, nil
		}
		return answer{}, err
	}}
}

// reasons are what kubectl says of the codes.
var reasons = map[string]int{"Forbidden": 403, "Invalid": 422, "BadRequest": 400, "InternalError": 500, "NotFound": 404}

var fromServer = regexp.MustCompile(`Error from server(?: \((\w+)\))?:`)

// ctl is a door of kubectl. It cannot be told an id for the audit log: there the
// request is known by what it is, such as "get secrets/gold", of who sends it.
func ctl(name string, as identity, line, stdin string, code int, says string, args ...string) door {
	return door{name: name, by: kubectl, code: code, says: says, line: as.name + " " + line, try: func(s *suite, server, _ string) (answer, error) {
		all := append(slices.Clone(args), "--server", "https://"+s.addr(server).String())
		if as.config.BearerToken != "" {
			ca := filepath.Join(shared.Dir, "ca.pem")
			if err := os.WriteFile(ca, as.config.CAData, 0o600); err != nil {
				return answer{}, err
			}
			all = append(all, "--kubeconfig", os.DevNull, "--certificate-authority", ca, "--token", as.config.BearerToken)
		}
		out, errs, exit, err := s.run(stdin, all...)
		if err != nil {
			return answer{}, err
		}
		if exit == 0 {
			return answer{min(code, http.StatusCreated), out}, nil // whether one was made, kubectl does not say
		}
		if strings.Contains(errs, "You must be logged in to the server") {
			return answer{http.StatusUnauthorized, errs}, nil
		}
		if m := fromServer.FindStringSubmatch(errs); m != nil && reasons[m[1]] != 0 {
			return answer{reasons[m[1]], errs}, nil
		}
		if m := regexp.MustCompile(`is forbidden: `).FindString(errs); m != "" {
			return answer{http.StatusForbidden, errs}, nil
		}
		return answer{}, fmt.Errorf("exit %s: %s%s", strconv.Itoa(exit), out, errs)
	}}
}

// event is what the suite reads of a line of an audit log.
type event struct {
	server                          string
	AuditID, Stage, Verb, UserAgent string
	User                            struct{ Username string }
	ResponseStatus                  struct{ Code int }
	ObjectRef                       struct{ Resource, Namespace, Name string }
	Annotations                     map[string]string
	ImpersonatedUser                *struct{ Username string }
}

// auditLogs are those of all servers.
type auditLogs struct {
	nodes   []cluster.Node
	offsets map[string]int64
	events  []event
}

// read takes the lines that are new. The last may be half written.
func (l *auditLogs) read() error {
	for _, n := range l.nodes {
		f, err := os.Open(filepath.Join(n.Data, "audit.log"))
		if err != nil {
			return err
		}
		_, err = f.Seek(l.offsets[n.Name], io.SeekStart)
		var b []byte
		if err == nil {
			b, err = io.ReadAll(f)
		}
		_ = f.Close()
		if err != nil {
			return err
		}
		b = b[:bytes.LastIndexByte(b, '\n')+1]
		l.offsets[n.Name] += int64(len(b))
		for line := range bytes.Lines(b) {
			e := event{server: n.Name}
			if err := json.Unmarshal(line, &e); err != nil {
				return fmt.Errorf("audit log of %s: %w: %.300s", n.Name, err, line)
			}
			if strings.HasPrefix(e.AuditID, mark) || strings.HasPrefix(e.UserAgent, "clusterctl/") || strings.HasPrefix(e.UserAgent, "kubectl/") {
				l.events = append(l.events, e)
			}
		}
	}
	return nil
}

// of are the lines that say how a request ended. What is long (a watch, exec) leaves one
// when it begins, too; a request of nobody that one alone.
func (l *auditLogs) of(d sent) (lines []event) {
	begun := []event{}
	defer func() {
		if len(lines) == 0 {
			lines = begun
		}
	}()
	for _, e := range l.events {
		byID := e.AuditID == d.id
		if d.by == kubectl {
			what := fmt.Sprintf("%s %s %s/%s", e.User.Username, e.Verb, e.ObjectRef.Resource, e.ObjectRef.Name)
			byID = !strings.HasPrefix(e.AuditID, mark) && what == d.line && e.ResponseStatus.Code == d.code
		}
		switch {
		case byID && e.Stage == "ResponseStarted":
			begun = append(begun, e)
		case byID:
			lines = append(lines, e)
		}
	}
	return lines
}

// pod is a pod of one container, bound to a node; "": to none.
func pod(name, node string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: ns}, Spec: corev1.PodSpec{
		NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "clusterd.local/hello:1"}},
	}}
}
