package main

import (
	"fmt"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/sealkey"
	"sigs.k8s.io/yaml"
)

// keyDir reads the sealing key, if there is one.
func (c *Config) keyDir() (nodedir.KeyDir, error) {
	d := nodedir.KeyDir{Dir: nodedir.Dir(c.Data)}
	if c.SealKey == "" {
		return d, nil
	}
	var err error
	if d.Seal, err = sealkey.Read(c.SealKey, c.Data); err != nil {
		return d, fmt.Errorf("--seal-key: %w", err)
	}
	return d, nil
}

// wireguardDir is where the node's key for pod traffic is stored.
func (c *Config) wireguardDir() string {
	d := nodedir.Dir(c.Data)
	if c.SealKey == "" {
		return d.Path("network")
	}
	return d.Memory()
}

// writeConfig replaces the configuration in a data directory.
func writeConfig(d nodedir.Dir, c Config) error {
	b, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	return nodedir.WriteFile(configPath(string(d)), append([]byte("# Written by clusterd init or join. Flags of `clusterd run` win over it.\n"), b...), 0o600)
}
