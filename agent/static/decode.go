package static

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/core"
)

// Annotations of static pods; the same as the kubelet's, as tools look for
// them.
const (
	// SourceAnnotation is "file" or "http".
	SourceAnnotation = "kubernetes.io/config.source"
	// HashAnnotation is the pod's UID on its node: a fingerprint of what was
	// read.
	HashAnnotation = "kubernetes.io/config.hash"
)

// decode reads the pods of a text: YAML documents or JSON, each a Pod or a
// list of Pods. Each pod is completed, made this node's, and checked.
func decode(text, where, source, node string) ([]*v1.Pod, error) {
	var out []*v1.Pod
	names := map[string]bool{}
	docs := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
	for {
		var raw json.RawMessage
		err := docs.Decode(&raw)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("it is neither YAML nor JSON: %w", err)
		}
		if raw = bytes.TrimSpace(raw); len(raw) == 0 || string(raw) == "null" {
			continue
		}
		pods, err := podsOf(raw)
		if err != nil {
			return nil, err
		}
		for _, p := range pods {
			if err := complete(p, where, source, node); err != nil {
				return nil, err
			}
			name := p.Namespace + "/" + p.Name
			if names[name] {
				return nil, fmt.Errorf("pod %s is in it twice", name)
			}
			names[name] = true
			out = append(out, p)
		}
	}
	return out, nil
}

// podsOf reads a Pod, a PodList or a List of Pods.
func podsOf(raw []byte) ([]*v1.Pod, error) {
	var kind metav1.TypeMeta
	if err := json.Unmarshal(raw, &kind); err != nil {
		return nil, fmt.Errorf("apiVersion and kind are required: %w", err)
	}
	switch kind.APIVersion + " " + kind.Kind {
	case "v1 Pod":
		var p v1.Pod
		if err := yaml.UnmarshalStrict(raw, &p); err != nil {
			return nil, plain(err)
		}
		return []*v1.Pod{&p}, nil
	case "v1 PodList", "v1 List":
		var list struct {
			metav1.TypeMeta
			Metadata metav1.ListMeta   `json:"metadata"`
			Items    []json.RawMessage `json:"items"`
		}
		if err := yaml.UnmarshalStrict(raw, &list); err != nil {
			return nil, plain(err)
		}
		var out []*v1.Pod
		for i, item := range list.Items {
			if kind.Kind == "PodList" { // its items need not repeat their kind
				var fields map[string]json.RawMessage
				if err := json.Unmarshal(item, &fields); err != nil {
					return nil, fmt.Errorf("items[%d]: %w", i, err)
				}
				fields["apiVersion"], fields["kind"] = json.RawMessage(`"v1"`), json.RawMessage(`"Pod"`)
				var err error
				if item, err = json.Marshal(fields); err != nil {
					return nil, fmt.Errorf("items[%d]: %w", i, err)
				}
			}
			pods, err := podsOf(item)
			if err != nil {
				return nil, fmt.Errorf("items[%d]: %w", i, err)
			}
			out = append(out, pods...)
		}
		return out, nil
	}
	return nil, fmt.Errorf("apiVersion %q, kind %q: only v1 Pod, PodList and List of Pods can be static", kind.APIVersion, kind.Kind)
}

// plain takes the library's own words off an error.
func plain(err error) error {
	return errors.New(strings.TrimPrefix(strings.TrimPrefix(err.Error(), "error unmarshaling JSON: "), "while decoding JSON: "))
}

