package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/features"
)

// kindLife is one kind with what its life needs.
type kindLife struct {
	rows []int
	gv   string // group/version
	res  string // plural
	// body is the object without apiVersion and metadata.name. Nothing acts on
	// it in a way that others notice.
	body string
	// status is a merge patch of the status subresource, and kept what the
	// status then contains, as JSON with sorted keys, whatever controllers add.
	// Empty: the kind has none, or its status is not tried here.
	status, kept string
	// settled is what a controller writes into the status first; may be empty.
	settled string
	// cluster: not in a namespace.
	cluster bool
}

const noPods = `{replicas: 0, selector: {matchLabels: {app: life}}, template: {metadata: {labels: {app: life}}, spec: {containers: [{name: c, image: "clusterd.local/none:1"}]}}`

// tried is a condition that no controller knows.
const (
	tried     = `{"status":{"conditions":[{"lastTransitionTime":"2026-01-01T00:00:00Z","message":"m","reason":"ByTest","status":"True","type":"Tried"}]}}`
	triedKept = `"message":"m","reason":"ByTest","status":"True","type":"Tried"`
)

// lives lists kinds whose rows ask for the whole set of verbs.
var lives = []kindLife{
	{rows: []int{66}, gv: "admissionregistration.k8s.io/v1", res: "mutatingadmissionpolicies", cluster: true,
		body: `{kind: MutatingAdmissionPolicy, spec: {reinvocationPolicy: Never, matchConstraints: {resourceRules: [{apiGroups: [none.example.com], apiVersions: [v1], operations: [CREATE], resources: [nones]}]}, mutations: [{patchType: ApplyConfiguration, applyConfiguration: {expression: "Object{metadata: Object.metadata{labels: {'a': 'b'}}}"}}]}}`},
	{rows: []int{67}, gv: "admissionregistration.k8s.io/v1", res: "mutatingadmissionpolicybindings", cluster: true,
		body: `{kind: MutatingAdmissionPolicyBinding, spec: {policyName: no-such-policy}}`},
	{rows: []int{92}, gv: "admissionregistration.k8s.io/v1", res: "validatingadmissionpolicies", cluster: true,
		body:   `{kind: ValidatingAdmissionPolicy, spec: {matchConstraints: {resourceRules: [{apiGroups: [none.example.com], apiVersions: [v1], operations: [CREATE], resources: [nones]}]}, validations: [{expression: "true"}]}}`,
		status: tried, kept: triedKept},
	{rows: []int{93}, gv: "admissionregistration.k8s.io/v1", res: "validatingadmissionpolicybindings", cluster: true,
		body: `{kind: ValidatingAdmissionPolicyBinding, spec: {policyName: no-such-policy, validationActions: [Deny]}}`},
	{rows: []int{84}, gv: "v1", res: "resourcequotas", body: `{kind: ResourceQuota, spec: {hard: {count/deployments.apps: "100"}}}`},
	{rows: []int{106}, gv: "batch/v1", res: "cronjobs",
		body:   `{kind: CronJob, spec: {suspend: true, schedule: "0 0 1 1 *", jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: "clusterd.local/none:1"}]}}}}}}`,
		status: `{"status":{"lastScheduleTime":"2026-01-01T00:00:00Z"}}`, kept: `"lastScheduleTime":"2026-01-01T00:00:00Z"`},
	{rows: []int{130, 134}, gv: "batch/v1", res: "jobs",
		body:   `{kind: Job, spec: {suspend: true, template: {spec: {restartPolicy: Never, containers: [{name: c, image: "clusterd.local/none:1"}]}}}}`,
		status: tried, kept: triedKept},
	{rows: []int{107, 113}, gv: "apps/v1", res: "daemonsets",
		body:   `{kind: DaemonSet, spec: {selector: {matchLabels: {app: life}}, template: {metadata: {labels: {app: life}}, spec: {nodeSelector: {no: such}, containers: [{name: c, image: "clusterd.local/none:1"}]}}}}`,
		status: tried, kept: triedKept},
	{rows: []int{121}, gv: "apps/v1", res: "deployments", body: `{kind: Deployment, spec: ` + noPods + `}}`,
		status: tried, kept: triedKept},
	{rows: []int{144, 146}, gv: "apps/v1", res: "replicasets", body: `{kind: ReplicaSet, spec: ` + noPods + `}}`,
		status: tried, kept: triedKept},
	{rows: []int{157, 160}, gv: "apps/v1", res: "statefulsets", body: `{kind: StatefulSet, spec: ` + noPods + `, serviceName: none}}`,
		status: tried, kept: triedKept},
	{rows: []int{122, 124, 126}, gv: "policy/v1", res: "poddisruptionbudgets", body: `{kind: PodDisruptionBudget, spec: {minAvailable: 1, selector: {matchLabels: {app: nobody}}}}`,
		status: tried, kept: triedKept},
	{rows: []int{176, 177}, gv: "v1", res: "serviceaccounts", body: `{kind: ServiceAccount}`},
	{rows: []int{208}, gv: "v1", res: "events",
		body: `{kind: Event, involvedObject: {kind: Pod, name: nobody, namespace: NAMESPACE}, reason: Tried, message: by a test, type: Normal, count: 1}`},
	{rows: []int{224}, gv: "discovery.k8s.io/v1", res: "endpointslices", body: `{kind: EndpointSlice, addressType: IPv4, endpoints: [{addresses: [192.0.2.1]}], ports: [{name: p, port: 80, protocol: TCP}]}`},
	{rows: []int{230}, gv: "networking.k8s.io/v1", res: "ingresses",
		body:   `{kind: Ingress, spec: {ingressClassName: no-such-class, defaultBackend: {service: {name: none, port: {number: 80}}}}}`,
		status: `{"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.7"}]}}}`, kept: `"ip":"192.0.2.7"`},
	{rows: []int{231}, gv: "networking.k8s.io/v1", res: "ingressclasses", cluster: true, body: `{kind: IngressClass, spec: {controller: example.com/none}}`},
	{rows: []int{240}, gv: "networking.k8s.io/v1", res: "ipaddresses", cluster: true, body: `{kind: IPAddress, spec: {parentRef: {group: example.com, resource: nones, namespace: default, name: none}}}`},
	{rows: []int{241}, gv: "networking.k8s.io/v1", res: "servicecidrs", cluster: true, body: `{kind: ServiceCIDR, spec: {cidrs: [192.0.2.0/24]}}`,
		status: tried, kept: triedKept, settled: `"type":"Ready"`},
	{rows: []int{179}, gv: "certificates.k8s.io/v1", res: "clustertrustbundles", cluster: true, body: `{kind: ClusterTrustBundle, spec: {trustBundle: ` + strconv.Quote(authority("life")) + `}}`},
	{rows: []int{249, 250}, gv: "v1", res: "services", body: `{kind: Service, spec: {clusterIP: None, ports: [{port: 80}]}}`,
		status: tried, kept: triedKept},
	{rows: []int{302, 303, 304}, gv: "v1", res: "podtemplates", body: `{kind: PodTemplate, template: {metadata: {labels: {app: life}}, spec: {containers: [{name: c, image: "clusterd.local/none:1"}]}}}`},
	{rows: []int{362}, gv: "v1", res: "limitranges", body: `{kind: LimitRange, spec: {limits: [{type: PersistentVolumeClaim, max: {storage: 1Ti}}]}}`},
	{rows: []int{372}, gv: "storage.k8s.io/v1", res: "csidrivers", cluster: true, body: `{kind: CSIDriver, spec: {attachRequired: false}}`},
	{rows: []int{373}, gv: "v1", res: "pods",
		body: `{kind: Pod, spec: {terminationGracePeriodSeconds: 0, schedulingGates: [{name: example.com/never}], containers: [{name: c, image: "clusterd.local/none:1"}], volumes: [{name: v, csi: {driver: none.example.com}}]}}`},
	{rows: []int{374}, gv: "storage.k8s.io/v1", res: "csinodes", cluster: true, body: `{kind: CSINode, spec: {drivers: []}}`},
	{rows: []int{375}, gv: "storage.k8s.io/v1", res: "csistoragecapacities", body: `{kind: CSIStorageCapacity, storageClassName: none, nodeTopology: {matchLabels: {a: b}}, capacity: 1Gi}`},
	{rows: []int{415, 416}, gv: "v1", res: "persistentvolumes", cluster: true,
		status: `{"status":{"message":"by a test","reason":"Tried"}}`, kept: `"message":"by a test"`, settled: `"phase":"Available"`,
		body: `{kind: PersistentVolume, spec: {storageClassName: life-none, capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], persistentVolumeReclaimPolicy: Retain, hostPath: {path: /no/such/folder}}}`},
	{rows: []int{415, 416}, gv: "v1", res: "persistentvolumeclaims", body: `{kind: PersistentVolumeClaim, spec: {storageClassName: life-no-such-class, accessModes: [ReadWriteOnce], resources: {requests: {storage: 2Gi}}}}`,
		status: tried, kept: triedKept},
	{rows: []int{454}, gv: "storage.k8s.io/v1", res: "storageclasses", cluster: true, body: `{kind: StorageClass, provisioner: none.example.com}`},
	{rows: []int{460, 461}, gv: "storage.k8s.io/v1", res: "volumeattachments", cluster: true,
		body:   `{kind: VolumeAttachment, spec: {attacher: none.example.com, nodeName: nobody, source: {persistentVolumeName: none}}}`,
		status: `{"status":{"attached":true}}`, kept: `"attached":true`},
	{rows: []int{462}, gv: "storage.k8s.io/v1", res: "volumeattributesclasses", cluster: true, body: `{kind: VolumeAttributesClass, driverName: none.example.com, parameters: {a: b}}`},
}

