package doors

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/member/pki"
)

// tight is a namespace of restricted pods, which the account robot edits.
const tight = "tight"

// restricted are pods that the standard of their namespace does not take.
func restricted(s *suite) []door {
	s.apply(`apiVersion: v1
kind: Namespace
metadata: {name: ` + tight + `, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: robot, namespace: ` + tight + `}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: robot, namespace: ` + ns + `}]
`)
	const good = `"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`
	body := func(pod, container string) string {
		return fmt.Sprintf(`{"metadata":{"name":"made"},"spec":{"containers":[{"name":"c","image":"x",%s}]%s}}`, container, pod)
	}
	path, dry := core+tight+"/pods", core+tight+"/pods?dryRun=All"
	s.soon("the account's role counts", call("", s.robot, http.MethodPost, dry, body("", good), http.StatusCreated, ""))
	const violates = `violates PodSecurity "restricted:latest": `
	privileged := strings.Replace(good, `"allowPrivilegeEscalation":false`, `"privileged":true`, 1)
	manifest := "apiVersion: v1\nkind: Pod\nmetadata: {name: by-kubectl, namespace: " + tight + "}\nspec: {containers: [{name: c, image: x, securityContext: {privileged: true}}]}\n"
	return []door{
		call("one that is taken", s.robot, http.MethodPost, dry, body("", good), http.StatusCreated, ""),
		call("privileged", s.robot, http.MethodPost, path, body("", privileged), 403, violates+`privileged (container "c" must not set securityContext.privileged=true)`),
		call("as root", s.robot, http.MethodPost, path, body("", strings.Replace(good, `"runAsNonRoot":true`, `"runAsNonRoot":true,"runAsUser":0`, 1)), 403, violates+`runAsUser=0`),
		call("in the node's network", s.robot, http.MethodPost, path, body(`,"hostNetwork":true`, good), 403, violates+"host namespaces (hostNetwork=true)"),
		call("with a folder of the node", s.robot, http.MethodPost, path, body(`,"volumes":[{"name":"v","hostPath":{"path":"/"}}]`, good), 403, `volume "v" uses restricted volume type "hostPath"`),
		call("with CAP_SYS_ADMIN", s.robot, http.MethodPost, path, body("", strings.Replace(good, `"drop":["ALL"]`, `"drop":["ALL"],"add":["SYS_ADMIN"]`, 1)), 403, "unrestricted capabilities"),
		call("with a privileged first container", s.robot, http.MethodPost, path, body(`,"initContainers":[{"name":"i","image":"x","securityContext":{"privileged":true}}]`, good), 403, `container "i" must not set securityContext.privileged=true`),
		call("by another label of the namespace", s.robot, http.MethodPatch, core+tight, `{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":null}}}`, 403, denied(robotName, "patch", "namespaces", "", tight)),
		call("by the administrator, too", s.admin, http.MethodPost, path, body("", privileged), 403, violates),
		inGo("privileged", s.robot, func(ctx context.Context, c kubernetes.Interface) error {
			p := pod("by-go", "")
			p.Namespace = tight
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
			_, err := c.CoreV1().Pods(tight).Create(ctx, p, metav1.CreateOptions{})
			return err
		}, 403, violates),
		ctl("privileged", s.robot, "create pods/by-kubectl", manifest, 403, violates, "create", "-f", "-"),
	}
}

// outside is a server of the test that the cluster's servers reach.
type outside struct {
	url string
	ca  []byte
	// asked is how often the webhook that changes was asked.
	asked atomic.Int64
}

