package pki

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
)

// Token admits a machine to the cluster. Its text form is
//
//	cd1.<authority>.<id>.<secret>.<check>
//
// authority is the fingerprint of the cluster's CA key, so that the joiner
// knows whom it talks to before it says anything; id names the token; secret
// proves the right to join; check catches typing and copying faults before
// any connection is made.
type Token struct {
	Authority string
	ID        string
	Secret    string
}

const tokenVersion = "cd1"

// TokenPrefix is what every token begins with.
const TokenPrefix = tokenVersion + "."

// Errors of ParseToken.
var (
	// ErrTokenForm is returned when a text is not a token at all.
	ErrTokenForm = errors.New("this is not a join token: give the part that begins with cd1. of the line that `clusterd init` or `clusterctl token create` printed, or the whole line")
	// ErrTokenAltered is returned when a token's check part does not fit.
	ErrTokenAltered = errors.New("the join token was altered or cut when it was copied: its check letters do not fit")
)

// NewToken makes a token for the cluster of that authority.
func NewToken(ca *x509.Certificate) Token {
	return Token{Authority: Fingerprint(ca.PublicKey), ID: random(4)[:6], Secret: random(20)}
}

func (t Token) String() string {
	body := strings.Join([]string{tokenVersion, t.Authority, t.ID, t.Secret}, ".")
	return body + "." + tokenCheck(body)
}

// ParseToken reads the text form. It returns ErrTokenForm or ErrTokenAltered.
func ParseToken(s string) (Token, error) {
	s = strings.TrimSpace(s)
	parts := strings.Split(s, ".")
	if parts[0] != tokenVersion {
		return Token{}, ErrTokenForm
	}
	if len(parts) != 5 {
		return Token{}, ErrTokenAltered
	}
	body := s[:strings.LastIndexByte(s, '.')]
	if parts[4] != tokenCheck(body) {
		return Token{}, ErrTokenAltered
	}
	t := Token{Authority: parts[1], ID: parts[2], Secret: parts[3]}
	if t.Authority == "" || t.ID == "" || t.Secret == "" {
		return Token{}, ErrTokenForm
	}
	return t, nil
}

// Pins reports whether ca is the authority the token was made for.
func (t Token) Pins(ca *x509.Certificate) bool {
	return subtle.ConstantTimeCompare([]byte(Fingerprint(ca.PublicKey)), []byte(t.Authority)) == 1
}

// HashSecret is what a server keeps of a secret. The secret has 160 random
// bits: a plain hash is enough.
func HashSecret(secret string) string {
	sum := sha256.Sum256([]byte("clusterd token secret\x00" + secret))
	return encode(sum[:])
}

func tokenCheck(body string) string {
	sum := sha256.Sum256([]byte("clusterd token check\x00" + body))
	return encode(sum[:])[:4]
}

func random(n int) string {
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil { // does not fail on Linux
		panic(fmt.Sprintf("pki: random: %v", err))
	}
	return encode(b)
}