// TestE2EXLifecycle takes kinds through every verb that the API has.
func TestE2EXLifecycle(t *testing.T) {
	t.Parallel()
	k := start(t, "lifecycle")
	client, err := dynamic.NewForConfig(k.config)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lives {
		k.sub(l.res, func(k *kit) {
			features.Conforms(k, l.rows...)
			k.lives(client, l)
		})
	}
	k.sub("namespaces", func(k *kit) { k.namespaces() })
	k.sub("immutable data", func(k *kit) {
		features.Conforms(k, 385, 453)
		for _, kind := range []string{"configmap", "secret"} {
			args := []string{"create", kind}
			if kind == "secret" {
				args = append(args, "generic")
			}
			k.ok(append(args, "fixed", "--from-literal=a=b")...)
			k.ok("patch", kind, "fixed", "-p", `{"immutable":true}`)
			for _, patch := range []string{`{"data":{"a":"eHg="}}`, `{"data":{"c":"ZA=="}}`, `{"immutable":false}`, `{"immutable":null}`} {
				k.has(k.fails("patch", kind, "fixed", "-p", patch), "field is immutable when `immutable` is set")
			}
			k.ok("label", kind, "fixed", "still=works")
			k.ok("delete", kind, "fixed")
		}
	})
	k.sub("PriorityClass", func(k *kit) {
		features.Conforms(k, 368)
		k.ok("create", "priorityclass", "life", "--value=7", "--description=before")
		k.has(k.ok("get", "priorityclasses"), "life", "7")
		k.ok("patch", "priorityclass", "life", "-p", `{"description":"after"}`)
		k.is("description", k.field("priorityclass/life", "{.description}"), "after")
		k.has(k.fails("patch", "priorityclass", "life", "-p", `{"value":8}`), "value", "may not be changed")
		k.ok("delete", "priorityclass", "life")
	})
}

