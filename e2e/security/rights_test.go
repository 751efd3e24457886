package security

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/member/pki"
)

const rbac = "/apis/rbac.authorization.k8s.io/v1"

// bindTo is a binding of the account to a role.
func bindTo(kind, role string) string {
	return fmt.Sprintf(`{"metadata":{"name":"made"},"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":%q,"name":%q},"subjects":[{"kind":"ServiceAccount","name":"climber","namespace":"$NS"}]}`, kind, role)
}

// roleOf is a role with one rule.
func roleOf(groups, resources, verbs string) string {
	return fmt.Sprintf(`{"metadata":{"name":"made"},"rules":[{"apiGroups":[%q],"resources":[%q],"verbs":[%q]}]}`, groups, resources, verbs)
}

// climberCalls are what an account must not do that may edit its namespace, write
// roles and bindings there, and write CertificateSigningRequests and approve them as
// far as no signer is concerned.
var climberCalls = []call{
	// Roles: none gives more than who makes it has.
	{name: "makes a role of all rights", method: "POST", path: rbac + "/namespaces/$NS/roles", body: roleOf("*", "*", "*")},
	{name: "makes a role that execs", method: "POST", path: rbac + "/namespaces/$NS/roles", body: roleOf("", "nodes/proxy", "create")},
	{name: "makes a role that names others", method: "POST", path: rbac + "/namespaces/$NS/roles", body: roleOf("", "users", "impersonate")},
	{name: "makes a role that may escalate", method: "POST", path: rbac + "/namespaces/$NS/roles", body: roleOf("rbac.authorization.k8s.io", "roles", "escalate")},
	{name: "widens its role", method: "PATCH", path: rbac + "/namespaces/$NS/roles/climber", body: `{"rules":[{"apiGroups":["*"],"resources":["*"],"verbs":["*"]}]}`},
	{name: "makes a cluster role", method: "POST", path: rbac + "/clusterroles", body: roleOf("", "secrets", "get")},
	{name: "adds itself to edit by aggregation", method: "POST", path: rbac + "/clusterroles",
		body: `{"metadata":{"name":"made","labels":{"rbac.authorization.k8s.io/aggregate-to-edit":"true"}},"rules":[{"apiGroups":["*"],"resources":["*"],"verbs":["*"]}]}`},
	{name: "changes the role edit", method: "PATCH", path: rbac + "/clusterroles/edit", body: `{"rules":[]}`},
	{name: "binds itself to cluster-admin", method: "POST", path: rbac + "/clusterrolebindings", body: bindTo("ClusterRole", "cluster-admin")},
	{name: "binds itself to cluster-admin in its namespace", method: "POST", path: rbac + "/namespaces/$NS/rolebindings", body: bindTo("ClusterRole", "cluster-admin")},
	{name: "binds itself to admin in its namespace", method: "POST", path: rbac + "/namespaces/$NS/rolebindings", body: bindTo("ClusterRole", "admin")},
	{name: "binds itself in kube-system", method: "POST", path: rbac + "/namespaces/kube-system/rolebindings", body: bindTo("ClusterRole", "view")},
	{name: "binds itself to a system role", method: "POST", path: rbac + "/namespaces/$NS/rolebindings", body: bindTo("ClusterRole", "system:node")},
	{name: "adds itself to the administrators", method: "PATCH", path: rbac + "/clusterrolebindings/cluster-admin",
		body: `{"subjects":[{"kind":"ServiceAccount","name":"climber","namespace":"$NS"}]}`},

	// Being somebody else.
	{name: "is admin", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "admin"}, alone: true},
	{name: "is in system:masters", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "climber", "Impersonate-Group": "system:masters"}},
	{name: "is in system:masters by letters of another case", method: "GET", path: "/api/v1/secrets", header: map[string]string{"impersonate-user": "climber", "IMPERSONATE-GROUP": "system:masters"}},
	{name: "is a node", method: "GET", path: "/api/v1/namespaces/$NS/secrets/others", header: map[string]string{"Impersonate-User": "system:node:a2", "Impersonate-Group": "system:nodes"}},
	{name: "is the scheduler", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "system:kube-scheduler"}, alone: true},
	{name: "is an account of kube-system", method: "GET", path: "/api/v1/namespaces/kube-system/pods", header: map[string]string{"Impersonate-User": "system:serviceaccount:kube-system:default"}, alone: true},
	{name: "is an account of its namespace in a group of its choice", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "system:serviceaccount:" + ns + ":default", "Impersonate-Group": "system:masters"}},
	{name: "has a uid of its choice", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "system:serviceaccount:" + ns + ":default", "Impersonate-Uid": "0"}, alone: true},
	{name: "has scopes of its choice", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "system:serviceaccount:" + ns + ":default", "Impersonate-Extra-Scopes": "all"}, alone: true},
	{name: "is in a group without a name", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-Group": "system:masters"}, refused: []int{400, 401, 403, 500}, alone: true},
	{name: "takes a token of kube-system", method: "POST", path: "/api/v1/namespaces/kube-system/serviceaccounts/default/token", body: `{"spec":{}}`},

	// Other namespaces and the cluster.
	{name: "reads Secrets of kube-system", method: "GET", path: "/api/v1/namespaces/kube-system/secrets"},
	{name: "reads Secrets of all", method: "GET", path: "/api/v1/secrets"},
	{name: "makes a pod in kube-system", method: "POST", path: "/api/v1/namespaces/kube-system/pods", body: `{"metadata":{"name":"made"},"spec":{"containers":[{"name":"c","image":"x"}]}}`},
	{name: "labels its namespace privileged", method: "PATCH", path: "/api/v1/namespaces/$NS", body: `{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"privileged"}}}`},
	{name: "deletes its namespace", method: "DELETE", path: "/api/v1/namespaces/$NS"},
	{name: "makes a namespace", method: "POST", path: "/api/v1/namespaces", body: `{"metadata":{"name":"made"}}`},
	{name: "lists nodes", method: "GET", path: "/api/v1/nodes"},
	{name: "writes a node", method: "PATCH", path: "/api/v1/nodes/a1", body: `{"metadata":{"annotations":{"x":"y"}}}`},
	{name: "asks a node by the proxy", method: "GET", path: "/api/v1/nodes/a1/proxy/pods"},
	{name: "binds a pod", method: "POST", path: "/api/v1/namespaces/$NS/pods/on-a2/binding", body: `{"metadata":{"name":"on-a2"},"target":{"kind":"Node","name":"a1"}}`, right: []int{http.StatusConflict}},
	{name: "writes a pod's status", method: "PATCH", path: "/api/v1/namespaces/$NS/pods/on-a2/status", body: `{"status":{"message":"x"}}`},
	{name: "adds a container to a running pod", method: "PATCH", path: "/api/v1/namespaces/$NS/pods/on-a2/ephemeralcontainers", kind: "application/strategic-merge-patch+json", body: `{"spec":{"ephemeralContainers":[{"name":"e","image":"x"}]}}`},
	{name: "makes a volume of the host", method: "POST", path: "/api/v1/persistentvolumes", body: `{"metadata":{"name":"made"},"spec":{"capacity":{"storage":"1Gi"},"accessModes":["ReadWriteOnce"],"hostPath":{"path":"/"}}}`},
	{name: "makes a storage class", method: "POST", path: "/apis/storage.k8s.io/v1/storageclasses", body: `{"metadata":{"name":"made"},"provisioner":"x"}`},
	{name: "makes a priority class", method: "POST", path: "/apis/scheduling.k8s.io/v1/priorityclasses", body: `{"metadata":{"name":"made"},"value":1000}`},
	{name: "makes a webhook", method: "POST", path: "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations", body: `{"metadata":{"name":"made"}}`},
	{name: "makes a policy of admission", method: "POST", path: "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies", body: `{"metadata":{"name":"made"},"spec":{"validations":[{"expression":"true"}],"matchConstraints":{"resourceRules":[{"apiGroups":[""],"apiVersions":["v1"],"resources":["pods"],"operations":["CREATE"]}]}}}`},
	{name: "makes a kind", method: "POST", path: "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", alone: true,
		body: `{"metadata":{"name":"things.example.com"},"spec":{"group":"example.com","scope":"Namespaced","names":{"plural":"things","singular":"thing","kind":"Thing"},"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object"}}}]}}`},
	{name: "takes an API group over", method: "POST", path: "/apis/apiregistration.k8s.io/v1/apiservices", alone: true,
		body: `{"metadata":{"name":"v1.example.com"},"spec":{"group":"example.com","version":"v1","groupPriorityMinimum":1,"versionPriority":1,"service":{"name":"x","namespace":"$NS"}}}`},
	{name: "reads the store's history", method: "GET", path: "/clusterd/v1/store"},
	{name: "makes a join token", method: "POST", path: "/clusterd/v1/tokens", body: `{"role":"server"}`, alone: true},
	{name: "takes a snapshot", method: "GET", path: "/clusterd/v1/snapshot", alone: true},
	{name: "removes a member", method: "DELETE", path: "/clusterd/v1/members/a2", alone: true},
	{name: "reads metrics", method: "GET", path: "/metrics"},
	{name: "reads a profile", method: "GET", path: "/debug/pprof/heap?debug=1"},
	{name: "asks who has a token", method: "POST", path: "/apis/authentication.k8s.io/v1/tokenreviews", body: `{"spec":{"token":"x"}}`},
	{name: "sets addresses of a Service from outside", method: "POST", path: "/api/v1/namespaces/$NS/services", body: `{"metadata":{"name":"made"},"spec":{"ports":[{"port":443}],"externalIPs":["127.0.0.1"]}}`, refused: []int{403, 422}, alone: true},
	{name: "takes cluster DNS's address for a Service", method: "POST", path: "/api/v1/namespaces/$NS/services", refused: []int{403, 422}, alone: true, body: `{"metadata":{"name":"made"},"spec":{"ports":[{"port":53,"protocol":"UDP"}],"externalIPs":["10.96.0.10"]}}`},
	{name: "takes an address of a later Service", method: "POST", path: "/api/v1/namespaces/$NS/services", refused: []int{403, 422}, alone: true, body: `{"metadata":{"name":"made"},"spec":{"ports":[{"port":443}],"externalIPs":["10.96.77.7"]}}`},
	{name: "takes a server's address for a Service", method: "POST", path: "/api/v1/namespaces/$NS/services?dryRun=All", refused: []int{403, 422}, alone: true, body: `{"metadata":{"name":"made"},"spec":{"ports":[{"port":6443}],"externalIPs":["10.85.0.2"]}}`},
	{name: "points a Service at the node's own address", method: "POST", path: "/apis/discovery.k8s.io/v1/namespaces/$NS/endpointslices", refused: []int{403, 422}, alone: true,
		body: `{"metadata":{"name":"made"},"addressType":"IPv4","endpoints":[{"addresses":["127.0.0.1"]}],"ports":[{"port":6443}]}`},
	{name: "points a Service at the metadata address", method: "POST", path: "/apis/discovery.k8s.io/v1/namespaces/$NS/endpointslices", refused: []int{403, 422}, alone: true,
		body: `{"metadata":{"name":"made"},"addressType":"IPv4","endpoints":[{"addresses":["169.254.169.254"]}],"ports":[{"port":80}]}`},
}

