package kubestore

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/metrics"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// maxPage bounds how many keys a filtered, limited list looks at in one go.
const maxPage = 10000

// storageName is how the metrics of lists name this storage.
const storageName = "raftstore"

// GetList implements storage.Interface. All chunks of a list show one revision;
// the continue token carries it.
func (s *Storage) GetList(ctx context.Context, key string, opts storage.ListOptions, listObj runtime.Object) error {
	prefix, err := s.key(key, opts.Recursive)
	if err != nil {
		return err
	}
	items, err := itemsOf(listObj)
	if err != nil {
		return err
	}
	l := lister{s: s, ctx: ctx, prefix: prefix, opts: opts, items: items, newItem: itemFunc(listObj, items)}
	l.unlisted.tolerant = s.values.markCorrupt
	l.rev, l.from, err = storage.ValidateListOptions(prefix, s.versioner, opts)
	if err != nil {
		return err
	}
	l.resuming = l.from != ""
	defer func() {
		metrics.RecordStorageListMetrics(s.resource, storageName, "", l.fetched, l.evaluated, items.Len())
	}()
	if err := l.run(); err != nil {
		return err
	}
	if err := l.unlisted.err(s.resource); err != nil {
		return err
	}
	token, remaining, err := storage.PrepareContinueToken(l.last, prefix, l.rev, l.count, l.more, opts)
	if err != nil {
		return err
	}
	if items.IsNil() {
		items.Set(reflect.MakeSlice(items.Type(), 0, 0)) // clients see [], not null
	}
	if err := s.versioner.UpdateList(listObj, uint64(l.rev), token, remaining); err != nil {
		return err
	}
	opts.Predicate.SetShardInfoOnList(listObj)
	return nil
}

// lister is one GetList under way.
type lister struct {
	s       *Storage
	ctx     context.Context
	prefix  string
	opts    storage.ListOptions
	items   reflect.Value // the slice that is filled
	newItem func() runtime.Object

	rev      int64  // the revision shown; 0 until the first page has set it
	from     string // first key of the next page; "" is the first of all
	resuming bool   // the client sent a continue token

	last               string // last key looked at
	count              int64  // keys from the first page's start on
	more               bool   // keys are left behind last
	fetched, evaluated int
	unlisted           unlisted
}

// run reads pages until the limit is reached or nothing is left. Selectors can
// empty a page, so the pages grow.
func (l *lister) run() error {
	limit := l.opts.Predicate.Limit
	for page := limit; ; page = min(page*2, max(maxPage, limit)) {
		res, err := l.read(int(page))
		if err != nil {
			return err
		}
		l.fetched += len(res.KVs)
		if l.last == "" {
			l.count = res.Count
		}
		full := l.take(res.KVs)
		l.more = full || res.More
		if !res.More || full || l.unlisted.fatal != nil || l.limitReached() {
			return nil
		}
		if len(res.KVs) == 0 {
			return storage.NewInternalError(fmt.Errorf("store returned an empty page of %s that is not the last", l.prefix))
		}
		l.from = after(res.KVs[len(res.KVs)-1].Key)
	}
}

// read fetches one page and, from the first one, learns the list's revision.
func (l *lister) read(page int) (raftstore.ListResult, error) {
	least := int64(0)
	read := raftstore.ReadOptions{Revision: l.rev}
	if l.rev == 0 && !l.resuming {
		var err error
		if least, err = l.s.leastRevision(l.opts.ResourceVersion); err != nil {
			return raftstore.ListResult{}, err
		}
		read = l.s.freshness(l.opts.ResourceVersion, least)
	}
	// A past revision never changes, so a node that has it need not ask.
	read.Stale = read.Stale || (l.rev > 0 && l.rev <= l.s.store.Revision())
	res, err := l.fetch(read, page)
	switch {
	case errors.Is(err, mvcc.ErrFutureRevision):
		return res, l.s.tooLarge(l.rev)
	case errors.Is(err, mvcc.ErrCompacted) && l.resuming:
		return res, continueExpired(l.from, l.prefix)
	case err != nil:
		return res, explain(err)
	case res.Revision < least:
		return res, storage.NewTooLargeResourceVersionError(uint64(least), uint64(res.Revision), 0)
	}
	if l.rev == 0 {
		l.rev = res.Revision
	}
	return res, nil
}

func (l *lister) fetch(read raftstore.ReadOptions, page int) (raftstore.ListResult, error) {
	if l.opts.Recursive {
		return l.s.list(l.ctx, l.prefix, raftstore.ListOptions{
			ReadOptions: read, From: l.from, Limit: page,
			NoCount: l.last != "" || !l.opts.Predicate.Empty(), // no client gets it
		})
	}
	kv, rev, err := l.s.get(l.ctx, l.prefix, read)
	res := raftstore.ListResult{Revision: rev}
	if kv != nil {
		res.KVs, res.Count = []mvcc.KeyValue{*kv}, 1
	}
	return res, err
}

// take appends the items of one page that the predicate selects. It reports
// full when the limit was reached before the page's end.
func (l *lister) take(kvs []mvcc.KeyValue) (full bool) {
	if l.opts.Predicate.Empty() {
		l.items.Grow(len(kvs))
	}
	for i := range kvs {
		if l.limitReached() {
			return true
		}
		kv := &kvs[i]
		l.last = kv.Key
		if l.ctx.Err() != nil {
			l.unlisted.fatal = storage.NewTimeoutError(kv.Key, "request did not complete within requested timeout")
			return false
		}
		obj, err := l.object(kv)
		if err != nil {
			if l.unlisted.add(l.s.shownKey(kv.Key), err) {
				return false
			}
			continue
		}
		l.evaluated++
		if ok, err := l.opts.Predicate.Matches(obj); err == nil && ok {
			l.items.Set(reflect.Append(l.items, reflect.ValueOf(obj).Elem()))
		}
	}
	return false
}

func (l *lister) object(kv *mvcc.KeyValue) (runtime.Object, error) {
	data, _, err := l.s.values.open(l.ctx, kv)
	if err != nil {
		return nil, storage.NewInternalError(fmt.Errorf("unable to transform key %q: %w", l.s.shownKey(kv.Key), err))
	}
	return l.s.values.decodeNew(l.ctx, data, l.newItem(), kv.ModRevision)
}

func (l *lister) limitReached() bool {
	limit := l.opts.Predicate.Limit
	return limit > 0 && int64(l.items.Len()) >= limit
}

// itemsOf is the slice of items of a list object, ready to be set.
func itemsOf(listObj runtime.Object) (reflect.Value, error) {
	ptr, err := meta.GetItemsPtr(listObj)
	if err != nil {
		return reflect.Value{}, err
	}
	v, err := conversion.EnforcePtr(ptr)
	if err != nil {
		return reflect.Value{}, err
	}
	if v.Kind() != reflect.Slice {
		return reflect.Value{}, fmt.Errorf("kubestore: items of %T are not a slice", listObj)
	}
	return v, nil
}

// itemFunc returns what makes an empty item for the list. Items of an
// unstructured list take over its API version, which tells the codec into what
// version to convert.
func itemFunc(listObj runtime.Object, items reflect.Value) func() runtime.Object {
	if u, ok := listObj.(*unstructured.UnstructuredList); ok && u.GetAPIVersion() != "" {
		return func() runtime.Object {
			return &unstructured.Unstructured{Object: map[string]any{"apiVersion": u.GetAPIVersion()}}
		}
	}
	item := items.Type().Elem()
	return func() runtime.Object { return reflect.New(item).Interface().(runtime.Object) }
}