// lives makes three objects, two of them labelled, and tries each verb.
func (k *kit) lives(client dynamic.Interface, l kindLife) {
	k.Helper()
	gv, err := schema.ParseGroupVersion(l.gv)
	if err != nil {
		k.Fatal(err)
	}
	k.discovers(l)
	everywhere := client.Resource(gv.WithResource(l.res))
	var objects dynamic.ResourceInterface = everywhere
	if !l.cluster {
		objects = everywhere.Namespace(k.ns)
	}
	const label = "case=lifecycle"
	w, err := objects.Watch(k.Context(), metav1.ListOptions{LabelSelector: label})
	if err != nil {
		k.Fatal(err)
	}
	defer w.Stop()
	names := []string{"life-one", "life-two", "life-other"}
	if l.res == "csidrivers" {
		names = []string{"one.life.example.com", "two.life.example.com", "other.life.example.com"}
	}
	if l.res == "ipaddresses" {
		names = []string{"192.0.2.71", "192.0.2.72", "192.0.2.73"}
	}
	for i, name := range names {
		o := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(strings.ReplaceAll(l.body, "NAMESPACE", k.ns)), &o.Object); err != nil {
			k.Fatal(err)
		}
		o.SetAPIVersion(l.gv)
		o.SetName(name)
		if i < 2 {
			o.SetLabels(map[string]string{"case": "lifecycle"})
		}
		if _, err := objects.Create(k.Context(), o, metav1.CreateOptions{}); err != nil {
			k.Fatalf("create %s: %v", name, err)
		}
	}
	k.seen(w, watch.Added, names[0])
	count := func(where dynamic.ResourceInterface) int {
		list, err := where.List(k.Context(), metav1.ListOptions{LabelSelector: label})
		if err != nil {
			k.Fatal(err)
		}
		return len(list.Items)
	}
	k.is("labelled here and everywhere", fmt.Sprint(count(objects), count(everywhere)), "2 2")

	if _, err := objects.Patch(k.Context(), names[0], types.MergePatchType, []byte(`{"metadata":{"annotations":{"patched":"yes"}}}`), metav1.PatchOptions{}); err != nil {
		k.Fatalf("patch: %v", err)
	}
	k.eventually("an update is written", func(ctx context.Context) error { // a controller may write in between
		o, err := objects.Get(ctx, names[0], metav1.GetOptions{})
		if err != nil {
			return err
		}
		k.is("patched", o.GetAnnotations()["patched"], "yes")
		o.SetAnnotations(map[string]string{"updated": "yes"})
		_, err = objects.Update(ctx, o, metav1.UpdateOptions{})
		return err
	})
	o, err := objects.Get(k.Context(), names[0], metav1.GetOptions{})
	if err != nil {
		k.Fatal(err)
	}
	k.is("updated", o.GetAnnotations()["updated"]+o.GetAnnotations()["patched"], "yes")
	k.seen(w, watch.Modified, names[0])
	if l.status != "" {
		k.statusKept(objects, names[0], l)
	}

	if err := objects.Delete(k.Context(), names[0], metav1.DeleteOptions{}); err != nil {
		k.Fatalf("delete: %v", err)
	}
	k.seen(w, watch.Deleted, names[0])
	if _, err := objects.Get(k.Context(), names[0], metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		k.Errorf("a deleted one: %v", err)
	}
	if err := objects.DeleteCollection(k.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: label}); err != nil {
		k.Fatalf("delete the labelled: %v", err)
	}
	k.seen(w, watch.Deleted, names[1])
	k.is("labelled ones left", fmt.Sprint(count(objects)), "0")
	if _, err := objects.Get(k.Context(), names[2], metav1.GetOptions{}); err != nil {
		k.Errorf("the one without label: %v", err)
	}
	if err := objects.Delete(k.Context(), names[2], metav1.DeleteOptions{}); err != nil {
		k.Error(err)
	}
}

