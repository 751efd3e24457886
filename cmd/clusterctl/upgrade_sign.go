package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/kubectl/pkg/util/templates"

	"github.com/clusterd/clusterd/member/releases"
)

// signatureSuffix is what minisign puts behind a file's name.
const signatureSuffix = ".minisig"

func newUpgradeKeyCommand(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "key FILE",
		Short: "Generate a release signing key",
		Long: templates.LongDesc(`
			Generate a release signing key: the secret key is written to FILE, the public key to
			FILE.pub, in minisign's formats. The secret key has no password (minisign -G creates
			one with a password): do not store it on the cluster's machines.`),
		Example: templates.Examples(`
			clusterctl upgrade key release.key
			clusterctl upgrade trust release.key.pub`),
		Args: oneArg("the name of a new file", ""),
		RunE: func(_ *cobra.Command, args []string) error {
			key, err := releases.NewSecretKey()
			if err != nil {
				return err
			}
			if err := writeNew(args[0], key.File(), 0o600); err != nil {
				return err
			}
			if err := writeNew(args[0]+".pub", key.Public().File(), 0o644); err != nil {
				return errors.Join(err, os.Remove(args[0]))
			}
			fmt.Fprintln(streams.Out, key.Public())
			return nil
		},
	}
}

// writeNew writes a file that must not be there.
func writeNew(name string, content []byte, mode os.FileMode) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(name))
	}
	return nil
}

func newUpgradeSignCommand(streams genericiooptions.IOStreams) *cobra.Command {
	var keyFile, version string
	cmd := &cobra.Command{
		Use:   "sign FILE",
		Short: "Sign a release file",
		Long: templates.LongDesc(`
			Sign the file of a release, and write the signature to FILE.minisig. What is signed
			with it is the version, which the program in the file is asked for unless it is for
			another machine, and the architecture.

			minisign does the same, with "clusterd VERSION linux/ARCH" as trusted comment:
			minisign -S -H -m FILE -t "clusterd v0.2.0 linux/arm64"`),
		Example: templates.Examples(`
			# Sign one
			clusterctl upgrade sign clusterd_0.2.0_amd64.tar.gz --key release.key

			# Sign one for other machines than this
			clusterctl upgrade sign clusterd_0.2.0_arm64.tar.gz --key release.key --release v0.2.0`),
		Args: oneArg("the file of a release", ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := signRelease(cmd.Context(), args[0], keyFile, version)
			if err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "%s: release %s for %s is signed\n", args[0]+signatureSuffix, m.Version, m.Platform())
			return nil
		},
	}
	cmd.Flags().StringVar(&keyFile, "key", "", "File of the secret key")
	cmd.Flags().StringVar(&version, "release", "", "The version, where the program in the file cannot be asked")
	return cmd
}

func signRelease(ctx context.Context, file, keyFile, version string) (m releases.Manifest, err error) {
	if keyFile == "" {
		return m, errors.New("give the file of the secret key with --key; clusterctl upgrade key makes one")
	}
	b, err := os.ReadFile(keyFile)
	if err != nil {
		return m, err
	}
	key, err := releases.ParseSecretKey(b)
	if err != nil {
		return m, fmt.Errorf("%s: %w", keyFile, err)
	}
	f, err := os.Open(file)
	if err != nil {
		return m, err
	}
	defer f.Close()
	if m, err = look(ctx, f, version); err != nil {
		return m, fmt.Errorf("%s: %w", file, err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return m, err
	}
	sig, err := key.Sign(f, m)
	if err != nil {
		return m, fmt.Errorf("sign %s: %w", file, err)
	}
	if err := os.Remove(file + signatureSuffix); err != nil && !errors.Is(err, os.ErrNotExist) {
		return m, err
	}
	return m, writeNew(file+signatureSuffix, sig, 0o644)
}

// look finds out what a release is.
func look(ctx context.Context, file io.Reader, version string) (releases.Manifest, error) {
	tmp, err := os.CreateTemp("", "clusterd-release-*")
	if err != nil {
		return releases.Manifest{}, err
	}
	defer os.Remove(tmp.Name())
	arch, err := releases.Look(file, tmp)
	if err = errors.Join(err, tmp.Chmod(0o700), tmp.Close()); err != nil {
		return releases.Manifest{}, err
	}
	m := releases.Manifest{Version: version, Arch: arch}
	if version != "" {
		return m, m.Check()
	}
	if arch != runtime.GOARCH {
		return m, fmt.Errorf("its clusterd is for linux/%s and cannot be asked for its version here: give that with --release", arch)
	}
	out, err := exec.CommandContext(ctx, tmp.Name(), "version").Output()
	if err != nil {
		return m, fmt.Errorf("ask its clusterd for its version: %w", err)
	}
	var named bool
	if m.Version, named = strings.CutPrefix(strings.TrimSpace(string(out)), "clusterd "); !named {
		return m, fmt.Errorf("its clusterd says %.80q and no version", out)
	}
	return m, m.Check()
}
