package csi

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	events "k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/csi/csitest"
	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/agent/volume"
)

const driverName = "disks.example.com"

// fakeNode is the node's object; what is in use is told at once.
type fakeNode struct {
	mu   sync.Mutex
	node *v1.Node
	m    *Manager
}

func (n *fakeNode) Object() *v1.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	node := n.node.DeepCopy()
	if n.m != nil {
		node.Status.VolumesInUse = n.m.InUse()
	}
	return node
}
func (n *fakeNode) StatusWritten(context.Context) error { return nil }
func (n *fakeNode) Poke()                               {}
func (n *fakeNode) Until(ctx context.Context, cond func(*v1.Node) bool) error {
	for !cond(n.Object()) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

func (n *fakeNode) SetLabels(_ context.Context, l map[string]string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.node.Labels = l
	return nil
}

func (n *fakeNode) attach(name v1.UniqueVolumeName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.node.Status.VolumesAttached = append(n.node.Status.VolumesAttached, v1.AttachedVolume{Name: name})
}

type fakeTokens struct{}

func (fakeTokens) Token(_ context.Context, pod *v1.Pod, audience string, _ int64) (string, error) {
	return "token-of-" + pod.Spec.ServiceAccountName + "-for-" + audience, nil
}

// bench is a node with a driver.
type bench struct {
	*testing.T
	root   string
	mounts *csitest.Fake
	driver *csitest.Driver
	node   *fakeNode
	client *fake.Clientset
	m      *Manager
	stop   func()
}

func setup(t *testing.T, objects ...runtime.Object) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi") // short: a socket's path is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{T: t, root: filepath.Join(dir, "k"), mounts: &csitest.Fake{}, client: fake.NewSimpleClientset(objects...)}
	b.node = &fakeNode{node: &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "n1"}}}
	disks := filepath.Join(dir, "disks")
	if err := os.MkdirAll(filepath.Join(disks, "disk-1"), 0o755); err != nil {
		t.Fatal(err)
	}
	b.driver = csitest.New(csitest.Config{
		Name: driverName, NodeID: "id-1", Root: b.root, Disks: disks, Topology: map[string]string{"example.com/rack": "r1"}, MaxVolumes: 3, Mounts: b.mounts,
	})
	b.run()
	if err := b.driver.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.driver.Kill)
	t.Cleanup(func() { b.stop() })
	b.registered()
	return b
}

// run starts a manager in the place of the last one.
func (b *bench) run() {
	b.Helper()
	plugins := plugin.New(b.root)
	b.m = New(Config{
		Client: b.client, NodeName: "n1", Node: b.node, Root: b.root, Plugins: plugins, Tokens: fakeTokens{}, Recorder: events.NewFakeRecorder(99), Mounted: b.mounts.Mounted, Republish: 20 * time.Millisecond,
	})
	b.node.mu.Lock()
	b.node.m = b.m
	b.node.mu.Unlock()
	ctx, cancel := context.WithCancel(b.Context())
	var wg sync.WaitGroup
	for _, run := range []func(context.Context) error{b.m.Run, plugins.Run} {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				b.Error(err)
			}
		})
	}
	b.stop = func() { cancel(); wg.Wait() }
}

func (b *bench) registered() {
	b.Helper()
	b.until("the driver is registered", func() bool { return b.m.drivers.get(driverName) != nil })
}

func (b *bench) until(what string, cond func() bool) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("waited a minute until %s", what)
		}
	}
}

// left are all files below the directory that are no sockets, but for the directories
// that are always there.
func (b *bench) left() []string {
	b.Helper()
	var out []string
	for _, dir := range []string{"pods", "plugins/kubernetes.io/csi"} {
		found, _ := filepath.Glob(filepath.Join(b.root, dir, "*"))
		out = append(out, found...)
	}
	return append(out, b.mounts.Left()...)
}

func object(change ...func(*storagev1.CSIDriver)) *storagev1.CSIDriver {
	d := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: driverName}, Spec: storagev1.CSIDriverSpec{AttachRequired: ptr.To(false)}}
	for _, f := range change {
		f(d)
	}
	return d
}

func pod(uid string) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "p-" + uid}, Spec: v1.PodSpec{ServiceAccountName: "sa"}}
	p.UID = types.UID(uid)
	return p
}

