package main

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/cmd/clusterd/sudoer"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/rights"
)

// adminUser is whom the administrator's kubeconfig names.
const adminUser = "admin"

// writeKubeconfig makes sure that the data directory has a kubeconfig for the
// administrator that leads to this node: it is made again when it is missing,
// points elsewhere, trusts or belongs to other authorities, was revoked or nears
// its end. With a sealing key it lies in memory, and the data directory has a link to it.
func writeKubeconfig(d nodedir.KeyDir, trust *pki.Trust, server, cluster string, r *rights.Rights) error {
	file := d.InClear(nodedir.KubeconfigName)
	if kubeconfigGood(file, trust, server, r.Now(), r.RevokedCertificate) {
		return d.LinkInClear(nodedir.KubeconfigName)
	}
	key, err := pki.NewKey()
	if err != nil {
		return err
	}
	cert, err := trust.For(pki.ForClients).Signer().IssueClient(key.Public(), adminUser, []string{pki.AdminsGroup}, pki.AdminLifetime, r.SignAt(adminUser))
	if err != nil {
		return err
	}
	keyPEM, err := pki.EncodeKey(key)
	if err != nil {
		return err
	}
	config := api.NewConfig()
	config.Clusters[cluster] = &api.Cluster{Server: server, CertificateAuthorityData: trust.Bundle()}
	config.AuthInfos["admin"] = &api.AuthInfo{ClientCertificateData: pki.EncodeCert(cert), ClientKeyData: keyPEM}
	config.Contexts[cluster] = &api.Context{Cluster: cluster, AuthInfo: "admin"}
	config.CurrentContext = cluster
	b, err := clientcmd.Write(*config)
	if err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	if err := nodedir.WriteFile(file, b, 0o600); err != nil {
		return err
	}
	return d.LinkInClear(nodedir.KubeconfigName)
}

func kubeconfigGood(path string, trust *pki.Trust, server string, now time.Time, revoked func(*x509.Certificate) bool) bool {
	b, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	config, err := clientcmd.Load(b)
	if err != nil {
		return false
	}
	ctx := config.Contexts[config.CurrentContext]
	if ctx == nil {
		return false
	}
	cluster, user := config.Clusters[ctx.Cluster], config.AuthInfos[ctx.AuthInfo]
	if cluster == nil || user == nil || cluster.Server != server || !bytes.Equal(cluster.CertificateAuthorityData, trust.Bundle()) {
		return false
	}
	cert, err := pki.ParseCert(user.ClientCertificateData)
	return err == nil && trust.For(pki.ForClients).Signer().Signed(cert) && !pki.NeedsRenewal(cert, now) && !revoked(cert) &&
		cert.NotAfter.Before(now.Add(pki.AdminLifetime+time.Hour)) // those of earlier versions lived a year
}

// personKubeconfig is where the copy of the administrator's kubeconfig lies that
// belongs to who typed sudo: beside the data directory, which only root enters.
func personKubeconfig(data string) string { return filepath.Clean(data) + ".kubeconfig" }

// leaveKubeconfig is the path of a kubeconfig that whoever typed the command can
// read. A node with a sealing key has no copy on a disk: there only root can.
func leaveKubeconfig(d nodedir.KeyDir) (string, error) {
	uid, gid, ok := sudoer.Person()
	if !ok || d.Seal != nil {
		return d.Kubeconfig(), nil
	}
	path := personKubeconfig(string(d.Dir))
	return path, sudoer.Leave(d.Kubeconfig(), path, uid, gid)
}

// lookCommand shows the nodes of the cluster to whoever may use sudo on this machine.
func lookCommand(data string) string {
	if filepath.Clean(data) == DefaultData { // where clusterctl looks by itself
		return "sudo clusterctl get nodes"
	}
	return "sudo clusterctl --kubeconfig " + nodedir.Dir(data).Kubeconfig() + " get nodes"
}

// writeKubeconfig keeps the administrator's kubeconfig of this machine.
func (m *Main) writeKubeconfig() error {
	if _, err := os.Stat(m.dir.InClear(nodedir.KubeconfigName)); err == nil && !m.clock.Verdict().MaySign() {
		return m.dir.LinkInClear(nodedir.KubeconfigName)
	}
	return writeKubeconfig(m.dir, m.trust.Load(), "https://"+m.cfg.addr().String(), "clusterd", m.rights)
}
