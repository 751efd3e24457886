// Package serviceaccount implements ServiceAccount: a pod runs as the service account it
// names, which must exist, or as "default". It mounts the account's token, which the node
// requests and renews.
package serviceaccount

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"

	"github.com/clusterd/clusterd/apis/core"
)

// ephemeral is the subresource by which containers are added to a pod that runs.
const ephemeral = "ephemeralcontainers"

// Default is the service account of pods that name none. A controller creates
// it in every namespace, so that it may be a moment late: its absence does not
// keep a pod out.
const Default = "default"

// ServiceAccounts finds a service account, or fails with a NotFound
// StatusError.
type ServiceAccounts interface {
	ServiceAccount(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error)
}

type plugin struct {
	*admission.Handler
	accounts ServiceAccounts
}

var (
	_ admission.MutationInterface   = &plugin{}
	_ admission.ValidationInterface = &plugin{}
)

// New makes the plugin.
func New(accounts ServiceAccounts) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Update), accounts: accounts}
}

// Admit names the default account where the pod names none, and hands the
// account's image pull secrets to a pod that has none.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	pod, err := podOf(a)
	if pod == nil || err != nil || a.GetOperation() != admission.Create || core.IsMirror(pod) {
		return err
	}
	if pod.Spec.ServiceAccountName == "" {
		pod.Spec.ServiceAccountName = Default
	}
	pod.Spec.DeprecatedServiceAccount = pod.Spec.ServiceAccountName
	account, err := p.accounts.ServiceAccount(ctx, a.GetNamespace(), pod.Spec.ServiceAccountName)
	if err != nil {
		if err := p.missing(a, pod, err); err != nil {
			return err
		}
		account = &corev1.ServiceAccount{} // "default", as it will be
	}
	if automounts(pod, account) {
		mountToken(pod)
	}
	if len(pod.Spec.ImagePullSecrets) == 0 {
		pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, account.ImagePullSecrets...)
	}
	return nil
}

// Validate refuses a pod whose account does not exist, or whose account keeps
// its pods to Secrets that it names, and a mirror pod that could show its node
// what the node may not read.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, err := podOf(a)
	if pod == nil || err != nil || a.GetOperation() != admission.Create && a.GetSubresource() != ephemeral {
		return err
	}
	if core.IsMirror(pod) {
		if err := checkMirror(pod); err != nil {
			return admission.NewForbidden(a, err)
		}
		return nil
	}
	account, err := p.accounts.ServiceAccount(ctx, a.GetNamespace(), pod.Spec.ServiceAccountName)
	if err != nil {
		return p.missing(a, pod, err)
	}
	if !limitsSecrets(account) {
		return nil
	}
	check := checkSecrets
	if a.GetSubresource() == ephemeral {
		check = checkEphemeral // all else was judged when the pod was made
	}
	if err := check(pod, account); err != nil {
		return admission.NewForbidden(a, err)
	}
	return nil
}

func (p *plugin) missing(a admission.Attributes, pod *corev1.Pod, err error) error {
	name := pod.Spec.ServiceAccountName
	if errors.IsNotFound(err) && name == Default {
		return nil
	}
	return admission.NewForbidden(a, fmt.Errorf("error looking up service account %s/%s: %w", a.GetNamespace(), name, err))
}

// podOf is the pod that a writes, or nil if it writes something else.
func podOf(a admission.Attributes) (*corev1.Pod, error) {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" && a.GetSubresource() != ephemeral {
		return nil, nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return nil, errors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
	}
	return pod, nil
}
