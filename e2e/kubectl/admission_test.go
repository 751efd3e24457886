package kubectl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/features"
)

// policy is an admission policy of the kind, with its binding, for this test's
// namespace alone.
func (k *kit) policy(kind, name, match, rest string) {
	k.Helper()
	binding := ""
	if kind == "Validating" {
		binding = "\n  validationActions: [Deny]"
	}
	k.okIn(fmt.Sprintf(`apiVersion: admissionregistration.k8s.io/v1
kind: %[1]sAdmissionPolicy
metadata: {name: %[2]s}
spec:
  failurePolicy: Fail
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %[3]s}}
    resourceRules: [%[4]s]
%[5]s
---
apiVersion: admissionregistration.k8s.io/v1
kind: %[1]sAdmissionPolicyBinding
metadata: {name: %[2]s}
spec:
  policyName: %[2]s%[6]s
`, kind, name, k.ns, match, rest, binding), "apply", "-f", "-")
}

func (k *kit) noPolicy(kind, name string) {
	k.Helper()
	for _, what := range []string{"policybinding", "policy"} {
		k.ok("delete", strings.ToLower(kind)+"admission"+what, name)
	}
}

// refusal waits until a policy refuses a command, with these words: policies
// take effect a moment after they are written.
func (k *kit) refusal(stdin string, args []string, words ...string) {
	k.Helper()
	k.eventually(fmt.Sprintf("%q is refused", args), func(context.Context) error {
		out, errs, code := k.in(stdin, args...)
		if code == 0 {
			return errors.New(out)
		}
		for _, w := range words {
			if !strings.Contains(errs, w) {
				return errors.New(errs)
			}
		}
		return nil
	})
}

const podRule = "{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [pods]}"

