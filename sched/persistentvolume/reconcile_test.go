package persistentvolume

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/volumes"
)

func size(q string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(q)}
}

func claim(change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "d", UID: "c1", Annotations: map[string]string{}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: size("2Gi")},
		},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func volume(name, q string, change ...func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: size(q),
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeAvailable},
	}
	for _, f := range change {
		f(v)
	}
	return v
}

func kept(name, uid string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) {
		v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "d", Name: name, UID: types.UID(uid)}
	}
}

func completed(volume string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Annotations[volumes.BindCompleted] = "yes"
		c.Spec.VolumeName, c.Status.Phase = volume, corev1.ClaimBound
	}
}

func class(provisioner string, mode storagev1.VolumeBindingMode) *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "k"}, Provisioner: provisioner, VolumeBindingMode: &mode}
}

func ofClass(c *corev1.PersistentVolumeClaim)  { c.Spec.StorageClassName = ptr.To("k") }
func volumeOfClass(v *corev1.PersistentVolume) { v.Spec.StorageClassName = "k" }
func going(c *corev1.PersistentVolumeClaim)    { c.DeletionTimestamp = ptr.To(metav1.Now()) }
func shared(c *corev1.PersistentVolumeClaim)   { c.Spec.AccessModes[0] = corev1.ReadWriteMany }
func asksFor(v string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = v }
}

