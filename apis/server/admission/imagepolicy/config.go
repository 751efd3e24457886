package imagepolicy

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"k8s.io/api/imagepolicy/v1alpha1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/util/webhook"
	"sigs.k8s.io/yaml"
)

// span is what a duration of the configuration may be: in units, 0 for the
// default, -1 for none.
type span struct{ unit, least, most, otherwise time.Duration }

var (
	ttlSpan     = span{unit: time.Second, least: time.Second, most: 30 * time.Minute}
	backoffSpan = span{unit: time.Millisecond, least: time.Millisecond, most: 5 * time.Minute, otherwise: 500 * time.Millisecond}
)

func (s span) or(otherwise time.Duration) span {
	s.otherwise = otherwise
	return s
}

// duration is value as the field says it.
func (s span) duration(field string, value int64) (time.Duration, error) {
	switch {
	case value == 0:
		return s.otherwise, nil
	case value == -1:
		return 0, nil
	case value < int64(s.least/s.unit) || value > int64(s.most/s.unit):
		return 0, fmt.Errorf("imagePolicy.%s: %d: must be %d to %d (in units of %v), 0 for the default of %v, or -1 for none",
			field, value, s.least/s.unit, s.most/s.unit, s.unit, s.otherwise)
	}
	return time.Duration(value) * s.unit, nil
}

// New makes the plugin from upstream's configuration, which is required:
//
//	imagePolicy:
//	  kubeConfigFile: FILE   # whom to ask, by https
//	  allowTTL: 300          # seconds
//	  denyTTL: 30            # seconds
//	  retryBackoff: 500      # milliseconds, grows by half
//	  defaultAllow: false    # when no answer is to be had
func New(config io.Reader) (admission.Interface, error) {
	if config == nil {
		return nil, errors.New("imagePolicy.kubeConfigFile is required: an AdmissionConfiguration has to name the backend that is asked")
	}
	data, err := io.ReadAll(config)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	var file struct {
		ImagePolicy *struct {
			KubeConfigFile string `json:"kubeConfigFile"`
			AllowTTL       int64  `json:"allowTTL"`
			DenyTTL        int64  `json:"denyTTL"`
			RetryBackoff   int64  `json:"retryBackoff"`
			DefaultAllow   bool   `json:"defaultAllow"`
		} `json:"imagePolicy"`
	}
	if err := yaml.UnmarshalStrict(data, &file); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	said := file.ImagePolicy
	if said == nil || said.KubeConfigFile == "" {
		return nil, errors.New("imagePolicy.kubeConfigFile is required: a kubeconfig that says where the backend is")
	}
	p := &plugin{
		Handler: admission.NewHandler(admission.Create, admission.Update),
		answers: cache.NewLRUExpireCache(answersKept), failureTTL: failureTTL, defaultAllow: said.DefaultAllow,
	}
	if p.allowTTL, err = ttlSpan.or(5*time.Minute).duration("allowTTL", said.AllowTTL); err != nil {
		return nil, err
	}
	if p.denyTTL, err = ttlSpan.or(30*time.Second).duration("denyTTL", said.DenyTTL); err != nil {
		return nil, err
	}
	backoff, err := backoffSpan.duration("retryBackoff", said.RetryBackoff)
	if err != nil {
		return nil, err
	}
	if p.backend, err = backend(said.KubeConfigFile, backoff); err != nil {
		return nil, fmt.Errorf("imagePolicy.kubeConfigFile: %s: %w", said.KubeConfigFile, err)
	}
	return p, nil
}

// backend is a client of the service that a kubeconfig names.
func backend(kubeconfig string, backoff time.Duration) (*webhook.GenericWebhook, error) {
	config, err := webhook.LoadKubeconfig(kubeconfig, nil)
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(config.Host, "https://") {
		return nil, fmt.Errorf("cluster.server: %q: must begin with https://, or any host on the path can decide", config.Host)
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	return webhook.NewGenericWebhook(scheme, serializer.NewCodecFactory(scheme), config,
		[]schema.GroupVersion{v1alpha1.SchemeGroupVersion}, webhook.DefaultRetryBackoffWithInitialDelay(backoff))
}