// newOutside serves webhooks of several kinds at the host's address.
func newOutside(s *suite) *outside {
	s.t.Helper()
	o := &outside{}
	host := shared.Subnet.Addr().Next()
	key, err := pki.NewKey()
	if err != nil {
		s.t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{host.AsSlice()}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		s.t.Fatal(err)
	}
	o.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	listener, err := net.Listen("tcp", host.String()+":0")
	if err != nil {
		s.t.Fatal(err)
	}
	o.url = "https://" + listener.Addr().String()
	mux := http.NewServeMux()
	review := func(path string, answer func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse) {
		mux.HandleFunc(path, func(w http.ResponseWriter, req *http.Request) {
			var r admissionv1.AdmissionReview
			if err := json.NewDecoder(req.Body).Decode(&r); err != nil || r.Request == nil {
				http.Error(w, "no review", http.StatusBadRequest)
				return
			}
			r.Response = answer(r.Request)
			if r.Response != nil && r.Response.UID == "" {
				r.Response.UID = r.Request.UID
			}
			r.Request = nil
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(r)
		})
	}
	yes := func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		return &admissionv1.AdmissionResponse{Allowed: true}
	}
	review("/yes", yes)
	review("/no", func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		return &admissionv1.AdmissionResponse{Result: &metav1.Status{Code: http.StatusTeapot, Message: "not on a Friday"}}
	})
	review("/silent", func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse { return nil })
	review("/another", func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		return &admissionv1.AdmissionResponse{UID: "another", Allowed: true}
	})
	review("/patch", func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		return &admissionv1.AdmissionResponse{Allowed: true, PatchType: ptr.To(admissionv1.PatchTypeJSONPatch), Patch: []byte(`[{"op":"add","path":"/no/such/place","value":1}]`)}
	})
	// Each of these two changes what the other has seen.
	review("/first", func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		o.asked.Add(1)
		if strings.Contains(string(r.Object.Raw), `"second"`) {
			return &admissionv1.AdmissionResponse{Result: &metav1.Status{Code: http.StatusForbidden, Message: "asked again, and what came after is refused"}}
		}
		return &admissionv1.AdmissionResponse{Allowed: true}
	})
	review("/second", func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		return &admissionv1.AdmissionResponse{Allowed: true, PatchType: ptr.To(admissionv1.PatchTypeJSONPatch), Patch: []byte(`[{"op":"add","path":"/data","value":{"second":"yes"}}]`)}
	})
	mux.HandleFunc("/hang", func(_ http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		<-req.Context().Done()
	})
	mux.HandleFunc("/garbage", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("}{")) })
	mux.HandleFunc("/error", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "out of order", http.StatusBadGateway) })
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: waitLimit, ErrorLog: log.New(io.Discard, "", 0),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.ServeTLS(listener, "", "")
	}()
	s.t.Cleanup(func() { _ = srv.Close(); <-done })
	return o
}

// hook is a webhook for ConfigMaps with a label of its own name.
type hook struct {
	name, kind, path string
	more             string // fields
}

