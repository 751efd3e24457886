package tokens

import (
	"encoding/json"
	"net/http"

	"github.com/go-jose/go-jose/v4"
	"k8s.io/klog/v2"
)

// Paths at which the issuer describes itself, for those who verify tokens
// without asking this server.
const (
	ConfigurationPath = "/.well-known/openid-configuration"
	KeysPath          = "/openid/v1/jwks"
)

// Discovery serves both paths. keysURL is where KeysPath is reached from
// outside.
func (i *Issuer) Discovery(keysURL string) (configuration, keys http.Handler) {
	configuration = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		answer(w, req, "application/json", map[string]any{
			"issuer":                                i.Name,
			"jwks_uri":                              keysURL,
			"response_types_supported":              []string{"id_token"},
			"subject_types_supported":               []string{"public"},
			"id_token_signing_alg_values_supported": []jose.SignatureAlgorithm{algorithm},
		})
	})
	keys = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		all, err := i.Keys.All(req.Context())
		if err != nil {
			klog.FromContext(req.Context()).Error(err, "Could not publish the keys of service account tokens")
			http.Error(w, "the signing keys cannot be read now", http.StatusServiceUnavailable)
			return
		}
		set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{}}
		for _, key := range all {
			set.Keys = append(set.Keys, jose.JSONWebKey{Key: &key.private.PublicKey, KeyID: key.ID, Algorithm: string(algorithm), Use: "sig"})
		}
		answer(w, req, "application/jwk-set+json", set)
	})
	return configuration, keys
}

func answer(w http.ResponseWriter, req *http.Request, media string, value any) {
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "only GET is served here", http.StatusMethodNotAllowed)
		return
	}
	w.Header().Set("Content-Type", media)
	// No longer than a new key is published before it signs.
	w.Header().Set("Cache-Control", "public, max-age=60")
	if err := json.NewEncoder(w).Encode(value); err != nil {
		klog.FromContext(req.Context()).V(3).Info("The client did not take the answer", "err", err)
	}
}