func TestDecideClaim(t *testing.T) {
	selects := func(c *corev1.PersistentVolumeClaim) {
		c.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "fast"}}
	}
	fast := func(v *corev1.PersistentVolume) { v.Labels = map[string]string{"tier": "fast"} }
	chosen := func(c *corev1.PersistentVolumeClaim) { c.Annotations[volumes.SelectedNode] = "n1" }
	immediate, waits := class("p", storagev1.VolumeBindingImmediate), class("p", storagev1.VolumeBindingWaitForFirstConsumer)
	for name, c := range map[string]struct {
		claim       *corev1.PersistentVolumeClaim
		volumes     []*corev1.PersistentVolume
		class       *storagev1.StorageClass
		fallback    *storagev1.StorageClass
		bind        string
		setClass    string
		phase       corev1.PersistentVolumeClaimPhase
		provisioner string
		note        string
	}{
		"the smallest that suits":             {claim: claim(), volumes: []*corev1.PersistentVolume{volume("big", "9Gi"), volume("fits", "3Gi"), volume("small", "1Gi")}, bind: "fits", phase: corev1.ClaimBound},
		"one that was kept comes first":       {claim: claim(), volumes: []*corev1.PersistentVolume{volume("fits", "2Gi"), volume("kept", "9Gi", kept("c", ""))}, bind: "kept", phase: corev1.ClaimBound},
		"kept for a former claim of the name": {claim: claim(), volumes: []*corev1.PersistentVolume{volume("kept", "9Gi", kept("c", "c0"))}, phase: corev1.ClaimPending, note: "no storage class is set"},
		"kept but of another class":           {claim: claim(), volumes: []*corev1.PersistentVolume{volume("kept", "9Gi", kept("c", ""), volumeOfClass)}, phase: corev1.ClaimPending, note: "storageClassName does not match"},
		"kept for another":                    {claim: claim(), volumes: []*corev1.PersistentVolume{volume("v", "2Gi", kept("other", ""))}, phase: corev1.ClaimPending, note: "no storage class is set"},
		"another class":                       {claim: claim(), volumes: []*corev1.PersistentVolume{volume("v", "2Gi", volumeOfClass)}, phase: corev1.ClaimPending, note: "no storage class is set"},
		"another mode":                        {claim: claim(shared), volumes: []*corev1.PersistentVolume{volume("v", "2Gi")}, phase: corev1.ClaimPending, note: "no storage class is set"},
		"block is not a file system":          {claim: claim(), volumes: []*corev1.PersistentVolume{volume("v", "2Gi", func(v *corev1.PersistentVolume) { v.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock) })}, phase: corev1.ClaimPending, note: "no storage class is set"},
		"by selector":                         {claim: claim(selects), volumes: []*corev1.PersistentVolume{volume("a", "2Gi"), volume("b", "3Gi", fast)}, bind: "b", phase: corev1.ClaimBound},
		"released ones are not taken":         {claim: claim(), volumes: []*corev1.PersistentVolume{volume("v", "2Gi", kept("c", "c0"), func(v *corev1.PersistentVolume) { v.Status.Phase = corev1.VolumeReleased })}, phase: corev1.ClaimPending, note: "no storage class is set"},
		"by name":                             {claim: claim(asksFor("b")), volumes: []*corev1.PersistentVolume{volume("a", "2Gi"), volume("b", "9Gi")}, bind: "b", phase: corev1.ClaimBound},
		"by name, not there":                  {claim: claim(asksFor("b")), phase: corev1.ClaimPending, note: "not there yet"},
		"by name, taken":                      {claim: claim(asksFor("b")), volumes: []*corev1.PersistentVolume{volume("b", "9Gi", kept("x", "x1"))}, phase: corev1.ClaimPending, note: "already bound to a different claim"},
		"by name, too small":                  {claim: claim(asksFor("b")), volumes: []*corev1.PersistentVolume{volume("b", "1Gi")}, phase: corev1.ClaimPending, note: "too small"},
		"by name, wrong mode":                 {claim: claim(asksFor("b"), shared), volumes: []*corev1.PersistentVolume{volume("b", "2Gi")}, phase: corev1.ClaimPending, note: "incompatible accessMode"},
		"provisioned at once":                 {claim: claim(ofClass), class: immediate, phase: corev1.ClaimPending, provisioner: "p", note: "Waiting for a volume"},
		"waits for a pod":                     {claim: claim(ofClass), class: waits, phase: corev1.ClaimPending, note: "waiting for first consumer"},
		"waits, though a volume suits":        {claim: claim(ofClass), class: waits, volumes: []*corev1.PersistentVolume{volume("v", "2Gi", volumeOfClass)}, phase: corev1.ClaimPending, note: "waiting for first consumer"},
		"the scheduler kept one":              {claim: claim(ofClass), class: waits, volumes: []*corev1.PersistentVolume{volume("v", "2Gi", volumeOfClass, kept("c", "c1"))}, bind: "v", phase: corev1.ClaimBound},
		"the scheduler chose a node":          {claim: claim(ofClass, chosen), class: waits, phase: corev1.ClaimPending, provisioner: "p", note: "Waiting for a volume"},
		"made before the default class":       {claim: claim(), fallback: waits, phase: corev1.ClaimPending, setClass: "k"},
		"a volume suits before the default":   {claim: claim(), fallback: waits, volumes: []*corev1.PersistentVolume{volume("v", "2Gi")}, bind: "v", phase: corev1.ClaimBound},
		"asks for no class":                   {claim: claim(func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = ptr.To("") }), fallback: waits, phase: corev1.ClaimPending, note: "no storage class is set"},
		"of another class than the default":   {claim: claim(ofClass), class: class(volumes.NoProvisioner, storagev1.VolumeBindingImmediate), fallback: waits, phase: corev1.ClaimPending, note: "has no provisioner"},
		"class by annotation":                 {claim: claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[corev1.BetaStorageClassAnnotation] = "k" }), fallback: waits, phase: corev1.ClaimPending, note: "not found"},
		"no such class":                       {claim: claim(ofClass), phase: corev1.ClaimPending, note: "\"k\" not found"},
		"no provisioner":                      {claim: claim(ofClass), class: class(volumes.NoProvisioner, storagev1.VolumeBindingImmediate), phase: corev1.ClaimPending, note: "has no provisioner"},
		"on its way out":                      {claim: claim(going), volumes: []*corev1.PersistentVolume{volume("v", "2Gi")}, phase: corev1.ClaimPending},
		"stays bound":                         {claim: claim(completed("v")), volumes: []*corev1.PersistentVolume{volume("v", "2Gi", kept("c", "c1"))}, bind: "v", phase: corev1.ClaimBound},
		"bound, on its way out":               {claim: claim(completed("v"), going), volumes: []*corev1.PersistentVolume{volume("v", "2Gi", kept("c", "c1"))}, bind: "v", phase: corev1.ClaimBound},
		"the volume forgot":                   {claim: claim(completed("v")), volumes: []*corev1.PersistentVolume{volume("v", "2Gi")}, bind: "v", phase: corev1.ClaimBound},
		"the volume is gone":                  {claim: claim(completed("v")), phase: corev1.ClaimLost, note: "lost its PersistentVolume"},
		"the volume is another's":             {claim: claim(completed("v")), volumes: []*corev1.PersistentVolume{volume("v", "2Gi", kept("x", "x1"))}, phase: corev1.ClaimLost, note: "Two claims"},
		"the name is gone":                    {claim: claim(completed("")), phase: corev1.ClaimLost, note: "lost reference"},
	} {
		t.Run(name, func(t *testing.T) {
			plan := decideClaim(claimInput{claim: c.claim, volumes: c.volumes, class: c.class, fallback: c.fallback})
			bind := ""
			if plan.bind != nil {
				bind = plan.bind.Name
			}
			if bind != c.bind || plan.phase != c.phase || plan.provisioner != c.provisioner {
				t.Errorf("binds %q, phase %s, provisioner %q; want %q, %s, %q", bind, plan.phase, plan.provisioner, c.bind, c.phase, c.provisioner)
			}
			if plan.setClass != c.setClass {
				t.Errorf("gives it class %q, want %q", plan.setClass, c.setClass)
			}
			if got := plan.note; (got == nil) != (c.note == "") || got != nil && !strings.Contains(got.message, c.note) {
				t.Errorf("tells %+v, want %q", got, c.note)
			}
		})
	}
}

