package kubestore

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// values turns objects into stored bytes and back, in two steps: encode and
// decode know the object, seal and open know the secret.
type values struct {
	codec       runtime.Codec
	versioner   storage.Versioner
	transformer value.Transformer
	markCorrupt bool
}

// encode clears what the store itself keeps (the resource version) from obj and
// returns its stored form.
func (v *values) encode(obj runtime.Object) ([]byte, error) {
	if err := v.versioner.PrepareObjectForStorage(obj); err != nil {
		return nil, fmt.Errorf("prepare object for storage: %w", err)
	}
	return runtime.Encode(v.codec, obj)
}

// decode fills the object that into points to from data, as of revision rev.
func (v *values) decode(data []byte, into runtime.Object, rev int64) error {
	if _, err := conversion.EnforcePtr(into); err != nil {
		return fmt.Errorf("decode into %T: %w", into, err)
	}
	if _, _, err := v.codec.Decode(data, nil, into); err != nil {
		return v.undecodable(err, rev)
	}
	return v.versioner.UpdateObject(into, uint64(rev))
}

// decodeNew returns data as an object of its own, as of revision rev. With a
// nil into the codec chooses the type.
func (v *values) decodeNew(ctx context.Context, data []byte, into runtime.Object, rev int64) (runtime.Object, error) {
	start := time.Now()
	defer func() { request.TrackDecodeLatency(ctx, time.Since(start)) }()
	obj, _, err := v.codec.Decode(data, nil, into)
	if err != nil {
		return nil, v.undecodable(err, rev)
	}
	if err := v.versioner.UpdateObject(obj, uint64(rev)); err != nil {
		return nil, fmt.Errorf("set resource version %d: %w", rev, err)
	}
	return obj, nil
}

func (v *values) undecodable(err error, rev int64) error {
	if !v.markCorrupt {
		return err
	}
	return &corruptError{what: "object cannot be decoded", revision: rev, err: err}
}

// seal makes of encoded data what is put at key.
func (v *values) seal(ctx context.Context, key string, data []byte) ([]byte, error) {
	sealed, err := v.transformer.TransformToStorage(ctx, data, value.DefaultContext(key))
	if err != nil {
		return nil, storage.NewInternalError(fmt.Errorf("unable to seal key %q: %w", key, err))
	}
	return sealed, nil
}

// open undoes seal. It reports stale when the value should be written again,
// for example because its secret has been replaced.
func (v *values) open(ctx context.Context, kv *mvcc.KeyValue) (data []byte, stale bool, err error) {
	return v.transformer.TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key))
}