// wish is a CertificateSigningRequest.
type wish struct {
	name, signer string
	subject      pkix.Name
	dns          []string
	usages       []string
	spec         map[string]any // beside
}

const client = "kubernetes.io/kube-apiserver-client"

// wishes are requests for certificates of names that are not the account's.
var wishes = []wish{
	{name: "in system:masters", signer: client, subject: pkix.Name{CommonName: "climber", Organization: []string{"system:masters"}}, usages: []string{"client auth"}},
	{name: "of a node by the kubelets' signer", signer: client + "-kubelet", subject: pkix.Name{CommonName: "system:node:n1", Organization: []string{"system:nodes"}}, usages: []string{"client auth", "digital signature"}},
	{name: "of a server by the kubelets' signer", signer: "kubernetes.io/kubelet-serving", subject: pkix.Name{CommonName: "system:node:n1", Organization: []string{"system:nodes"}}, dns: []string{"kubernetes.default.svc"}, usages: []string{"server auth", "digital signature"}},
	{name: "of the scheduler", signer: client, subject: pkix.Name{CommonName: "system:kube-scheduler"}, usages: []string{"client auth"}},
	{name: "of an administrator", signer: client, subject: pkix.Name{CommonName: "admin"}, usages: []string{"client auth"}},
	{name: "for a server by the signer for clients", signer: client, subject: pkix.Name{CommonName: "kubernetes"}, dns: []string{"kubernetes.default.svc"}, usages: []string{"server auth"}},
	{name: "for an authority", signer: client, subject: pkix.Name{CommonName: "ca"}, usages: []string{"cert sign", "client auth"}},
	{name: "of a signer that is unknown", signer: "example.com/any", subject: pkix.Name{CommonName: "climber"}, usages: []string{"any"}},
}

