package tools

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const (
	hostpath     = "hostpath.csi.k8s.io"
	hostpathNode = "topology.hostpath.csi/node"
)

// driver is upstream's hostpath driver with its sidecars, in pods of the test's namespace.
type driver struct {
	*kit
	kubelet string // the node's directory for drivers and volumes
	disks   string // the driver's volumes
}

// TestE2ECSIHostPath runs upstream's CSI driver for tests with upstream's sidecars
// and snapshot controller, as they are published, and follows volumes of each kind.
func TestE2ECSIHostPath(t *testing.T) {
	images := os.Getenv("CLUSTERD_CSI")
	if images == "" {
		t.Skip("needs root and upstream's CSI sidecars: make csi-test")
	}
	k := start(t, "tools-csi")
	d := &driver{kit: k, kubelet: filepath.Join(k.c.Nodes()[0].Data, "kubelet"), disks: filepath.Join(t.TempDir(), "disks")}
	t.Cleanup(func() {
		if t.Failed() {
			d.state()
		}
	})
	d.share()
	d.install(images)
	d.registered()
	d.provisioned()
	d.capacity()
	d.grows()
	d.snapshots()
	d.clones()
	d.modified()
	d.raw()
	d.inline()
	d.driverRestarts()
	d.nodeRestarts()
	d.detaches()
	d.nothingLeft()
	d.uninstalled()
	d.ok("clusterctl", "delete", "-f", filepath.Join(images, "crds"), "--timeout="+testTimeout.String())
}

// share makes the node's directory for drivers a shared mount, as / is on a machine
// with systemd: what the driver mounts in its pod is then seen by the node.
func (d *driver) share() {
	d.Helper()
	if err := unix.Mount(d.kubelet, d.kubelet, "", unix.MS_BIND, ""); err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() {
		if err := unix.Unmount(d.kubelet, unix.MNT_DETACH); err != nil { // after a failed test the driver may still be there
			d.Error(err)
		}
	})
	if err := unix.Mount("", d.kubelet, "", unix.MS_SHARED, ""); err != nil {
		d.Fatal(err)
	}
}

// install loads the images and applies what upstream publishes and the manifest.
func (d *driver) install(images string) {
	d.Helper()
	archives, err := filepath.Glob(filepath.Join(images, "*.tar"))
	if err != nil || len(archives) != 8 {
		d.Fatalf("%d images in %s (%v), want 8: make csi-programs", len(archives), images, err)
	}
	for _, a := range archives {
		d.ok("clusterctl", "image", "load", a)
	}
	d.ok("clusterctl", "apply", "-f", filepath.Join(images, "crds"))
	for _, plural := range []string{"volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses"} {
		d.eventuallyIs("crd/"+plural+".snapshot.storage.k8s.io", `{.status.conditions[?(@.type=="Established")].status}`, "True")
	}
	roles, err := filepath.Glob(filepath.Join(images, "rbac", "*.yaml"))
	if err != nil || len(roles) != 5 {
		d.Fatalf("roles %q (%v), want those of five programs", roles, err)
	}
	for _, f := range roles {
		b, err := os.ReadFile(f)
		if err != nil {
			d.Fatal(err)
		}
		d.okIn(strings.NewReplacer("namespace: default", "namespace: "+d.ns, "namespace: kube-system", "namespace: "+d.ns).Replace(string(b)), "clusterctl", "apply", "-f", "-")
	}
	b, err := os.ReadFile("testdata/csi-hostpath.yaml")
	if err != nil {
		d.Fatal(err)
	}
	// Discovery knows of the kinds of snapshots a moment after they are established.
	d.eventuallyHas([]string{"statefulset.apps/hostpath", "volumesnapshotclass.snapshot.storage.k8s.io/"},
		strings.NewReplacer("${KUBELET}", d.kubelet, "${DISKS}", d.disks, "${NS}", d.ns).Replace(string(b)), "clusterctl", "apply", "-f", "-")
	d.ok("clusterctl", "rollout", "status", "statefulset/hostpath", "--timeout="+testTimeout.String())
	d.ok("clusterctl", "rollout", "status", "deployment/snapshot-controller", "--timeout="+testTimeout.String())
}

