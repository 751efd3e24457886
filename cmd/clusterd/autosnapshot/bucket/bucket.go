// Package bucket keeps snapshots in a bucket of an object store that speaks S3. It makes
// no bucket, and removes only objects that the Taker names and its own unfinished ones.
package bucket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/minio/minio-go/v7"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot"
)

const (
	// partSize is what is held in memory at once; 10 000 parts are the most of an object.
	partSize = 8 << 20
	// oneCopy is how large an object may be that a store copies by one request.
	oneCopy = 5 << 30
	// short bounds requests that move no snapshot.
	short = time.Minute
	// discardTime bounds the removal of what is unfinished: leadership waits for it.
	discardTime = 5 * time.Second
	// mostNames is how many objects a listing may have: more are no snapshots of a schedule.
	mostNames = 100_000
)

// Config of a Bucket; all is required but Access's defaults.
type Config struct {
	Location
	Access
	Node string // this node's name
	// Flag is the one that says where the bucket is, for errors.
	Flag string
	Log  *slog.Logger
}

// Bucket is an autosnapshot.Target.
//
//	PREFIX.clusterd-snapshot-CLUSTER_NODE_… ── is uploaded, read again, verified ──▶ copied to PREFIX+NAME by the store
type Bucket struct{ cfg Config }

// New returns a Bucket; it asks the store nothing.
func New(cfg Config) *Bucket { return &Bucket{cfg} }

// Path implements autosnapshot.Target.
func (b *Bucket) Path(name string) string { return b.cfg.Location.String() + name }

// Find implements autosnapshot.Target.
func (b *Bucket) Find(ctx context.Context, name string) (f *autosnapshot.File, err error) {
	err = b.do(ctx, short, func(ctx context.Context, c minio.Core) error {
		info, err := c.StatObject(ctx, b.cfg.Bucket, b.cfg.Prefix+name, minio.StatObjectOptions{})
		if gone(err) {
			return nil
		}
		f = &autosnapshot.File{Bytes: info.Size, Modified: info.LastModified}
		return err
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Put implements autosnapshot.Target.
func (b *Bucket) Put(ctx context.Context, name string, write func(context.Context, io.Writer) error, verify func(context.Context, io.Reader) error) error {
	return b.do(ctx, b.cfg.Timeout, func(ctx context.Context, c minio.Core) error {
		part := b.unfinished(name)
		err := b.upload(ctx, c, part, write)
		if err == nil {
			err = b.verify(ctx, c, part, verify)
		}
		if err == nil {
			err = b.rename(ctx, c, part, b.cfg.Prefix+name)
		}
		b.discard(ctx, c, part, err)
		return err
	})
}

// unfinished is the name of a new object that is not whole yet. No name of a cluster or
// a node has a "_" in it.
func (b *Bucket) unfinished(name string) string {
	cluster := name[:strings.LastIndex(name, "-")]
	return b.own(cluster) + uuid.NewString()
}

// own is how names of this node's unfinished objects begin.
func (b *Bucket) own(cluster string) string { return b.all(cluster) + b.cfg.Node + "_" }

// all is how names of the cluster's unfinished objects begin.
func (b *Bucket) all(cluster string) string {
	return b.cfg.Prefix + autosnapshot.Unfinished + cluster + "_"
}

// upload has the store read what write writes, a part at a time.
func (b *Bucket) upload(ctx context.Context, c minio.Core, key string, write func(context.Context, io.Writer) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		err := write(ctx, w)
		w.CloseWithError(err) // nil: io.EOF
		wrote <- err
	}()
	opts := minio.PutObjectOptions{ContentType: "application/octet-stream", PartSize: partSize, NumThreads: 1, SendContentMd5: true}
	_, err := c.Client.PutObject(ctx, b.cfg.Bucket, key, r, -1, opts)
	r.CloseWithError(io.ErrClosedPipe) // ends write, if the store gave up first
	werr := <-wrote
	if werr != nil && (err == nil || !errors.Is(werr, io.ErrClosedPipe)) {
		return local{werr}
	}
	return err
}

// local is an error of this node, which no store can be blamed for.
type local struct{ error }

func (l local) Unwrap() error { return l.error }

// verify reads the object again, whole.
func (b *Bucket) verify(ctx context.Context, c minio.Core, key string, verify func(context.Context, io.Reader) error) error {
	body, _, _, err := c.GetObject(ctx, b.cfg.Bucket, key, minio.GetObjectOptions{})
	if err != nil {
		return err
	}
	defer body.Close()
	return verify(ctx, body)
}

// rename has the store copy the object, whole or not at all, and compares the sizes.
func (b *Bucket) rename(ctx context.Context, c minio.Core, from, to string) error {
	src, err := c.StatObject(ctx, b.cfg.Bucket, from, minio.StatObjectOptions{})
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	dst := minio.CopyDestOptions{Bucket: b.cfg.Bucket, Object: to}
	if src.Size <= oneCopy {
		_, err = c.Client.CopyObject(ctx, dst, minio.CopySrcOptions{Bucket: b.cfg.Bucket, Object: from})
	} else {
		_, err = c.ComposeObject(ctx, dst, minio.CopySrcOptions{Bucket: b.cfg.Bucket, Object: from})
	}
	if err != nil {
		return err
	}
	got, err := c.StatObject(ctx, b.cfg.Bucket, to, minio.StatObjectOptions{})
	if err == nil && got.Size != src.Size {
		err = fmt.Errorf("the store's copy of %s has %d bytes, and not %d", from, got.Size, src.Size)
		// It would be taken for one that was verified.
		err = errors.Join(err, c.RemoveObject(ctx, b.cfg.Bucket, to, minio.RemoveObjectOptions{}))
	}
	return err
}

// discard removes an unfinished object, and the parts of an upload that did not end.
func (b *Bucket) discard(ctx context.Context, c minio.Core, key string, failed error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), discardTime)
	defer cancel()
	err := c.RemoveObject(ctx, b.cfg.Bucket, key, minio.RemoveObjectOptions{})
	if failed != nil {
		err = errors.Join(err, c.RemoveIncompleteUpload(ctx, b.cfg.Bucket, key))
	}
	if err != nil {
		b.cfg.Log.Warn("an unfinished snapshot stays in the object store until the next try", "object", key, "err", b.explain(ctx, err))
	}
}

