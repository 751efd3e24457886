// Package eventrate implements EventRateLimit: it limits the Events per second of the
// server, of a namespace, of a user, and of a source and object. It is off by default.
package eventrate

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/lru"
	"sigs.k8s.io/yaml"
)

const apiVersion = "eventratelimit.admission.k8s.io/v1alpha1"

// defaultCacheSize is for how many namespaces, users or objects a limit keeps
// count, unless it says otherwise.
const defaultCacheSize = 4096

// limit is one entry of the configuration. QPS and burst hold for each key of
// its type, for as long as the key is among the last cacheSize ones.
type limit struct {
	Type      string `json:"type"`
	QPS       int32  `json:"qps"`
	Burst     int32  `json:"burst"`
	CacheSize int    `json:"cacheSize,omitempty"`

	mu   sync.Mutex
	seen *lru.Cache // key → flowcontrol.PassiveRateLimiter
}

// keys are the types of limits, and what each tells Events apart by.
var keys = map[string]func(a admission.Attributes, event *corev1.Event) string{
	"Server":    func(admission.Attributes, *corev1.Event) string { return "" },
	"Namespace": func(a admission.Attributes, _ *corev1.Event) string { return a.GetNamespace() },
	"User":      func(a admission.Attributes, _ *corev1.Event) string { return a.GetUserInfo().GetName() },
	"SourceAndObject": func(_ admission.Attributes, e *corev1.Event) string {
		o := e.InvolvedObject
		return strings.Join([]string{e.Source.Component, e.Source.Host, o.Kind, o.Namespace, o.Name, string(o.UID), o.APIVersion}, "\x00")
	},
}

type plugin struct {
	*admission.Handler
	limits []*limit
}

var _ admission.ValidationInterface = &plugin{}

// New makes the plugin from upstream's Configuration, which is required.
func New(config io.Reader) (admission.Interface, error) {
	if config == nil {
		return nil, fmt.Errorf("a Configuration of %s is required: without limits the plugin does nothing", apiVersion)
	}
	data, err := io.ReadAll(config)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	var file struct {
		APIVersion string   `json:"apiVersion"`
		Kind       string   `json:"kind"`
		Limits     []*limit `json:"limits"`
	}
	if err := yaml.UnmarshalStrict(data, &file); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if file.APIVersion != apiVersion || file.Kind != "Configuration" {
		return nil, fmt.Errorf("configuration: apiVersion %q, kind %q: want a Configuration of %s", file.APIVersion, file.Kind, apiVersion)
	}
	if len(file.Limits) == 0 {
		return nil, fmt.Errorf("limits: at least one is required")
	}
	for i, l := range file.Limits {
		switch {
		case l == nil || keys[l.Type] == nil:
			return nil, fmt.Errorf("limits[%d].type: must be Server, Namespace, User or SourceAndObject", i)
		case l.QPS <= 0:
			return nil, fmt.Errorf("limits[%d].qps: %d: must be positive", i, l.QPS)
		case l.Burst < l.QPS:
			return nil, fmt.Errorf("limits[%d].burst: %d: must be at least qps, %d", i, l.Burst, l.QPS)
		case l.CacheSize < 0:
			return nil, fmt.Errorf("limits[%d].cacheSize: %d: must not be negative", i, l.CacheSize)
		}
		if l.CacheSize == 0 {
			l.CacheSize = defaultCacheSize
		}
		l.seen = lru.New(l.CacheSize)
	}
	return &plugin{admission.NewHandler(admission.Create, admission.Update), file.Limits}, nil
}

// Validate answers 429 to an Event beyond a limit. Each limit counts it.
func (p *plugin) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().Resource != "events" || a.GetSubresource() != "" || a.IsDryRun() {
		return nil
	}
	event, ok := a.GetObject().(*corev1.Event)
	if !ok {
		return nil
	}
	var exceeded []string
	for _, l := range p.limits {
		key := keys[l.Type](a, event)
		if !l.take(key) {
			exceeded = append(exceeded, fmt.Sprintf("limit reached on type %s for key %s", l.Type, strings.ReplaceAll(key, "\x00", "_")))
		}
	}
	if len(exceeded) > 0 {
		return apierrors.NewTooManyRequestsError(strings.Join(exceeded, "; "))
	}
	return nil
}

func (l *limit) take(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	known, ok := l.seen.Get(key)
	limiter, isLimiter := known.(flowcontrol.PassiveRateLimiter)
	if !ok || !isLimiter {
		limiter = flowcontrol.NewTokenBucketPassiveRateLimiter(float32(l.QPS), int(l.Burst))
		l.seen.Add(key, limiter)
	}
	return limiter.TryAccept()
}