// registered waits until the registrar has brought the driver to the node.
func (d *driver) registered() {
	d.Helper()
	d.eventuallyIs("csinode/"+node, "{.spec.drivers[*].name} {.spec.drivers[*].nodeID} {.spec.drivers[*].topologyKeys}", fmt.Sprintf(`%s %s ["%s"]`, hostpath, node, hostpathNode))
	d.eventuallyIs("node/"+node, `{.metadata.labels.topology\.hostpath\.csi/node}`, node)
}

// claim is a manifest of a claim; more is further lines of its spec, in flow style.
func claim(name, size string, more ...string) string {
	spec := append([]string{"storageClassName: hostpath", "accessModes: [ReadWriteOnce]", "resources: {requests: {storage: " + size + "}}"}, more...)
	return fmt.Sprintf("---\n{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: %s}, spec: {%s}}\n", name, strings.Join(spec, ", "))
}

// user is a manifest of a pod that has a volume at /data, and no right to it but
// by its group.
func user(name, source string) string {
	return fmt.Sprintf("---\n{apiVersion: v1, kind: Pod, metadata: {name: %s}, spec: {securityContext: {fsGroup: 4321}, terminationGracePeriodSeconds: 1, "+
		"containers: [{name: main, image: %s, imagePullPolicy: Never, args: [sleep], volumeMounts: [{name: data, mountPath: /data}]}], volumes: [{name: data, %s}]}}\n", name, image, source)
}

func ofClaim(name string) string { return "persistentVolumeClaim: {claimName: " + name + "}" }

// apply applies manifests and waits until the pods are Ready.
func (d *driver) apply(manifest string, pods ...string) {
	d.Helper()
	d.okIn(manifest, "clusterctl", "apply", "-f", "-")
	for _, p := range pods {
		d.ok("clusterctl", "wait", "--for=condition=Ready", "pod/"+p, "--timeout="+testTimeout.String())
	}
}

func (d *driver) write(pod, path, words string) {
	d.Helper()
	d.ok("clusterctl", "exec", pod, "--", "/hello", "write", path, words)
}

func (d *driver) reads(pod, path, words string) {
	d.Helper()
	if got := d.ok("clusterctl", "exec", pod, "--", "/hello", "cat", path); !strings.HasPrefix(got, words) {
		d.Errorf("%s reads %.80q in %s, want %q", pod, got, path, words)
	}
}

// volume is the name of a bound claim's volume.
func (d *driver) volume(claim string) string {
	d.Helper()
	return d.field("pvc/"+claim, "{.spec.volumeName}")
}

// attachment is the state of the attachment of a claim's volume.
func (d *driver) attachment(ctx context.Context, volume string) (string, error) {
	list, err := d.api.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for _, a := range list.Items {
		if ptr.Deref(a.Spec.Source.PersistentVolumeName, "") == volume {
			return fmt.Sprintf("%s by %s: %v", a.Spec.NodeName, a.Spec.Attacher, a.Status.Attached), nil
		}
	}
	return "", nil
}

