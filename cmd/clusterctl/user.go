package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	typed "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	"github.com/clusterd/clusterd/apis/certificates"
)

const (
	defaultUserLifetime = 90 * 24 * time.Hour
	minUserLifetime     = 10 * time.Minute
	maxUserLifetime     = 365 * 24 * time.Hour
	// signTimeout is how long the leader may take to sign.
	signTimeout = 30 * time.Second
)

func newUserCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "user",
		Short: "Create and revoke kubeconfigs of users",
		Long: templates.LongDesc(`
			Create and revoke kubeconfigs of users. A user is a name in a client certificate, with
			groups. The cluster keeps no list of users: roles that are bound to the name or to a
			group define the permissions.`),
		Run: cmdutil.DefaultSubCommandRun(streams.ErrOut),
	}
	cmd.AddCommand(newUserAddCommand(f, streams), newUserRevokeCommand(f, streams), newUserRevokedCommand(f, streams))
	return cmd
}

// newUser is what user add is given.
type newUser struct {
	name     string
	groups   []string
	lifetime time.Duration
	out      string
}

func newUserAddCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	u := newUser{lifetime: defaultUserLifetime}
	cmd := &cobra.Command{
		Use:   "add NAME",
		Short: "Create a kubeconfig for a user",
		Long: templates.LongDesc(`
			Create a key on this machine, let the cluster sign a certificate for it, and write
			both with the address of the cluster to a kubeconfig. The key is stored only in that
			file.

			It requires permission to create and approve CertificateSigningRequests of the signer
			kubernetes.io/kube-apiserver-client; administrators have it. The user has no
			permissions until a role is bound to the name or to one of the groups. A certificate
			can be revoked before it expires, see clusterctl user revoke; also delete the role
			bindings of a user who leaves.`),
		Example: templates.Examples(`
			# A kubeconfig for jane, in jane.kubeconfig, valid for 90 days
			clusterctl user add jane

			# Permission to edit objects in the namespace shop
			clusterctl create rolebinding jane --clusterrole=edit --user=jane --namespace=shop

			# A member of a group, for a day, to another file
			clusterctl user add ci --group builders --for 24h --out /secure/ci.kubeconfig`),
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			u.name = args[0]
			if u.out == "" {
				u.out = u.name + ".kubeconfig"
			}
			return addUser(cmd.Context(), f, streams, u)
		},
	}
	cmd.Flags().StringSliceVar(&u.groups, "group", nil, "Group of the user; may be repeated")
	cmd.Flags().DurationVar(&u.lifetime, "for", u.lifetime, "Lifetime of the certificate, from 10m to 8760h")
	cmd.Flags().StringVar(&u.out, "out", "", "Write the kubeconfig to this file, - for standard output (default NAME.kubeconfig)")
	return cmd
}

func (u *newUser) check() error {
	if strings.TrimSpace(u.name) != u.name || strings.ContainsAny(u.name, "/\x00\n") && u.out == u.name+".kubeconfig" {
		return fmt.Errorf("NAME %q: must have no space around it, and no slash unless --out names the file", u.name)
	}
	if u.lifetime < minUserLifetime || u.lifetime > maxUserLifetime {
		return fmt.Errorf("--for %s: must be from %s to %s", u.lifetime, minUserLifetime, maxUserLifetime)
	}
	if err := certificates.CheckClient(u.name, u.groups); err != nil {
		return fmt.Errorf("user %q of groups %q: %w", u.name, u.groups, err)
	}
	return nil
}

func addUser(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, u newUser) (err error) {
	if err := u.check(); err != nil {
		return err
	}
	cluster, err := currentCluster(f)
	if err != nil {
		return err
	}
	config, err := f.ToRESTConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	// Before anything is made: a file that is there already is not ours.
	out, keep, err := openNew(streams.Out, u.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, keep(err == nil)) }()

	key, request, err := newRequest(u)
	if err != nil {
		return err
	}
	cert, err := signed(ctx, client.CertificatesV1().CertificateSigningRequests(), u, request)
	if err != nil {
		return err
	}
	text, err := kubeconfigOf(cluster, u.name, cert, key)
	if err != nil {
		return err
	}
	if _, err := out.Write(text); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	printUser(streams.ErrOut, u, cert)
	return nil
}

// openNew opens a file that must not exist yet; - is standard output. keep
// closes it, and removes it if it is not to be kept.
func openNew(stdout io.Writer, path string) (io.Writer, func(keep bool) error, error) {
	if path == "-" {
		return stdout, func(bool) error { return nil }, nil
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil, nil, fmt.Errorf("%s exists: name another file with --out, or remove it", path)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("--out: %w", err)
	}
	return file, func(keep bool) error {
		err := file.Close()
		if !keep {
			err = errors.Join(err, os.Remove(path))
		}
		return err
	}, nil
}

