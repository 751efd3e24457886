package main

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/apis/server/auth"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/pki"
)

func newSeparated(t *testing.T) *pki.Trust {
	t.Helper()
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	trust, err := pki.NewTrust(0, ca).Separate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return trust
}

func identityOf(t *testing.T, trust *pki.Trust, role pki.Role) *nodedir.Identity {
	t.Helper()
	id := &nodedir.Identity{Trust: trust, Ring: gossipkey.Ring{Keys: [][]byte{gossipkey.New()}}}
	var err error
	if id.Key, err = pki.NewKey(); err != nil {
		t.Fatal(err)
	}
	id.Cert, err = trust.Signer().IssueServer(id.Key.Public(), "n1", nil, time.Now())
	if role == pki.Agent {
		id.Cert, err = trust.For(pki.ForNodes).Signer().IssueAgent(id.Key.Public(), "n1", time.Now())
	}
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func filesOf(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestAPIOfEachAuthority: the API knows nobody whose certificate was signed by the authority
// for something else.
func TestAPIOfEachAuthority(t *testing.T) {
	trust := newSeparated(t)
	asks := auth.ClientCert(trust.Roots)
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for _, by := range pki.Purposes {
		ca := trust.For(by).Signer()
		for of, sign := range map[pki.Purpose]func() (*x509.Certificate, error){
			pki.ForPeers: func() (*x509.Certificate, error) { return ca.IssueServer(key.Public(), "n1", nil, now) },
			pki.ForNodes: func() (*x509.Certificate, error) { return ca.IssueAgent(key.Public(), "a1", now) },
			pki.ForClients: func() (*x509.Certificate, error) {
				return ca.IssueClient(key.Public(), adminUser, []string{pki.AdminsGroup}, time.Hour, now)
			},
			pki.ForFront: func() (*x509.Certificate, error) {
				return ca.IssueClient(key.Public(), "system:node:a1", []string{pki.NodesGroup, pki.AdminsGroup}, time.Hour, now)
			},
		} {
			cert, err := sign()
			if err != nil {
				t.Fatal(err)
			}
			req := &http.Request{TLS: &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert, ca.Cert}}}
			who, ok, err := asks.AuthenticateRequest(req)
			if want := of == by && of != pki.ForFront; ok != want || want != (err == nil) {
				t.Errorf("%s by the authority for %s: %v, %t, %v", cert.Subject, by, who, ok, err)
			}
		}
	}
}

// TestDirOfTheVersionBefore has one authority for all, and is written again as it was.
func TestDirOfTheVersionBefore(t *testing.T) {
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	d := nodedir.KeyDir{Dir: nodedir.Dir(t.TempDir())}
	want := []string{"ca.crt", "ca.key", "gossip.key", "node.crt", "node.key"}
	for range 2 {
		if err := os.RemoveAll(d.Path("pki")); err != nil {
			t.Fatal(err)
		}
		if err := d.WriteIdentity(identityOf(t, pki.NewTrust(0, ca), pki.Server)); err != nil {
			t.Fatal(err)
		}
		if got := filesOf(t, d.Path("pki")); !slices.Equal(got, want) {
			t.Fatalf("pki holds %q", got)
		}
		id, err := d.ReadIdentity()
		if err != nil || id.Trust.Separated() || id.Trust.For(pki.ForClients).Signer().ID() != ca.ID() {
			t.Fatalf("%+v, %v", id, err)
		}
		m := &Main{dir: d, id: id}
		keys, err := m.derivedSealKeys()
		if err != nil || len(keys) != 1 || keys[0].ID != "authority" {
			t.Errorf("secrets are sealed with %+v, %v", keys, err)
		}
	}
}

// TestDirWithSeparateAuthorities: what seals secrets does not follow from the servers'
// authority; a version that knows one authority does not start; an agent holds no key of any.
func TestDirWithSeparateAuthorities(t *testing.T) {
	trust := newSeparated(t)
	d := nodedir.KeyDir{Dir: nodedir.Dir(t.TempDir())}
	if err := d.WriteIdentity(identityOf(t, trust, pki.Server)); err != nil {
		t.Fatal(err)
	}
	id, err := d.ReadIdentity()
	if err != nil {
		t.Fatal(err)
	}
	m := &Main{dir: d, id: id}
	keys, err := m.derivedSealKeys()
	if err != nil || len(keys) != 1 {
		t.Fatalf("%v, %v", keys, err)
	}
	for _, p := range pki.Purposes {
		key, err := nodedir.SealKeyOf(trust.For(p).Signer())
		if err != nil {
			t.Fatal(err)
		}
		if same := key.ID == keys[0].ID || string(key.Secret) == string(keys[0].Secret); same != (p == pki.ForSecrets) {
			t.Errorf("secrets are sealed with what follows from the authority for %s: %t", p, same)
		}
	}
	b, err := os.ReadFile(d.Path("pki", "trust"))
	if err != nil {
		t.Fatal(err)
	}
	// As the version before reads it.
	if _, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil || !strings.Contains(err.Error(), "needs a later clusterd") {
		t.Errorf("the version before: %v", err)
	}

	// It is demoted.
	agent := identityOf(t, trust, pki.Agent)
	agent.Trust = id.Trust.Public()
	if err := d.ReplaceIdentity(agent); err != nil {
		t.Fatal(err)
	}
	for _, name := range filesOf(t, d.Path("pki")) {
		if filepath.Ext(name) == ".key" && name != "node.key" {
			t.Errorf("an agent holds pki/%s", name)
		}
	}
	if id, err = d.ReadIdentity(); err != nil || !id.Trust.Separated() || id.Trust.For(pki.ForNodes).Signer().HasKey() || !id.Trust.For(pki.ForNodes).Signer().Signed(id.Cert) {
		t.Errorf("as an agent: %+v, %v", id, err)
	}
}

// TestPurposesOfTheAPI are those that there are.
func TestPurposesOfTheAPI(t *testing.T) {
	var all []string
	for _, p := range pki.Purposes {
		all = append(all, string(p))
	}
	if !slices.Equal(all, v1.AuthorityPurposes) {
		t.Errorf("%q, and the API has %q", all, v1.AuthorityPurposes)
	}
	infos := authorityInfos(newSeparated(t))
	if len(infos) != len(all) || infos[0].Purposes[0] != "peer" || !slices.Equal(infos[1].Purposes, []string{"client"}) {
		t.Errorf("%+v", infos)
	}
	if one := authorityInfos(newSeparated(t).For(pki.ForNodes)); len(one) != 1 || !slices.Equal(one[0].Purposes, all) {
		t.Errorf("%+v", one)
	}
}