// provisioned: the claim waits for its first pod, then a volume is made where the
// pod is, attached, mounted with the pod's group, and written.
func (d *driver) provisioned() {
	d.Helper()
	d.okIn(claim("notes", "1Gi"), "clusterctl", "apply", "-f", "-")
	d.eventually("the claim waits for a pod", func(ctx context.Context) error {
		events, err := d.api.CoreV1().Events(d.ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=notes,reason=WaitForFirstConsumer"})
		if err == nil && len(events.Items) == 0 {
			err = fmt.Errorf("no event WaitForFirstConsumer")
		}
		return err
	})
	d.apply(user("writer", ofClaim("notes")), "writer")
	d.write("writer", "/data/note", "first")
	d.reads("writer", "/data/note", "first")
	pv := d.volume("notes")
	d.is("the volume", d.field("pv/"+pv, `{.spec.csi.driver} {.metadata.annotations.pv\.kubernetes\.io/provisioned-by} {.spec.persistentVolumeReclaimPolicy} {.spec.capacity.storage} {.status.phase}`),
		hostpath+" "+hostpath+" Delete 1Gi Bound")
	d.is("where it can be reached", d.field("pv/"+pv, "{.spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].key} {.spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].values[0]}"), hostpathNode+" "+node)
	if got, err := d.attachment(d.Context(), pv); err != nil || got != node+" by "+hostpath+": true" {
		d.Errorf("the attachment is %q (%v)", got, err)
	}
	d.has(d.ok("clusterctl", "exec", "writer", "--", "/hello", "stat", "/data"), "4321")
	d.eventually("the node's summary has the volume", func(context.Context) error {
		out, errs, code := d.run("", "clusterctl", "get", "--raw", "/api/v1/nodes/"+node+"/proxy/stats/summary")
		if code != 0 || !strings.Contains(strings.ReplaceAll(out, " ", ""), `"pvcRef":{"name":"notes"`) {
			return fmt.Errorf("exit %d: %s: no volume of claim notes", code, errs)
		}
		return nil
	})
}

// capacity: the provisioner publishes what room the driver has, less what is used.
func (d *driver) capacity() {
	d.Helper()
	d.eventually("the driver's room is published", func(ctx context.Context) error {
		list, err := d.api.StorageV1().CSIStorageCapacities(d.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, c := range list.Items {
			if c.StorageClassName == "hostpath" && c.Capacity != nil && c.Capacity.Cmp(resource.MustParse("9Gi")) == 0 {
				if len(c.OwnerReferences) != 1 || c.OwnerReferences[0].Kind != "StatefulSet" {
					return fmt.Errorf("its owners are %+v", c.OwnerReferences)
				}
				return nil
			}
		}
		return fmt.Errorf("%d capacities, none of 9Gi: %+v", len(list.Items), list.Items)
	})
	// A claim for more than that has no node.
	d.okIn(claim("huge", "100Gi")+user("huge", ofClaim("huge")), "clusterctl", "apply", "-f", "-")
	d.eventually("the pod is told that no node has so much room", func(ctx context.Context) error {
		p, err := d.api.CoreV1().Pods(d.ns).Get(ctx, "huge", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, "storage") {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", p.Status.Conditions)
	})
	d.ok("clusterctl", "delete", "pod/huge", "pvc/huge", "--timeout="+testTimeout.String())
}

// grows: the claim asks for more while a pod uses it.
func (d *driver) grows() {
	d.Helper()
	d.ok("clusterctl", "patch", "pvc/notes", "--type=merge", "-p", `{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}`)
	d.eventuallyIs("pvc/notes", "{.status.capacity.storage} {.status.conditions} {.status.allocatedResourceStatuses}", "2Gi  ")
	d.is("the volume's size", d.field("pv/"+d.volume("notes"), "{.spec.capacity.storage}"), "2Gi")
	d.reads("writer", "/data/note", "first")
}

// snapshots: what was there at a moment is there again in a new claim.
func (d *driver) snapshots() {
	d.Helper()
	d.okIn("{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: noon}, spec: {volumeSnapshotClassName: hostpath, source: {persistentVolumeClaimName: notes}}}", "clusterctl", "apply", "-f", "-")
	d.eventuallyIs("volumesnapshot/noon", "{.status.readyToUse} {.status.restoreSize}", "true 2Gi")
	d.write("writer", "/data/note", "second")
	d.apply(claim("restored", "2Gi", "dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: noon}")+user("restored", ofClaim("restored")), "restored")
	d.reads("restored", "/data/note", "first")
	d.reads("writer", "/data/note", "second")
}

// clones: a claim begins as another one is.
func (d *driver) clones() {
	d.Helper()
	d.apply(claim("cloned", "2Gi", "dataSource: {kind: PersistentVolumeClaim, name: notes}")+user("cloned", ofClaim("cloned")), "cloned")
	d.reads("cloned", "/data/note", "second")
	d.write("cloned", "/data/note", "third")
	d.reads("writer", "/data/note", "second")
}

// modified: a claim takes another class of attributes while it is used.
func (d *driver) modified() {
	d.Helper()
	d.ok("clusterctl", "patch", "pvc/notes", "--type=merge", "-p", `{"spec":{"volumeAttributesClassName":"silver"}}`)
	d.eventuallyIs("pvc/notes", "{.status.currentVolumeAttributesClassName} {.status.modifyVolumeStatus}", "silver ")
	d.is("the volume's class", d.field("pv/"+d.volume("notes"), "{.spec.volumeAttributesClassName}"), "silver")
}

// raw: a block device, which grows, too.
func (d *driver) raw() {
	d.Helper()
	device := strings.NewReplacer("volumeMounts: [{name: data, mountPath: /data}]", "securityContext: {runAsUser: 0}, volumeDevices: [{name: data, devicePath: /dev/disk}]").Replace(user("raw", ofClaim("raw")))
	d.apply(claim("raw", "1Mi", "volumeMode: Block")+device, "raw")
	d.write("raw", "/dev/disk", "blocks")
	d.reads("raw", "/dev/disk", "blocks")
	d.ok("clusterctl", "patch", "pvc/raw", "--type=merge", "-p", `{"spec":{"resources":{"requests":{"storage":"2Mi"}}}}`)
	d.eventuallyIs("pvc/raw", "{.status.capacity.storage} {.status.conditions}", "2Mi ")
	d.reads("raw", "/dev/disk", "blocks")
}

// inline: a volume of the pod's own, and one of a claim of its own, go with it.
func (d *driver) inline() {
	d.Helper()
	d.apply(user("inline", "csi: {driver: "+hostpath+", volumeAttributes: {kind: fast}}")+
		user("scratch", "ephemeral: {volumeClaimTemplate: {spec: {storageClassName: hostpath, accessModes: [ReadWriteOncePod], resources: {requests: {storage: 1Gi}}}}}"), "inline", "scratch")
	for _, pod := range []string{"inline", "scratch"} {
		d.write(pod, "/data/x", "mine")
		d.reads(pod, "/data/x", "mine")
	}
	d.ok("clusterctl", "delete", "pod/inline", "pod/scratch", "--timeout="+testTimeout.String())
	d.eventually("the claim goes with its pod", func(ctx context.Context) error {
		list, err := d.api.CoreV1().PersistentVolumeClaims(d.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, c := range list.Items {
			if c.Name == "scratch-data" {
				return fmt.Errorf("%s is %s, finalizers %v", c.Name, c.Status.Phase, c.Finalizers)
			}
		}
		return nil
	})
}

// driverRestarts: the driver's pod is replaced; volumes in use go on, and the next
// is mounted by the new one.
func (d *driver) driverRestarts() {
	d.Helper()
	before := d.field("pod/hostpath-0", "{.metadata.uid}")
	d.ok("clusterctl", "delete", "pod/hostpath-0", "--timeout="+testTimeout.String())
	d.eventually("another pod of the driver", func(ctx context.Context) error {
		p, err := d.api.CoreV1().Pods(d.ns).Get(ctx, "hostpath-0", metav1.GetOptions{})
		if err == nil && string(p.UID) == before {
			err = fmt.Errorf("it is still %s", before)
		}
		return err
	})
	d.reads("writer", "/data/note", "second")
	d.ok("clusterctl", "wait", "--for=condition=Ready", "pod/hostpath-0", "--timeout="+testTimeout.String())
	d.registered()
	d.apply(claim("after", "1Gi")+user("after", ofClaim("after")), "after")
	d.write("after", "/data/x", "after")
	d.reads("after", "/data/x", "after")
}

// nodeRestarts: clusterd is killed; volumes stay mounted and are let go by the next one.
func (d *driver) nodeRestarts() {
	d.Helper()
	if err := d.c.Kill(node); err != nil {
		d.Fatal(err)
	}
	if err := d.c.Start(d.Context(), node); err != nil {
		d.Fatal(err)
	}
	d.eventually("the pod still has its volume", func(context.Context) error {
		out, errs, code := d.run("", "clusterctl", "exec", "writer", "--", "/hello", "cat", "/data/note")
		if code != 0 || out != "second" && out != "second\n" {
			return fmt.Errorf("exit %d, %q %s", code, out, errs)
		}
		return nil
	})
	d.registered()
}

// detaches: a pod that goes lets its volume go, and the next finds what was written.
func (d *driver) detaches() {
	d.Helper()
	pv := d.volume("notes")
	d.ok("clusterctl", "delete", "pod/writer", "--timeout="+testTimeout.String())
	d.eventually("the volume is detached", func(ctx context.Context) error {
		got, err := d.attachment(ctx, pv)
		if err == nil && got != "" {
			err = fmt.Errorf("it is at %s", got)
		}
		return err
	})
	d.apply(user("reader", ofClaim("notes")), "reader")
	d.reads("reader", "/data/note", "second")
}

// nothingLeft: when pods, claims and snapshots are deleted, so is all that was made for them.
func (d *driver) nothingLeft() {
	d.Helper()
	for _, what := range []string{"reader", "restored", "cloned", "raw", "after"} {
		d.ok("clusterctl", "delete", "pod/"+what, "--timeout="+testTimeout.String())
	}
	d.ok("clusterctl", "delete", "volumesnapshots", "--all", "--timeout="+testTimeout.String())
	d.ok("clusterctl", "delete", "pvc", "--all", "--timeout="+testTimeout.String())
	d.eventually("no volume, attachment or snapshot is left", func(ctx context.Context) error {
		out, errs, code := d.run("", "clusterctl", "get", "pv,volumeattachments,volumesnapshots,volumesnapshotcontents", "-o", "name")
		if code != 0 || out != "" {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		return nil
	})
	left, err := filepath.Glob(filepath.Join(d.disks, "*"))
	if err != nil {
		d.Fatal(err)
	}
	for _, f := range left {
		if filepath.Base(f) != "state.json" {
			d.Errorf("on the disk is left %s", f)
		}
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		d.Fatal(err)
	}
	for _, loop := range loops {
		if file, err := os.ReadFile(loop); err == nil && strings.HasPrefix(string(file), d.disks) { // one of another may go meanwhile
			d.Errorf("%s still has %s", loop, file)
		}
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		d.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, "kubernetes.io~csi") || strings.Contains(line, "kubernetes.io/csi") {
			d.Errorf("still mounted: %s", line)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(d.kubelet, "plugins", "kubernetes.io", "csi", "*")); len(left) > 0 {
		d.Errorf("on the node are left %q", left)
	}
}

// uninstalled: the driver goes, and the node says so.
func (d *driver) uninstalled() {
	d.Helper()
	d.ok("clusterctl", "delete", "statefulset/hostpath", "deployment/snapshot-controller", "--cascade=foreground", "--timeout="+testTimeout.String())
	d.eventuallyIs("csinode/"+node, "{.spec.drivers[*].name}", "")
	if _, err := os.Stat(filepath.Join(d.kubelet, "plugins_registry", hostpath+"-reg.sock")); !os.IsNotExist(err) {
		d.Errorf("the driver's socket for registration: %v", err)
	}
	d.ok("clusterctl", "delete", "storageclass/hostpath", "csidriver/"+hostpath, "volumeattributesclass/silver", "volumesnapshotclass/hostpath")
}

// state logs what the driver and its sidecars say and made.
func (d *driver) state() {
	d.Helper()
	for _, args := range [][]string{{"get", "pods,pvc,pv,volumeattachments,csistoragecapacities,volumesnapshots,volumesnapshotcontents", "-o", "wide"}, {"describe", "pod/hostpath-0"}} {
		out, errs, _ := d.run("", "clusterctl", args...)
		d.Logf("$ clusterctl %s\n%s%s", strings.Join(args, " "), out, errs)
	}
	for _, c := range []string{"driver", "registrar", "liveness", "provisioner", "attacher", "resizer", "snapshotter"} {
		out, errs, _ := d.run("", "clusterctl", "logs", "hostpath-0", "-c", c, "--tail=25")
		d.Logf("--- %s:\n%s%s", c, out, errs)
	}
}
