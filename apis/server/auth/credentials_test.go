package auth

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"math/big"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
)

// TestWrongCredentials: who shows credentials that are wrong is no stranger, not even
// where strangers may look.
func TestWrongCredentials(t *testing.T) {
	wrong := errors.New("the token is forged")
	chain := Chain(authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		if req.Header.Get("Authorization") != "" {
			return nil, false, wrong
		}
		return nil, false, nil
	}))
	req := httptest.NewRequest("GET", "/healthz", nil)
	if response, ok, err := chain.AuthenticateRequest(req); !ok || err != nil || response.User.GetName() != "system:anonymous" {
		t.Errorf("a stranger: %v, %v, %v", response, ok, err)
	}
	req.Header.Set("Authorization", "Bearer forged")
	if response, ok, err := chain.AuthenticateRequest(req); ok || !errors.Is(err, wrong) && (err == nil || !strings.Contains(err.Error(), wrong.Error())) {
		t.Errorf("a forger: %v, %v, %v", response, ok, err)
	}
}

// TestHolder: a certificate may name the UID of its holder, once.
func TestHolder(t *testing.T) {
	uid := asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}
	for name, test := range map[string]struct {
		uids []any
		want string
		ok   bool
	}{
		"no uid":        {nil, "", true},
		"a uid":         {[]any{"1234"}, "1234", true},
		"two":           {[]any{"1", "2"}, "", false},
		"that is empty": {[]any{""}, "", false},
	} {
		ca := newAuthority(t)
		subject := pkix.Name{CommonName: "ann", Organization: []string{"devs"}}
		for _, value := range test.uids {
			subject.ExtraNames = append(subject.ExtraNames, pkix.AttributeTypeAndValue{Type: uid, Value: value})
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: subject, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour)}
		raw, err := x509.CreateCertificate(rand.Reader, template, ca.cert, &ca.key.PublicKey, ca.key)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(raw)
		if err != nil {
			t.Fatal(err)
		}
		response, ok, err := holder(leaf)
		if ok != test.ok || (err == nil) != test.ok {
			t.Errorf("%s: %v, %v", name, ok, err)
		} else if ok && (response.User.GetName() != "ann" || response.User.GetUID() != test.want || !slices.Equal(response.User.GetGroups(), []string{"devs"}) || len(response.User.GetExtra()) != 1) {
			t.Errorf("%s: %+v", name, response.User)
		}
	}
}
