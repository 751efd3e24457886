package apis

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"github.com/clusterd/clusterd/apis/openapi"
)

var update = flag.Bool("update", false, "write testdata/*.golden.yaml instead of comparing with them")

// now is when the tables of the tests are printed.
var now = time.Date(2026, 1, 2, 3, 9, 5, 0, time.UTC)

// golden reads testdata/<kind>.yaml, an object as a user writes it, without
// defaulting it.
func golden(t *testing.T, k Kind) runtime.Object {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", k.GVK.Kind+".yaml"))
	if err != nil {
		t.Fatalf("every kind needs a golden object: %v", err)
	}
	strict := serializer.NewCodecFactory(Scheme, serializer.EnableStrict)
	obj, gvk, err := strict.UniversalDeserializer().Decode(text, nil, nil)
	if err != nil {
		t.Fatalf("decode: %v", err)
	}
	if *gvk != k.GVK {
		t.Fatalf("is a %s, want %s", gvk, k.GVK)
	}
	return obj
}

// eachKind runs f on every kind and a defaulted golden object of it.
func eachKind(t *testing.T, f func(t *testing.T, k Kind, obj runtime.Object)) {
	for _, k := range Kinds() {
		t.Run(k.GVK.Kind, func(t *testing.T) {
			obj := golden(t, k)
			Scheme.Default(obj)
			f(t, k, obj)
		})
	}
}

func TestKindsAreWhole(t *testing.T) {
	seen := map[schema.GroupResource]bool{}
	for _, k := range Kinds() {
		t.Run(k.GVK.Kind, func(t *testing.T) {
			resource := schema.GroupResource{Group: k.GVK.Group, Resource: k.Resource}
			if seen[resource] {
				t.Errorf("resource %s is served twice", resource)
			}
			seen[resource] = true
			if k.Resource == "" || k.Singular == "" {
				t.Errorf("resource %q, singular %q: both are needed", k.Resource, k.Singular)
			}
			if k.New == nil || k.NewList == nil || k.Validate == nil || k.ValidateUpdate == nil || k.Row == nil {
				t.Fatal("New, NewList, Validate, ValidateUpdate and Row are needed")
			}
			for _, obj := range []struct {
				obj  runtime.Object
				kind string
			}{{k.New(), k.GVK.Kind}, {k.NewList(), k.GVK.Kind + "List"}} {
				gvks, _, err := Scheme.ObjectKinds(obj.obj)
				if err != nil || gvks[0].Kind != obj.kind || gvks[0].Group != k.GVK.Group {
					t.Errorf("%T is registered as %v, %v; want kind %s", obj.obj, gvks, err, obj.kind)
				}
			}
			if !meta.IsListType(k.NewList()) {
				t.Errorf("%T is no list", k.NewList())
			}
			if len(k.Columns) == 0 {
				t.Error("no columns")
			}
			// An empty object must not make it panic: printers meet them.
			if got := len(k.Row(k.New(), now)); got != len(k.Columns) {
				t.Errorf("row of an empty object has %d cells, want %d", got, len(k.Columns))
			}
		})
	}
}

func TestRoundTrip(t *testing.T) {
	eachKind(t, func(t *testing.T, k Kind, obj runtime.Object) {
		for _, mediaType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeYAML, runtime.ContentTypeProtobuf} {
			info, ok := runtime.SerializerInfoForMediaType(Codecs.SupportedMediaTypes(), mediaType)
			if !ok {
				t.Errorf("%s is not supported", mediaType)
				continue
			}
			codec := Codecs.CodecForVersions(info.Serializer, info.Serializer, k.GVK.GroupVersion(), schema.GroupVersion{Group: k.GVK.Group, Version: runtime.APIVersionInternal})
			data, err := runtime.Encode(codec, obj)
			if err != nil {
				t.Errorf("encode as %s: %v", mediaType, err)
				continue
			}
			back, err := runtime.Decode(codec, data)
			if err != nil {
				t.Errorf("decode from %s: %v", mediaType, err)
				continue
			}
			// The internal version is the same Go type without a stamp.
			want := obj.DeepCopyObject()
			want.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
			back.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
			if !equality.Semantic.DeepEqual(want, back) {
				t.Errorf("through %s (-want +got):\n%s", mediaType, cmp.Diff(want, back))
			}
		}
	})
}