// discovers looks for the group, its version, and the resource with all verbs.
func (k *kit) discovers(l kindLife) {
	k.Helper()
	if group, _, ok := strings.Cut(l.gv, "/"); ok {
		groups, err := k.api.Discovery().ServerGroups()
		if err != nil {
			k.Fatal(err)
		}
		i := slices.IndexFunc(groups.Groups, func(g metav1.APIGroup) bool { return g.Name == group })
		if i < 0 || !slices.ContainsFunc(groups.Groups[i].Versions, func(v metav1.GroupVersionForDiscovery) bool { return v.GroupVersion == l.gv }) {
			k.Fatalf("%s is not discovered", l.gv)
		}
	}
	list, err := k.api.Discovery().ServerResourcesForGroupVersion(l.gv)
	if err != nil {
		k.Fatal(err)
	}
	find := func(name string) *metav1.APIResource {
		for i := range list.APIResources {
			if list.APIResources[i].Name == name {
				return &list.APIResources[i]
			}
		}
		k.Fatalf("%s of %s is not discovered", name, l.gv)
		return nil
	}
	for _, verb := range []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"} {
		if r := find(l.res); !slices.Contains(r.Verbs, verb) {
			k.Errorf("%s has the verbs %q", l.res, r.Verbs)
		}
	}
	if l.status != "" {
		k.is("verbs of the status", fmt.Sprint(slices.Sorted(slices.Values(find(l.res+"/status").Verbs))), "[get patch update]")
	}
}

// seen waits for an event about the object.
func (k *kit) seen(w watch.Interface, kind watch.EventType, name string) {
	k.Helper()
	for {
		select {
		case e, open := <-w.ResultChan():
			if !open {
				k.Fatalf("the watch ended before %s %s", name, kind)
			}
			if o, ok := e.Object.(*unstructured.Unstructured); ok && e.Type == kind && o.GetName() == name {
				return
			}
		case <-k.Context().Done():
			k.Fatalf("%s %s was not seen", name, kind)
		}
	}
}

