package kubectl

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// authority is a new certificate of an authority, in PEM.
func authority(name string) string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// trustBundles mounts ClusterTrustBundles.
func trustBundles(k *kit) {
	features.Conforms(k, 180, 181, 182, 183, 184, 185, 186, 187, 188)
	a, b, c, d := authority("a"), authority("b"), authority("c"), authority("d")
	bundle := func(name, signer, tier string, anchors ...string) string {
		return fmt.Sprintf("apiVersion: certificates.k8s.io/v1\nkind: ClusterTrustBundle\nmetadata: {name: %q, labels: {tier: %s}}\nspec: {signerName: %q, trustBundle: %s}\n---\n",
			name, tier, signer, strconv.Quote(strings.Join(anchors, "")))
	}
	k.apply(bundle("roots", "", "own", a) + bundle("trust.example.com:lab:1", "trust.example.com/lab", "live", b, c) + bundle("trust.example.com:lab:2", "trust.example.com/lab", "old", c, d))
	mounting := func(name string, sources ...string) string {
		var mounts, volumes []string
		for i, source := range sources {
			mounts = append(mounts, fmt.Sprintf("{name: v%d, mountPath: /v%d}", i, i))
			volumes = append(volumes, fmt.Sprintf("- {name: v%d, projected: {sources: [{clusterTrustBundle: {path: roots.pem, %s}}]}}", i, source))
		}
		return strings.Replace(simple(name, "sleep", append([]string{"volumes:"}, volumes...)...), "args:", "volumeMounts: ["+strings.Join(mounts, ", ")+"], args:", 1)
	}
	const lab = "signerName: trust.example.com/lab"
	k.apply(mounting("trust", "name: roots", lab+", labelSelector: {}", lab+", labelSelector: {matchLabels: {tier: old}}",
		lab+", labelSelector: {matchLabels: {tier: none}}, optional: true", lab+", optional: true", "name: no-such, optional: true"))
	for _, waits := range []struct{ pod, source, says string }{
		{"no-match", lab + ", labelSelector: {matchLabels: {tier: none}}", `no ClusterTrustBundle of signer "trust.example.com/lab" has labels that fit "tier=none"`},
		{"no-bundle", "name: late", `"late" not found`},
	} {
		k.apply(mounting(waits.pod, waits.source))
		k.event(waits.pod, "FailedMount", waits.says)
		if p := k.pod(waits.pod); p.Status.Phase != corev1.PodPending {
			k.Errorf("%s is %s", waits.pod, p.Status.Phase)
		}
	}
	k.ready("trust")
	for i, want := range []string{a, b + c + d, c + d, "", "", ""} {
		path := fmt.Sprintf("/v%d/roots.pem", i)
		k.eventually("what is in "+path, func(context.Context) error { // the node learns of the second bundle after the first
			if got := k.exec("trust", "main", "cat", path); got != want {
				return fmt.Errorf("it is %q, want %q", got, want)
			}
			return nil
		})
	}
	// What changes is followed, and what was waited for comes.
	k.apply(bundle("roots", "", "own", d) + bundle("late", "", "own", a))
	k.ready("no-bundle")
	k.is("the late one", k.exec("no-bundle", "main", "cat", "/v0/roots.pem"), a)
	k.eventuallyHas([]string{"exec", "trust", "-c", "main", "--", "/hello", "cat", "/v0/roots.pem"}, strings.Split(d, "\n")[1])
	many := make([]string, 101)
	for i := range many {
		many[i] = "name: roots"
	}
	k.apply(mounting("many", many...))
	k.ready("many")
	k.is("the last of many", k.exec("many", "main", "cat", "/v100/roots.pem"), d)
	k.ok("delete", "pod", "trust", "no-match", "no-bundle", "many", "--wait=false")
	k.ok("delete", "clustertrustbundle", "roots", "late", "trust.example.com:lab:1", "trust.example.com:lab:2")
}