func TestDefaultsGolden(t *testing.T) {
	eachKind(t, func(t *testing.T, k Kind, obj runtime.Object) {
		info, _ := runtime.SerializerInfoForMediaType(Codecs.SupportedMediaTypes(), runtime.ContentTypeYAML)
		got, err := runtime.Encode(Codecs.EncoderForVersion(info.Serializer, k.GVK.GroupVersion()), obj)
		if err != nil {
			t.Fatalf("encode: %v", err)
		}
		path := filepath.Join("testdata", k.GVK.Kind+".golden.yaml")
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
			return
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("defaulted object (-want +got), see -update:\n%s", diff)
		}
	})
}

func TestDefaultsAreIdempotent(t *testing.T) {
	eachKind(t, func(t *testing.T, k Kind, once runtime.Object) {
		twice := once.DeepCopyObject()
		Scheme.Default(twice)
		if diff := cmp.Diff(once, twice); diff != "" {
			t.Errorf("defaulting again changes it:\n%s", diff)
		}
	})
}

func TestDefaultsReachListItems(t *testing.T) {
	eachKind(t, func(t *testing.T, k Kind, want runtime.Object) {
		list := k.NewList()
		if err := meta.SetList(list, []runtime.Object{golden(t, k)}); err != nil {
			t.Fatal(err)
		}
		Scheme.Default(list)
		items, err := meta.ExtractList(list)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, items[0]); diff != "" {
			t.Errorf("item of a defaulted list (-want +got):\n%s", diff)
		}
	})
}

func TestGoldenObjectsAreValid(t *testing.T) {
	eachKind(t, func(t *testing.T, k Kind, obj runtime.Object) {
		if errs := k.Validate(obj); len(errs) > 0 {
			t.Errorf("validate: %v", errs.ToAggregate())
		}
		accessor, err := meta.Accessor(obj)
		if err != nil {
			t.Fatal(err)
		}
		accessor.SetResourceVersion("7")
		again := obj.DeepCopyObject()
		if k.PrepareUpdate != nil {
			k.PrepareUpdate(again, obj)
		}
		if errs := k.ValidateUpdate(again, obj); len(errs) > 0 {
			t.Errorf("validate an update that changes nothing: %v", errs.ToAggregate())
		}
		if diff := cmp.Diff(obj, again); diff != "" {
			t.Errorf("an update that changes nothing changes:\n%s", diff)
		}
		if k.Status == nil {
			return
		}
		k.Status.PrepareUpdate(again, obj)
		if errs := k.Status.ValidateUpdate(again, obj); len(errs) > 0 {
			t.Errorf("validate a status update that changes nothing: %v", errs.ToAggregate())
		}
		if diff := cmp.Diff(obj, again); diff != "" {
			t.Errorf("a status update that changes nothing changes:\n%s", diff)
		}
	})
}

