package tokens

import (
	"context"
	"fmt"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
)

// algorithm signs in 30 µs where RSA takes a millisecond: every pod's start
// costs a signature.
const algorithm = jose.ES256

// Ref names one object at one time of its life.
type Ref struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// Grant is what a token says.
type Grant struct {
	Namespace string
	Account   Ref
	// Pod, Secret and Node are what the token is bound to; nil: nothing. A
	// token of a pod also names the pod's node.
	Pod, Secret, Node *Ref
	Audiences         []string
	Expires           time.Time
	// WarnAfter is when a client that still uses the token should have got a
	// new one; zero: never.
	WarnAfter time.Time
}

// private are the claims that are Kubernetes' own.
type private struct {
	Kubernetes kubernetes `json:"kubernetes.io,omitzero"`
}

type kubernetes struct {
	Namespace string           `json:"namespace,omitempty"`
	Account   Ref              `json:"serviceaccount,omitzero"`
	Pod       *Ref             `json:"pod,omitempty"`
	Secret    *Ref             `json:"secret,omitempty"`
	Node      *Ref             `json:"node,omitempty"`
	WarnAfter *jwt.NumericDate `json:"warnafter,omitempty"`
}

// Issuer makes tokens.
type Issuer struct {
	// Name is the issuer that tokens name.
	Name string
	Keys *Keys
	now  func() time.Time
}

// NewIssuer makes an issuer of that name.
func NewIssuer(name string, keys *Keys) *Issuer {
	return &Issuer{Name: name, Keys: keys, now: time.Now}
}

// By has it sign by another clock than this machine's.
func (i *Issuer) By(now func() time.Time) { i.now = now }

// Issue signs a token and returns it with its id.
func (i *Issuer) Issue(ctx context.Context, grant Grant) (token, id string, err error) {
	key, err := i.Keys.Signer(ctx)
	if err != nil {
		return "", "", err
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: algorithm, Key: jose.JSONWebKey{Key: key.private, KeyID: key.ID}}, nil)
	if err != nil {
		return "", "", fmt.Errorf("use signing key %d: %w", key.Number, err)
	}
	now, id := i.now(), string(uuid.NewUUID())
	own := private{kubernetes{
		Namespace: grant.Namespace, Account: grant.Account, Pod: grant.Pod, Secret: grant.Secret, Node: grant.Node,
	}}
	if !grant.WarnAfter.IsZero() {
		own.Kubernetes.WarnAfter = jwt.NewNumericDate(grant.WarnAfter)
	}
	token, err = jwt.Signed(signer).Claims(jwt.Claims{
		Issuer:    i.Name,
		Subject:   serviceaccount.MakeUsername(grant.Namespace, grant.Account.Name),
		Audience:  grant.Audiences,
		Expiry:    jwt.NewNumericDate(grant.Expires),
		NotBefore: jwt.NewNumericDate(now),
		IssuedAt:  jwt.NewNumericDate(now),
		ID:        id,
	}).Claims(own).Serialize()
	if err != nil {
		return "", "", fmt.Errorf("sign a token: %w", err)
	}
	return token, id, nil
}
