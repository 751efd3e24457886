package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/csi/csitest"
)

const diskDriver = "disks.example.com"

// disks are volumes of a driver that runs beside each node, on directories that all
// nodes reach, and what its sidecars do.
type disks struct {
	*env
	ns      string
	dir     string
	drivers map[string]*csitest.Driver // by node
}

// csiVolumes follows volumes of a CSI driver through the life of a cluster.
func (e *env) csiVolumes() {
	e.t.Helper()
	d := &disks{env: e, ns: e.namespace("disks"), dir: e.t.TempDir(), drivers: map[string]*csitest.Driver{}}
	for _, n := range e.Nodes() {
		d.drivers[n.Name] = csitest.New(csitest.Config{
			Name: diskDriver, NodeID: "id-" + n.Name, Root: filepath.Join(n.Data, "kubelet"), Disks: d.dir, Topology: map[string]string{"disks.example.com/node": n.Name}, MaxVolumes: 16,
		})
		e.must(d.drivers[n.Name].Start())
		e.t.Cleanup(d.drivers[n.Name].Kill)
	}
	sidecars := newSidecars(e, d.dir)
	defer sidecars.end()
	api := e.api.StorageV1()
	_, err := api.CSIDrivers().Create(e.t.Context(), &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: diskDriver}, Spec: storagev1.CSIDriverSpec{
		PodInfoOnMount: ptr.To(true), VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral},
	}}, metav1.CreateOptions{})
	e.must(err)
	_, err = api.StorageClasses().Create(e.t.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: "disks"}, Provisioner: diskDriver, AllowVolumeExpansion: ptr.To(true), VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}, metav1.CreateOptions{})
	e.must(err)
	for _, n := range e.Nodes() {
		e.eventually("the driver is registered on "+n.Name, func(ctx context.Context) error {
			c, err := api.CSINodes().Get(ctx, n.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			node, err := e.api.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
			if err == nil && (len(c.Spec.Drivers) != 1 || c.Spec.Drivers[0].NodeID != "id-"+n.Name || *c.Spec.Drivers[0].Allocatable.Count != 16 || node.Labels["disks.example.com/node"] != n.Name) {
				err = fmt.Errorf("drivers %+v, labels %v", c.Spec.Drivers, node.Labels)
			}
			return err
		})
	}
	d.claim("notes", corev1.PersistentVolumeFilesystem)
	d.moves()
	d.grows()
	d.inlineAndBlock()
	d.killed()
	d.nothingLeft()
}

func (d *disks) claim(name string, mode corev1.PersistentVolumeMode) {
	d.t.Helper()
	_, err := d.api.CoreV1().PersistentVolumeClaims(d.ns).Create(d.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To("disks"), VolumeMode: &mode,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}},
		},
	}, metav1.CreateOptions{})
	d.must(err)
}

// user is a pod on a node that has a volume at /data.
func (d *disks) user(name, node string, source corev1.VolumeSource) *corev1.Pod {
	p := pod(name, "sleep")
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: source}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	return p
}

func ofClaim(name string) corev1.VolumeSource {
	return corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
}

// write has a pod write into a file or a device.
func (d *disks) write(in, path, words string) {
	d.t.Helper()
	if _, stderr, code := d.run("clusterctl", "", "-n", d.ns, "exec", in, "--", "/hello", "write", path, words); code != 0 {
		d.t.Fatalf("%s writes to %s: exit %d: %s", in, path, code, stderr)
	}
}

// holds waits until a file that a pod sees says so.
func (d *disks) holds(in, path, words string) {
	d.t.Helper()
	d.eventually(in+" reads "+words+" in "+path, func(context.Context) error {
		got, stderr, code := d.run("clusterctl", "", "-n", d.ns, "exec", in, "--", "/hello", "cat", path)
		if code != 0 || !strings.Contains(got, words) {
			return fmt.Errorf("it reads %.80q, exit %d: %s", got, code, stderr)
		}
		return nil
	})
}