func TestRows(t *testing.T) {
	want := map[string][]any{
		"Namespace":               {"hello", "Active", "<unknown>"},
		"Node":                    {"n1", "Ready,SchedulingDisabled", "control-plane", "<unknown>", "v1.37.2", "192.0.2.11", "<none>", "Debian GNU/Linux 12", "6.18.0", "podmon://1"},
		"Pod":                     {"web", "1/2", "Running", "2 (5m1s ago)", "<unknown>", "10.42.0.7", "<none>", "<none>", "<none>"},
		"ConfigMap":               {"web", int64(2), "<unknown>"},
		"Secret":                  {"web", "Opaque", int64(2), "<unknown>"},
		"ServiceAccount":          {"web", int64(0), "<unknown>"},
		"Service":                 {"web", "LoadBalancer", "10.43.0.10", "192.0.2.80", "80:30080/TCP,53/UDP", "<unknown>", "app=web"},
		"Event":                   {"3m", "Warning", "BackOff", "pod/web", "spec.containers{web}", "agent, n1", "Back-off restarting failed container", "5m", int64(7), "web.1"},
		"LimitRange":              {"bounds", "<unknown>"},
		"ResourceQuota":           {"team", "", "", "<unknown>"},
		"ReplicaSet":              {"web-5f7d", int64(1), int64(1), int64(1), "<unknown>", "web", "web:latest", "app=web,pod-template-hash=5f7d"},
		"Deployment":              {"web", "2/1", int64(2), int64(1), "<unknown>", "web", "web:1.2", "app=web"},
		"StatefulSet":             {"db", "2/3", "<unknown>", "db", "db:15"},
		"DaemonSet":               {"logs", int64(3), int64(3), int64(2), int64(3), int64(2), "disk=ssd", "<unknown>", "logs", "logs:2", "app=logs"},
		"HorizontalPodAutoscaler": {"web", "Deployment/web", "cpu: 42%/50%, memory: <unknown>/200Mi", "1", int64(10), int64(3), "<unknown>"},
		"Job":                     {"pi", "Running", "1/3", "", "<unknown>", "pi", "perl:5", "app=pi"},
		"CronJob":                 {"night", "30 3 * * *", "Europe/Berlin", false, int64(0), "<none>", "<unknown>", "night", "night:1", "<none>"},
		"Lease":                   {"n1", "n1", "<unknown>"},

		"ControllerRevision":               {"db-6c5b", "statefulset.apps/db", int64(3), "<unknown>"},
		"Endpoints":                        {"web", "10.42.0.7:8080,10.42.1.7:8080,[fd00::7]:8080 + 1 more...", "<unknown>"},
		"EndpointSlice":                    {"web-x7", "IPv4", "8080,53", "10.42.0.7,10.42.1.7,10.42.2.7 + 1 more...", "<unknown>"},
		"PodDisruptionBudget":              {"web", "N/A", "30%", int64(1), "<unknown>"},
		"RuntimeClass":                     {"usual", "runc", "<unknown>"},
		"Role":                             {"reader", "<unknown>"},
		"RoleBinding":                      {"readers", "Role/reader", "<unknown>", "ann, bob", "", "hello/web"},
		"ClusterRole":                      {"system:monitoring", "<unknown>"},
		"ClusterRoleBinding":               {"monitoring", "ClusterRole/system:monitoring", "<unknown>", "", "ops", ""},
		"PersistentVolume":                 {"disk", "10Gi", "RWO", "Retain", "Pending", "hello/data", "local", "<unset>", "", "<unknown>", "Filesystem"},
		"PersistentVolumeClaim":            {"data", "Bound", "disk", "10Gi", "RWO", "local", "<unset>", "<unknown>", "Filesystem"},
		"StorageClass":                     {"local (default)", "example.com/local", "Delete", "WaitForFirstConsumer", true, "<unknown>"},
		"VolumeAttachment":                 {"disk-n1", "disks.example.com", "disk", "n1", false, "<unknown>"},
		"VolumeAttributesClass":            {"gold", "disks.example.com", "<unknown>"},
		"CSIDriver":                        {"disks.example.com", true, true, false, "vault", false, "Persistent", "<unknown>"},
		"CSINode":                          {"n1", int64(1), "<unknown>"},
		"CSIStorageCapacity":               {"fast-n1", "local", "100Gi"},
		"PodGroup":                         {"train-workers", "Gang(4)", "False", "<unknown>", "train"},
		"Workload":                         {"train", "workers:Gang(4),driver:Basic", "<unknown>", "Job/train"},
		"StorageVersionMigration":          {"ovens", "ovens.kitchen.example.com", "Running"},
		"Ingress":                          {"web", "proxy", "web.example.com", "", "80, 443", "<unknown>"},
		"IngressClass":                     {"proxy", "example.com/proxy", "Proxy.example.com/outer", "<unknown>"},
		"IPAddress":                        {"192.0.2.7", "services/default/web", "<unknown>"},
		"ServiceCIDR":                      {"more", "192.0.2.0/24,2001:db8::/108", "<unknown>"},
		"PodTemplate":                      {"web", "main", "web:1", "app=web"},
		"ReplicationController":            {"web", int64(2), int64(2), int64(1), "<unknown>", "main", "web:1", "app=web"},
		"ValidatingWebhookConfiguration":   {"colours", int64(1), "<unknown>"},
		"MutatingWebhookConfiguration":     {"sidecars", int64(1), "<unknown>"},
		"ValidatingAdmissionPolicy":        {"replicas", int64(1), "v1/ConfigMap", "<unknown>"},
		"ValidatingAdmissionPolicyBinding": {"replicas", "replicas", "hello/limits", "<unknown>"},
		"MutatingAdmissionPolicy":          {"labels", int64(1), "<unset>", "<unknown>"},
		"MutatingAdmissionPolicyBinding":   {"labels", "labels", "<unset>", "<unknown>"},
		"DeviceClass":                      {"gpu", "<unknown>"},
		"DeviceTaintRule":                  {"hot-gpus", "gpu.example.com/hot", "yes", "NoExecute", "5m", "<unknown>"},
		"ResourceClaim":                    {"one-gpu", "allocated,reserved", "<unknown>"},
		"ResourceClaimTemplate":            {"one-gpu", "<unknown>"},
		"ResourceSlice":                    {"n1-gpus", "n1", "gpu.example.com", "n1", "<unknown>"},
		"PriorityClass":                    {"important", int64(1000), false, "<unknown>", "PreemptLowerPriority"},
		"NetworkPolicy":                    {"web", "app=web", "<unknown>"},
		"PodCertificateRequest":            {"req-7x2lq", "web", "web", "n1", "example.com/lab", "Pending", "<unknown>"},
		"ClusterTrustBundle":               {"example.com:lab:v1", "example.com/lab", "<unknown>"},
		"CertificateSigningRequest":        {"jane", "<unknown>", "kubernetes.io/kube-apiserver-client", "admin", "24h", "Approved"},
		"FlowSchema":                       {"reports", "slow", int64(1000), "ByUser", "<unknown>", "?"},
		"PriorityLevelConfiguration":       {"slow", "Limited", "30", "64", "8", "50", "<unknown>"},
	}
	eachKind(t, func(t *testing.T, k Kind, obj runtime.Object) {
		row := k.Row(obj, now)
		if len(row) != len(k.Columns) {
			t.Fatalf("%d cells for %d columns", len(row), len(k.Columns))
		}
		for i, cell := range row {
			// What else a cell may hold, JSON's deep copy panics on.
			want := "none that JSON has"
			switch cell.(type) {
			case string:
				want = "string"
			case int64:
				want = "integer"
			case bool:
				want = "boolean"
			}
			if got := k.Columns[i].Type; got != want && !(got == "date" && want == "string") {
				t.Errorf("column %s is of type %s, its cell (%T) of type %s", k.Columns[i].Name, got, cell, want)
			}
		}
		if diff := cmp.Diff(want[k.GVK.Kind], row); diff != "" {
			t.Errorf("row (-want +got):\n%s", diff)
		}
	})
}

func TestOpenAPIHasEveryKind(t *testing.T) {
	definitions := openapi.GetOpenAPIDefinitions(func(path string) spec.Ref { return spec.MustCreateRef("#/definitions/" + path) })
	for _, k := range Kinds() {
		for _, obj := range []runtime.Object{k.New(), k.NewList()} {
			name := obj.(interface{ OpenAPIModelName() string }).OpenAPIModelName()
			if _, ok := definitions[name]; !ok {
				t.Errorf("no definition of %s: add its package to apis/openapi", name)
			}
		}
	}
}
