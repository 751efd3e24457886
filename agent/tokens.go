package agent

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	authn "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/agent/checkpoint"
	"github.com/clusterd/clusterd/slack"
)

type objectUID = types.UID

// tokens asks the API for service account tokens bound to pods, and keeps
// each until a fifth of its life is left, or the key that signed it is gone.
type tokens struct {
	client kubernetes.Interface
	// readKeys reads the JSON web key set of the keys that count now.
	readKeys func(context.Context) ([]byte, error)
	// changed has a pod's volumes rendered again.
	changed func(pod types.UID)
	// given is called when a pod has got another token; nil: nobody asks. It does not block.
	given func(pod types.UID)

	mu   sync.Mutex // guards held
	held map[tokenKey]heldToken
}

type tokenKey struct {
	pod      types.UID
	audience string
	seconds  int64
}

type heldToken struct {
	token   string
	key     string // id of the key that signed it
	renewAt time.Time
	ends    time.Time
	// recalled: it is of a record. It stays after its end, as the API that gives another
	// may not answer.
	recalled bool
}

func newTokens(client kubernetes.Interface, changed func(pod types.UID)) *tokens {
	return &tokens{client: client, changed: changed, readKeys: func(ctx context.Context) ([]byte, error) {
		api := client.Discovery().RESTClient()
		if api == nil {
			return nil, errors.New("the client reaches no server")
		}
		return api.Get().AbsPath(keysPath).DoRaw(ctx)
	}}
}

// Token implements volume.Tokens.
func (t *tokens) Token(ctx context.Context, pod *v1.Pod, audience string, seconds int64) (string, error) {
	key := tokenKey{pod.UID, audience, seconds}
	now := time.Now()
	t.mu.Lock()
	for k, h := range t.held {
		if now.After(h.ends) && !h.recalled {
			delete(t.held, k) // of pods long gone
		}
	}
	have, ok := t.held[key]
	t.mu.Unlock()
	if ok && now.Before(have.renewAt) {
		return have.token, nil
	}
	req := &authn.TokenRequest{Spec: authn.TokenRequestSpec{
		ExpirationSeconds: &seconds,
		BoundObjectRef:    &authn.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if audience != "" {
		req.Spec.Audiences = []string{audience}
	}
	account := pod.Spec.ServiceAccountName
	if account == "" {
		account = "default"
	}
	got, err := t.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, account, req, metav1.CreateOptions{})
	if err != nil {
		if ok && (now.Before(have.ends) || have.recalled) {
			return have.token, nil // still good for a while, or the last one that there was
		}
		if !t.issued() {
			return "", fmt.Errorf("token of service account %s/%s: this cluster issues no tokens of service accounts: %w", pod.Namespace, account, err)
		}
		return "", fmt.Errorf("token of service account %s/%s: %w", pod.Namespace, account, err)
	}
	ends := got.Status.ExpirationTimestamp.Time
	if ends.IsZero() {
		ends = now.Add(time.Duration(seconds) * time.Second)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held == nil {
		t.held = map[tokenKey]heldToken{}
	}
	t.held[key] = heldToken{token: got.Status.Token, key: signingKey(got.Status.Token), renewAt: now.Add(ends.Sub(now) * 4 / 5), ends: ends}
	if t.given != nil {
		t.given(pod.UID)
	}
	return got.Status.Token, nil
}

// of are the tokens that the pod has, for its record.
func (t *tokens) of(pod types.UID) (out []checkpoint.Token) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, h := range t.held {
		if k.pod == pod {
			out = append(out, checkpoint.Token{Audience: k.audience, Seconds: k.seconds, Token: h.token, RenewAt: h.renewAt.UTC(), Ends: h.ends.UTC()})
		}
	}
	slices.SortFunc(out, func(a, b checkpoint.Token) int {
		return cmp.Or(cmp.Compare(a.Audience, b.Audience), cmp.Compare(a.Seconds, b.Seconds))
	})
	return out
}

// recall takes the tokens of a pod's record.
func (t *tokens) recall(pod types.UID, list []checkpoint.Token) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range list {
		if t.held == nil {
			t.held = map[tokenKey]heldToken{}
		}
		t.held[tokenKey{pod, k.Audience, k.Seconds}] = heldToken{token: k.Token, key: signingKey(k.Token), renewAt: k.RenewAt, ends: k.Ends, recalled: true}
	}
}

// forget drops the tokens of a pod that has no record any more: the others end by time.
func (t *tokens) forget(pod types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.held, func(k tokenKey, h heldToken) bool { return k.pod == pod && h.recalled })
}

// renewEnded has the pods whose tokens have ended, or are about to, get others.
func (t *tokens) renewEnded() {
	now := time.Now()
	pods := map[types.UID]bool{}
	t.mu.Lock()
	for k, h := range t.held {
		if h.recalled && now.After(h.renewAt) {
			pods[k.pod] = true
		}
	}
	t.mu.Unlock()
	for pod := range pods {
		t.changed(pod)
	}
}

// issued reports whether the API issues tokens at all, as far as can be known:
// a refusal does not tell.
func (t *tokens) issued() bool {
	list, err := t.client.Discovery().ServerResourcesForGroupVersion("v1")
	return err != nil || slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == "serviceaccounts/token" })
}

// tokenKeysLook is how often a node that holds tokens looks whether the keys that
// signed them still count: they do not after `clusterctl ca rotate --finish`.
const tokenKeysLook = time.Minute

// keysPath is where the API publishes those keys.
const keysPath = "/openid/v1/jwks"

// Run gives up tokens whose key is gone, until ctx ends.
func (t *tokens) Run(ctx context.Context) error {
	tick := slack.NewTicker(tokenKeysLook)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			// An API that cannot be asked, or does not tell nodes, is asked again.
			_ = t.dropUnsigned(ctx)
		}
	}
}

// dropUnsigned gives up the tokens whose key is not among those that count now.
// Their pods get others.
func (t *tokens) dropUnsigned(ctx context.Context) error {
	t.mu.Lock()
	held := maps.Clone(t.held)
	t.mu.Unlock()
	if len(held) == 0 {
		return nil
	}
	body, err := t.readKeys(ctx)
	if err != nil {
		return fmt.Errorf("read the keys of tokens: %w", err)
	}
	var set struct {
		Keys []struct {
			ID string `json:"kid"`
		} `json:"keys"`
	}
	if err := json.Unmarshal(body, &set); err != nil {
		return fmt.Errorf("the keys of tokens: %w", err)
	}
	good := map[string]bool{"": true} // of a token that names none nothing is known
	for _, key := range set.Keys {
		good[key.ID] = true
	}
	if len(set.Keys) == 0 {
		return nil
	}
	pods := map[types.UID]bool{}
	t.mu.Lock()
	for k, h := range held {
		if !good[h.key] && t.held[k] == h {
			delete(t.held, k)
			pods[k.pod] = true
		}
	}
	t.mu.Unlock()
	for pod := range pods {
		t.changed(pod)
	}
	return nil
}

// signingKey is the id of the key in a token's header; "": it names none.
func signingKey(token string) string {
	head, _, _ := strings.Cut(token, ".")
	b, err := base64.RawURLEncoding.DecodeString(head)
	var header struct {
		ID string `json:"kid"`
	}
	if err != nil || json.Unmarshal(b, &header) != nil {
		return ""
	}
	return header.ID
}
