package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// dataKubeconfig is where clusterd leaves the administrator's kubeconfig on a
// server node.
const dataKubeconfig = "/var/lib/clusterd/admin.kubeconfig"

// kubeconfigSearch says where a kubeconfig may be found when no flag names one.
type kubeconfigSearch struct {
	env  string // value of $KUBECONFIG
	home string // ~/.kube/config
	data string // of a server on this machine
	// inCluster: running as a pod, whose service account is used.
	inCluster bool
}

func places() kubeconfigSearch {
	return kubeconfigSearch{
		env:       os.Getenv(clientcmd.RecommendedConfigPathEnvVar),
		home:      clientcmd.RecommendedHomeFile,
		data:      dataKubeconfig,
		inCluster: os.Getenv("KUBERNETES_SERVICE_HOST") != "",
	}
}

// apply points flags at the data directory's kubeconfig when nothing comes before
// it. When there is none either, every request fails with what to do about it.
//
// A shell's completion calls it before the flags of the line are parsed, so
// that those are looked at again when a client is made.
func (s kubeconfigSearch) apply(flags *genericclioptions.ConfigFlags) {
	named := func() bool { return *flags.KubeConfig != "" || *flags.APIServer != "" }
	var lost error
	switch {
	case named(), s.env != "", exists(s.home), s.inCluster:
	case readable(s.data) == nil:
		*flags.KubeConfig = s.data
	default:
		lost = s.lost()
	}
	flags.WithWrapConfigFn(func(c *rest.Config) *rest.Config {
		c.UserAgent = name + "/" + version()
		if lost != nil && !named() {
			c.Wrap(func(http.RoundTripper) http.RoundTripper { return failing{lost} })
		}
		return c
	})
}

// lost says why no cluster was found and what to do next.
func (s kubeconfigSearch) lost() error {
	if err := readable(s.data); errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("no cluster is configured: %s", forbidden(s.data))
	}
	return fmt.Errorf("no cluster is configured: looked at %s; set KUBECONFIG, give --kubeconfig FILE, or run this on a server node, where clusterd init leaves a kubeconfig",
		strings.Join([]string{"--kubeconfig", "$KUBECONFIG", s.home, s.data}, ", "))
}

// forbidden says of a kubeconfig that this user may not read it, and what to do.
func forbidden(path string) string {
	return path + " may not be read by this user; use sudo, or copy it (sudo install -m 0600 -o $USER " + path + " FILE) and set KUBECONFIG to the copy"
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func readable(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return f.Close()
}

// failing answers every request with the same error.
type failing struct{ err error }

func (f failing) RoundTrip(*http.Request) (*http.Response, error) { return nil, f.err }
