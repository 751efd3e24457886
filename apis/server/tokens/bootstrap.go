package tokens

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	bootstraputil "k8s.io/cluster-bootstrap/token/util"
	bootstrapsecrets "k8s.io/cluster-bootstrap/util/secrets"
)

// Bootstrap recognises bootstrap tokens: ID.SECRET, kept in Secrets of type
// bootstrap.kubernetes.io/token in kube-system (Kubernetes documentation,
// "Authenticating with Bootstrap Tokens").
type Bootstrap struct {
	secret func(ctx context.Context, namespace, name string) (*corev1.Secret, error)
	now    func() time.Time
}

var _ authenticator.Token = &Bootstrap{}

// NewBootstrap reads Secrets of objects.
func NewBootstrap(objects Objects) *Bootstrap {
	return &Bootstrap{secret: objects.BoundSecret, now: time.Now}
}

// AuthenticateToken implements authenticator.Token. It has no opinion about what
// does not look like a bootstrap token. The error for one that is not good does
// not say why: a client that guesses learns nothing about existing tokens.
func (b *Bootstrap) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	if !bootstraputil.IsValidBootstrapToken(token) {
		return nil, false, nil
	}
	id, given, _ := strings.Cut(token, ".")
	secret, err := b.secret(ctx, metav1.NamespaceSystem, bootstraputil.BootstrapTokenSecretName(id))
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, false, fmt.Errorf("read the Secret of a bootstrap token: %w", err)
	}
	if err != nil || !b.good(secret, id, given) {
		return nil, false, errBootstrap
	}
	groups, err := bootstrapsecrets.GetGroups(secret)
	if err != nil {
		return nil, false, fmt.Errorf("%s of Secret %s: %w", bootstrapapi.BootstrapTokenExtraGroupsKey, secret.Name, err)
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: bootstrapapi.BootstrapUserPrefix + id, Groups: groups}}, true, nil
}

var errBootstrap = errors.New("bootstrap token is not valid, or not any more")

// good says whether a Secret lets in who gives that secret.
func (b *Bootstrap) good(s *corev1.Secret, id, given string) bool {
	return s.Type == bootstrapapi.SecretTypeBootstrapToken && s.DeletionTimestamp == nil &&
		subtle.ConstantTimeCompare(s.Data[bootstrapapi.BootstrapTokenSecretKey], []byte(given)) == 1 &&
		bootstrapsecrets.GetData(s, bootstrapapi.BootstrapTokenIDKey) == id &&
		!bootstrapsecrets.HasExpired(s, b.now()) &&
		bootstrapsecrets.GetData(s, bootstrapapi.BootstrapTokenUsageAuthentication) == "true"
}