// request is the object of a wish.
func (w wish) request(name string) (string, error) {
	key, err := pki.NewKey()
	if err != nil {
		return "", err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: w.subject, DNSNames: w.dns}, key)
	if err != nil {
		return "", err
	}
	spec := map[string]any{"signerName": w.signer, "usages": w.usages, "request": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})}
	for key, value := range w.spec {
		spec[key] = value
	}
	b, err := json.Marshal(map[string]any{"metadata": map[string]any{"name": name}, "spec": spec})
	return string(b), err
}

const requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// attack asks for a certificate and approves the request, both as somebody.
func (w wish) attack(as *rest.Config) attack {
	name := "wish-" + strings.ReplaceAll(strings.ToLower(w.name), " ", "-")
	name = strings.ReplaceAll(name, ":", "-")
	return attack{name: "has a certificate signed " + w.name, try: func(s *suite) verdict {
		body, err := w.request(name)
		if err != nil {
			return broken(err)
		}
		code, said, err := s.send(as, call{method: http.MethodPost, path: requests, body: body}, false)
		if err != nil {
			return broken(err)
		}
		if code == http.StatusForbidden || code == http.StatusUnprocessableEntity {
			return shut("%d %s", code, message(said))
		}
		if code != http.StatusCreated {
			return broken(fmt.Errorf("%d %s", code, said))
		}
		code, said, err = s.send(as, call{method: http.MethodPatch, path: requests + "/" + name + "/approval",
			body: `{"status":{"conditions":[{"type":"Approved","status":"True","reason":"x","message":"x"}]}}`}, false)
		if err != nil {
			return broken(err)
		}
		if code == http.StatusForbidden {
			return shut("the approval: %s", message(said))
		}
		return open("%d %s", code, said)
	}}
}

