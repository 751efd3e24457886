package certificates

import (
	"fmt"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apiserver/pkg/authentication/user"
)

// nodePrefix begins the names of nodes.
const nodePrefix = "system:node:"

// FrontName is the common name by which aggregated APIs know that a request was
// authenticated by a server of the cluster.
const FrontName = "clusterd:front-proxy"

// clusterPrefix begins names and groups in clusterd's own certificates.
const clusterPrefix = "clusterd:"

// CheckClient says why no certificate for the API may be asked for with such a
// common name (the user) and such organizations (the groups); nil: one may.
// Members of the cluster get theirs by joining, administrators from the
// authority's key alone.
func CheckClient(name string, groups []string) error {
	if name == "" {
		return fmt.Errorf("the subject of a certificate for signerName %q needs a common name: it is the user", certificatesv1.KubeAPIServerClientSignerName)
	}
	if strings.HasPrefix(name, nodePrefix) {
		return fmt.Errorf("use of %s signer with common name %q is not allowed: a node gets its certificate by joining (clusterd join)", certificatesv1.KubeAPIServerClientSignerName, name)
	}
	if strings.HasPrefix(name, clusterPrefix) {
		return fmt.Errorf("use of %s signer with common name %q is not allowed: names that begin with %s are the cluster's own", certificatesv1.KubeAPIServerClientSignerName, name, clusterPrefix)
	}
	for _, group := range groups {
		if group == user.SystemPrivilegedGroup || group == user.NodesGroup || strings.HasPrefix(group, clusterPrefix) {
			return fmt.Errorf("use of %s signer with %s group is not allowed", certificatesv1.KubeAPIServerClientSignerName, group)
		}
	}
	return nil
}

// CheckUsages says why the API's signer does not sign for these usages; nil: it
// does.
func CheckUsages(usages []certificatesv1.KeyUsage) error {
	client := false
	for _, u := range usages {
		switch u {
		case certificatesv1.UsageClientAuth:
			client = true
		case certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment:
		default:
			return fmt.Errorf("usage %q is not signed for: only client auth, digital signature and key encipherment are", u)
		}
	}
	if !client {
		return fmt.Errorf("usages do not include %q, which is all that a certificate for the API is good for", certificatesv1.UsageClientAuth)
	}
	return nil
}
