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
	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/member/sealkey"
)

func keysCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Seal this node's key files with a key that lies elsewhere, or put them in clear again",
		Long: `Seal this node's key files with a key that lies elsewhere, or put them in clear again.

With --seal-key FILE a node keeps its keys (its own and, on a server, the
authority's, gossip's and those for Secrets at rest) in files of age, which that key opens.
A copy of the data folder, a backup of it or its disk then open nothing. FILE is
needed at each start, so it lies on another disk, in memory, or in a credential of
systemd, which a TPM can hold.`,
		Example: `  # A key, and from the next start on a node whose files it seals:
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
		Short: "Make a sealing key and write it to a new file, or to the standard output for -",
		Example: `  sudo clusterd keys new /media/key/n1

  # Bound to this machine's TPM, for systemd's LoadCredentialEncrypted=:
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
				return fmt.Errorf("%s exists: a sealing key is not written over, as files may need it", args[0])
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
		Short:   "Say which of this node's key files are sealed, and with which key",
		Example: `  sudo clusterd keys status`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d, err := keysOf(cmd, &cfg)
			if err != nil {
				return err
			}
			files, err := d.keyFiles()
			if err != nil {
				return err
			}
			out := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(out, "FILE\tIS")
			for _, f := range files {
				fmt.Fprintf(out, "%s\t%s\n", f.name, f.is)
			}
			return out.Flush()
		},
	}
	cfg.addFlags(cmd.Flags())
	return cmd
}

func keysShowCommand() *cobra.Command {
	cfg := defaultConfig()
	cmd := &cobra.Command{
		Use:   "show FILE",
		Short: "Print what a sealed file of the data folder holds",
		Example: `  # The keys for Secrets at rest, to put another one on top:
  sudo clusterd keys show seal.keys`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := keysOf(cmd, &cfg)
			if err != nil {
				return err
			}
			secret, err := d.show(args[0])
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(secret)
			return err
		},
	}
	cfg.addFlags(cmd.Flags())
	return cmd
}

// show is what a file of the folder holds; nothing, of a node without keys of its
// administrator's for Secrets.
func (d keyDir) show(path string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		path = d.path(path)
	}
	secret, err := d.readKey(path)
	if errors.Is(err, fs.ErrNotExist) && path == d.path(sealFile) {
		return nil, nil
	}
	return secret, err
}

func keysWriteCommand() *cobra.Command {
	cfg := defaultConfig()
	var drop bool
	cmd := &cobra.Command{
		Use:   "write seal.keys",
		Short: "Replace the file of keys for Secrets at rest by the standard input, sealed",
		Long: `Replace the file of keys for Secrets at rest by the standard input, sealed.

The file that is there has to be readable, and a key that it has and the standard input
has not is an error unless --drop is given: Secrets and their history may need that key.
A key that stands twice is kept where it stands first.`,
		Example: `  # Another key, made once (docs/security.md says how all servers get it):
  sudo sh -c 'umask 077; echo "key-$(date +%s) $(head -c 32 /dev/urandom | base64)" > /media/key/secrets'

  # On each server below the keys that are there, and when all of them have it, on each on top:
  { sudo clusterd keys show seal.keys; sudo cat /media/key/secrets; } | sudo clusterd keys write seal.keys
  { sudo cat /media/key/secrets; sudo clusterd keys show seal.keys; } | sudo clusterd keys write seal.keys`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] != sealFile {
				return fmt.Errorf("%q: only %s is written by hand", args[0], sealFile)
			}
			d, err := keysOf(cmd, &cfg)
			if err != nil {
				return err
			}
			return d.writeSealKeys(cmd.InOrStdin(), drop)
		},
	}
	cmd.Flags().BoolVar(&drop, "drop", false, "allow that keys of the file are not in the standard input: what is sealed with them cannot be read any more")
	cfg.addFlags(cmd.Flags())
	return cmd
}