// TestE2EXAdmission writes policies and sees what they refuse and change.
func TestE2EXAdmission(t *testing.T) {
	t.Parallel()
	k := start(t, "admission")
	k.sub("a policy on image names", func(k *kit) {
		features.Shows(k, 64)
		k.policy("Validating", "images", podRule, `  validations: [{expression: "object.spec.containers.all(c, c.image.startsWith('clusterd.local/'))", message: images come from clusterd.local}]`)
		foreign := strings.Replace(simple("foreign", "sleep"), image, "example.com/other:1", 1)
		k.refusal(foreign, []string{"create", "-f", "-", "--dry-run=server"}, "images come from clusterd.local", "ValidatingAdmissionPolicy 'images'")
		k.okIn(simple("ours", "sleep"), "create", "-f", "-")
		k.noPolicy("Validating", "images")
	})
	k.sub("the first refusal is the answer", func(k *kit) {
		features.Shows(k, 62)
		for _, name := range []string{"one", "two"} {
			k.policy("Validating", "says-"+name, podRule, `  matchConditions: [{name: c, expression: "'`+name+`' in object.metadata.labels"}]
  validations: [{expression: "false", message: `+name+` refuses}]`)
		}
		labelled := func(labels string) string {
			return strings.Replace(simple("refused", "sleep"), "labels: {", "labels: {"+labels, 1)
		}
		dry := []string{"create", "-f", "-", "--dry-run=server"}
		k.refusal(labelled("one: x, "), dry, "one refuses")
		k.refusal(labelled("two: x, "), dry, "two refuses")
		if out := k.failsIn(labelled("one: x, two: x, "), dry...); strings.Count(out, " refuses") != 1 {
			k.Errorf("not one refusal: %s", out)
		}
		k.noPolicy("Validating", "says-one")
		k.noPolicy("Validating", "says-two")
	})
	k.sub("expressions that do not fit the kinds", func(k *kit) {
		checked := func(expression string, generation int, words ...string) {
			k.Helper()
			k.policy("Validating", "typed", "{apiGroups: [apps], apiVersions: [v1], operations: [CREATE], resources: [deployments]}",
				fmt.Sprintf(`  validations: [{expression: "object.spec.replicas > 1", messageExpression: "'replicas: ' + string(object.spec.replicas)"}, {expression: %q}]`, expression))
			k.eventuallyHas([]string{"get", "validatingadmissionpolicy", "typed", "-o",
				`jsonpath=checked {.status.observedGeneration}: {.status.typeChecking.expressionWarnings[*].fieldRef} {.status.typeChecking.expressionWarnings[*].warning}.`},
				append(words, fmt.Sprintf("checked %d: ", generation))...)
		}
		checked("object.spec.copies > 1", 1, "checked 1: spec.validations[1].expression apps/v1, Kind=Deployment: ERROR", "undefined field 'copies'")
		checked("object.spec.replicas > '1'", 2, "checked 2: spec.validations[1].expression ", "no matching overload")
		checked("object.spec.replicas < 9", 3, "checked 3:  .")
		k.noPolicy("Validating", "typed")
	})
	k.sub("what is judged, and what not", func(k *kit) {
		features.Shows(k, 63)
		k.ready("ours")
		k.policy("Validating", "nothing", "{apiGroups: [''], apiVersions: [v1], operations: ['*'], resources: [pods, pods/exec]}", `  validations: [{expression: "false", message: nothing goes}]`)
		k.refusal(simple("more", "sleep"), []string{"create", "-f", "-", "--dry-run=server"}, "nothing goes")
		k.has(k.fails("label", "pod", "ours", "a=b"), "nothing goes")
		k.has(k.fails("exec", "ours", "--", "/hello", "id"), "nothing goes")
		k.has(k.fails("delete", "pod", "ours"), "nothing goes")
		k.has(k.ok("get", "pod", "ours"), "Running")
		k.has(k.ok("get", "pods"), "ours")
		k.noPolicy("Validating", "nothing")
		k.eventually("it is deleted", func(context.Context) error {
			_, errs, code := k.in("", "delete", "pod", "ours", "--wait=false")
			return complaint(code, errs)
		})
	})
	k.sub("a Deployment is refused or passes", func(k *kit) {
		features.Conforms(k, 94)
		k.policy("Validating", "few", "{apiGroups: [apps], apiVersions: [v1], operations: [CREATE, UPDATE], resources: [deployments]}", `  validations: [{expression: "object.spec.replicas <= 1", messageExpression: "'replicas are ' + string(object.spec.replicas) + ', at most 1'"}]`)
		k.refusal(web("many", 2), []string{"create", "-f", "-", "--dry-run=server"}, "replicas are 2, at most 1")
		k.okIn(web("one", 1), "create", "-f", "-")
		k.ok("delete", "deploy", "one", "--wait=false")
		k.noPolicy("Validating", "few")
	})
	k.sub("a Deployment is changed", func(k *kit) {
		features.Conforms(k, 64, 65)
		k.policy("Mutating", "mark", "{apiGroups: [apps], apiVersions: [v1], operations: [CREATE], resources: [deployments]}", `  reinvocationPolicy: Never
  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration: {expression: "Object{metadata: Object.metadata{annotations: {'marked': object.metadata.name}}, spec: Object.spec{replicas: 0}}"}`)
		k.eventually("it is", func(context.Context) error {
			out, errs, code := k.in(web("marked", 2), "create", "-f", "-", "--dry-run=server", "-o", "jsonpath={.metadata.annotations.marked} {.spec.replicas}")
			if code != 0 || out != "marked 0" {
				return errors.New(out + errs)
			}
			return nil
		})
		k.noPolicy("Mutating", "mark")
	})
	k.sub("a sidecar for pods with port 80", func(k *kit) {
		features.Shows(k, 83, 86)
		k.policy("Mutating", "sidecar", podRule, fmt.Sprintf(`  matchConditions: [{name: port, expression: "object.spec.containers.exists(c, has(c.ports) && c.ports.exists(p, p.containerPort == 80))"}]
  reinvocationPolicy: IfNeeded
  mutations:
  - patchType: JSONPatch
    jsonPatch: {expression: "object.spec.containers.exists(c, c.name == 'sidecar') ? [] : [JSONPatch{op: 'add', path: '/spec/containers/-', value: Object.spec.containers{name: 'sidecar', image: '%s', args: ['sleep']}}]"}`, image))
		serving := strings.Replace(simple("serving", "sleep"), "args:", "ports: [{containerPort: 80}], args:", 1)
		k.eventually("it comes", func(context.Context) error {
			out, errs, code := k.in(serving, "create", "-f", "-", "--dry-run=server", "-o", "jsonpath={.spec.containers[*].name}")
			if code != 0 || out != "main sidecar" {
				return errors.New(out + errs)
			}
			return nil
		})
		k.okIn(serving, "create", "-f", "-")
		k.ready("serving")
		k.is("what runs", k.field("pod/serving", "{.status.containerStatuses[?(@.ready==true)].name}"), "main sidecar")
		k.okIn(simple("silent", "sleep"), "create", "-f", "-")
		k.is("without that port", k.field("pod/silent", "{.spec.containers[*].name}"), "main")
		k.ok("delete", "pod", "serving", "silent", "--wait=false")
		k.noPolicy("Mutating", "sidecar")
	})
	k.sub("a certificate in every pod of a namespace", func(k *kit) {
		features.Shows(k, 87)
		k.ok("create", "configmap", "ca", "--from-literal=ca.crt=a certificate")
		k.policy("Mutating", "certificate", podRule, `  reinvocationPolicy: Never
  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration: {expression: "Object{spec: Object.spec{volumes: [Object.spec.volumes{name: 'ca', configMap: Object.spec.volumes.configMap{name: 'ca'}}], containers: object.spec.containers.map(c, Object.spec.containers{name: c.name, volumeMounts: [Object.spec.containers.volumeMounts{name: 'ca', mountPath: '/ca'}]})}}"}`)
		k.eventually("it is there", func(context.Context) error {
			out, errs, code := k.in(simple("trusting", "sleep"), "create", "-f", "-", "--dry-run=server", "-o", "jsonpath={.spec.volumes[*].name}")
			if code != 0 || !strings.Contains(out, "ca") {
				return errors.New(out + errs)
			}
			return nil
		})
		k.okIn(simple("trusting", "sleep"), "create", "-f", "-")
		k.ready("trusting")
		k.is("from inside", k.exec("trusting", "main", "cat", "/ca/ca.crt"), "a certificate")
		k.is("in another namespace", strings.TrimSpace(strings.ReplaceAll(k.okIn(simple("elsewhere", "sleep"), "create", "-n", "default", "-f", "-", "--dry-run=server", "-o", `jsonpath={.spec.volumes[?(@.name=="ca")].name}`), "\n", "")), "")
		k.ok("delete", "pod", "trusting", "--wait=false")
		k.noPolicy("Mutating", "certificate")
	})
	k.sub("Secrets with short passwords", func(k *kit) {
		features.Shows(k, 88)
		k.policy("Validating", "passwords", "{apiGroups: [''], apiVersions: [v1], operations: [CREATE, UPDATE], resources: [secrets]}",
			// data is base64: 4 characters for 3 bytes, padded with one or two.
			`  variables: [{name: text, expression: "has(object.data) && 'password' in object.data ? string(object.data.password) : ''"}]
  validations: [{expression: "variables.text == '' || size(variables.text) / 4 * 3 - (variables.text.endsWith('==') ? 2 : variables.text.endsWith('=') ? 1 : 0) >= 20", message: a password has at least 20 characters}]`)
		k.refusal("", []string{"create", "secret", "generic", "short", "--from-literal=password=nineteen-characters", "--dry-run=server"}, "a password has at least 20 characters")
		k.ok("create", "secret", "generic", "long", "--from-literal=password=twenty-characters-xx")
		k.ok("create", "secret", "generic", "none", "--from-literal=user=x")
		k.has(k.fails("patch", "secret", "long", "-p", `{"stringData":{"password":"short"}}`), "a password has at least 20 characters")
		k.noPolicy("Validating", "passwords")
	})
	k.sub("quotas", func(k *kit) { k.quotas() })
}

