package csi

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/durable"
)

// paths are those below the directory that drivers look for.
type paths string

func (p paths) pods() string { return filepath.Join(string(p), "pods") }
func (p paths) csi() string  { return filepath.Join(string(p), "plugins", "kubernetes.io", "csi") }
func (p paths) volumes(uid types.UID) string {
	return filepath.Join(p.pods(), string(uid), "volumes", "kubernetes.io~csi")
}

// Owned are the directories below root that hold nothing but what this package made
// and had mounted; none if root was never a node's of ours.
func Owned(root string) []string {
	p := paths(root)
	if !plugin.Owned(root) {
		return nil
	}
	return []string{p.pods(), p.csi()}
}

const recordFile = "record.json"

// recordKey names a volume of a pod: spec is the persistent volume's name, or
// the pod's own for an inline one.
type recordKey struct {
	pod  types.UID
	spec string
}

// record is what is known on disk of one volume of one pod. It is written
// before the driver is asked for anything, and goes after the driver has said
// that all is undone. It holds no secret.
type record struct {
	Version int `json:"version"` // 1

	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	UID       types.UID `json:"uid"`
	Account   string    `json:"account"`         // the pod's service account
	Claim     string    `json:"claim,omitempty"` // "": inline
	Name      string    `json:"name"`            // the pod's for the volume
	Spec      string    `json:"spec"`            // see recordKey

	Driver string `json:"driver"`
	Handle string `json:"handle"`
	Block  bool   `json:"block,omitempty"`
	Inline bool   `json:"inline,omitempty"`
	// Attach: the volume is attached to the node before anything else.
	Attach bool `json:"attach,omitempty"`
	// Stages: the driver was asked to stage it, or is about to be.
	Stages bool `json:"stages,omitempty"`
	// Called: the driver was asked for something, or is about to be.
	Called bool `json:"called,omitempty"`

	// Publish is the request as JSON without secrets and tokens, for drivers
	// that want it again; PublishSecret names the Secret that goes with it.
	Publish       json.RawMessage     `json:"publish,omitempty"`
	PublishSecret *v1.SecretReference `json:"publishSecret,omitempty"`
}

func (r *record) key() recordKey { return recordKey{r.UID, r.Spec} }

// volume names what is staged and attached: one for all pods of the node.
func (r *record) volume() string { return r.Driver + "^" + r.Handle }

// unique is the volume's name in the node's status.
func (r *record) unique() v1.UniqueVolumeName {
	return v1.UniqueVolumeName("kubernetes.io/csi/" + r.volume())
}

// staging is where the volume is staged.
func (p paths) staging(r *record) string {
	if r.Block {
		return filepath.Join(p.csi(), "volumeDevices", "staging", r.Spec)
	}
	return filepath.Join(p.csi(), r.Driver, fmt.Sprintf("%x", sha256.Sum256([]byte(r.Handle))), "globalmount")
}

// target is where the volume is published for the pod.
func (p paths) target(r *record) string {
	if r.Block {
		return filepath.Join(p.csi(), "volumeDevices", "publish", r.Spec, string(r.UID))
	}
	return filepath.Join(p.record(r), "mount")
}

// record is the directory of the record.
func (p paths) record(r *record) string { return filepath.Join(p.volumes(r.UID), r.Spec) }

// write puts the record on disk: all of it or nothing.
func (p paths) write(r *record) error {
	r.Version = 1
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	dir := p.record(r)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	if err := durable.ReplaceFile(filepath.Join(dir, recordFile), data, 0o600); err != nil {
		return fmt.Errorf("record of volume %s: %w", r.Spec, err)
	}
	return nil
}

// forget removes the record and its directories.
func (p paths) forget(r *record) error {
	dir := p.record(r)
	left, err := filepath.Glob(filepath.Join(dir, "."+recordFile+".*"))
	if err != nil {
		return err
	}
	for _, f := range append(left, filepath.Join(dir, recordFile)) {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	removeUpTo(dir, p.pods())
	return nil
}

// read reads every record. A directory without one was made by an attempt that got
// no further, and is removed.
func (p paths) read() ([]*record, error) {
	dirs, err := filepath.Glob(filepath.Join(p.pods(), "*", "volumes", "kubernetes.io~csi", "*"))
	if err != nil {
		return nil, err
	}
	var out []*record
	for _, dir := range dirs {
		data, err := os.ReadFile(filepath.Join(dir, recordFile))
		if errors.Is(err, fs.ErrNotExist) {
			uid, _, _ := strings.Cut(strings.TrimPrefix(dir, p.pods()+"/"), "/")
			if err := p.forget(&record{UID: types.UID(uid), Spec: filepath.Base(dir)}); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		r := &record{}
		if err := json.Unmarshal(data, r); err != nil {
			return nil, fmt.Errorf("record %s: %w", filepath.Join(dir, recordFile), err)
		}
		if r.Version != 1 || p.record(r) != dir || r.Driver == "" {
			return nil, fmt.Errorf("record %s is of version %d and volume %q: not one that this clusterd can have written", filepath.Join(dir, recordFile), r.Version, r.Spec)
		}
		out = append(out, r)
	}
	return out, nil
}
