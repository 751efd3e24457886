package server

import (
	"context"
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/server/resource"
	"github.com/clusterd/clusterd/apis/server/tokens"
)

// TokenKeys is the resource, outside of the API, as which the keys that sign
// service account tokens are stored: for sealing at rest.
var TokenKeys = schema.GroupResource{Group: "keys", Resource: "serviceaccounts"}

// tokenKeysPrefix is where the keys are stored.
const tokenKeysPrefix = "/keys/serviceaccounts"

// Fields of the Secrets as which keys are stored.
const (
	keyPrivate   = "private"
	keyCreated   = "created"
	keyAuthority = "authority" // a number, see tokens.Cause
	keyAlone     = "alone"     // "true", see tokens.Cause
)

// serviceAccounts is what this server has to do with tokens of service
// accounts.
type serviceAccounts struct {
	issuer        *tokens.Issuer
	authenticator *tokens.Authenticator
	bootstrap     authenticator.Token
	audiences     []string
	destroy       func()
}

func newServiceAccounts(config Config, stores *stores) (*serviceAccounts, error) {
	store, destroy, err := stores.tokenKeys()
	if err != nil {
		return nil, err
	}
	keys := tokens.NewKeys(store)
	issuer := tokens.NewIssuer(config.Issuer, keys)
	judge := tokens.NewAuthenticator(config.Issuer, keys, config.Audiences, stores)
	if config.Now != nil {
		judge.By(config.Now)
		issuer.By(config.Now)
	}
	return &serviceAccounts{
		issuer:        issuer,
		authenticator: judge,
		bootstrap:     authenticator.WrapAudienceAgnosticToken(config.Audiences, tokens.NewBootstrap(stores)),
		audiences:     config.Audiences,
		destroy:       destroy,
	}, nil
}

// publish serves what verifiers elsewhere need.
func (s *serviceAccounts) publish(server *genericapiserver.GenericAPIServer, address string) {
	configuration, keys := s.issuer.Discovery("https://" + address + tokens.KeysPath)
	server.Handler.NonGoRestfulMux.Handle(tokens.ConfigurationPath, configuration)
	server.Handler.NonGoRestfulMux.Handle(tokens.KeysPath, keys)
}

// FollowAuthority makes a new key for the tokens of service accounts, unless the
// newest one was made since the state of the cluster's certificate authority with
// that number, and reports whether it did. The new key signs a minute from now on
// all servers, and tokens in use stay good for a year. alone: it signs at once,
// and no token of an older key is good from now on.
func (s *Server) FollowAuthority(ctx context.Context, number uint64, alone bool) (made bool, err error) {
	return s.accounts.issuer.Keys.Follow(ctx, tokens.Cause{Authority: number, Alone: alone})
}

// RotateTokenKey makes a new key for the tokens of service accounts if the newest one is
// at least age old, and reports whether it did. The new key signs a minute from now
// on all servers, and tokens in use stay good.
func (s *Server) RotateTokenKey(ctx context.Context, age time.Duration) (made bool, err error) {
	return s.accounts.issuer.Keys.Rotate(ctx, age)
}

// TokenKeys are the keys that verify tokens of service accounts, oldest first.
func (s *Server) TokenKeys(ctx context.Context) ([]tokens.State, error) {
	return s.accounts.issuer.Keys.States(ctx)
}

// DropTokenKeys deletes the keys that verify no token any more, and returns how
// many.
func (s *Server) DropTokenKeys(ctx context.Context) (int, error) {
	return s.accounts.issuer.Keys.Drop(ctx)
}

// TokenKeyIDs are the ids of the keys that verify tokens, oldest first.
func (s *Server) TokenKeyIDs(ctx context.Context) ([]string, error) {
	keys, err := s.accounts.issuer.Keys.All(ctx)
	ids := make([]string, len(keys))
	for i, key := range keys {
		ids[i] = key.ID
	}
	return ids, err
}