// quotas are of a namespace of their own.
func (k *kit) quotas() {
	k.ns = "admission-quotas"
	k.ok("create", "namespace", k.ns)
	k.sub("sums of requests", func(k *kit) {
		features.Shows(k, 68)
		k.ok("create", "quota", "cpu", "--hard=requests.cpu=1")
		k.used("cpu", "requests.cpu", "0")
		cpu := func(name, amount string) string {
			return strings.Replace(simple(name, "sleep"), "args:", "resources: {requests: {cpu: "+amount+"}}, args:", 1)
		}
		k.okIn(cpu("first", "600m"), "create", "-f", "-")
		k.has(k.failsIn(cpu("second", "500m"), "create", "-f", "-"), "exceeded quota: cpu", "requested: requests.cpu=500m, used: requests.cpu=600m, limited: requests.cpu=1")
		k.has(k.failsIn(simple("unsaid", "sleep"), "create", "-f", "-"), "failed quota: cpu: must specify requests.cpu")
		k.eventuallyHas([]string{"describe", "quota", "cpu"}, "requests.cpu", "600m", "1")
		k.ok("delete", "pod", "first")
		k.used("cpu", "requests.cpu", "0")
		k.ok("delete", "quota", "cpu")
	})
	k.sub("numbers of objects", func(k *kit) {
		features.Conforms(k, 77, 79, 81, 82, 83)
		k.ok("create", "quota", "counts", "--hard=configmaps=5,secrets=5,services=5,services.nodeports=1,services.loadbalancers=1,count/replicasets.apps=1")
		k.used("counts", "configmaps", "1") // kube-root-ca.crt
		k.ok("create", "configmap", "x")
		k.ok("create", "secret", "generic", "x")
		k.ok("create", "service", "clusterip", "x", "--tcp=80")
		k.ok("create", "service", "nodeport", "np", "--tcp=80")
		k.apply(replicaSet("set", "set", 0))
		const nodePorts, sets = `services\.nodeports`, `count/replicasets\.apps`
		are := func(counts map[string]string) {
			k.Helper()
			for resource, want := range counts {
				k.used("counts", resource, want)
			}
		}
		are(map[string]string{"configmaps": "2", "secrets": "1", "services": "2", nodePorts: "1", sets: "1"})
		k.has(k.fails("create", "service", "nodeport", "np2", "--tcp=80"), "exceeded quota: counts", "services.nodeports=1")
		k.has(k.failsIn(replicaSet("set2", "set2", 0), "create", "-f", "-"), "exceeded quota: counts")
		// All go at once: kinds that the loop does not watch are counted each 20 s.
		k.ok("delete", "configmap/x", "secret/x", "service/x", "service/np", "rs/set")
		are(map[string]string{"configmaps": "1", "secrets": "0", "services": "0", nodePorts: "0", sets: "0"})
		k.ok("delete", "quota", "counts")
	})
	k.sub("few tries at a full quota", func(k *kit) {
		features.Shows(k, 99, 100)
		k.ok("create", "quota", "pods", "--hard=pods=2")
		k.used("pods", "pods", "0")
		k.apply(replicaSet("crowd", "crowd", 20))
		k.owns("crowd", 2)
		k.eventually("the condition says why", func(context.Context) error {
			got := k.field("rs/crowd", `{.status.conditions[?(@.type=="ReplicaFailure")].status} {.status.conditions[?(@.type=="ReplicaFailure")].reason} {.status.conditions[?(@.type=="ReplicaFailure")].message}`)
			if !strings.HasPrefix(got, "True FailedCreate") || !strings.Contains(got, "exceeded quota: pods") {
				return errors.New(got)
			}
			return nil
		})
		k.event("crowd", "FailedCreate", "exceeded quota: pods")
		// 1, then 2 of which one is refused; from then on 1 a pass. A pass that tried
		// all would be refused 18 times, and there have been several by now.
		failed := 0
		for _, e := range k.events("crowd") {
			if e.Reason == "FailedCreate" {
				failed += int(max(e.Count, 1))
			}
		}
		if failed > 60 {
			t := k.ok("get", "events", "--field-selector=involvedObject.name=crowd")
			k.Errorf("%d creates were refused while two pods were made:\n%s", failed, t)
		}
		k.ok("delete", "rs", "crowd")
		k.ok("delete", "quota", "pods")
	})
	k.ok("delete", "namespace", k.ns, "--wait=false")
}

// used waits until a quota says that so much of a resource is used.
func (k *kit) used(quota, resource, want string) {
	k.Helper()
	k.eventually(fmt.Sprintf("%s %s are used", want, resource), func(context.Context) error {
		if got := k.field("quota/"+quota, "{.status.used."+strings.ReplaceAll(resource, "requests.cpu", `requests\.cpu`)+"}"); got != want {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
}
