package extend

import (
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/registry/generic"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
)

// storage hands out the places of one group's objects.
type storage struct {
	decorator generic.StorageDecorator
	// prefix is the folder of a resource.
	prefix    func(group, resource string) string
	codec     runtime.Codec
	versioner runtime.GroupVersioner
}

var _ generic.RESTOptionsGetter = &storage{}

// GetRESTOptions implements generic.RESTOptionsGetter. The library changes
// what it gets, so each call makes a new one.
func (s *storage) GetRESTOptions(name schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig: &storagebackend.ConfigForResource{
			Config:        storagebackend.Config{Codec: s.codec, EncodeVersioner: s.versioner},
			GroupResource: name,
		},
		Decorator:               s.decorator,
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 16,
		ResourcePrefix:          s.prefix(name.Group, name.Resource),
	}, nil
}

// newStorage stores the kinds of a library's own group, in protobuf.
func (o *Options) newStorage(version schema.GroupVersion, codecs serializer.CodecFactory) (*storage, error) {
	codec, versioner, err := serverstorage.NewStorageCodec(serverstorage.StorageCodecConfig{
		StorageMediaType:  runtime.ContentTypeProtobuf,
		StorageSerializer: codecs,
		StorageVersion:    version,
		MemoryVersion:     schema.GroupVersion{Group: version.Group, Version: runtime.APIVersionInternal},
	})
	if err != nil {
		return nil, fmt.Errorf("codec of %s: %w", version, err)
	}
	return &storage{o.remembered(), o.Prefix, codec, versioner}, nil
}

// remembered is the decorator, whose results Ready asks.
func (o *Options) remembered() generic.StorageDecorator {
	return func(
		config *storagebackend.ConfigForResource,
		prefix string,
		key func(obj runtime.Object) (string, error),
		newFunc func() runtime.Object,
		newList func() runtime.Object,
		attrs apistorage.AttrFunc,
		triggers apistorage.IndexerFuncs,
		indexers *cache.Indexers,
	) (apistorage.Interface, factory.DestroyFunc, error) {
		store, destroy, err := o.Storage(config, prefix, key, newFunc, newList, attrs, triggers, indexers)
		if err == nil {
			o.stores = append(o.stores, store)
			if config.GroupResource == apiregistration.Resource("apiservices") {
				o.seeds.store = store
			}
		}
		return store, destroy, err
	}
}

// Ready is nil when the definitions and APIServices can be read.
func (o *Options) Ready() error {
	for _, store := range o.stores {
		if err := store.ReadinessCheck(); err != nil {
			return err
		}
	}
	return nil
}

// definitionStorage stores CustomResourceDefinitions.
func (o *Options) definitionStorage() (*storage, error) {
	return o.newStorage(apiextensionsv1.SchemeGroupVersion, crdserver.Codecs)
}

// serviceStorage stores APIServices.
func (o *Options) serviceStorage() (*storage, error) {
	return o.newStorage(apiregistrationv1.SchemeGroupVersion, aggregatorscheme.Codecs)
}

// objectStorage stores objects of custom kinds, in JSON: there is no other
// form of what has no Go type. Their version is the library's business.
func (o *Options) objectStorage() *storage {
	return &storage{o.Storage, o.Prefix, unstructured.UnstructuredJSONScheme, nil}
}
