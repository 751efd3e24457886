package csi

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/volume"
)

// entry is a record in memory.
type entry struct {
	record
	object *v1.PersistentVolume // as last seen; nil: inline, or not seen since the start
}

// Mount has the volume's driver publish it for the pod. It can be called again
// after whatever went wrong.
func (m *Manager) Mount(ctx context.Context, pod *v1.Pod, d volume.Driven) (volume.Place, error) {
	none := volume.Place{}
	if err := m.load(); err != nil {
		return none, err
	}
	w, err := mountRequestOf(pod, d)
	if err != nil {
		return none, err
	}
	r := &record{
		Namespace: pod.Namespace, Pod: pod.Name, UID: pod.UID, Account: account(pod), Claim: d.Claim, Name: d.Name, Spec: d.Name,
		Driver: w.driver, Handle: w.handle, Block: w.block, Inline: d.Inline != nil, PublishSecret: w.publishSecret,
	}
	if d.PV != nil {
		r.Spec = d.PV.Name
	}
	for what, name := range map[string]string{"pod": string(r.UID), "volume": r.Spec, "driver": r.Driver} {
		if err := checkName(what, name); err != nil {
			return none, err
		}
	}
	object, err := m.object(ctx, w.driver)
	if err != nil {
		return none, err
	}
	if err := mayBe(object, r.Inline); err != nil {
		return none, err
	}
	r.Attach = !r.Inline && attaches(object)
	unlock, err := m.lock(ctx, r.volume())
	if err != nil {
		return none, err
	}
	defer unlock()
	if before := m.entry(r.key()); before != nil {
		if before.volume() != r.volume() {
			return none, fmt.Errorf("volume %s of the pod is %s and was %s before", r.Spec, r.volume(), before.volume())
		}
		r.Stages, r.Called = before.Stages, before.Called
	}
	if err := m.keep(&entry{record: *r, object: d.PV}); err != nil {
		return none, err
	}
	var published map[string]string
	if r.Attach {
		if published, err = m.awaitAttached(ctx, r); err != nil {
			return none, err
		}
	}
	driver := m.drivers.get(w.driver)
	if driver == nil {
		return none, notRegistered(w.driver)
	}
	can, err := driver.caps(ctx)
	if err != nil {
		return none, err
	}
	var group *int64
	if s := pod.Spec.SecurityContext; s != nil {
		group = s.FSGroup
	}
	call := &spec.NodePublishVolumeRequest{
		VolumeId: w.handle, PublishContext: published, TargetPath: m.paths.target(r), VolumeCapability: w.capability(can, group), Readonly: w.readOnly,
		VolumeContext: mergedContext(w.attributes, podContext(object, pod, r.Inline)),
	}
	r.Stages, r.Called = r.Stages || can.stage && !r.Inline, true
	if r.Stages {
		call.StagingTargetPath = m.paths.staging(r)
	}
	if r.Publish, err = protojson.Marshal(call); err != nil {
		return none, err
	}
	if err := m.keep(&entry{record: *r, object: d.PV}); err != nil {
		return none, err
	}
	if r.Stages {
		if err := m.stage(ctx, driver, r, w, call); err != nil {
			return none, err
		}
	}
	if d.PV != nil && !r.Block && can.expand {
		if err := m.expandBefore(ctx, driver, r, d.PV, call); err != nil {
			return none, err
		}
	}
	if err := m.publish(ctx, driver, object, r, pod, call); err != nil {
		return none, err
	}
	if r.Block {
		if err := isDevice(call.TargetPath); err != nil {
			return none, fmt.Errorf("CSI driver %s has published no block device: %w", w.driver, err)
		}
		if d.PV != nil && can.expand {
			if err := m.expandBefore(ctx, driver, r, d.PV, call); err != nil {
				return none, err
			}
		}
	}
	m.watchClaim(r)
	return volume.Place{Path: call.TargetPath, Own: group != nil && w.owns(object.Spec.FSGroupPolicy, can, r.Inline)}, nil
}

func notRegistered(driver string) error {
	return fmt.Errorf("driver name %s not found in the list of registered CSI drivers of this node", driver)
}