// tokenKeys is where the signing keys are kept: as Secrets that no API serves.
func (s *stores) tokenKeys() (tokenKeyStore, func(), error) {
	secrets := s.core("secrets").Kind()
	options := s.options(secrets)
	options.StorageConfig.GroupResource = TokenKeys
	store, destroy, err := s.storage(options.StorageConfig, tokenKeysPrefix, keyOfTokenKey,
		secrets.New, secrets.NewList, resource.Attrs(secrets), nil, nil)
	if err != nil {
		return tokenKeyStore{}, nil, fmt.Errorf("storage of the token keys: %w", err)
	}
	return tokenKeyStore{store}, destroy, nil
}

func keyOfTokenKey(secret runtime.Object) (string, error) {
	object, err := meta.Accessor(secret)
	if err != nil {
		return "", fmt.Errorf("key of a token key: %w", err)
	}
	return tokenKeysPrefix + "/" + object.GetName(), nil
}

type tokenKeyStore struct{ storage storage.Interface }

func (s tokenKeyStore) secrets(ctx context.Context) ([]corev1.Secret, error) {
	list := &corev1.SecretList{}
	err := s.storage.GetList(ctx, tokenKeysPrefix, storage.ListOptions{Recursive: true, Predicate: storage.Everything}, list)
	return list.Items, err
}

// List implements tokens.Store.
func (s tokenKeyStore) List(ctx context.Context) ([]tokens.StoredKey, error) {
	secrets, err := s.secrets(ctx)
	if err != nil {
		return nil, err
	}
	keys := make([]tokens.StoredKey, 0, len(secrets))
	for _, secret := range secrets {
		number, err := strconv.Atoi(secret.Name)
		if err != nil {
			return nil, fmt.Errorf("token key %q has no number: %w", secret.Name, err)
		}
		created, err := time.Parse(time.RFC3339, string(secret.Data[keyCreated]))
		if err != nil {
			return nil, fmt.Errorf("token key %d: %w", number, err)
		}
		cause := tokens.Cause{Alone: string(secret.Data[keyAlone]) == "true"}
		if text, ok := secret.Data[keyAuthority]; ok {
			if cause.Authority, err = strconv.ParseUint(string(text), 10, 64); err != nil {
				return nil, fmt.Errorf("token key %d: %s: %w", number, keyAuthority, err)
			}
		}
		keys = append(keys, tokens.StoredKey{Number: number, Created: created, Cause: cause, Private: secret.Data[keyPrivate]})
	}
	return keys, nil
}

// Delete implements tokens.Store.
func (s tokenKeyStore) Delete(ctx context.Context, number int) error {
	at, err := keyOfTokenKey(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: strconv.Itoa(number)}})
	if err != nil {
		return err
	}
	err = s.storage.Delete(ctx, at, &corev1.Secret{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	if storage.IsNotFound(err) {
		return nil
	}
	return err
}

// Create implements tokens.Store.
func (s tokenKeyStore) Create(ctx context.Context, key tokens.StoredKey) error {
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: strconv.Itoa(key.Number), CreationTimestamp: metav1.NewTime(key.Created)},
		Type:       names.TokenKey,
		Data:       map[string][]byte{keyPrivate: key.Private, keyCreated: []byte(key.Created.Format(time.RFC3339))},
	}
	if key.Cause.Authority > 0 {
		secret.Data[keyAuthority] = strconv.AppendUint(nil, key.Cause.Authority, 10)
	}
	if key.Cause.Alone {
		secret.Data[keyAlone] = []byte("true")
	}
	at, err := keyOfTokenKey(secret)
	if err != nil {
		return err
	}
	err = s.storage.Create(ctx, at, secret, &corev1.Secret{}, 0)
	if storage.IsExist(err) {
		return tokens.ErrKeyExists
	}
	return err
}

// BoundPod implements tokens.Objects.
func (s *stores) BoundPod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	return get(ctx, s, corev1.Resource("pods"), namespace, name, func(*corev1.Pod) bool { return true })
}

// BoundSecret implements tokens.Objects.
func (s *stores) BoundSecret(ctx context.Context, namespace, name string) (*corev1.Secret, error) {
	return get(ctx, s, corev1.Resource("secrets"), namespace, name, func(*corev1.Secret) bool { return true })
}

// BoundNode implements tokens.Objects.
func (s *stores) BoundNode(ctx context.Context, name string) (*corev1.Node, error) {
	return get(ctx, s, corev1.Resource("nodes"), "", name, func(*corev1.Node) bool { return true })
}
