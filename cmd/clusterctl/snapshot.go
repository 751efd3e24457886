package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/backup"
)

func newSnapshotCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Save the cluster to one encrypted file, verify or restore it",
		Long: templates.LongDesc(`
			Save the cluster to one encrypted file, verify such a file, or create a cluster from
			it.

			The file holds the cluster's state and its CA keys: all that is needed to restore the
			cluster on other machines, under other names and addresses. Restore it there with
			clusterctl snapshot restore or clusterd init --from-snapshot, which do the same.
			Anybody who can decrypt it can act as anyone in the cluster, so it is always
			encrypted, with a passphrase or to an age public key (age-encryption.org).`),
		Run: cmdutil.DefaultSubCommandRun(streams.ErrOut),
	}
	cmd.AddCommand(newSnapshotSaveCommand(f, streams), newSnapshotVerifyCommand(streams), newSnapshotRestoreCommand())
	return cmd
}

func newSnapshotSaveCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var passphraseFile string
	var recipients []string
	cmd := &cobra.Command{
		Use:   "save FILE",
		Short: "Save the cluster to one encrypted file",
		Long: templates.LongDesc(`
			Save the cluster to one encrypted file.

			The state is that of one point in time, with every write that was acknowledged
			before. While it is written it is rebuilt and compared with the server's hashes, so a
			file that this command leaves behind is complete. FILE must not exist.`),
		Example: templates.Examples(`
			# Asks for a passphrase
			clusterctl snapshot save cluster.backup

			# From a timer: encrypted to a key whose secret part is kept elsewhere
			clusterctl snapshot save --recipient age1... /backup/$(date +%F)`),
		Args: oneArg("the name of the file to write", ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			var lock backup.Lock
			var err error
			switch {
			case len(recipients) > 0 && passphraseFile != "":
				return errors.New("--recipient and --passphrase-file: give one of them")
			case len(recipients) > 0:
				if lock, err = backup.Recipients(recipients); err != nil {
					return fmt.Errorf("--recipient: %w", err)
				}
			default:
				p, err := passphrase(passphraseFile, args[0], true)
				if err != nil {
					return err
				}
				if lock, _, err = backup.Passphrase(p); err != nil {
					return err
				}
			}
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			c, err := saveSnapshot(cmd.Context(), a, args[0], lock)
			if err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "%s holds cluster %s as of revision %d: %d keys, %s.\n", args[0], c.Cluster, c.Digest.Revision, c.Digest.Keys, size(c.Digest.Bytes))
			return checkSealKeys(args[0], c)
		},
	}
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "File whose first line is the passphrase (default: ask)")
	cmd.Flags().StringArrayVar(&recipients, "recipient", nil, "age public key (age1...) to encrypt the file to; may be repeated")
	return cmd
}

// saveSnapshot writes the file in one go: sealed on the way in, rebuilt and
// compared on the side, and given its name last.
func saveSnapshot(ctx context.Context, a *api, path string, lock backup.Lock) (_ *backup.Content, err error) {
	if _, err := os.Lstat(path); err == nil {
		return nil, fmt.Errorf("%s exists: choose another name, or remove it", path)
	}
	body, err := a.get(ctx, pathOf("snapshot"))
	if err != nil {
		return nil, err
	}
	defer body.Close()
	part, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-") // 0600
	if err != nil {
		return nil, err
	}
	defer func() {
		part.Close()
		os.Remove(part.Name()) // gone already when it has its name
	}()
	sealed, err := backup.Seal(part, lock)
	if err != nil {
		return nil, err
	}
	c, err := backup.Read(io.TeeReader(body, sealed))
	if err != nil {
		return nil, fmt.Errorf("what the server sent: %w", err)
	}
	if err := errors.Join(sealed.Close(), part.Sync(), part.Close()); err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	if err := place(os.Link, part.Name(), path); err != nil {
		return nil, err
	}
	return c, durable.SyncDir(filepath.Dir(path))
}

// place gives a file its name. A link, unlike a rename, does not replace what has come
// to be there; file systems without links (FAT, many of FUSE's) get the next best.
func place(link func(old, new string) error, part, path string) error {
	err := link(part, path)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("%s exists: choose another name, or remove it", path)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return durable.Rename(part, path)
}

func newSnapshotVerifyCommand(streams genericiooptions.IOStreams) *cobra.Command {
	var passphraseFile, identity string
	cmd := &cobra.Command{
		Use:   "verify FILE",
		Short: "Verify a snapshot: rebuild its state in memory and compare",
		Long: templates.LongDesc(`
			Verify a snapshot: rebuild its state in memory and compare the hash of each part, the
			number of keys of each kind, and the hash of the whole state with its revisions, as
			the servers compute it. No cluster is needed.`),
		Example: templates.Examples(`
			clusterctl snapshot verify cluster.backup
			clusterctl snapshot verify --identity key.txt /backup/2026-11-21`),
		Args: oneArg("the name of a file", ""),
		RunE: func(_ *cobra.Command, args []string) error {
			var key backup.Key
			var err error
			switch {
			case identity != "" && passphraseFile != "":
				return errors.New("--identity and --passphrase-file: give one of them")
			case identity != "":
				if key, err = backup.ReadIdentities(identity); err != nil {
					return fmt.Errorf("--identity: %w", err)
				}
			default:
				p, err := passphrase(passphraseFile, args[0], false)
				if err != nil {
					return err
				}
				if _, key, err = backup.Passphrase(p); err != nil {
					return err
				}
			}
			return verifySnapshot(streams.Out, args[0], key)
		},
	}
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "File whose first line is the passphrase (default: ask)")
	cmd.Flags().StringVar(&identity, "identity", "", "File with the age-keygen secret key that decrypts the snapshot")
	return cmd
}