func disk() *v1.PersistentVolume {
	return &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv1"}, Spec: v1.PersistentVolumeSpec{
		AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}, Capacity: size("1Gi"), MountOptions: []string{"noatime"},
		PersistentVolumeSource: v1.PersistentVolumeSource{CSI: &v1.CSIPersistentVolumeSource{
			Driver: driverName, VolumeHandle: "disk-1", FSType: "ext4", VolumeAttributes: map[string]string{"tier": "fast"},
			NodeStageSecretRef: &v1.SecretReference{Namespace: "vault", Name: "s"},
		}},
	}}
}

func claim() *v1.PersistentVolumeClaim {
	return &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "c"}, Spec: v1.PersistentVolumeClaimSpec{VolumeName: "pv1"}, Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound, Capacity: size("1Gi")}}
}

func secret() *v1.Secret {
	return &v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "vault", Name: "s"}, Data: map[string][]byte{"key": []byte("very-secret")}}
}

func size(q string) v1.ResourceList {
	return v1.ResourceList{v1.ResourceStorage: resource.MustParse(q)}
}

var driven = volume.Driven{Name: "data", PV: disk(), Claim: "c"}

func TestADriverRegisters(t *testing.T) {
	b := setup(t, object())
	n, err := b.client.StorageV1().CSINodes().Get(t.Context(), "n1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := storagev1.CSINodeDriver{Name: driverName, NodeID: "id-1", TopologyKeys: []string{"example.com/rack"}, Allocatable: &storagev1.VolumeNodeResources{Count: ptr.To(int32(3))}}
	if len(n.Spec.Drivers) != 1 || n.Spec.Drivers[0].Name != want.Name || n.Spec.Drivers[0].NodeID != want.NodeID || !slices.Equal(n.Spec.Drivers[0].TopologyKeys, want.TopologyKeys) || *n.Spec.Drivers[0].Allocatable.Count != 3 {
		t.Errorf("drivers %+v", n.Spec.Drivers)
	}
	if len(n.OwnerReferences) != 1 || n.OwnerReferences[0].Kind != "Node" || b.node.Object().Labels["example.com/rack"] != "r1" {
		t.Errorf("owner %+v, labels %v", n.OwnerReferences, b.node.Object().Labels)
	}
	// Killed and started again, it is there again; removed, it is not.
	before := b.m.drivers.get(driverName)
	b.driver.Kill()
	if err := b.driver.Start(); err != nil {
		t.Fatal(err)
	}
	b.until("the driver is registered again", func() bool {
		one := b.m.drivers.get(driverName)
		return one != nil && one != before
	})
	if err := b.driver.Remove(); err != nil {
		t.Fatal(err)
	}
	b.until("CSINode has no driver", func() bool {
		n, err := b.client.StorageV1().CSINodes().Get(t.Context(), "n1", metav1.GetOptions{})
		return err == nil && len(n.Spec.Drivers) == 0
	})
	if _, err := b.m.Mount(t.Context(), pod("u1"), driven); err == nil || !strings.Contains(err.Error(), "not found in the list of registered CSI drivers") {
		t.Errorf("without a driver: %v", err)
	}
	if err := b.m.Release(t.Context(), "u1"); err != nil { // it was asked for nothing
		t.Error(err)
	}
	if left := b.left(); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func TestAVolumeOfTwoPods(t *testing.T) {
	b := setup(t, object(func(d *storagev1.CSIDriver) { d.Spec.PodInfoOnMount = ptr.To(true) }), claim(), secret())
	group := int64(1234)
	first := pod("u1")
	first.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &group}
	place, err := b.m.Mount(t.Context(), first, driven)
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(b.root, "pods/u1/volumes/kubernetes.io~csi/pv1/mount"); place.Path != want || !place.Own {
		t.Errorf("place %+v, want %s to be owned", place, want)
	}
	if _, err := b.m.Mount(t.Context(), first, driven); err != nil { // again
		t.Fatal(err)
	}
	readOnly := driven
	readOnly.ReadOnly = true
	if _, err := b.m.Mount(t.Context(), pod("u2"), readOnly); err != nil {
		t.Fatal(err)
	}
	stage := b.driver.Calls("NodeStageVolume")[0].Request.(*spec.NodeStageVolumeRequest)
	if stage.Secrets["key"] != "very-secret" || stage.VolumeContext["tier"] != "fast" || stage.VolumeCapability.GetMount().FsType != "ext4" || stage.VolumeCapability.GetMount().MountFlags[0] != "noatime" ||
		stage.VolumeCapability.AccessMode.Mode != spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER {
		t.Errorf("stage %v", stage)
	}
	calls := b.driver.Calls("NodePublishVolume")
	publish := calls[len(calls)-1].Request.(*spec.NodePublishVolumeRequest)
	if !publish.Readonly || publish.StagingTargetPath != stage.StagingTargetPath || publish.VolumeContext[contextPod] != "p-u2" || publish.VolumeContext[contextEphemeral] != "false" || publish.VolumeContext[contextAccount] != "sa" {
		t.Errorf("publish %v", publish)
	}
	if err := b.m.Release(t.Context(), "u1"); err != nil {
		t.Fatal(err)
	}
	if n := len(b.driver.Calls("NodeUnstageVolume")); n != 0 {
		t.Errorf("unstaged %d times while another pod uses it", n)
	}
	if err := b.m.Release(t.Context(), "u2"); err != nil {
		t.Fatal(err)
	}
	if n := len(b.driver.Calls("NodeUnstageVolume")); n != 1 {
		t.Errorf("unstaged %d times", n)
	}
	if left := b.left(); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

// TestNothingLeaksWhenKilled breaks off at each call and has another manager, that
// knows nothing but the disk, clean up.
func TestNothingLeaksWhenKilled(t *testing.T) {
	for _, method := range []string{"NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"} {
		t.Run(method, func(t *testing.T) {
			b := setup(t, object(), claim(), secret())
			b.driver.Fail(method, status.Error(codes.Internal, "no"))
			_, err := b.m.Mount(t.Context(), pod("u1"), driven)
			if strings.HasPrefix(method, "NodeUn") {
				if err != nil {
					t.Fatal(err)
				}
				err = b.m.Release(t.Context(), "u1")
			}
			if err == nil || !strings.Contains(err.Error(), driverName) || !strings.Contains(err.Error(), method) {
				t.Fatalf("failed with %v", err)
			}
			b.stop()
			b.driver.Fail(method, nil)
			b.run()
			b.registered()
			if pods, err := b.m.Pods(); err != nil || !slices.Equal(pods, []types.UID{"u1"}) {
				t.Fatalf("pods %q, %v", pods, err)
			}
			if err := b.m.Release(t.Context(), "u1"); err != nil {
				t.Fatal(err)
			}
			if left := b.left(); len(left) > 0 {
				t.Errorf("left are %q", left)
			}
			if pods, err := b.m.Pods(); err != nil || len(pods) > 0 {
				t.Errorf("pods %q, %v", pods, err)
			}
		})
	}
}

func TestADeadDriverDelaysItsOwnPodsOnly(t *testing.T) {
	b := setup(t, object(), claim(), secret())
	resume := b.driver.Hang("NodeStageVolume")
	defer resume()
	// A busy machine may need longer than the first limits to come to the call.
	for limit := 100 * time.Millisecond; len(b.driver.Calls("NodeStageVolume")) == 0; limit *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		_, err := b.m.Mount(ctx, pod("u1"), driven)
		cancel()
		if limit > time.Minute {
			t.Fatalf("within %s it has not called NodeStageVolume: %v", limit, err)
		}
		if err == nil || len(b.driver.Calls("NodeStageVolume")) > 0 && !strings.Contains(err.Error(), "has not answered NodeStageVolume in time") {
			t.Errorf("hanging: %v", err)
		}
	}
	b.driver.Kill()
	if _, err := b.m.Mount(t.Context(), pod("u1"), driven); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("killed: %v", err)
	}
	if err := b.m.Release(t.Context(), "u1"); err == nil {
		t.Error("a volume that may be staged was let go without its driver")
	}
	if err := b.driver.Start(); err != nil {
		t.Fatal(err)
	}
	b.until("the volume is released", func() bool { return b.m.Release(t.Context(), "u1") == nil })
	if left := b.left(); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func TestAttachedFirst(t *testing.T) {
	b := setup(t, object(func(d *storagev1.CSIDriver) { d.Spec.AttachRequired = ptr.To(true) }), claim(), secret())
	mounted := make(chan error, 1)
	go func() {
		_, err := b.m.Mount(t.Context(), pod("u1"), driven)
		mounted <- err
	}()
	name := v1.UniqueVolumeName("kubernetes.io/csi/" + driverName + "^disk-1")
	b.until("the volume is in use", func() bool { return slices.Contains(b.m.InUse(), name) })
	if n := len(b.driver.Calls("NodeStageVolume")); n != 0 {
		t.Fatal("staged before it is attached")
	}
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: attachment("disk-1", driverName, "n1")}, Status: storagev1.VolumeAttachmentStatus{Attached: true, AttachmentMetadata: map[string]string{"lun": "7"}}}
	if _, err := b.client.StorageV1().VolumeAttachments().Create(t.Context(), va, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.node.attach(name)
	if err := <-mounted; err != nil {
		t.Fatal(err)
	}
	stage := b.driver.Calls("NodeStageVolume")[0].Request.(*spec.NodeStageVolumeRequest)
	if stage.PublishContext["lun"] != "7" {
		t.Errorf("stage %v", stage)
	}
	if err := b.m.Release(t.Context(), "u1"); err != nil || len(b.m.InUse()) > 0 {
		t.Errorf("%v, in use %v", err, b.m.InUse())
	}
}