// moves: a volume is made, attached and mounted; a pod on another node has to
// wait for it, gets an event that says so, and then finds what was written.
func (d *disks) moves() {
	d.t.Helper()
	d.create(d.ns, d.user("first", "n2", ofClaim("notes")))
	d.podReady(d.ns, "first")
	d.write("first", "/data/note", "kept")
	d.holds("first", "/data/note", "kept")
	d.create(d.ns, d.user("second", "n3", ofClaim("notes")))
	d.eventually("the second gets an event that the volume is on another node", func(ctx context.Context) error {
		return d.reported(ctx, "second", "Multi-Attach error")
	})
	d.ctl("-n", d.ns, "delete", "pod", "first")
	d.podReady(d.ns, "second")
	d.holds("second", "/data/note", "kept")
	if n := len(d.drivers["n2"].Calls("NodeUnstageVolume")); n == 0 {
		d.t.Error("n2 has not unstaged the volume")
	}
}

func (d *disks) reported(ctx context.Context, pod, words string) error {
	list, err := d.api.CoreV1().Events(d.ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
	if err != nil {
		return err
	}
	var all []string
	for _, ev := range list.Items {
		if strings.Contains(ev.Message, words) {
			return nil
		}
		all = append(all, ev.Reason+": "+ev.Message)
	}
	return fmt.Errorf("events %q", all)
}

// grows: a claim asks for more while it is used, and has it.
func (d *disks) grows() {
	d.t.Helper()
	_, err := d.api.CoreV1().PersistentVolumeClaims(d.ns).Patch(d.t.Context(), "notes", types.MergePatchType, []byte(`{"spec":{"resources":{"requests":{"storage":"3Mi"}}}}`), metav1.PatchOptions{})
	d.must(err)
	d.eventually("the claim has grown", func(ctx context.Context) error {
		c, err := d.api.CoreV1().PersistentVolumeClaims(d.ns).Get(ctx, "notes", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if size := c.Status.Capacity[corev1.ResourceStorage]; size.String() != "3Mi" || len(c.Status.Conditions) > 0 || c.Annotations["volume.kubernetes.io/storage-resizer"] != diskDriver {
			return fmt.Errorf("%+v, annotations %v", c.Status, c.Annotations)
		}
		return nil
	})
	if n := len(d.drivers["n3"].Calls("NodeExpandVolume")); n == 0 {
		d.t.Error("n3 has not expanded the volume")
	}
	d.eventually("the node's summary tells the volume's size", func(context.Context) error {
		out, errs, _ := d.run("clusterctl", "", "get", "--raw", "/api/v1/nodes/n3/proxy/stats/summary")
		if !strings.Contains(strings.ReplaceAll(out, " ", ""), `"capacityBytes":3145728`) {
			return errors.New(out + errs)
		}
		return nil
	})
}

// inlineAndBlock: a volume of a pod's own, one of an ephemeral claim, and a raw
// block device.
func (d *disks) inlineAndBlock() {
	d.t.Helper()
	d.create(d.ns, d.user("inline", "n2", corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: diskDriver}}))
	d.create(d.ns, d.user("scratch", "n2", corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}, StorageClassName: ptr.To("disks"),
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}},
	}}}}))
	d.claim("raw", corev1.PersistentVolumeBlock)
	raw := d.user("raw", "n2", ofClaim("raw"))
	raw.Spec.Containers[0].VolumeMounts = nil
	raw.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsUser: ptr.To[int64](0)} // the device has the host's owner
	raw.Spec.Containers[0].VolumeDevices = []corev1.VolumeDevice{{Name: "data", DevicePath: "/dev/disk"}}
	d.create(d.ns, raw)
	for _, name := range []string{"inline", "scratch", "raw"} {
		d.podReady(d.ns, name)
	}
	d.write("inline", "/data/x", "mine")
	d.holds("inline", "/data/x", "mine")
	d.write("raw", "/dev/disk", "blocks")
	d.holds("raw", "/dev/disk", "blocks")
	d.eventually("it is on the disk", func(context.Context) error {
		images, err := filepath.Glob(filepath.Join(d.dir, "*.img"))
		if err != nil || len(images) != 1 {
			return fmt.Errorf("disks %q, %v", images, err)
		}
		if data, err := os.ReadFile(images[0]); err != nil || !strings.HasPrefix(string(data), "blocks") {
			return fmt.Errorf("it begins with %.20q, %v", data, err)
		}
		return nil
	})
}