// Names implements autosnapshot.Target.
func (b *Bucket) Names(ctx context.Context, prefix string) (names []string, err error) {
	err = b.do(ctx, short, func(ctx context.Context, c minio.Core) error {
		objects, err := b.list(ctx, c, b.cfg.Prefix+prefix)
		for _, o := range objects {
			names = append(names, strings.TrimPrefix(o.Key, b.cfg.Prefix))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return names, nil
}

// list lists objects by the beginning of their names; names with a further slash are left out.
func (b *Bucket) list(ctx context.Context, c minio.Core, prefix string) ([]minio.ObjectInfo, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // the listing ends with it
	var out []minio.ObjectInfo
	for o := range c.Client.ListObjects(ctx, b.cfg.Bucket, minio.ListObjectsOptions{Prefix: prefix}) {
		if o.Err != nil {
			return nil, o.Err
		}
		if !strings.HasPrefix(o.Key, prefix) || strings.Contains(o.Key[len(prefix):], "/") {
			continue
		}
		if len(out) == mostNames {
			return nil, fmt.Errorf("more than %d objects begin with %s: give the cluster a prefix of its own", mostNames, prefix)
		}
		out = append(out, o)
	}
	return out, ctx.Err()
}

// Remove implements autosnapshot.Target.
func (b *Bucket) Remove(ctx context.Context, name string) error {
	return b.do(ctx, short, func(ctx context.Context, c minio.Core) error {
		return c.RemoveObject(ctx, b.cfg.Bucket, b.cfg.Prefix+name, minio.RemoveObjectOptions{})
	})
}

// CleanUp implements autosnapshot.Target.
func (b *Bucket) CleanUp(ctx context.Context, cluster string, now time.Time) error {
	return b.do(ctx, short, func(ctx context.Context, c minio.Core) error {
		left := func(key string, at time.Time) bool {
			return strings.HasPrefix(key, b.own(cluster)) || strings.HasPrefix(key, b.all(cluster)) && now.Sub(at) > autosnapshot.Abandoned
		}
		objects, err := b.list(ctx, c, b.all(cluster))
		errs := []error{err}
		for _, o := range objects {
			if left(o.Key, o.LastModified) {
				errs = append(errs, c.RemoveObject(ctx, b.cfg.Bucket, o.Key, minio.RemoveObjectOptions{}))
			}
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		for u := range c.ListIncompleteUploads(ctx, b.cfg.Bucket, b.all(cluster), false) {
			if u.Err != nil {
				errs = append(errs, u.Err)
				break
			}
			if left(u.Key, u.Initiated) {
				errs = append(errs, c.AbortMultipartUpload(ctx, b.cfg.Bucket, u.Key, u.UploadID))
			}
		}
		return errors.Join(errs...)
	})
}

// Get calls read with the object of that name.
func (b *Bucket) Get(ctx context.Context, name string, read func(io.Reader) error) error {
	return b.do(ctx, b.cfg.Timeout, func(ctx context.Context, c minio.Core) error {
		err := errors.New("no object is named: add its name")
		if name != "" {
			err = b.verify(ctx, c, b.cfg.Prefix+name, func(_ context.Context, r io.Reader) error {
				if err := read(r); err != nil {
					return local{err}
				}
				return nil
			})
		}
		if name != "" && !gone(err) {
			return err
		}
		objects, lerr := b.list(ctx, c, b.cfg.Prefix)
		if lerr != nil {
			return lerr
		}
		var names []string
		for _, o := range objects {
			if n := o.Key[len(b.cfg.Prefix):]; strings.HasSuffix(n, ".backup") {
				names = append(names, n)
			}
		}
		if len(names) == 0 {
			return local{fmt.Errorf("there is no object %q, and no other snapshot: check the URL", name)}
		}
		slices.Sort(names)
		return local{fmt.Errorf("there is no object %q; of %d snapshots there the last by name is %s: give its URL", name, len(names), tame(names[len(names)-1]))}
	})
}

// do runs one operation, for most at most; 0: for any time.
func (b *Bucket) do(ctx context.Context, most time.Duration, op func(context.Context, minio.Core) error) error {
	c, done, err := b.cfg.client(b.cfg.Location)
	if err != nil {
		return err
	}
	defer done()
	if most > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, most, tooSlow(most))
		defer cancel()
	}
	err = op(ctx, c)
	var own local
	var slow tooSlow
	if errors.As(err, &own) && !errors.As(context.Cause(ctx), &slow) {
		return own.error
	}
	return b.explain(ctx, err)
}

// gone reports whether the store has no such object.
func gone(err error) bool {
	resp := minio.ToErrorResponse(err)
	return resp.StatusCode == http.StatusNotFound && resp.Code != minio.NoSuchBucket
}