func TestInlineVolumes(t *testing.T) {
	inline := volume.Driven{Name: "own", Inline: &v1.CSIVolumeSource{Driver: driverName, VolumeAttributes: map[string]string{"a": "b"}}}
	b := setup(t, object())
	if _, err := b.m.Mount(t.Context(), pod("u1"), inline); err == nil || !strings.Contains(err.Error(), "volumeLifecycleModes") {
		t.Errorf("a driver that has no such volumes: %v", err)
	}
	b = setup(t, object(func(d *storagev1.CSIDriver) {
		d.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}
		d.Spec.PodInfoOnMount, d.Spec.RequiresRepublish = ptr.To(true), ptr.To(true)
		d.Spec.TokenRequests = []storagev1.TokenRequest{{Audience: "vault"}}
	}))
	if _, err := b.m.Mount(t.Context(), pod("u1"), inline); err != nil {
		t.Fatal(err)
	}
	b.until("it is published again and again", func() bool { return len(b.driver.Calls("NodePublishVolume")) > 2 })
	for _, c := range b.driver.Calls("NodePublishVolume") {
		r := c.Request.(*spec.NodePublishVolumeRequest)
		if r.VolumeContext[contextEphemeral] != "true" || !strings.Contains(r.VolumeContext[contextTokens], `"vault":{"token":"token-of-sa-for-vault"`) || r.VolumeContext["a"] != "b" || r.StagingTargetPath != "" {
			t.Fatalf("publish %v", r)
		}
	}
	data, err := os.ReadFile(filepath.Join(b.root, "pods/u1/volumes/kubernetes.io~csi/own", recordFile))
	if err != nil || strings.Contains(string(data), "token-of") {
		t.Errorf("on disk: %s, %v", data, err)
	}
	if n := len(b.driver.Calls("NodeStageVolume")); n != 0 {
		t.Error("an inline volume was staged")
	}
	if err := b.m.Release(t.Context(), "u1"); err != nil {
		t.Fatal(err)
	}
	if left := b.left(); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func TestAVolumeGrowsWhileItIsUsed(t *testing.T) {
	pv := disk()
	pv.Spec.Capacity = size("2Gi")
	b := setup(t, object(), claim(), secret(), pv)
	if _, err := b.m.Mount(t.Context(), pod("u1"), driven); err != nil {
		t.Fatal(err)
	}
	if n := len(b.driver.Calls("NodeExpandVolume")); n != 0 {
		t.Fatal("expanded before the claim says so")
	}
	grow := claim()
	grow.Status.Conditions = []v1.PersistentVolumeClaimCondition{{Type: v1.PersistentVolumeClaimFileSystemResizePending, Status: v1.ConditionTrue}, {Type: "Other", Status: v1.ConditionTrue}}
	grow.Status.AllocatedResourceStatuses = map[v1.ResourceName]v1.ClaimResourceStatus{v1.ResourceStorage: v1.PersistentVolumeClaimNodeResizePending}
	if _, err := b.client.CoreV1().PersistentVolumeClaims("d").Update(t.Context(), grow, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.until("the claim tells its new size", func() bool {
		c, err := b.client.CoreV1().PersistentVolumeClaims("d").Get(t.Context(), "c", metav1.GetOptions{})
		has := c.Status.Capacity[v1.ResourceStorage]
		return err == nil && has.String() == "2Gi" && len(c.Status.Conditions) == 1 && len(c.Status.AllocatedResourceStatuses) == 0
	})
	use := b.m.Usage(t.Context(), "u1")
	if len(use) != 1 || use[0].Claim != "c" || use[0].Bytes.Total != 2<<30 {
		t.Errorf("usage %+v", use)
	}
}

func TestOneNodeADir(t *testing.T) {
	b := setup(t, object())
	if err := plugin.New(b.root).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "--kubelet-root") {
		t.Errorf("a second node in the folder: %v", err)
	}
	for _, name := range []string{"", ".", "..", "a/b"} {
		if checkName("pod", name) == nil {
			t.Errorf("%q passes for a folder's name", name)
		}
	}
}