// killed: a driver that is gone delays its own pods alone and is reported; a node
// whose clusterd is killed between staging and publishing a volume goes on.
func (d *disks) killed() {
	d.t.Helper()
	d.drivers["n2"].Kill()
	d.create(d.ns, d.user("late", "n2", corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: diskDriver}}))
	other := pod("other", "sleep")
	other.Spec.NodeName = "n2"
	d.create(d.ns, other)
	d.podReady(d.ns, "other")
	d.eventually("the pod gets an event about its driver", func(ctx context.Context) error {
		return d.reported(ctx, "late", "does not answer")
	})
	d.must(d.drivers["n2"].Start())
	d.podReady(d.ns, "late")

	d.claim("cut", corev1.PersistentVolumeFilesystem)
	d.drivers["n2"].Fail("NodePublishVolume", status.Error(codes.Internal, "not now"))
	d.create(d.ns, d.user("cut", "n2", ofClaim("cut")))
	d.eventually("the volume is staged and not published", func(ctx context.Context) error { return d.reported(ctx, "cut", "not now") })
	d.must(d.Kill("n2"))
	d.drivers["n2"].Fail("NodePublishVolume", nil)
	d.must(d.Start(d.t.Context(), "n2"))
	d.podReady(d.ns, "cut")
	d.holds("inline", "/data/x", "mine")
}

// nothingLeft deletes everything and looks at the disks, the mounts and the API.
func (d *disks) nothingLeft() {
	d.t.Helper()
	d.ctl("delete", "namespace", d.ns, "--wait=false")
	d.within(2*testTimeout, "the namespace is gone", func(ctx context.Context) error {
		n, err := d.api.CoreV1().Namespaces().Get(ctx, d.ns, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("%+v, %v", n.Status, err)
	})
	d.eventually("no volume and no attachment is left", func(ctx context.Context) error {
		volumes, err := d.api.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		attachments, err := d.api.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
		if err == nil && len(volumes.Items)+len(attachments.Items) > 0 {
			err = fmt.Errorf("%d volumes, %d attachments", len(volumes.Items), len(attachments.Items))
		}
		return err
	})
	// A node may remove a directory after the API has forgotten its pod.
	d.eventually("no disk, no mount and no directory is left", func(context.Context) error {
		left, err := os.ReadDir(d.dir)
		if err != nil || len(left) > 0 {
			return fmt.Errorf("disks left: %v, %v", left, err)
		}
		loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
		if err != nil {
			return err
		}
		for _, loop := range loops {
			if file, err := os.ReadFile(loop); err == nil && strings.HasPrefix(string(file), d.dir) { // one of another may go meanwhile
				return fmt.Errorf("%s still has %s", loop, file)
			}
		}
		table, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			return err
		}
		for _, n := range d.Nodes() {
			root := filepath.Join(n.Data, "kubelet")
			for line := range strings.Lines(string(table)) {
				if strings.Contains(line, root+"/") {
					return fmt.Errorf("still mounted: %s", line)
				}
			}
			for _, dir := range []string{"pods", "plugins/kubernetes.io/csi"} {
				left, _ := filepath.Glob(filepath.Join(root, dir, "*"))
				if len(left) > 0 {
					return fmt.Errorf("on %s are left %q", n.Name, left)
				}
			}
		}
		return nil
	})
	d.eventually("no node says that it uses a volume", func(ctx context.Context) error {
		nodes, err := d.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range nodes.Items {
			if len(n.Status.VolumesInUse)+len(n.Status.VolumesAttached) > 0 {
				return fmt.Errorf("%s: %v %v", n.Name, n.Status.VolumesInUse, n.Status.VolumesAttached)
			}
		}
		return nil
	})
	for _, name := range slices.Sorted(maps.Keys(d.drivers)) {
		d.must(d.drivers[name].Remove())
	}
}