// statusKept patches and updates the status subresource, and reads it.
func (k *kit) statusKept(objects dynamic.ResourceInterface, name string, l kindLife) {
	k.Helper()
	status := func(o *unstructured.Unstructured) string {
		b, err := json.Marshal(o.Object["status"])
		if err != nil {
			k.Fatal(err)
		}
		return string(b)
	}
	check := func(what string, o *unstructured.Unstructured) {
		k.Helper()
		if got := status(o); !strings.Contains(got, l.kept) {
			k.Errorf("%s: the status is %s, want %s in it", what, got, l.kept)
		}
	}
	k.eventually("its controller has written "+l.settled, func(ctx context.Context) error {
		o, err := objects.Get(ctx, name, metav1.GetOptions{})
		if err == nil && !strings.Contains(status(o), l.settled) {
			err = errors.New(status(o))
		}
		return err
	})
	o, err := objects.Patch(k.Context(), name, types.MergePatchType, []byte(l.status), metav1.PatchOptions{}, "status")
	if err != nil {
		k.Fatalf("patch the status: %v", err)
	}
	check("patched", o)
	k.eventually("the status is updated", func(ctx context.Context) error {
		o, err := objects.Get(ctx, name, metav1.GetOptions{}, "status")
		if err != nil {
			return err
		}
		check("read", o)
		if len(o.GetAnnotations()) == 0 {
			return errors.New("the main resource's annotations are not shown")
		}
		// An update through /status changes the status alone.
		annotations := o.GetAnnotations()
		annotations["through-status"] = "yes"
		o.SetAnnotations(annotations)
		updated, err := objects.UpdateStatus(ctx, o, metav1.UpdateOptions{})
		if err == nil {
			check("updated", updated)
		}
		return err
	})
}

// namespaces are taken through what only they have.
func (k *kit) namespaces() {
	features.Conforms(k, 68, 69, 70, 72, 73)
	namespaces := k.api.CoreV1().Namespaces()
	k.ok("create", "namespace", "life-ns")
	k.ok("create", "service", "clusterip", "svc", "--tcp=80", "-n", "life-ns")
	k.is("phase", k.field("namespace/life-ns", "{.status.phase}"), "Active")
	k.ok("patch", "namespace", "life-ns", "-p", `{"metadata":{"labels":{"patched":"yes"}}}`)
	k.is("label", k.field("namespace/life-ns", "{.metadata.labels.patched}"), "yes")
	condition := `{"type":"Tried","status":"True","reason":"ByTest","message":"m"}`
	if _, err := namespaces.Patch(k.Context(), "life-ns", types.MergePatchType, []byte(`{"status":{"conditions":[`+condition+`]}}`), metav1.PatchOptions{}, "status"); err != nil {
		k.Fatal(err)
	}
	k.eventually("label and status are updated", func(ctx context.Context) error {
		ns, err := namespaces.Get(ctx, "life-ns", metav1.GetOptions{})
		if err != nil {
			return err
		}
		k.is("patched condition", string(ns.Status.Conditions[0].Type), "Tried")
		ns.Labels["updated"] = "yes"
		if ns, err = namespaces.Update(ctx, ns, metav1.UpdateOptions{}); err != nil {
			return err
		}
		ns.Status.Conditions[0].Reason = "Again"
		_, err = namespaces.UpdateStatus(ctx, ns, metav1.UpdateOptions{})
		return err
	})
	k.is("label and condition", k.field("namespace/life-ns", "{.metadata.labels.updated} {.status.conditions[0].reason} {.status.phase}"), "yes Again Active")
	finalize := func(name string, on bool) {
		k.Helper()
		k.eventually("the finalizer is written", func(ctx context.Context) error {
			ns, err := namespaces.Get(ctx, "life-ns", metav1.GetOptions{})
			if err != nil {
				return err
			}
			ns.Spec.Finalizers = slices.DeleteFunc(ns.Spec.Finalizers, func(f corev1.FinalizerName) bool { return string(f) == name })
			if on {
				ns.Spec.Finalizers = append(ns.Spec.Finalizers, corev1.FinalizerName(name))
			}
			_, err = namespaces.Finalize(ctx, ns, metav1.UpdateOptions{})
			return err
		})
	}
	finalize("example.com/test", true)
	k.has(k.field("namespace/life-ns", "{.spec.finalizers}"), "example.com/test")
	finalize("example.com/test", false)
	k.lacks(k.field("namespace/life-ns", "{.spec.finalizers}"), "example.com/test")
	k.ok("delete", "namespace", "life-ns", timeoutFlag)
	k.ok("create", "namespace", "life-ns")
	k.is("services of the new one", k.ok("get", "services", "-n", "life-ns", "-o", "name"), "")
	k.ok("delete", "namespace", "life-ns", "--wait=false")
}
