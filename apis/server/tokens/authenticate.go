package tokens

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
)

// leeway is how long a token still counts after what it is bound to was to be
// gone: a program may use it while it ends.
const leeway = time.Minute

// skew is how far another server's clock may be ahead of this one's: what it has just
// issued counts here, too.
const skew = time.Minute

// Objects finds what tokens are bound to. It is called on requests, may block
// on the store, and a missing object is a NotFound StatusError.
type Objects interface {
	ServiceAccount(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error)
	BoundPod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	BoundSecret(ctx context.Context, namespace, name string) (*corev1.Secret, error)
	BoundNode(ctx context.Context, name string) (*corev1.Node, error)
}

// Authenticator recognises the tokens of one issuer.
type Authenticator struct {
	issuer    string
	keys      *Keys
	audiences authenticator.Audiences
	objects   Objects
	now       func() time.Time
}

var _ authenticator.Token = &Authenticator{}

// NewAuthenticator recognises tokens that name issuer, are signed by one of
// keys, and are meant for one of audiences where a request does not say for
// whom they have to be.
func NewAuthenticator(issuer string, keys *Keys, audiences []string, objects Objects) *Authenticator {
	return &Authenticator{issuer: issuer, keys: keys, audiences: audiences, objects: objects, now: time.Now}
}

// By has it judge tokens by another clock than this machine's.
func (a *Authenticator) By(now func() time.Time) { a.now = now }

var errInvalid = errors.New("service account token has been invalidated")

// AuthenticateToken implements authenticator.Token. It has no opinion about
// what is no token of its issuer.
func (a *Authenticator) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	if strings.Count(token, ".") != 2 {
		return nil, false, nil
	}
	parsed, err := jwt.ParseSigned(token, []jose.SignatureAlgorithm{algorithm})
	if err != nil || len(parsed.Headers) != 1 {
		return nil, false, nil
	}
	var public jwt.Claims
	var own private
	if err := parsed.UnsafeClaimsWithoutVerification(&public); err != nil || public.Issuer != a.issuer {
		return nil, false, nil
	}
	key, ok, err := a.keys.Verifier(ctx, parsed.Headers[0].KeyID)
	if err != nil {
		return nil, false, err
	}
	if !ok {
		return nil, false, errors.New("service account token is signed by an unknown key")
	}
	if err := parsed.Claims(&key.private.PublicKey, &public, &own); err != nil {
		return nil, false, fmt.Errorf("service account token: %w", err)
	}
	now := a.now()
	switch err := public.ValidateWithLeeway(jwt.Expected{Time: now}, skew); {
	case errors.Is(err, jwt.ErrExpired):
		return nil, false, errors.New("service account token has expired")
	case err != nil:
		return nil, false, fmt.Errorf("service account token: %w", err)
	case public.Expiry != nil && now.After(public.Expiry.Time()):
		return nil, false, errors.New("service account token has expired")
	case public.Expiry == nil || own.Kubernetes.Account.Name == "":
		return nil, false, errors.New("service account token lacks its claims")
	}
	wanted, ok := authenticator.AudiencesFrom(ctx)
	if !ok {
		wanted = a.audiences
	}
	audiences := authenticator.Audiences(public.Audience).Intersect(wanted)
	if len(audiences) == 0 {
		return nil, false, fmt.Errorf("token audiences %q is invalid for the target audiences %q", public.Audience, wanted)
	}
	if err := a.live(ctx, own.Kubernetes, now); err != nil {
		return nil, false, err
	}
	return &authenticator.Response{User: userOf(own.Kubernetes, public.ID), Audiences: audiences}, true, nil
}

// live is nil if the account and all that the token is bound to still exist.
func (a *Authenticator) live(ctx context.Context, k kubernetes, now time.Time) error {
	account, err := a.objects.ServiceAccount(ctx, k.Namespace, k.Account.Name)
	if err := same(account, err, k.Account, now); err != nil {
		return err
	}
	if k.Pod != nil {
		pod, err := a.objects.BoundPod(ctx, k.Namespace, k.Pod.Name)
		if err := same(pod, err, *k.Pod, now); err != nil {
			return err
		}
	}
	if k.Secret != nil {
		secret, err := a.objects.BoundSecret(ctx, k.Namespace, k.Secret.Name)
		if err := same(secret, err, *k.Secret, now); err != nil {
			return err
		}
	}
	// The node that a pod's token names is where the pod ran: the token ends
	// with the pod.
	if k.Node != nil && k.Pod == nil {
		node, err := a.objects.BoundNode(ctx, k.Node.Name)
		if err := same(node, err, *k.Node, now); err != nil {
			return err
		}
	}
	return nil
}

func same(object metav1.Object, err error, ref Ref, now time.Time) error {
	if apierrors.IsNotFound(err) {
		return errInvalid
	}
	if err != nil {
		return fmt.Errorf("look up what the service account token is bound to: %w", err)
	}
	if string(object.GetUID()) != ref.UID {
		return errInvalid
	}
	if gone := object.GetDeletionTimestamp(); gone != nil && now.After(gone.Add(leeway)) {
		return errInvalid
	}
	return nil
}

func userOf(k kubernetes, id string) user.Info {
	who := &user.DefaultInfo{
		Name:   serviceaccount.MakeUsername(k.Namespace, k.Account.Name),
		UID:    k.Account.UID,
		Groups: serviceaccount.MakeGroupNames(k.Namespace),
		Extra:  map[string][]string{},
	}
	if id != "" {
		who.Extra[user.CredentialIDKey] = []string{"JTI=" + id}
	}
	if k.Pod != nil {
		who.Extra[serviceaccount.PodNameKey] = []string{k.Pod.Name}
		who.Extra[serviceaccount.PodUIDKey] = []string{k.Pod.UID}
	}
	if k.Node != nil {
		who.Extra[serviceaccount.NodeNameKey] = []string{k.Node.Name}
		if k.Node.UID != "" {
			who.Extra[serviceaccount.NodeUIDKey] = []string{k.Node.UID}
		}
	}
	return who
}
