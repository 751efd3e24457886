package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// What `clusterctl token create` prints can be given as it is, wherever a token can.
func TestReadToken(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	token, other := pki.NewToken(ca.Cert), pki.NewToken(ca.Cert)
	server := netip.MustParseAddrPort("192.0.2.7:6443")
	line := joinCommand(server, token)
	for text, want := range map[string]string{
		token.String():                                     token.String(),
		token.String() + "\r\n":                            token.String(),
		line + "\n":                                        token.String(),
		"# Add a server:\n" + line:                         token.String(),
		"sudo " + line + "\n\n" + line:                     token.String(),
		"clusterd join x --token=" + token.String():        token.String(),
		"clusterd join x --token '" + token.String() + "'": token.String(),
		line + "\n" + joinCommand(server, other):           "", // which role?
		"clusterd join 192.0.2.7:6443 --ask":               "",
		"":                                                 "",
	} {
		file := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		for from, read := range map[string]func() (string, error){
			"--token-file":   func() (string, error) { return readToken("", file, nil) },
			"standard input": func() (string, error) { return readToken("", "-", strings.NewReader(text)) },
			tokenEnv: func() (string, error) {
				t.Setenv(tokenEnv, text)
				return readToken("", "", nil)
			},
		} {
			got, err := read()
			if err == nil {
				var parsed pki.Token
				if parsed, err = pki.ParseToken(got); err == nil {
					got = parsed.String()
				}
			}
			if want != "" && (err != nil || got != want) || want == "" && err == nil {
				t.Errorf("%s: %q by %s: %q, %v", t.Name(), text, from, got, err)
			}
		}
	}
	_, err = readToken("", "-", strings.NewReader(fmt.Sprint(token, " ", other)))
	if err == nil || !strings.Contains(err.Error(), "give one of the lines") {
		t.Errorf("two tokens: %v", err)
	}
	if _, err = pki.ParseToken("hello"); !errors.Is(err, pki.ErrTokenForm) || !strings.Contains(err.Error(), "begins with cd1.") {
		t.Errorf("no token: %v", err)
	}
}