// accountRights is what an account makes of the rights that it has.
func accountRights(s *suite) []attack {
	s.ctl("create", "serviceaccount", "climber", "-n", ns)
	s.ctl("create", "rolebinding", "climber-edits", "-n", ns, "--clusterrole=edit", "--serviceaccount="+ns+":climber")
	s.apply(fmt.Sprintf(`apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: climber, namespace: %[1]s}
rules:
- {apiGroups: [rbac.authorization.k8s.io], resources: [roles, rolebindings], verbs: [get, list, create, update, patch, delete]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: climber, namespace: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: climber}
subjects: [{kind: ServiceAccount, name: climber, namespace: %[1]s}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: climber-asks}
rules:
- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests], verbs: [get, list, create]}
- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests/approval, certificatesigningrequests/status], verbs: [update, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: climber-asks}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: climber-asks}
subjects: [{kind: ServiceAccount, name: climber, namespace: %[1]s}]
`, ns))
	as := s.asBearer(s.mustMint("climber", authenticationv1.TokenRequestSpec{}))
	out := calls(as, climberCalls)
	for _, w := range wishes {
		out = append(out, w.attack(as))
	}
	// What it may do, it can: the refusals above are not of a token that opens nothing.
	mine := call{method: "POST", path: rbac + "/namespaces/$NS/roles", body: roleOf("", "pods", "get")}
	out[0].control = func(s *suite) error {
		code, body, err := s.send(as, mine, true)
		if err == nil && code != http.StatusCreated {
			err = fmt.Errorf("a role of what it has: %d %s", code, body)
		}
		return err
	}
	return append(out,
		attack{name: "asks in another's name", try: func(s *suite) verdict {
			w := wish{signer: client, subject: pkix.Name{CommonName: "climber"}, usages: []string{"client auth"}, spec: map[string]any{"username": "admin", "groups": []string{"system:masters"}, "uid": "0"}}
			body, err := w.request("wish-for-another")
			if err != nil {
				return broken(err)
			}
			code, said, err := s.send(as, call{method: http.MethodPost, path: requests, body: body}, false)
			if err != nil || code != http.StatusCreated {
				return broken(fmt.Errorf("%d %s: %w", code, said, err))
			}
			if !strings.Contains(said, `"username":"system:serviceaccount:`+ns+`:climber"`) || strings.Contains(said, "system:masters") {
				return open("%s", said)
			}
			return shut("the request bears the account's name")
		}},
		attack{name: "writes a certificate into a request", try: func(s *suite) verdict {
			body, err := wish{signer: client, subject: pkix.Name{CommonName: "climber"}, usages: []string{"client auth"}}.request("wish-signed")
			if err != nil {
				return broken(err)
			}
			if code, said, err := s.send(as, call{method: http.MethodPost, path: requests, body: body}, false); err != nil || code != http.StatusCreated {
				return broken(fmt.Errorf("%d %s: %w", code, said, err))
			}
			cert := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.authority().Raw}))
			code, said, err := s.send(as, call{method: http.MethodPatch, path: requests + "/wish-signed/status", body: fmt.Sprintf(`{"status":{"certificate":%q}}`, cert)}, false)
			if err != nil {
				return broken(err)
			}
			if code != http.StatusForbidden && code != http.StatusUnprocessableEntity {
				return open("%d %s", code, said)
			}
			return shut("%d %s", code, message(said))
		}},
	)
}

