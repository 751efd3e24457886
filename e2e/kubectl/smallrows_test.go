package kubectl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXSmallRows are looks at one thing each.
func TestE2EXSmallRows(t *testing.T) {
	t.Parallel()
	k := start(t, "smallrows")
	k.sub("apply --prune", func(k *kit) {
		features.Shows(k, 10)
		cm := func(name string) string {
			return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + name + ", labels: {app: pruned}}\n---\n"
		}
		k.okIn(cm("kept")+cm("dropped"), "apply", "-f", "-")
		k.okIn("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: unlabelled}\n", "apply", "-f", "-")
		k.has(k.failsIn(cm("kept"), "apply", "--prune", "-f", "-"), "all resources selected for prune without explicitly passing --all")
		k.has(k.okIn(cm("kept"), "apply", "-l", "app=pruned", "--prune", "--prune-allowlist=core/v1/ConfigMap", "-f", "-"), "configmap/dropped pruned")
		k.is("what is left", strings.Join(strings.Fields(k.ok("get", "cm", "-o", "name", "--field-selector=metadata.name!=kube-root-ca.crt")), " "), "configmap/kept configmap/unlabelled")
	})
	k.sub("metrics of pods", func(k *kit) {
		features.Shows(k, 203, 204)
		counts := func() (started, containers string) {
			for _, line := range strings.Split(k.ok("get", "--raw", "/api/v1/nodes/"+node+"/proxy/metrics"), "\n") {
				switch name, value, _ := strings.Cut(line, " "); name {
				case "kubelet_pod_start_duration_seconds_count":
					started = value
				case "kubelet_containers_per_pod_count_count":
					containers = value
				}
			}
			return started, containers
		}
		started, containers := counts()
		k.apply(simple("counted", "sleep"))
		k.ready("counted")
		k.eventually("both count", func(context.Context) error {
			if s, c := counts(); s == started || c == containers || s == "" || c == "" {
				return fmt.Errorf("pods started %q, then %q; containers of pods %q, then %q", started, s, containers, c)
			}
			return nil
		})
	})
	k.sub("the log's first lines", func(k *kit) {
		features.Shows(k, 150)
		r, err := k.c.Logs(node)
		if err != nil {
			k.Fatal(err)
		}
		defer r.Close()
		log, err := io.ReadAll(r)
		if err != nil {
			k.Fatal(err)
		}
		k.has(string(log), `msg="clusterd runs"`, "version=v", "go=go1.", "procs=", "gogc=")
	})
	k.sub("kinds of volumes", func(k *kit) {
		features.Shows(k, 248)
		k.ok("create", "configmap", "c", "--from-literal=f=config")
		k.ok("create", "secret", "generic", "s", "--from-literal=f=secret")
		folder := filepath.Join(k.dir, "local")
		if err := errors.Join(os.Mkdir(folder, 0o755), os.WriteFile(filepath.Join(folder, "f"), []byte("local"), 0o644)); err != nil {
			k.Fatal(err)
		}
		k.okIn(fmt.Sprintf(`apiVersion: v1
kind: PersistentVolume
metadata: {name: small-local}
spec:
  storageClassName: small-local
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  local: {path: %q}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%s]}]}]}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: small-local}
spec: {storageClassName: small-local, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
`, folder, node), "create", "-f", "-")
		k.apply(strings.Replace(simple("mounts", "sleep", "volumes:",
			"- {name: empty, emptyDir: {}}", "- {name: host, hostPath: {path: "+folder+"}}", "- {name: config, configMap: {name: c}}", "- {name: secret, secret: {secretName: s}}",
			"- {name: projected, projected: {sources: [{configMap: {name: c}}]}}", "- {name: down, downwardAPI: {items: [{path: f, fieldRef: {fieldPath: metadata.name}}]}}",
			"- {name: local, persistentVolumeClaim: {claimName: small-local}}", "- {name: image, image: {reference: \""+image+"\", pullPolicy: Never}}"),
			"args:", "volumeMounts: [{name: empty, mountPath: /m/empty}, {name: host, mountPath: /m/host}, {name: config, mountPath: /m/config}, {name: secret, mountPath: /m/secret}, {name: projected, mountPath: /m/projected}, {name: down, mountPath: /m/down}, {name: local, mountPath: /m/local}, {name: image, mountPath: /m/image}], args:", 1))
		k.ready("mounts")
		for path, want := range map[string]string{"host/f": "local", "config/f": "config", "secret/f": "secret", "projected/f": "config", "down/f": "mounts", "local/f": "local"} {
			k.is(path, k.exec("mounts", "main", "cat", "/m/"+path), want)
		}
		k.exec("mounts", "main", "stat", "/m/image/hello")
		k.has(k.exec("mounts", "main", "stat", "/m/empty"), "drwxrwxrwx")
		k.ok("delete", "pod", "mounts")
		k.ok("delete", "pvc/small-local", "pv/small-local", "--wait=false")
	})
}
