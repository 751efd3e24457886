package server

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Front is how a server proves to APIs of others that it sends on what it has
// authenticated. Its zero value proves nothing: they get the user and
// cannot know by whom.
type Front struct {
	// CertFile and KeyFile are in PEM; they are read again when they change.
	CertFile, KeyFile string
	// Name is the common name of the certificate. No other certificate may have it.
	Name string
	// Authorities gives the bundle, in PEM, of those that sign it; Clients of those that sign
	// certificates of users. They may change.
	Authorities, Clients func() []byte
}

// trustName and trustNamespace name the ConfigMap by which aggregated API
// servers know which authorities to trust. It is part of upstream's API: their libraries do not
// start without it.
const (
	trustName      = "extension-apiserver-authentication"
	trustNamespace = metav1.NamespaceSystem
)

// trustReview is how often it is compared with what it should be.
const trustReview = time.Minute

// bundleLook is how often it is looked whether the authorities changed.
const bundleLook = 5 * time.Second

// trust keeps that ConfigMap.
type trust struct {
	front  Front
	client func() *rest.Config
}

// run blocks until ctx ends. Every server does this: they write the same.
func (t *trust) run(ctx context.Context) error {
	if t.front.Name == "" {
		return nil
	}
	client, err := v1.NewForConfig(t.client())
	if err != nil {
		return fmt.Errorf("client for the ConfigMap by which aggregated APIs trust this server: %w", err)
	}
	backoff := wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 10, Cap: 10 * time.Second}
	failed := backoff
	for {
		pause := wait.Jitter(trustReview, 0.2)
		bundles := t.front.bundles()
		if err := t.ensure(ctx, client.ConfigMaps(trustNamespace), bundles); err != nil {
			klog.FromContext(ctx).V(2).Info("ConfigMap for aggregated APIs not written yet, trying again", "name", trustName, "err", err)
			pause = failed.Step()
		} else {
			failed = backoff
		}
		if !t.rest(ctx, pause, bundles) {
			return nil
		}
	}
}

// bundles are Authorities' and Clients'.
type bundles struct{ front, clients string }

func (f Front) bundles() bundles { return bundles{string(f.Authorities()), string(f.Clients())} }

// rest waits for so long, or until the bundles are others. It returns false
// when ctx has ended.
func (t *trust) rest(ctx context.Context, pause time.Duration, was bundles) bool {
	for end := time.Now().Add(pause); time.Now().Before(end) && was == t.front.bundles(); {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(min(pause, bundleLook)):
		}
	}
	return true
}

func (t *trust) ensure(ctx context.Context, client v1.ConfigMapInterface, now bundles) error {
	want, err := t.data(now)
	if err != nil {
		return err
	}
	have, err := client.Get(ctx, trustName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err := client.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: trustName}, Data: want}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil // another server was quicker
		}
		return err
	}
	if err != nil {
		return err
	}
	put := have.DeepCopy()
	if put.Data == nil {
		put.Data = map[string]string{}
	}
	maps.Copy(put.Data, want)
	if maps.Equal(put.Data, have.Data) {
		return nil
	}
	_, err = client.Update(ctx, put, metav1.UpdateOptions{})
	return err
}

// data is what the library of aggregated APIs reads.
func (t *trust) data(now bundles) (map[string]string, error) {
	data := map[string]string{
		"client-ca-file":               now.clients,
		"requestheader-client-ca-file": now.front,
	}
	for key, values := range map[string][]string{
		"requestheader-allowed-names":        {t.front.Name},
		"requestheader-username-headers":     {"X-Remote-User"},
		"requestheader-uid-headers":          {"X-Remote-Uid"},
		"requestheader-group-headers":        {"X-Remote-Group"},
		"requestheader-extra-headers-prefix": {"X-Remote-Extra-"},
	} {
		b, err := json.Marshal(values)
		if err != nil {
			return nil, err
		}
		data[key] = string(b)
	}
	return data, nil
}