// loosened are pods that restricted refuses: fields of the pod, and of its container,
// that take the place of those of a pod that it takes.
var loosened = []struct{ name, pod, container string }{
	{"privileged", ``, `"securityContext":{"privileged":true}`},
	{"with privileges to gain", ``, `"securityContext":{"allowPrivilegeEscalation":true,"runAsNonRoot":true,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"with no word on privileges", ``, `"securityContext":{"runAsNonRoot":true,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"with CAP_SYS_ADMIN", ``, `"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"],"add":["SYS_ADMIN"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"with CAP_NET_RAW", ``, `"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"],"add":["NET_RAW"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"with the default capabilities", ``, `"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"as root", ``, `"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"runAsUser":0,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"with no word on root", ``, `"securityContext":{"allowPrivilegeEscalation":false,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"without a filter of system calls", ``, `"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"Unconfined"}}`},
	{"with no word on system calls", ``, `"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"]}}`},
	{"with all of /proc", `"hostUsers":false`, `"securityContext":{"procMount":"Unmasked","allowPrivilegeEscalation":false,"runAsNonRoot":true,"runAsUser":0,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"without AppArmor", ``, `"securityContext":{"appArmorProfile":{"type":"Unconfined"},"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"with a type of SELinux", ``, `"securityContext":{"seLinuxOptions":{"type":"spc_t"},"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`},
	{"in the node's network", `"hostNetwork":true`, ``},
	{"among the node's processes", `"hostPID":true`, ``},
	{"in the node's IPC", `"hostIPC":true`, ``},
	{"with a folder of the node", `"volumes":[{"name":"v","hostPath":{"path":"/"}}]`, ``},
	{"with a socket of the node", `"volumes":[{"name":"v","hostPath":{"path":"/run","type":"Directory"}}]`, ``},
	{"with NFS", `"volumes":[{"name":"v","nfs":{"server":"192.0.2.1","path":"/"}}]`, ``},
	{"with iSCSI", `"volumes":[{"name":"v","iscsi":{"targetPortal":"192.0.2.1","iqn":"iqn.2001-04.com.example:x","lun":0}}]`, ``},
	{"with a port of the node", ``, `"ports":[{"containerPort":80,"hostPort":80}]`},
	{"with a probe of another host", ``, `"livenessProbe":{"httpGet":{"path":"/","port":80,"host":"169.254.169.254"}}`},
	{"with a hook of another host", ``, `"lifecycle":{"postStart":{"httpGet":{"path":"/","port":80,"host":"169.254.169.254"}}}`},
	{"with an unsafe sysctl", `"securityContext":{"sysctls":[{"name":"kernel.msgmax","value":"1"}]}`, ``},
	{"with a privileged first container", `"initContainers":[{"name":"i","image":"x","securityContext":{"privileged":true}}]`, ``},
	{"with a privileged sidecar", `"initContainers":[{"name":"i","image":"x","restartPolicy":"Always","securityContext":{"privileged":true}}]`, ``},
}

// tight is a namespace of restricted pods.
const tight = "tight"

// podOf is a pod that restricted takes, with fields put in.
func podOf(fields, container string) string {
	if !strings.Contains(container, "securityContext") {
		container = strings.TrimPrefix(container+`,"securityContext":{"allowPrivilegeEscalation":false,"runAsNonRoot":true,"capabilities":{"drop":["ALL"]},"seccompProfile":{"type":"RuntimeDefault"}}`, ",")
	}
	if fields != "" {
		fields = "," + fields
	}
	return fmt.Sprintf(`{"metadata":{"generateName":"made-"},"spec":{"containers":[{"name":"c","image":"x",%s}]%s}}`, container, fields)
}

// restrictedPods are made by who may edit a namespace that is labelled restricted.
func restrictedPods(s *suite) []attack {
	s.apply(`apiVersion: v1
kind: Namespace
metadata: {name: ` + tight + `, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: climber, namespace: ` + tight + `}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: climber, namespace: ` + ns + `}]
`)
	as := s.asBearer(s.mustMint("climber", authenticationv1.TokenRequestSpec{}))
	const pods = "/api/v1/namespaces/" + tight + "/pods"
	var list []call
	for _, l := range loosened {
		list = append(list, call{name: l.name, method: http.MethodPost, path: pods, body: podOf(l.pod, l.container), alone: true})
	}
	list = append(list,
		call{name: "with another label of the namespace", method: "PATCH", path: "/api/v1/namespaces/" + tight, body: `{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":null}}}`},
		call{name: "privileged, in a namespace of his own", method: "POST", path: "/api/v1/namespaces", body: `{"metadata":{"name":"loose"}}`},
	)
	out := calls(as, list)
	for i := range loosened {
		body := list[i].body
		// The same pod is one that the API takes where nothing restricts it.
		out[i].control = func(s *suite) error {
			code, said, err := s.send(s.admin, call{method: http.MethodPost, path: "/api/v1/namespaces/$NS/pods", body: body}, true)
			if err == nil && code != http.StatusCreated {
				err = fmt.Errorf("%d %s", code, said)
			}
			return err
		}
	}
	return append(out, attack{name: "privileged, by a Deployment", try: func(s *suite) verdict {
		body := fmt.Sprintf(`{"metadata":{"name":"made"},"spec":{"replicas":1,"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":%q,"securityContext":{"privileged":true}}]}}}}`, image)
		if code, said, err := s.send(as, call{method: "POST", path: "/apis/apps/v1/namespaces/" + tight + "/deployments", body: body}, false); err != nil || code != http.StatusCreated {
			return broken(fmt.Errorf("%d %s: %w", code, said, err))
		}
		return s.refusedByEvent(tight, "violates PodSecurity")
	}}, attack{name: "privileged, by a later change", control: func(s *suite) error {
		code, said, err := s.send(as, call{method: http.MethodPost, path: pods, body: podOf("", "")}, true)
		if err == nil && code != http.StatusCreated {
			err = fmt.Errorf("a pod that restricted takes: %d %s", code, said)
		}
		return err
	}, try: func(s *suite) verdict {
		if code, said, err := s.send(as, call{method: http.MethodPost, path: pods, body: strings.Replace(podOf("", ""), `"generateName":"made-"`, `"name":"later"`, 1)}, false); err != nil || code != http.StatusCreated {
			return broken(fmt.Errorf("%d %s: %w", code, said, err))
		}
		code, said, err := s.send(as, call{method: http.MethodPatch, path: pods + "/later", kind: "application/strategic-merge-patch+json",
			body: `{"spec":{"containers":[{"name":"c","securityContext":{"privileged":true}}]}}`}, false)
		if err != nil {
			return broken(err)
		}
		if code < 300 {
			return open("%d", code)
		}
		return shut("%d %s", code, message(said))
	}})
}
