package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/cmd/clusterd/doctor"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/member/sealkey"
)

// keysFlags are the flags of Config that the commands below `clusterd keys` use.
var keysFlags = []string{"data", "config", "seal-key"}

func keysCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Encrypt this node's key files with an external key, or decrypt them",
		Long: `Encrypt this node's key files with an external key, or decrypt them.

With --seal-key FILE a node stores its keys (its own and, on a server, those of the
CA, of gossip and of Secrets at rest) in age files that only this key decrypts: a copy
of the data directory, a backup of it or its disk is then of no use. FILE is needed at
each start: keep it on another disk, in memory, or in a systemd credential, which a
TPM can protect.`,
		Example: `  # Create a key; the next start encrypts the key files:
  sudo clusterd keys new /media/key/n1
  sudo clusterd run --seal-key /media/key/n1

  sudo clusterd keys status --seal-key /media/key/n1`,
	}
	cmd.AddCommand(keysNewCommand(), keysStatusCommand(), keysShowCommand(), keysWriteCommand(), keysUnsealCommand())
	return cmd
}

func keysNewCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "new FILE",
		Short: "Create a sealing key in a new file (- = standard output)",
		Example: `  sudo clusterd keys new /media/key/n1

  # Bound to this machine's TPM, for LoadCredentialEncrypted= of systemd:
  clusterd keys new - | sudo systemd-creds encrypt --with-key=tpm2 --name=clusterd.seal-key - /etc/clusterd/seal-key.cred`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := sealkey.New()
			if err != nil {
				return err
			}
			if args[0] == "-" {
				_, err := cmd.OutOrStdout().Write(key)
				return err
			}
			f, err := os.OpenFile(args[0], os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("%s exists: a sealing key is never overwritten, as files may be encrypted with it", args[0])
			}
			if err != nil {
				return err
			}
			if _, err := f.Write(key); err != nil {
				return errors.Join(err, f.Close(), os.Remove(args[0]))
			}
			if err := errors.Join(f.Sync(), f.Close()); err != nil {
				return err
			}
			return durable.SyncDir(filepath.Dir(args[0]))
		},
	}
}

func keysStatusCommand() *cobra.Command {
	cfg := defaultConfig()
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show which of this node's key files are encrypted, and with which key",
		Example: `  sudo clusterd keys status`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d, err := keysOf(cmd, &cfg)
			if err != nil {
				return err
			}
			files, err := d.KeyFiles()
			if err != nil {
				return err
			}
			out := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(out, "FILE\tSTATE")
			for _, f := range files {
				fmt.Fprintf(out, "%s\t%s\n", f.Name, f.Is)
			}
			return out.Flush()
		},
	}
	cfg.addFlags(cmd.Flags())
	showOnly(cmd, keysFlags...)
	return cmd
}

func keysShowCommand() *cobra.Command {
	cfg := defaultConfig()
	cmd := &cobra.Command{
		Use:   "show FILE",
		Short: "Decrypt a file of the data directory and print it",
		Example: `  # The keys for Secrets at rest, to add another one:
  sudo clusterd keys show seal.keys`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := keysOf(cmd, &cfg)
			if err != nil {
				return err
			}
			secret, err := d.Show(args[0])
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(secret)
			return err
		},
	}
	cfg.addFlags(cmd.Flags())
	showOnly(cmd, keysFlags...)
	return cmd
}

func keysWriteCommand() *cobra.Command {
	cfg := defaultConfig()
	var drop bool
	cmd := &cobra.Command{
		Use:   "write seal.keys",
		Short: "Replace the keys for Secrets at rest by those on the standard input",
		Long: `Replace the keys for Secrets at rest by those on the standard input, and encrypt the
file.

The present file must be readable. A key of it that the standard input lacks is an
error unless --drop is given: Secrets and their history may need that key. Of a key
that occurs twice the first occurrence counts.`,
		Example: `  # Another key, created once (docs/security.md: how all servers get it):
  sudo sh -c 'umask 077; echo "key-$(date +%s) $(head -c 32 /dev/urandom | base64)" > /media/key/secrets'

  # First append it on each server; when all servers have it, move it to the top on each:
  { sudo clusterd keys show seal.keys; sudo cat /media/key/secrets; } | sudo clusterd keys write seal.keys
  { sudo cat /media/key/secrets; sudo clusterd keys show seal.keys; } | sudo clusterd keys write seal.keys`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] != nodedir.SealKeysFile {
				return fmt.Errorf("%q: only %s is written by hand", args[0], nodedir.SealKeysFile)
			}
			d, err := keysOf(cmd, &cfg)
			if err != nil {
				return err
			}
			return d.WriteSealKeys(cmd.InOrStdin(), drop)
		},
	}
	cmd.Flags().BoolVar(&drop, "drop", false, "allow to drop keys: what is encrypted with them can no longer be read")
	cfg.addFlags(cmd.Flags())
	showOnly(cmd, keysFlags...)
	return cmd
}

