package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
	"github.com/spf13/pflag"

	"github.com/clusterd/clusterd/apis/batch"
	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot"
	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot/bucket"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/raftstore/backup"
)

// SnapshotConfig says when the leader takes snapshots of the cluster. The same belongs
// on every server.
type SnapshotConfig struct {
	// SnapshotSchedule is when: as a CronJob's, in UTC, such as "0 3 * * *", or "@every 6h";
	// empty: never.
	SnapshotSchedule string `json:"snapshotSchedule,omitempty"`
	// SnapshotFolder is where the file goes, on the machine of the server that leads
	// then: an absolute path. Files there that are not the cluster's snapshots are left alone.
	SnapshotFolder string `json:"snapshotFolder,omitempty"`
	// SnapshotStore is where the file goes instead of a directory: a bucket of an object
	// store that speaks S3, as https://HOST[:PORT]/BUCKET[/PREFIX], as http://… without
	// TLS, or as s3://BUCKET[/PREFIX] at Amazon's.
	SnapshotStore string `json:"snapshotStore,omitempty"`
	// SnapshotStoreCredentials is a file with the keys for that store, in the form of
	// ~/.aws/credentials; empty: the variables AWS_ACCESS_KEY_ID,
	// AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.
	SnapshotStoreCredentials string `json:"snapshotStoreCredentials,omitempty"`
	// SnapshotStoreCA is a file with the CA of the store's certificate; empty: the
	// machine's CAs.
	SnapshotStoreCA string `json:"snapshotStoreCA,omitempty"`
	// SnapshotStoreRegion is the bucket's; empty: the store is asked.
	SnapshotStoreRegion string `json:"snapshotStoreRegion,omitempty"`
	// SnapshotStoreTimeout is how long one snapshot may take to be uploaded and read back.
	SnapshotStoreTimeout Duration `json:"snapshotStoreTimeout"`
	// SnapshotRecipients are the public keys of age (age1…), separated by commas, each
	// of whose secret keys opens the files.
	SnapshotRecipients string `json:"snapshotRecipients,omitempty"`
	// SnapshotKeep is how many of them stay in the directory; 0: all.
	SnapshotKeep int `json:"snapshotKeep"`
	// SnapshotKeepAge is how old they get, but for the newest; 0: any age.
	SnapshotKeepAge Duration `json:"snapshotKeepAge,omitzero"`
}

func defaultSnapshots() SnapshotConfig {
	return SnapshotConfig{SnapshotKeep: 14, SnapshotStoreTimeout: Duration{30 * time.Minute}}
}

func (c *SnapshotConfig) addFlags(f *pflag.FlagSet) {
	f.StringVar(&c.SnapshotSchedule, "snapshot-schedule", c.SnapshotSchedule, "when the leader takes a snapshot of the cluster: as a CronJob's schedule, in UTC, such as \"0 3 * * *\", or \"@every 6h\"; the same on every server (default: never)")
	f.StringVar(&c.SnapshotFolder, "snapshot-folder", c.SnapshotFolder, "directory for these snapshots, on the machine of the server that leads then")
	f.StringVar(&c.SnapshotStore, "snapshot-store", c.SnapshotStore, "bucket of an object store for these snapshots, instead of a directory: https://HOST[:PORT]/BUCKET[/PREFIX], http://... without TLS, or s3://BUCKET[/PREFIX] for Amazon S3")
	f.StringVar(&c.SnapshotStoreCredentials, "snapshot-store-credentials", c.SnapshotStoreCredentials, "file with the keys for it, in the form of ~/.aws/credentials (default: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN in the environment)")
	f.StringVar(&c.SnapshotStoreCA, "snapshot-store-ca", c.SnapshotStoreCA, "file with the CA of its certificate (default: the machine's CAs)")
	f.StringVar(&c.SnapshotStoreRegion, "snapshot-store-region", c.SnapshotStoreRegion, "region of the bucket (default: the store is asked)")
	f.DurationVar(&c.SnapshotStoreTimeout.Duration, "snapshot-store-timeout", c.SnapshotStoreTimeout.Duration, "how long a snapshot may take to be uploaded and read back")
	f.StringVar(&c.SnapshotRecipients, "snapshot-recipients", c.SnapshotRecipients, "public keys of age (age1...), separated by commas, to which these snapshots are encrypted")
	f.IntVar(&c.SnapshotKeep, "snapshot-keep", c.SnapshotKeep, "maximum number of these snapshots (0 = unlimited)")
	f.DurationVar(&c.SnapshotKeepAge.Duration, "snapshot-keep-age", c.SnapshotKeepAge.Duration, "maximum age of these snapshots, except the newest (0 = unlimited)")
}

// minSnapshotInterval is how far snapshots are apart at least.
const minSnapshotInterval = time.Minute

