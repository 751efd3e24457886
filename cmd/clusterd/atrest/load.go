package atrest

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiserverv1 "k8s.io/apiserver/pkg/apis/apiserver/v1"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/envelope/kmsv2"
	kmstypes "k8s.io/apiserver/pkg/storage/value/encrypt/envelope/kmsv2/v2"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// providers are what one content of the file says. The zero value is no file.
type providers struct {
	hash     string
	all      encryptionconfig.StaticTransformers
	resource map[schema.GroupResource]*entry // as the file names them
	order    []schema.GroupResource
	check    healthz.HealthChecker
	stop     context.CancelFunc
	grace    time.Duration // how long requests may still use it
	readable bool          // others may read the file

	chains sync.Map // schema.GroupResource → *chain, of resources that were asked for
}

// entry is what the file says of one resource, or of a group of them.
type entry struct {
	prefixes []string // of values that its providers open
	clear    bool     // the first provider is identity
}

// chain is an entry for one resource.
type chain struct {
	*entry
	transformer value.Transformer
}

func fileHash(file string) (string, error) { return encryptionconfig.GetEncryptionConfigHash(file) }

// load reads the file and begins to speak to its KMS plugins.
func load(file, id string) (*providers, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("the EncryptionConfiguration: %w", err)
	}
	var config apiserverv1.EncryptionConfiguration
	if err := yaml.Unmarshal(data, &config); err == nil { // the library says what is wrong with it
		if err := refuseV1(&config); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	loaded, err := encryptionconfig.LoadEncryptionConfig(ctx, file, true, id)
	if err != nil {
		stop()
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	p := &providers{
		hash: loaded.EncryptionFileContentHash, all: loaded.Transformers, resource: map[schema.GroupResource]*entry{},
		check: loaded.HealthChecks[0], stop: stop, grace: loaded.KMSCloseGracePeriod,
	}
	if p.hash != fmt.Sprintf("sha256:%x", sha256.Sum256(data)) {
		stop()
		return nil, fmt.Errorf("%s was changed while it was read", file)
	}
	p.index(&config)
	if info, err := os.Stat(file); err == nil {
		p.readable = info.Mode().Perm()&0o077 != 0
	}
	return p, nil
}

// refuseV1 refuses KMS plugins of the first version.
func refuseV1(config *apiserverv1.EncryptionConfiguration) error {
	for i, r := range config.Resources {
		for j, p := range r.Providers {
			if p.KMS != nil && p.KMS.APIVersion != "v2" {
				return fmt.Errorf("resources[%d].providers[%d].kms.apiVersion %q: only v2 is supported, as Kubernetes has KMS v1 off by default; set apiVersion: v2 and use a plugin that speaks it (without the field, v1 is meant)", i, j, p.KMS.APIVersion)
			}
		}
	}
	return nil
}

// index notes by what the values of each resource begin.
func (p *providers) index(config *apiserverv1.EncryptionConfiguration) {
	for _, r := range config.Resources {
		var prefixes []string
		clear := false
		for i, provider := range r.Providers {
			made, identity := prefixesOf(provider)
			prefixes = append(prefixes, made...)
			clear = clear || identity && i == 0
		}
		for _, name := range r.Resources {
			gr := schema.ParseGroupResource(name)
			if known := p.resource[gr]; known != nil {
				known.prefixes = append(known.prefixes, prefixes...)
				continue
			}
			p.resource[gr] = &entry{prefixes: slices.Clone(prefixes), clear: clear}
			p.order = append(p.order, gr)
		}
	}
}

// prefixesOf are the beginnings of values that a provider opens.
func prefixesOf(p apiserverv1.ProviderConfiguration) (prefixes []string, identity bool) {
	add := func(provider string, keys []apiserverv1.Key) {
		for _, key := range keys {
			prefixes = append(prefixes, "k8s:enc:"+provider+":v1:"+key.Name+":")
		}
	}
	switch {
	case p.AESGCM != nil:
		add("aesgcm", p.AESGCM.Keys)
	case p.AESCBC != nil:
		add("aescbc", p.AESCBC.Keys)
	case p.Secretbox != nil:
		add("secretbox", p.Secretbox.Keys)
	case p.KMS != nil:
		prefixes = append(prefixes, kmsPrefix+p.KMS.Name+":")
	}
	return prefixes, p.Identity != nil
}

const kmsPrefix = "k8s:enc:kms:v2:"

// close ends connections to KMS plugins after a while.
func (p *providers) close(after time.Duration) {
	switch {
	case p.stop == nil:
	case after == 0:
		p.stop()
	default:
		time.AfterFunc(after, p.stop)
	}
}

// answerTime is how long the KMS plugins of a new file may take in all, at least.
const answerTime = 10 * time.Second

// answer is nil when all KMS plugins are well.
func (p *providers) answer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, max(answerTime, p.grace))
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/healthz/kms-providers", http.NoBody)
	if err != nil {
		return err
	}
	return p.check.Check(r)
}

// chain is what the file says of a resource: by its name, its group or all.
func (p *providers) chain(resource schema.GroupResource) *chain {
	if p.hash == "" {
		return nil
	}
	if c, ok := p.chains.Load(resource); ok {
		return c.(*chain)
	}
	var c *chain
	for _, name := range []schema.GroupResource{resource, {Group: resource.Group, Resource: "*"}, {Group: "*", Resource: "*"}} {
		if e := p.resource[name]; e != nil {
			c = &chain{e, p.all.TransformerForResource(resource)}
			break
		}
	}
	p.chains.Store(resource, c)
	return c
}

// keys asks what each resource of the file would be written with now.
func (p *providers) keys() []Key {
	var keys []Key
	for _, gr := range p.order {
		k := p.key(gr)
		i := slices.IndexFunc(keys, func(other Key) bool { return other.Provider == k.Provider && other.ID == k.ID && other.Err == k.Err })
		if i < 0 {
			keys = append(keys, k)
			i = len(keys) - 1
		}
		name := gr.String()
		if gr == (schema.GroupResource{Resource: "*"}) {
			name = "*."
		}
		keys[i].Resources = append(keys[i].Resources, name)
	}
	return keys
}

// key seals a value that goes nowhere: what it begins with names the key.
func (p *providers) key(resource schema.GroupResource) Key {
	sealed, err := p.all[resource].TransformToStorage(context.Background(), []byte("probe"), value.DefaultContext("probe"))
	if err != nil {
		return Key{Provider: "kms", Err: err.Error()} // the others always have one
	}
	by := kubestore.SealedBy(sealed)
	if by == "" {
		return Key{Provider: "identity"}
	}
	parts := strings.SplitN(by, ":", 5) // k8s:enc:PROVIDER:VERSION:NAME:
	k := Key{Provider: parts[2], ID: strings.TrimSuffix(parts[4], ":")}
	if k.Provider == "kms" {
		var object kmstypes.EncryptedObject
		if err := proto.Unmarshal(sealed[len(by):], &object); err != nil {
			return Key{Provider: k.Provider, ID: k.ID, Err: err.Error()}
		}
		k.ID += " " + kmsv2.GetHashIfNotEmpty(object.KeyID)
	}
	return k
}