// webhooks are what their failures keep out, and what not.
func webhooks(s *suite) []door {
	hooks := []hook{
		{"yes", "Validating", "/yes", ""},
		{"no", "Validating", "/no", ""},
		{"hang", "Validating", "/hang", "timeoutSeconds: 2"},
		{"hang-ignored", "Validating", "/hang", "timeoutSeconds: 2\n  failurePolicy: Ignore"},
		{"garbage", "Validating", "/garbage", ""},
		{"garbage-ignored", "Validating", "/garbage", "failurePolicy: Ignore"},
		{"error", "Validating", "/error", ""},
		{"nowhere", "Validating", "/nowhere", ""},
		{"silent", "Validating", "/silent", ""},
		{"another", "Validating", "/another", ""},
		{"patch", "Mutating", "/patch", ""},
		{"effects", "Validating", "/yes", ""},
		// By their names the first is asked before the second, and then again.
		{"reinvoked-1", "Mutating", "/first", "reinvocationPolicy: IfNeeded"},
		{"reinvoked-2", "Mutating", "/second", ""},
	}
	ca, err := json.Marshal(s.out.ca)
	if err != nil {
		s.t.Fatal(err)
	}
	var all strings.Builder
	for _, h := range hooks {
		effects, label := "None", h.name
		if h.name == "effects" {
			effects = "NoneOnDryRun"
		}
		if strings.HasPrefix(label, "reinvoked") {
			label = "reinvoked"
		}
		fmt.Fprintf(&all, `---
apiVersion: admissionregistration.k8s.io/v1
kind: %[2]sWebhookConfiguration
metadata: {name: "%[1]s"}
webhooks:
- name: %[1]s.doors.example
  clientConfig: {url: "%[3]s", caBundle: %[4]s}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  objectSelector: {matchLabels: {hook: "%[5]s"}}
  sideEffects: %[6]s
  admissionReviewVersions: [v1]
  %[7]s
`, h.name, h.kind, s.out.url+h.path, ca, label, effects, h.more)
	}
	s.apply(all.String())
	s.t.Cleanup(func() {
		s.ctl("delete", "validatingwebhookconfigurations,mutatingwebhookconfigurations", "--all")
	})
	labelled := func(name, hook string) string {
		return fmt.Sprintf(`{"metadata":{"name":%q,"labels":{"hook":%q}}}`, name, hook)
	}
	path := core + ns + "/configmaps"
	post := func(name, hook string, code int, says string) door {
		return call(name, s.robot, http.MethodPost, path, labelled("by-"+hook, hook), code, says)
	}
	// The last one is known: so are those before.
	s.soon("the webhooks count", call("", s.robot, http.MethodPost, path+"?dryRun=All", labelled("x", "reinvoked"), 403, "asked again"))
	s.soon("the webhooks count", call("", s.robot, http.MethodPost, path+"?dryRun=All", labelled("x", "no"), http.StatusTeapot, "not on a Friday"))
	s.out.asked.Store(0)
	failed := func(name string) string { return `failed calling webhook "` + name + `.doors.example": ` }
	manifest := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: by-kubectl-%[1]s, namespace: " + ns + ", labels: {hook: %[1]s}}\n"
	return []door{
		post("one that says yes", "yes", http.StatusCreated, ""),
		post("one that hangs and may be ignored", "hang-ignored", http.StatusCreated, ""),
		post("one that talks nonsense and may be ignored", "garbage-ignored", http.StatusCreated, ""),
		post("one with effects, in earnest", "effects", http.StatusCreated, ""),

		post("one that says no, with a code of its own", "no", http.StatusTeapot, `admission webhook "no.doors.example" denied the request: not on a Friday`),
		post("one that hangs", "hang", 500, failed("hang")),
		post("one that talks nonsense", "garbage", 500, failed("garbage")),
		post("one that fails", "error", 500, failed("error")),
		post("one that is not there", "nowhere", 500, failed("nowhere")),
		post("one that says nothing", "silent", 500, failed("silent")),
		post("one that answers another request", "another", 500, failed("another")+"received invalid webhook response: expected response.uid="),
		post("one whose change fits nowhere", "patch", 500, "add operation does not apply"),
		post("one that is asked again", "reinvoked", 403, `admission webhook "reinvoked-1.doors.example" denied the request: asked again, and what came after is refused`),
		call("one with effects, in a dry run", s.robot, http.MethodPost, path+"?dryRun=All", labelled("dry", "effects"), http.StatusCreated, ""),
		inGo("one that hangs", s.robot, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "by-go", Labels: map[string]string{"hook": "hang"}}}, metav1.CreateOptions{})
			return err
		}, 500, failed("hang")),
		ctl("one that talks nonsense", s.robot, "create configmaps/by-kubectl-garbage", fmt.Sprintf(manifest, "garbage"), 500, failed("garbage"), "create", "-f", "-"),
		call("makes a webhook that would be asked in vain", s.robot, http.MethodPost, "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations", `{"metadata":{"name":"made"}}`, 403, denied(robotName, "create", "validatingwebhookconfigurations", "admissionregistration.k8s.io", "")),
		call("a webhook of effects that are not said", s.admin, http.MethodPost, "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations", `{"metadata":{"name":"made"},"webhooks":[{"name":"a.doors.example","clientConfig":{"url":"https://example.com"},"sideEffects":"Some","admissionReviewVersions":["v1"]}]}`, 422, "sideEffects"),
	}
}
