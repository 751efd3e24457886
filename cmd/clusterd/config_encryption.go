package main

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/clusterd/clusterd/member/join"
)

// Values of PodEncryption.
const (
	podEncryptionOff       = join.PodEncryptionOff
	podEncryptionWireGuard = "wireguard"
)

// EncryptionConfig says how what pods send to other nodes is encrypted, and what seals this
// node's key files.
type EncryptionConfig struct {
	// PodEncryption is off or wireguard: what pods send to pods of other nodes goes
	// through WireGuard, and nothing of it in clear. It is chosen at init, and nodes
	// that join take it over. Another value later belongs on every node: between
	// one that encrypts and one that does not, nothing passes. Those that join
	// afterwards get the leader's.
	PodEncryption string `json:"podEncryption"`
	// WireGuardKeyAge is after what time this node makes itself another key for
	// WireGuard; 0: never. Connections go on.
	WireGuardKeyAge Duration `json:"wireguardKeyAge"`
	// SealKey is a file with the key that seals this node's key files in DATA: a secret
	// key of age, as clusterd keys new makes one. It is read at each start and lies outside
	// of DATA: on another disk, in memory, in a credential of systemd. Empty: the key files
	// lie in clear, with the mode 0600.
	SealKey string `json:"sealKey,omitempty"`
	// EncryptionProviderConfig is a file with an EncryptionConfiguration of
	// apiserver.config.k8s.io/v1: which resources are sealed at rest, and by which providers.
	// It is followed while this server runs. Empty: the cluster's own keys seal Secrets.
	EncryptionProviderConfig string `json:"encryptionProviderConfig,omitempty"`
}

func defaultEncryption() EncryptionConfig {
	return EncryptionConfig{PodEncryption: podEncryptionOff, WireGuardKeyAge: Duration{30 * 24 * time.Hour}}
}

func (c *EncryptionConfig) addFlags(areas *cliflag.NamedFlagSets) {
	areas.FlagSet(areaNetwork).DurationVar(&c.WireGuardKeyAge.Duration, "wireguard-key-age", c.WireGuardKeyAge.Duration, "age at which this node rotates its WireGuard key (0 = never)")
	areas.FlagSet(areaKeys).StringVar(&c.SealKey, "seal-key", c.SealKey, "file outside of the data directory with the key that encrypts this node's key files, see clusterd keys (empty = not encrypted)")
	areas.FlagSet(areaAPI).StringVar(&c.EncryptionProviderConfig, "encryption-provider-config", c.EncryptionProviderConfig, "file with an EncryptionConfiguration, the same on all servers: which resources are encrypted at rest (empty = Secrets, with the cluster's own keys)")
}

func (c *EncryptionConfig) addClusterFlags(f *pflag.FlagSet) {
	f.StringVar(&c.PodEncryption, "pod-encryption", c.PodEncryption, "encryption of pod traffic between nodes: off or wireguard")
}

func (c *EncryptionConfig) check() error {
	switch c.PodEncryption {
	case podEncryptionOff, podEncryptionWireGuard:
	case "": // a cluster of before, in its record
		c.PodEncryption = podEncryptionOff
	default:
		return fmt.Errorf("--pod-encryption %q: %s or %s", c.PodEncryption, podEncryptionOff, podEncryptionWireGuard)
	}
	if age := c.WireGuardKeyAge.Duration; age != 0 && age < time.Minute {
		return fmt.Errorf("--wireguard-key-age %s: give 1m or more, or 0", age)
	}
	if c.SealKey != "" && !filepath.IsAbs(c.SealKey) {
		return fmt.Errorf("--seal-key %q: an absolute path is required, such as /media/key/n1: it is read again at each start", c.SealKey)
	}
	if file := c.EncryptionProviderConfig; file != "" && !filepath.IsAbs(file) {
		return fmt.Errorf("--encryption-provider-config %q: an absolute path is required, such as /etc/clusterd/encryption.yaml: it is followed while this server runs", file)
	}
	return nil
}
