package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// revokedUsers takes certificates away: jane's, and the administrator's own. asked
// is a server that runs.
func revokedUsers(t *testing.T, e *env, asked string) {
	kubeconfig := nodeOf(e, asked).Kubeconfig()
	by := "--kubeconfig=" + kubeconfig
	user := func(file string) *rest.Config {
		config, err := clientcmd.BuildConfigFromFlags("", file)
		if err != nil {
			t.Fatal(err)
		}
		return config
	}
	// ask lists namespaces as the user, of the server.
	ask := func(ctx context.Context, config *rest.Config, server string) error {
		config = rest.CopyConfig(config)
		config.Host = "https://" + addrOf(e, server).String()
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err
		}
		_, err = client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
		return err
	}
	refusedEverywhere := func(who string, config *rest.Config) {
		for _, server := range []string{"n1", "n2", "n3"} {
			e.eventually(server+" refuses "+who, func(ctx context.Context) error {
				if err := ask(ctx, config, server); !apierrors.IsUnauthorized(err) {
					return fmt.Errorf("%v", err)
				}
				return nil
			})
		}
	}
	add := func(file string) *rest.Config {
		e.ctl("user", "add", "jane", "--for=1h", "--out="+file, by)
		return user(file)
	}

	e.ctl("create", "clusterrolebinding", "jane", "--clusterrole=view", "--user=jane", by)
	jane := add(filepath.Join(t.TempDir(), "jane.kubeconfig"))
	e.eventually("jane reads", func(ctx context.Context) error { return ask(ctx, jane, asked) })
	client, err := kubernetes.NewForConfig(jane)
	if err != nil {
		t.Fatal(err)
	}
	watch, err := client.CoreV1().Namespaces().Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()

	mustContain(t, "a node", e.refused("", "user", "revoke", "system:node:n1", by), "clusterctl members rm n1")
	mustContain(t, "nothing", e.refused("", "user", "revoke", by), "give the name of a user or --serial")
	mustContain(t, "a word", e.refused("", "user", "revoke", "--serial=xyz", by), "give it in hexadecimal")
	mustContain(t, "revoke", e.ctl("user", "revoke", "jane", by), `user "jane" revoked`)
	refusedEverywhere("jane's certificate", jane)
	ended := time.After(testTimeout)
	for open := true; open; {
		select {
		case _, open = <-watch.ResultChan():
		case <-ended:
			t.Fatal("what it had open goes on")
		}
	}
	mustContain(t, "list", e.ctl("user", "revoked", by), "jane")
	var again *rest.Config
	e.eventually("jane reads with another certificate", func(ctx context.Context) error {
		again = add(filepath.Join(t.TempDir(), "again.kubeconfig")) // of the same second it would be one of the revoked
		return ask(ctx, again, asked)
	})

	admin := user(kubeconfig)
	e.ctl("user", "revoke", "admin", by)
	refusedEverywhere("the administrator's certificate of before", admin)
	e.eventually("the machine's administrator has another", func(ctx context.Context) error { return ask(ctx, user(kubeconfig), asked) })
}