func verifySnapshot(w io.Writer, path string, key backup.Key) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	plain, err := backup.Open(f, key)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	c, err := backup.Read(plain)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	rows := [][]string{
		{"Cluster:", c.Cluster},
		{"Taken:", c.Taken.Format(time.RFC3339) + " on " + c.Node + " by clusterd " + c.Release},
		{"Epoch:", strconv.FormatUint(c.Epoch, 10)},
		{"Revision:", strconv.FormatInt(c.Digest.Revision, 10)},
		{"Keys:", strconv.FormatInt(c.Digest.Keys, 10)},
		{"Size:", size(c.Digest.Bytes)},
		{"Hash:", fmt.Sprintf("%016x", c.Digest.Hash)},
	}
	if err := printTable(w, nil, rows); err != nil {
		return err
	}
	fmt.Fprintln(w)
	rows = nil
	for _, folder := range slices.Sorted(maps.Keys(c.Counts)) {
		rows = append(rows, []string{folder, strconv.FormatInt(c.Counts[folder], 10)})
	}
	if err := printTable(w, []string{"FOLDER", "KEYS"}, rows); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "\n%s is whole: all counts and hashes are those that were saved.\n", path); err != nil {
		return err
	}
	providers, err := c.Providers()
	if err != nil {
		return err
	}
	if len(providers) > 0 {
		fmt.Fprintf(w, "Objects in it are sealed by providers of an EncryptionConfiguration, whose keys no snapshot holds: %s. Keep the servers' file of --encryption-provider-config too.\n", strings.Join(providers, ", "))
	}
	return checkSealKeys(path, c)
}

// checkSealKeys returns an error if Secrets in the snapshot are sealed with keys that
// it does not hold.
func checkSealKeys(path string, c *backup.Content) error {
	missing, err := c.MissingSealKeys()
	if err != nil || len(missing) == 0 {
		return err
	}
	return fmt.Errorf("%s does not hold the keys %s, with which Secrets in it are sealed: keep the file DATA/seal.keys of a server that has them too, and put it into the data folder after a restore", path, strings.Join(missing, ", "))
}

// newSnapshotRestoreCommand hands over to clusterd: a cluster begins on the
// machine that is to be its first node, where no server runs yet.
func newSnapshotRestoreCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "restore FILE",
		Short: "Create a cluster on this machine from a snapshot",
		Long: templates.LongDesc(`
			Create a cluster on this machine from a snapshot. This runs

			    clusterd init --from-snapshot FILE

			with all further arguments: a name and an address for this machine, the passphrase or
			key of the file, --prepare; see clusterd init --help. It needs root, and clusterd
			beside clusterctl or on the PATH. FILE may be the URL of a snapshot in an object
			store.

			The cluster continues in a new epoch, with this machine as its only member; others
			join as usual. Machines of the previous cluster are NotReady until they join again or
			are deleted.`),
		Example: templates.Examples(`
			sudo clusterctl snapshot restore cluster.backup --name n1 --advertise 192.0.2.7`),
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 || strings.HasPrefix(args[0], "-") {
				if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
					return cmd.Help()
				}
				return errors.New("clusterctl snapshot restore needs the name of a file, before any flag")
			}
			path, err := clusterdPath()
			if err != nil {
				return err
			}
			argv := append([]string{"clusterd", "init", "--from-snapshot", args[0]}, args[1:]...)
			return fmt.Errorf("run %s: %w", path, syscall.Exec(path, argv, os.Environ()))
		},
	}
}

// clusterdPath is clusterd beside this program, or on the PATH.
func clusterdPath() (string, error) {
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "clusterd")
		if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() {
			return beside, nil
		}
	}
	path, err := exec.LookPath("clusterd")
	if err != nil {
		return "", fmt.Errorf("clusterd is neither beside clusterctl nor on the PATH: run `clusterd init --from-snapshot` on the machine that has it (%w)", err)
	}
	return path, nil
}

// passphrase comes from a file or from whoever sits there, who types a new one
// twice.
func passphrase(file, what string, anew bool) (string, error) {
	if file != "" {
		p, err := backup.ReadPassphrase(file)
		if err != nil {
			return "", fmt.Errorf("--passphrase-file: %w", err)
		}
		return p, nil
	}
	stdin := int(os.Stdin.Fd())
	if !term.IsTerminal(stdin) {
		return "", errors.New("give --passphrase-file, or a key: there is no terminal to ask on")
	}
	ask := func(prompt string) (string, error) {
		fmt.Fprint(os.Stderr, prompt)
		b, err := term.ReadPassword(stdin)
		fmt.Fprintln(os.Stderr)
		return string(b), err
	}
	p, err := ask("Passphrase of " + what + ": ")
	if err != nil || !anew {
		return p, err
	}
	again, err := ask("Once more: ")
	if err == nil && again != p {
		err = errors.New("the two passphrases differ; nothing was written")
	}
	return p, err
}

// get opens the answer to a GET, whose body the caller closes.
func (a *api) get(ctx context.Context, path string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.server.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, refusal(req, resp)
	}
	return resp.Body, nil
}
