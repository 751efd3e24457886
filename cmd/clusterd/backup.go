package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot/bucket"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/recovery"
)

// getSnapshot answers with the archive of the whole state and the authority,
// not sealed: clusterctl seals it before it is written. Only administrators
// come this far, whose certificate opens everything anyway.
func (a *clusterAPI) getSnapshot(w http.ResponseWriter, r *http.Request) {
	write, err := a.archive(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-tar")
	if err := write(w); err != nil {
		// The answer has begun: cutting it off is the only way left to say no.
		panic(http.ErrAbortHandler)
	}
}

// archive captures the whole state and the authorities; write writes them, not sealed.
func (a *clusterAPI) archive(ctx context.Context) (write func(io.Writer) error, err error) {
	snap, err := a.store.Capture(ctx)
	if err != nil {
		return nil, err
	}
	counts, err := countsOf(snap)
	if err != nil {
		return nil, err
	}
	secrets, err := a.secrets()
	if err != nil {
		return nil, err
	}
	cluster, err := join.GetCluster(ctx, a.store)
	if err != nil {
		return nil, err
	}
	m := backup.Manifest{Cluster: cluster.Name, Node: a.name, Release: version(), Taken: time.Now().UTC(), Epoch: a.store.Epoch().Number}
	return func(w io.Writer) error { return backup.Write(w, m, secrets, snap, counts) }, nil
}

// countsOf counts the live keys of a snapshot, whose parts are the state at
// its oldest revision and the changes since.
func countsOf(snap *mvcc.Snapshot) (map[string]int64, error) {
	b := mvcc.NewBuilder(snap.Header())
	if err := errors.Join(snap.Base(func(kv *mvcc.KeyValue) error { return b.Base(*kv) }), snap.Changes(b.Change), snap.Window(b.Window)); err != nil {
		return nil, err
	}
	k, err := b.Finish()
	if err != nil {
		return nil, err
	}
	return backup.Counts(k)
}

// restoreFlags say which snapshot a cluster begins with, and what opens it.
type restoreFlags struct {
	file, passphraseFile, identity string
}

func (r *restoreFlags) add(f *pflag.FlagSet) {
	f.StringVar(&r.file, "from-snapshot", "", "file of clusterctl snapshot save, or URL of a snapshot in an object store (see --snapshot-store): start with its state and CA")
	f.StringVar(&r.passphraseFile, "passphrase-file", "", "file whose first line is the snapshot's passphrase (default: ask)")
	f.StringVar(&r.identity, "identity", "", "file with the age-keygen secret key that decrypts the snapshot")
}

// read opens the file and reads all of it.
func (r *restoreFlags) read(ctx context.Context, cfg *SnapshotConfig) (*backup.Content, error) {
	if strings.Contains(r.file, "://") {
		return r.fetch(ctx, cfg)
	}
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	f, err := os.Open(r.file)
	if err != nil {
		return nil, fmt.Errorf("--from-snapshot: %w", err)
	}
	defer f.Close()
	plain, err := backup.Open(f, key)
	if err != nil {
		return nil, fmt.Errorf("--from-snapshot %s: %w", r.file, err)
	}
	c, err := backup.Read(plain)
	if err != nil {
		return nil, fmt.Errorf("--from-snapshot %s: %w", r.file, err)
	}
	return c, nil
}

// fetch reads all of an object of a store.
func (r *restoreFlags) fetch(ctx context.Context, cfg *SnapshotConfig) (content *backup.Content, err error) {
	const flag = "--from-snapshot"
	l, name, err := bucket.Split(r.file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	err = bucket.New(bucket.Config{Location: l, Access: cfg.access(), Flag: flag, Log: slog.New(slog.DiscardHandler)}).Get(ctx, name, func(f io.Reader) error {
		plain, err := backup.Open(f, key)
		if err == nil {
			content, err = backup.Read(plain)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", flag, r.file, err)
		}
		return nil
	})
	return content, err
}

func (r *restoreFlags) key() (backup.Key, error) {
	switch {
	case r.identity != "" && r.passphraseFile != "":
		return nil, errors.New("--identity and --passphrase-file: give one of them")
	case r.identity != "":
		key, err := backup.ReadIdentities(r.identity)
		if err != nil {
			return nil, fmt.Errorf("--identity: %w", err)
		}
		return key, nil
	}
	var passphrase string
	var err error
	switch {
	case r.passphraseFile != "":
		passphrase, err = backup.ReadPassphrase(r.passphraseFile)
	case term.IsTerminal(int(os.Stdin.Fd())):
		fmt.Fprintf(os.Stderr, "Passphrase of %s: ", r.file)
		var b []byte
		b, err = term.ReadPassword(int(os.Stdin.Fd()))
		fmt.Fprintln(os.Stderr)
		passphrase = string(b)
	default:
		err = errors.New("give --passphrase-file or --identity: there is no terminal to ask on")
	}
	if err != nil {
		return nil, fmt.Errorf("passphrase: %w", err)
	}
	_, key, err := backup.Passphrase(passphrase)
	return key, err
}

// prepareRestore writes the data directory of the first node of a cluster that
// goes on from a snapshot, in a new epoch. The members of the cluster that was
// are none of this one: its machines join again. The gossip key is new as well,
// so that the two clusters, should both live, do not meet.
func prepareRestore(cfg Config, c *backup.Content) error {
	cluster, err := join.ClusterOf(c.Store)
	if err != nil {
		return err
	}
	// These are as fixed as the addresses that were given out from them.
	cfg.ClusterCIDR, cfg.ServiceCIDR = cluster.ClusterCIDR.String(), cluster.ServiceCIDR.String()
	cfg.PodEncryption = cluster.PodEncryption
	if err := errors.Join(cfg.checkRestoredFamily(), cfg.EncryptionConfig.check()); err != nil {
		return err
	}
	return prepare(cfg, func(dir nodedir.KeyDir) error {
		now := time.Now()
		k := c.Store.Rebase(recovery.RevisionGap)
		trust, err := restoredTrust(c, now)
		if err != nil {
			return err
		}
		state, ops, err := authority.Restored(k, trust, now)
		if err != nil {
			return err
		}
		trust.Number = state.Number
		id, err := restoredIdentity(cfg, trust, now)
		if err != nil {
			return err
		}
		epoch := raftstore.NewEpoch(c.Epoch)
		life := join.RestorePlan{Epoch: epoch.Number, Why: join.Restored, Now: now, First: &join.Record{
			ID: id.NodeID(), Name: cfg.Name, Addr: cfg.addr(), Joined: now.UTC(), Confirmed: true,
		}}
		t, err := life.Apply(k)
		if err != nil {
			return err
		}
		forget, err := gossipkey.Forget(k)
		if err != nil {
			return err
		}
		t.Ops = deletedOnce(slices.Concat(t.Ops, ops, forget))
		if err := recovery.Amend(k, t); err != nil {
			return err
		}
		if err := recovery.Recover(dir.Path("store"), id.NodeID(), epoch, k, 1); err != nil {
			return err
		}
		own, derived, err := nodedir.SplitSealKeys(c.SealKeys)
		if err != nil {
			return err
		}
		if err := dir.AddSealKeys(own); err != nil {
			return err
		}
		id.RetiredSeals = derived
		if err := writeConfig(dir.Dir, cfg); err != nil {
			return err
		}
		return dir.WriteIdentity(id)
	})
}

// restoredTrust are the snapshot's authorities.
func restoredTrust(c *backup.Content, now time.Time) (*pki.Trust, error) {
	certs, keys := map[pki.Purpose][]byte{}, map[pki.Purpose][]byte{}
	for p, ca := range c.Own {
		certs[pki.Purpose(p)], keys[pki.Purpose(p)] = ca.Cert, ca.Key
	}
	trust, err := pki.ParseTrust(0, c.CACert, c.CAKey)
	if err == nil {
		trust, err = trust.WithOwn(certs, keys)
	}
	if err != nil {
		return nil, fmt.Errorf("the snapshot: %w", err)
	}
	for _, ca := range trust.Whole() {
		if now.After(ca.Cert.NotAfter) {
			return nil, fmt.Errorf("the snapshot: its authority's certificate was valid until %s (is this machine's clock right?)", ca.Cert.NotAfter)
		}
	}
	return trust, nil
}

func restoredIdentity(cfg Config, trust *pki.Trust, now time.Time) (*nodedir.Identity, error) {
	id := &nodedir.Identity{Trust: trust, Ring: gossipkey.Ring{Keys: [][]byte{gossipkey.New()}}}
	var err error
	if id.Key, err = pki.NewKey(); err != nil {
		return nil, err
	}
	id.Cert, err = trust.Signer().IssueServer(id.Key.Public(), cfg.Name, certAddrs(cfg), now, certNames(cfg)...)
	return id, err
}

// printRestoreSummary says what a person should know after a restore.
func printRestoreSummary(w io.Writer, cfg Config, c *backup.Content) {
	fmt.Fprintf(w, "%s begins with the state of cluster %s of %s (%d keys). Its former machines show as NotReady until they join again (clusterd reset, then join) or are deleted (kubectl delete node NAME).\n",
		cfg.Name, c.Cluster, c.Taken.Format(time.RFC3339), c.Digest.Keys)
	if missing, err := c.MissingSealKeys(); err == nil && len(missing) > 0 {
		fmt.Fprintf(w, "Secrets in it are sealed with keys that it does not hold: %s. Put them into %s, a line ID BASE64 each; until then those Secrets cannot be read.\n", strings.Join(missing, ", "), nodedir.Dir(cfg.Data).Path(nodedir.SealKeysFile))
	}
	if providers, err := c.Providers(); err == nil && len(providers) > 0 && cfg.EncryptionProviderConfig == "" {
		fmt.Fprintf(w, "Objects in it are sealed by providers of an EncryptionConfiguration: %s. Until clusterd runs with --encryption-provider-config and a file that has them, those objects cannot be read.\n", strings.Join(providers, ", "))
	}
}

// deletedOnce leaves out deletions of keys that an operation before deletes already: what a
// removed member had of a change of keys goes with its record, and with the change.
func deletedOnce(ops []mvcc.Op) []mvcc.Op {
	deleted := map[string]bool{}
	return slices.DeleteFunc(ops, func(op mvcc.Op) bool {
		again := op.Type == mvcc.OpDelete && deleted[op.Key]
		deleted[op.Key] = deleted[op.Key] || op.Type == mvcc.OpDelete
		return again
	})
}

// snapshotSecrets are what a snapshot of the state needs beside it.
func (m *Main) snapshotSecrets() (backup.Secrets, error) {
	keys, err := m.sealKeys()
	if err != nil {
		return backup.Secrets{}, err
	}
	trust := m.trust.Load()
	secrets := backup.Secrets{CACert: pki.EncodeCert(trust.Signer().Cert), Own: map[string]backup.Authority{}}
	own, err := nodedir.SealKeyOf(trust.For(pki.ForSecrets).Signer())
	if err != nil {
		return secrets, err
	}
	for _, key := range keys {
		if key.ID != own.ID {
			secrets.SealKeys = append(secrets.SealKeys, nodedir.SealLine(key)...)
		}
	}
	for _, p := range pki.OwnPurposes {
		ca := trust.For(p).Signer()
		if ca.ID() == trust.Signer().ID() {
			continue // it has none of its own, or none that signs yet
		}
		key, err := ca.EncodeCAKey()
		if err != nil {
			return secrets, err
		}
		secrets.Own[string(p)] = backup.Authority{Cert: pki.EncodeCert(ca.Cert), Key: key}
	}
	secrets.CAKey, err = trust.Signer().EncodeCAKey()
	return secrets, err
}