func TestDecideVolume(t *testing.T) {
	removed := func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimDelete
	}
	recycled := func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRecycle
	}
	made := func(v *corev1.PersistentVolume) { v.Annotations[volumes.ProvisionedBy] = "p" }
	for name, c := range map[string]struct {
		volume  *corev1.PersistentVolume
		claim   *corev1.PersistentVolumeClaim
		deleter bool
		want    volumePlan
	}{
		"free":                    {volume: volume("v", "1Gi"), want: volumePlan{phase: corev1.VolumeAvailable}},
		"reserved":                {volume: volume("v", "1Gi", kept("c", "")), want: volumePlan{phase: corev1.VolumeAvailable}},
		"bound":                   {volume: volume("v", "1Gi", kept("c", "c1")), claim: claim(completed("v")), want: volumePlan{phase: corev1.VolumeBound}},
		"half bound":              {volume: volume("v", "1Gi", kept("c", "c1")), claim: claim(), want: volumePlan{phase: corev1.VolumeAvailable}},
		"its claim is gone":       {volume: volume("v", "1Gi", kept("c", "c1")), want: volumePlan{phase: corev1.VolumeReleased, reclaim: true}},
		"another of that name":    {volume: volume("v", "1Gi", kept("c", "c0")), claim: claim(), want: volumePlan{phase: corev1.VolumeReleased, reclaim: true}},
		"deleted by its maker":    {volume: volume("v", "1Gi", kept("c", "c1"), removed, made), deleter: true, want: volumePlan{phase: corev1.VolumeReleased, reclaim: true}},
		"no deleter":              {volume: volume("v", "1Gi", kept("c", "c1"), removed), want: volumePlan{phase: corev1.VolumeFailed, reason: "VolumeFailedDelete", reclaim: true}},
		"recycle":                 {volume: volume("v", "1Gi", kept("c", "c1"), recycled), want: volumePlan{phase: corev1.VolumeFailed, reason: "VolumeFailedRecycle", reclaim: true}},
		"claim has another":       {volume: volume("v", "1Gi", kept("c", "c1")), claim: claim(completed("w")), want: volumePlan{phase: corev1.VolumeAvailable, unbind: true}},
		"made, claim has another": {volume: volume("v", "1Gi", kept("c", "c1"), removed, made), claim: claim(completed("w")), deleter: true, want: volumePlan{phase: corev1.VolumeReleased, reclaim: true}},
	} {
		t.Run(name, func(t *testing.T) {
			got := decideVolume(c.volume, c.claim, c.deleter)
			if (got.message == "") != (got.phase != corev1.VolumeFailed) {
				t.Errorf("phase %s says %q", got.phase, got.message)
			}
			got.message, got.note = "", nil
			if got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
