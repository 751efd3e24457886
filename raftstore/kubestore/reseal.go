package kubestore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

const (
	resealPage = 500
	// namedErrors is how many values that could not be sealed again are named.
	namedErrors = 10
	// slowOpen is how long a value may take to be opened in vain, before others of the
	// same provider are not tried.
	slowOpen = 500 * time.Millisecond
)

// Resealer writes again what is stored in another form than its transformer writes
// now. It works on stored values, past the API: no admission and no validation of
// today keeps an older object from being sealed. An object does not change by it, but
// for its resource version.
type Resealer struct {
	Store Store
	// Prefix comes before every key; "" means DefaultPrefix.
	Prefix string
	// Folders are those of the resources to look at, such as "/core/secrets"; none: all.
	Folders []string
	// Transformer is that of the value under an API server's key, and whether it is one
	// that is to be sealed. Nil: the value does not matter.
	Transformer func(key string) (t value.Transformer, sealed bool)
	// Origin is who the history names as the writer.
	Origin string
	// Wait returns when the next value, of so many bytes, may be written; nil: at once.
	Wait func(ctx context.Context, bytes int) error
	// Progress is called when all values have been looked at, and then after each
	// value that was written; nil: it is not.
	Progress func(ResealProgress)
}

// ResealProgress is how far a Resealer has come.
type ResealProgress struct {
	// Values are all that have to be sealed, and those that are and need not be any more.
	Values int
	// Stale are those of them that are not in the form of now yet.
	Stale int
	// Unopened are those of them that this server cannot open.
	Unopened int
	// Resealed are those that were stale when this round began, and are not any more.
	Resealed int
}

// Run looks at all values once. Its error names those that could not be sealed; they
// keep none of the others.
func (r *Resealer) Run(ctx context.Context) (ResealProgress, error) {
	var p ResealProgress
	var failed failures
	stale, err := r.find(ctx, &p, &failed)
	if err != nil {
		return p, err
	}
	r.tell(p)
	for _, key := range stale {
		err := r.rewrite(ctx, key)
		if ctx.Err() != nil {
			return p, ctx.Err()
		}
		if err != nil {
			failed.add(fmt.Errorf("seal %s anew: %w", r.shown(key), err))
			continue
		}
		p.Stale, p.Resealed = p.Stale-1, p.Resealed+1
		r.tell(p)
	}
	return p, failed.err()
}

func (r *Resealer) tell(p ResealProgress) {
	if r.Progress != nil {
		r.Progress(p)
	}
}

func (r *Resealer) prefix() string {
	if r.Prefix == "" {
		return DefaultPrefix
	}
	return r.Prefix
}

// shown is a key of the store as the API server knows it.
func (r *Resealer) shown(key string) string {
	return strings.TrimPrefix(key, strings.TrimSuffix(path.Join("/", r.prefix()), "/"))
}

// find returns the keys of stale values.
func (r *Resealer) find(ctx context.Context, p *ResealProgress, failed *failures) (stale []string, err error) {
	folders := r.Folders
	if len(folders) == 0 {
		folders = []string{""}
	}
	slow := map[string]bool{} // providers that open nothing and take long for it
	for _, folder := range folders {
		prefix := strings.TrimSuffix(path.Join("/", r.prefix(), folder), "/") + "/"
		for from := ""; ; {
			page, err := r.Store.List(ctx, prefix, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Stale: true}, From: from, Limit: resealPage, NoCount: true})
			if err != nil {
				return nil, fmt.Errorf("list %s: %w", prefix, err)
			}
			for i := range page.KVs {
				kv := &page.KVs[i]
				t, sealed := r.Transformer(r.shown(kv.Key))
				if t == nil {
					continue
				}
				is, err := opened(ctx, t, kv, slow)
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				if sealed || is || err != nil {
					p.Values++
				}
				switch {
				case err != nil:
					p.Unopened++
					failed.add(fmt.Errorf("open %s: %w", r.shown(kv.Key), err))
				case is:
					p.Stale++
					stale = append(stale, kv.Key)
				}
			}
			if !page.More || len(page.KVs) == 0 {
				break
			}
			from = after(page.KVs[len(page.KVs)-1].Key)
		}
	}
	return stale, nil
}

var errSlowProvider = errors.New("not tried, as its provider opened another value neither, and took long")

// opened reports whether the value is stale.
func opened(ctx context.Context, t value.Transformer, kv *mvcc.KeyValue, slow map[string]bool) (stale bool, err error) {
	by := SealedBy(kv.Value)
	if slow[by] {
		return false, errSlowProvider
	}
	began := time.Now()
	_, stale, err = t.TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key))
	if err != nil && by != "" && time.Since(began) > slowOpen {
		slow[by] = true
	}
	return stale, err
}

// rewrite seals one value again. Who has written or deleted it meanwhile has sealed it.
func (r *Resealer) rewrite(ctx context.Context, key string) error {
	kv, _, err := r.Store.Get(ctx, key, raftstore.ReadOptions{Stale: true})
	if err != nil || kv == nil {
		return err
	}
	t, _ := r.Transformer(r.shown(key))
	if t == nil {
		return nil
	}
	at := value.DefaultContext(key)
	clear, stale, err := t.TransformFromStorage(ctx, kv.Value, at)
	if err != nil || !stale {
		return err
	}
	sealed, err := t.TransformToStorage(ctx, clear, at)
	if err != nil {
		return err
	}
	if r.Wait != nil { // what is written meanwhile is sealed as it should be
		if err := r.Wait(ctx, len(sealed)); err != nil {
			return err
		}
	}
	_, err = r.Store.Txn(ctx, mvcc.Txn{
		Compares: []mvcc.Compare{{Key: key, ModRevision: kv.ModRevision}},
		Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: sealed, TTL: secondsLeft(kv.ExpiresAt, r.Store.Time())}},
		Origin:   mvcc.PlainOrigin(r.Origin),
	})
	return err
}

// failures names the first of many errors.
type failures struct {
	named []error
	more  int
}

func (f *failures) add(err error) {
	if len(f.named) < namedErrors {
		f.named = append(f.named, err)
		return
	}
	f.more++
}

func (f *failures) err() error {
	if f.more > 0 {
		return errors.Join(append(f.named, fmt.Errorf("and %d more values", f.more))...)
	}
	return errors.Join(f.named...)
}

// sealedPrefix is what every sealed value begins with.
var sealedPrefix = []byte("k8s:enc:")

// SealedBy is the beginning of a sealed value that names its provider and, in most, the
// key: "k8s:enc:PROVIDER:VERSION:KEY:" for those of Kubernetes, "k8s:enc:clusterd:KEY:"
// for a Seal's. "" is a value in clear.
func SealedBy(stored []byte) string {
	if !bytes.HasPrefix(stored, sealedPrefix) {
		return ""
	}
	parts := 5
	if bytes.HasPrefix(stored, []byte(SealPrefix)) {
		parts = 4
	}
	end := 0
	for range parts {
		i := bytes.IndexByte(stored[end:min(len(stored), end+maxPrefixPart)], ':')
		if i < 0 {
			break
		}
		end += i + 1
	}
	return strings.ToValidUTF8(string(stored[:end]), "\uFFFD")
}

// maxPrefixPart bounds what is taken for a part of a prefix in a value that is damaged.
const maxPrefixPart = 256