// complete makes a pod this node's: defaults, name, UID, node; then checks it.
func complete(p *v1.Pod, where, source, node string) error {
	if p.Name == "" {
		return errors.New("metadata.name: Required value")
	}
	given := p.Name
	p.Status = v1.PodStatus{}
	p.ObjectMeta = metav1.ObjectMeta{
		Name: p.Name, Namespace: p.Namespace, Labels: p.Labels, Annotations: p.Annotations,
	}
	if p.Namespace == "" {
		p.Namespace = metav1.NamespaceDefault
	}
	if p.Spec.NodeName != "" && p.Spec.NodeName != node {
		return fmt.Errorf("pod %s: spec.nodeName %q: this node is %q; leave the field out", given, p.Spec.NodeName, node)
	}
	content, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("pod %s: %w", given, err)
	}
	sum := sha256.Sum256(fmt.Appendf(content, "\x00%s\x00%s", node, where))
	p.UID = types.UID(hex.EncodeToString(sum[:16]))
	p.Name += "-" + strings.ToLower(node)
	p.Spec.NodeName = node
	// Only the file's owner takes it away.
	p.Spec.Tolerations = append(p.Spec.Tolerations, v1.Toleration{Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoExecute})
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[SourceAnnotation], p.Annotations[HashAnnotation] = source, string(p.UID)
	p.Status.Phase = v1.PodPending

	kind := core.Pod()
	kind.Default(p)
	if errs := kind.Validate(p); len(errs) > 0 {
		return fmt.Errorf("pod %s: %w", given, errs.ToAggregate())
	}
	if ref := apiReference(&p.Spec); ref != "" {
		return fmt.Errorf("pod %s: %s: a static pod cannot refer to objects of the API, it must run without it", given, ref)
	}
	return nil
}

// apiReference is the first field of the spec that names an object of the
// API, "": none does.
func apiReference(spec *v1.PodSpec) string {
	switch {
	case spec.ServiceAccountName != "":
		return fmt.Sprintf("spec.serviceAccountName %q", spec.ServiceAccountName)
	case len(spec.ImagePullSecrets) > 0:
		return fmt.Sprintf("spec.imagePullSecrets[0] %q", spec.ImagePullSecrets[0].Name)
	case len(spec.ResourceClaims) > 0:
		return fmt.Sprintf("spec.resourceClaims[0] %q", spec.ResourceClaims[0].Name)
	case len(spec.EphemeralContainers) > 0:
		return "spec.ephemeralContainers"
	}
	for i, v := range spec.Volumes {
		what := ""
		switch s := v.VolumeSource; {
		case s.Secret != nil:
			what = fmt.Sprintf("secret %q", s.Secret.SecretName)
		case s.ConfigMap != nil:
			what = fmt.Sprintf("configMap %q", s.ConfigMap.Name)
		case s.PersistentVolumeClaim != nil:
			what = fmt.Sprintf("persistentVolumeClaim %q", s.PersistentVolumeClaim.ClaimName)
		case s.Ephemeral != nil:
			what = "ephemeral"
		case s.CSI != nil && s.CSI.NodePublishSecretRef != nil:
			what = fmt.Sprintf("csi.nodePublishSecretRef %q", s.CSI.NodePublishSecretRef.Name)
		case s.Projected != nil:
			for j, p := range s.Projected.Sources {
				if p.DownwardAPI == nil {
					what = fmt.Sprintf("projected.sources[%d]", j)
				}
			}
		}
		if what != "" {
			return fmt.Sprintf("spec.volumes[%d].%s", i, what)
		}
	}
	for _, list := range []struct {
		name       string
		containers []v1.Container
	}{{"initContainers", spec.InitContainers}, {"containers", spec.Containers}} {
		for i, c := range list.containers {
			at := fmt.Sprintf("spec.%s[%d]", list.name, i)
			if len(c.EnvFrom) > 0 {
				return at + ".envFrom[0]"
			}
			for j, e := range c.Env {
				if f := e.ValueFrom; f != nil && (f.ConfigMapKeyRef != nil || f.SecretKeyRef != nil) {
					return fmt.Sprintf("%s.env[%d] (%s)", at, j, e.Name)
				}
			}
		}
	}
	return ""
}

// IsUID reports whether a UID is one that a pod from a file or a URL has on its
// node: 32 hexadecimal digits. The API server's have hyphens (RFC 9562).
func IsUID(uid types.UID) bool {
	sum, err := hex.DecodeString(string(uid))
	return err == nil && len(sum) == 16
}