func keysUnsealCommand() *cobra.Command {
	cfg := defaultConfig()
	cmd := &cobra.Command{
		Use:   "unseal",
		Short: "Decrypt this node's key files; clusterd must not be running",
		Example: `  sudo systemctl stop clusterd
  sudo clusterd keys unseal --seal-key /media/key/n1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d, err := keysOf(cmd, &cfg)
			if err != nil {
				return err
			}
			return unseal(d, cmd.OutOrStdout())
		},
	}
	cfg.addFlags(cmd.Flags())
	showOnly(cmd, keysFlags...)
	return cmd
}

// keysOf is the directory of a node, with its sealing key.
func keysOf(cmd *cobra.Command, cfg *Config) (nodedir.KeyDir, error) {
	if err := needRoot(cmd); err != nil {
		return nodedir.KeyDir{}, err
	}
	if err := cfg.load(cmd.Flags()); err != nil {
		return nodedir.KeyDir{}, err
	}
	if !nodedir.Dir(cfg.Data).Member() {
		return nodedir.KeyDir{}, fmt.Errorf("--data %s: it holds no node", cfg.Data)
	}
	return cfg.keyDir()
}

// unseal puts the files in clear. That the node is to have no sealing key is written
// down last: until then it would seal them again.
func unseal(d nodedir.KeyDir, out io.Writer) error {
	lock, err := d.Lock()
	if errors.Is(err, nodedir.ErrInUse) {
		return fmt.Errorf("%w: stop it first (`systemctl stop clusterd`, or end the process)", err)
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := d.UnsealAll(); err != nil {
		return err
	}
	written := defaultConfig()
	b, err := os.ReadFile(configPath(string(d.Dir)))
	if err == nil {
		err = yaml.UnmarshalStrict(b, &written)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the files are in clear; take sealKey away yourself: %s: %w", configPath(string(d.Dir)), err)
	}
	if written.SealKey != "" {
		written.SealKey = ""
		if err := writeConfig(d.Dir, written); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "The key files in %s are in clear. Start clusterd without --seal-key, also where systemd's unit sets CLUSTERD_SEAL_KEY or a file that --config names has sealKey: it would seal them again.\n", d.Dir)
	return nil
}

// examineKeys says how a node's keys lie on its disk; nil: it is none.
func examineKeys(cfg Config) []doctor.Finding {
	if !nodedir.Dir(cfg.Data).Member() {
		return nil
	}
	fault := func(err error) []doctor.Finding {
		return []doctor.Finding{{Check: "keys", Level: doctor.Problem, Says: err.Error(), Fix: "give --seal-key the file with the key of this node: clusterd does not start without it"}}
	}
	d, err := cfg.keyDir()
	if err != nil {
		return fault(err)
	}
	files, err := d.KeyFiles()
	if err != nil {
		return fault(err)
	}
	var clear []string
	for _, f := range files {
		switch {
		case f.Fault != nil:
			return fault(fmt.Errorf("%s: %w", f.Name, f.Fault))
		case f.Clear:
			clear = append(clear, f.Name)
		}
	}
	switch {
	case d.Seal == nil:
		return []doctor.Finding{{Check: "keys", Level: doctor.OK, Says: fmt.Sprintf("%d key files lie in clear in %s, mode 0600: who gets a copy of it has them (--seal-key: docs/security.md)", len(clear), cfg.Data)}}
	case len(clear) > 0:
		return []doctor.Finding{{Check: "keys", Level: doctor.Warning, Says: fmt.Sprintf("%d key files are not sealed yet: %s", len(clear), clear[0]), Fix: "start clusterd again with --seal-key " + cfg.SealKey}}
	}
	return []doctor.Finding{{Check: "keys", Level: doctor.OK, Says: "the key files are sealed; what opens them: " + cfg.SealKey}}
}

// examineSwap says that a sealing key protects less where memory is written to a disk; nil: it is not.
func examineSwap(cfg Config, swaps []string) []doctor.Finding {
	var disks []string
	for _, name := range swaps {
		if !strings.HasPrefix(name, "/dev/zram") { // memory again
			disks = append(disks, name)
		}
	}
	if cfg.SealKey == "" || len(disks) == 0 {
		return nil
	}
	return []doctor.Finding{{
		Check: "keys", Level: doctor.Warning,
		Says: fmt.Sprintf("this machine swaps to %s: what lies in memory for the sake of --seal-key, the keys on a tmpfs included, may be written there in clear", strings.Join(disks, ", ")),
		Fix:  "swapoff -a, and take its line out of /etc/fstab; or swap to what is encrypted with a key that each boot draws",
	}}
}