// newRequest makes a key, and a request for a certificate in PEM.
func newRequest(u newUser) (key, request []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	asked, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: u.name, Organization: u.groups},
	}, private)
	if err != nil {
		return nil, nil, fmt.Errorf("make the certificate request: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: asked}), nil
}

// signed has the cluster sign the request and returns the certificate. The
// object that carried it is deleted whatever comes of it.
func signed(ctx context.Context, requests typed.CertificateSigningRequestInterface, u newUser, request []byte) (cert []byte, err error) {
	seconds := int32(u.lifetime / time.Second)
	made, err := requests.Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "clusterctl-user-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: request, SignerName: certificatesv1.KubeAPIServerClientSignerName, ExpirationSeconds: &seconds,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("ask for a certificate: %w", err)
	}
	defer func() {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if gone := requests.Delete(late, made.Name, metav1.DeleteOptions{}); gone != nil && !apierrors.IsNotFound(gone) && !apierrors.IsForbidden(gone) {
			err = errors.Join(err, fmt.Errorf("delete certificatesigningrequest %s, which is not needed any more: %w", made.Name, gone))
		}
	}()
	made.Status.Conditions = append(made.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue,
		Reason: "ClusterctlUserAdd", Message: "This certificate was asked for and approved by clusterctl user add.",
	})
	if made, err = requests.UpdateApproval(ctx, made.Name, made, metav1.UpdateOptions{}); err != nil {
		return nil, fmt.Errorf("approve the certificate of %s: %w", u.name, err)
	}
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, signTimeout, true, func(ctx context.Context) (bool, error) {
		now, err := requests.Get(ctx, made.Name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		for _, c := range now.Status.Conditions {
			if c.Type == certificatesv1.CertificateFailed || c.Type == certificatesv1.CertificateDenied {
				return false, fmt.Errorf("%s: %s", strings.ToLower(string(c.Type)), c.Message)
			}
		}
		cert = now.Status.Certificate
		return len(cert) > 0, nil
	})
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return nil, fmt.Errorf("the certificate of %s was not signed within %s: the cluster's leader signs; see clusterctl members whether there is one", u.name, signTimeout)
	}
	if err != nil {
		return nil, fmt.Errorf("wait for the certificate of %s: %w", u.name, err)
	}
	return cert, nil
}

// currentCluster is the cluster that the command talks to, as the user's
// kubeconfig will have it.
func currentCluster(f cmdutil.Factory) (*clientcmdapi.Cluster, error) {
	raw, err := f.ToRawKubeConfigLoader().RawConfig()
	if err != nil {
		return nil, err
	}
	config, err := f.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	cluster := clientcmdapi.NewCluster()
	if context := raw.Contexts[raw.CurrentContext]; context != nil && raw.Clusters[context.Cluster] != nil {
		cluster.TLSServerName, cluster.ProxyURL = raw.Clusters[context.Cluster].TLSServerName, raw.Clusters[context.Cluster].ProxyURL
	}
	cluster.Server = config.Host
	cluster.InsecureSkipTLSVerify = config.Insecure
	cluster.CertificateAuthorityData = config.CAData
	if len(cluster.CertificateAuthorityData) == 0 && config.CAFile != "" {
		if cluster.CertificateAuthorityData, err = os.ReadFile(config.CAFile); err != nil {
			return nil, fmt.Errorf("the cluster's authority: %w", err)
		}
	}
	return cluster, nil
}

func kubeconfigOf(cluster *clientcmdapi.Cluster, user string, cert, key []byte) ([]byte, error) {
	const name = "clusterd"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = cluster
	config.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	context := user + "@" + name
	config.Contexts[context] = &clientcmdapi.Context{Cluster: name, AuthInfo: user}
	config.CurrentContext = context
	return clientcmd.Write(*config)
}

// printUser says what was made and what comes next.
func printUser(w io.Writer, u newUser, cert []byte) {
	end := "?"
	if block, _ := pem.Decode(cert); block != nil {
		if parsed, err := x509.ParseCertificate(block.Bytes); err == nil {
			end = parsed.NotAfter.Local().Format("2006-01-02 15:04 MST")
		}
	}
	if u.out != "-" {
		fmt.Fprintf(w, "%s: user %s, good until %s\n", u.out, u.name, end)
	}
	if len(u.groups) == 0 {
		fmt.Fprintf(w, "Give it rights: clusterctl create rolebinding %s --clusterrole=edit --user=%s --namespace=NAMESPACE\n", u.name, u.name)
		return
	}
	fmt.Fprintf(w, "Its rights are those of the user and of the groups: %s\n", strings.Join(u.groups, ", "))
	if u.out != "-" {
		fmt.Fprintf(w, "See them: clusterctl --kubeconfig %s auth can-i --list\n", u.out)
	}
}
