package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/member/pki"
)

// podTokenFile is where a pod finds the token of its service account.
const podTokenFile = "/var/run/secrets/kubernetes.io/serviceaccount/token"

// tokensBefore are tokens that live on for a day at least: of an account, and of a pod.
func tokensBefore(e *env, ns, pod string) map[string]string {
	e.t.Helper()
	tokens := map[string]string{
		"an account's": strings.TrimSpace(e.ctl("create", "token", "default", "-n", ns, "--duration=24h")),
		"a pod's":      strings.TrimSpace(e.ctl("exec", "-n", ns, pod, "--", "/hello", "cat", podTokenFile)),
	}
	for _, server := range []string{"n1", "n2", "n3"} {
		for what, token := range tokens {
			e.eventually(what+" token is good before the rotation, to "+server, func(context.Context) error { return shows(e, server, token) })
		}
	}
	return tokens
}

// shows uses a token at a server, which says whose it is, or why it is not good.
func shows(e *env, server, token string) error {
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: "https://" + addrOf(e, server).String(), BearerToken: token,
		TLSClientConfig: rest.TLSClientConfig{CAData: pki.EncodeCert(stealAuthority(e, server).Cert)},
	})
	if err != nil {
		return err
	}
	_, err = client.AuthenticationV1().SelfSubjectReviews().Create(e.t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	return err
}

// tokensAfter: when the rotation was finished at once no server takes a token from
// before, and pods have others, with which they go on.
func tokensAfter(t *testing.T, e *env, ns, pod, kubeconfig string, before map[string]string) {
	servers := []string{"n1", "n2", "n3"}
	e.eventually("no server takes a token from before", func(context.Context) error {
		for _, server := range servers {
			for what, token := range before {
				if err := shows(e, server, token); err == nil || !strings.Contains(err.Error(), "Unauthorized") {
					return fmt.Errorf("%s token, to %s: %v", what, server, err)
				}
			}
		}
		return nil
	})
	e.eventually("the pod has a token that all servers take", func(context.Context) error {
		inside, errs, code := e.run("clusterctl", "", "exec", "-n", ns, pod, kubeconfig, "--", "/hello", "cat", podTokenFile)
		if code != 0 {
			return fmt.Errorf("exit %d: %s", code, errs)
		}
		token := strings.TrimSpace(inside)
		if token == before["a pod's"] {
			return fmt.Errorf("it has the one from before")
		}
		for _, server := range servers {
			if err := shows(e, server, token); err != nil {
				return fmt.Errorf("to %s: %w", server, err)
			}
		}
		return nil
	})
}