func mergedContext(a, b map[string]string) map[string]string {
	out := map[string]string{}
	maps.Copy(out, a)
	maps.Copy(out, b)
	return out
}

// stage has the driver stage the volume, for all pods of this node.
func (m *Manager) stage(ctx context.Context, driver *driver, r *record, w mountRequest, call *spec.NodePublishVolumeRequest) error {
	secrets, err := m.secret(ctx, w.stageSecret)
	if err != nil {
		return err
	}
	// A raw block volume's is a directory too, in which the driver has its own.
	if err := os.MkdirAll(call.StagingTargetPath, 0o750); err != nil {
		return err
	}
	_, err = driver.node.NodeStageVolume(ctx, &spec.NodeStageVolumeRequest{
		VolumeId: call.VolumeId, PublishContext: call.PublishContext, StagingTargetPath: call.StagingTargetPath,
		VolumeCapability: call.VolumeCapability, Secrets: secrets, VolumeContext: w.attributes,
	})
	if err != nil {
		return fmt.Errorf("MountVolume.MountDevice failed for volume %s: %w", r.Spec, driver.fault("NodeStageVolume", err))
	}
	return nil
}

// publish has the driver publish the volume at its target, for one pod.
func (m *Manager) publish(ctx context.Context, driver *driver, object *storagev1.CSIDriver, r *record, pod *v1.Pod, call *spec.NodePublishVolumeRequest) error {
	// The target is the driver's to make, its parent is ours.
	if err := os.MkdirAll(filepath.Dir(call.TargetPath), 0o750); err != nil {
		return err
	}
	full := proto.CloneOf(call)
	var err error
	if full.Secrets, err = m.secret(ctx, r.PublishSecret); err != nil {
		return err
	}
	if err := m.addTokens(ctx, object, pod, full); err != nil {
		return err
	}
	if _, err := driver.node.NodePublishVolume(ctx, full); err != nil {
		return driver.fault("NodePublishVolume", err)
	}
	return nil
}

// token is one as drivers read them.
type token struct {
	Token               string      `json:"token"`
	ExpirationTimestamp metav1.Time `json:"expirationTimestamp"`
}

// addTokens adds the tokens that the driver's object asks for, where it wants
// them: among the secrets, or in the volume's context.
func (m *Manager) addTokens(ctx context.Context, object *storagev1.CSIDriver, pod *v1.Pod, call *spec.NodePublishVolumeRequest) error {
	if len(object.Spec.TokenRequests) == 0 {
		return nil
	}
	all := map[string]token{}
	for _, want := range object.Spec.TokenRequests {
		seconds := int64(3600)
		if want.ExpirationSeconds != nil {
			seconds = *want.ExpirationSeconds
		}
		text, err := m.cfg.Tokens.Token(ctx, pod, want.Audience, seconds)
		if err != nil {
			return err
		}
		all[want.Audience] = token{Token: text, ExpirationTimestamp: metav1.NewTime(expiry(text, time.Now().Add(time.Duration(seconds)*time.Second)))}
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	if isTrue(object.Spec.ServiceAccountTokenInSecrets) {
		call.Secrets = mergedContext(call.Secrets, map[string]string{contextTokens: string(text)})
		return nil
	}
	call.VolumeContext = mergedContext(call.VolumeContext, map[string]string{contextTokens: string(text)})
	return nil
}

// secret reads what a driver is to be given of a Secret.
func (m *Manager) secret(ctx context.Context, ref *v1.SecretReference) (map[string]string, error) {
	if ref == nil || ref.Name == "" {
		return nil, nil
	}
	s, err := m.cfg.Client.CoreV1().Secrets(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("secret %s/%s for the CSI driver: %w", ref.Namespace, ref.Name, err)
	}
	out := map[string]string{}
	for k, v := range s.Data {
		out[k] = string(v)
	}
	return out, nil
}

// isDevice says why path is no block device.
func isDevice(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st.Mode()&os.ModeDevice == 0 || st.Mode()&os.ModeCharDevice != 0 {
		return fmt.Errorf("%s is %v", path, st.Mode().Type())
	}
	return nil
}