// check holds what can be held against nothing but itself.
func (c *SnapshotConfig) check() error {
	switch {
	case c.SnapshotKeep < 0:
		return fmt.Errorf("--snapshot-keep %d: it cannot be negative", c.SnapshotKeep)
	case c.SnapshotKeepAge.Duration < 0:
		return fmt.Errorf("--snapshot-keep-age %s: it cannot be negative", c.SnapshotKeepAge)
	case c.SnapshotStoreTimeout.Duration <= 0:
		return fmt.Errorf("--snapshot-store-timeout %s: give more than 0, such as 30m", c.SnapshotStoreTimeout)
	case c.SnapshotSchedule == "" && (c.SnapshotFolder != "" || c.SnapshotStore != "" || c.SnapshotRecipients != ""):
		return fmt.Errorf("--snapshot-schedule: it is empty, and --snapshot-folder, --snapshot-store or --snapshot-recipients is not: say when snapshots are taken, such as --snapshot-schedule %q", "0 3 * * *")
	case c.SnapshotSchedule == "":
		return nil
	case c.SnapshotStore != "" && c.SnapshotFolder != "":
		return fmt.Errorf("--snapshot-store and --snapshot-folder %s: give one of them", c.SnapshotFolder)
	case c.SnapshotStore == "" && !filepath.IsAbs(c.SnapshotFolder):
		return fmt.Errorf("--snapshot-folder %q: an absolute path of a folder is required with --snapshot-schedule, such as /var/backups/clusterd, or a bucket with --snapshot-store", c.SnapshotFolder)
	}
	if c.SnapshotStore != "" {
		if _, err := bucket.Parse(c.SnapshotStore); err != nil {
			return fmt.Errorf("--snapshot-store: %w", err)
		}
		for flag, path := range map[string]string{"--snapshot-store-credentials": c.SnapshotStoreCredentials, "--snapshot-store-ca": c.SnapshotStoreCA} {
			if path != "" && !filepath.IsAbs(path) {
				return fmt.Errorf("%s %s: an absolute path is required with --snapshot-schedule, since the service has a working directory of its own", flag, path)
			}
		}
	}
	if _, err := c.schedule(); err != nil {
		return err
	}
	_, err := c.lock()
	return err
}

func (c *SnapshotConfig) schedule() (cron.Schedule, error) {
	s, err := batch.ParseSchedule(c.SnapshotSchedule)
	if err != nil {
		return nil, fmt.Errorf("--snapshot-schedule %q: %w: write it as minute, hour, day of the month, month and day of the week, such as \"0 3 * * *\", or as \"@every 6h\"", c.SnapshotSchedule, err)
	}
	if every, ok := s.(cron.ConstantDelaySchedule); ok && every.Delay < minSnapshotInterval {
		return nil, fmt.Errorf("--snapshot-schedule %q: give %s or more", c.SnapshotSchedule, minSnapshotInterval)
	}
	return s, nil
}

// checkAccess reads the files of keys and CAs, which may be missing when a server starts:
// that is no reason not to start, but a snapshot that fails.
func (c *SnapshotConfig) checkAccess() error {
	if c.SnapshotSchedule == "" || c.SnapshotStore == "" {
		return nil
	}
	return c.access().Check()
}

// access is what this node authenticates to the store with.
func (c *SnapshotConfig) access() bucket.Access {
	return bucket.Access{
		Credentials: c.SnapshotStoreCredentials, CA: c.SnapshotStoreCA, Region: c.SnapshotStoreRegion, Timeout: c.SnapshotStoreTimeout.Duration,
	}
}

// target is where the files go.
func (c *SnapshotConfig) target(node string, log *slog.Logger) (autosnapshot.Target, error) {
	if c.SnapshotStore == "" {
		return autosnapshot.Folder{Dir: c.SnapshotFolder, Node: node}, nil
	}
	l, err := bucket.Parse(c.SnapshotStore)
	if err != nil {
		return nil, fmt.Errorf("--snapshot-store: %w", err)
	}
	return bucket.New(bucket.Config{Location: l, Access: c.access(), Node: node, Flag: "--snapshot-store", Log: log}), nil
}

// clusterName is what names of the cluster's snapshots begin with. All clusters are named
// alike, and may share a bucket: there an id follows, of when the cluster was made, which
// all servers know and no rotation changes.
func (c *SnapshotConfig) clusterName(of join.Cluster) string {
	if c.SnapshotStore == "" {
		return of.Name
	}
	sum := sha256.Sum256([]byte(of.Created.UTC().Format(time.RFC3339Nano)))
	return of.Name + "-" + hex.EncodeToString(sum[:5])
}

// lock is what seals the files. Whoever opens one can become anyone in the cluster, so
// there is none that is not sealed.
func (c *SnapshotConfig) lock() (backup.Lock, error) {
	if c.SnapshotRecipients == "" {
		return nil, errors.New("--snapshot-recipients: a public key of age is required with --snapshot-schedule: age-keygen, or clusterd keys new, makes a pair; keep the secret key elsewhere")
	}
	lock, err := backup.Recipients(strings.Split(c.SnapshotRecipients, ","))
	if err != nil {
		return nil, fmt.Errorf("--snapshot-recipients: %w", err)
	}
	return lock, nil
}