func keysUnsealCommand() *cobra.Command {
	cfg := defaultConfig()
	cmd := &cobra.Command{
		Use:   "unseal",
		Short: "Put this node's key files in clear again; clusterd must not run",
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
	return cmd
}

// keysOf is the folder of a node, with its sealing key.
func keysOf(cmd *cobra.Command, cfg *Config) (keyDir, error) {
	if err := needRoot(cmd); err != nil {
		return keyDir{}, err
	}
	if err := cfg.load(cmd.Flags()); err != nil {
		return keyDir{}, err
	}
	if !dataDir(cfg.Data).member() {
		return keyDir{}, fmt.Errorf("--data %s: it holds no node", cfg.Data)
	}
	return cfg.keyDir()
}

// unseal puts the files in clear. That the node is to have no sealing key is written
// down last: until then it would seal them again.
func unseal(d keyDir, out io.Writer) error {
	lock, err := d.lock()
	if errors.Is(err, errInUse) {
		return fmt.Errorf("%w: stop it first (`systemctl stop clusterd`, or end the process)", err)
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := d.unsealAll(); err != nil {
		return err
	}
	written := defaultConfig()
	b, err := os.ReadFile(configPath(string(d.dataDir)))
	if err == nil {
		err = yaml.UnmarshalStrict(b, &written)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the files are in clear; take sealKey away yourself: %s: %w", configPath(string(d.dataDir)), err)
	}
	if written.SealKey != "" {
		written.SealKey = ""
		if err := d.writeConfig(written); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "The key files in %s are in clear. Start clusterd without --seal-key, also where systemd's unit sets CLUSTERD_SEAL_KEY or a file that --config names has sealKey: it would seal them again.\n", d.dataDir)
	return nil
}

// keyFile is one file with a key.
type keyFile struct {
	name string // in the data folder
	is   string // what it is, for people
	// clear: whoever reads it has the key. fault: the sealing key does not open it.
	clear bool
	fault error
}

// keyFiles are those that the folder has.
func (d keyDir) keyFiles() ([]keyFile, error) {
	entries, err := os.ReadDir(d.path("pki"))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if !publicFile(e.Name()) {
			paths = append(paths, d.path("pki", e.Name()))
		}
	}
	loose, err := d.loose()
	if err != nil {
		return nil, err
	}
	paths = append(paths, loose...)
	for _, name := range []string{kubeconfigName, "front-proxy.key", "network/" + wireguardKey} {
		if _, err := os.Lstat(d.path(name)); err == nil {
			paths = append(paths, d.path(name))
		}
	}
	var files []keyFile
	for _, path := range paths {
		f := keyFile{name: path[len(d.dataDir)+1:]}
		if to, err := os.Readlink(path); err == nil {
			f.is = "in memory, " + to
			files = append(files, f)
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		n, err := d.seal.With(b)
		switch {
		case err != nil:
			f.fault, f.is = err, "sealed, and cannot be opened: "+err.Error()
		case n == 0:
			f.clear, f.is = true, "in clear"
		default:
			f.is = fmt.Sprintf("sealed with key %d of %s", n, d.seal.File())
		}
		files = append(files, f)
	}
	return files, nil
}

// examineKeys says how a node's keys lie on its disk; nil: it is none.
func examineKeys(cfg Config) []doctor.Finding {
	if !dataDir(cfg.Data).member() {
		return nil
	}
	fault := func(err error) []doctor.Finding {
		return []doctor.Finding{{Check: "keys", Level: doctor.Problem, Says: err.Error(), Cure: "give --seal-key the file with the key of this node: clusterd does not start without it"}}
	}
	d, err := cfg.keyDir()
	if err != nil {
		return fault(err)
	}
	files, err := d.keyFiles()
	if err != nil {
		return fault(err)
	}
	var clear []string
	for _, f := range files {
		switch {
		case f.fault != nil:
			return fault(fmt.Errorf("%s: %w", f.name, f.fault))
		case f.clear:
			clear = append(clear, f.name)
		}
	}
	switch {
	case d.seal == nil:
		return []doctor.Finding{{Check: "keys", Level: doctor.OK, Says: fmt.Sprintf("%d key files lie in clear in %s, mode 0600: who gets a copy of it has them (--seal-key: docs/security.md)", len(clear), cfg.Data)}}
	case len(clear) > 0:
		return []doctor.Finding{{Check: "keys", Level: doctor.Warning, Says: fmt.Sprintf("%d key files are not sealed yet: %s", len(clear), clear[0]), Cure: "start clusterd again with --seal-key " + cfg.SealKey}}
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
		Cure: "swapoff -a, and take its line out of /etc/fstab; or swap to what is encrypted with a key that each boot draws",
	}}
}
