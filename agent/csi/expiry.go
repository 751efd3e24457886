package csi

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
)

// expiry is when a token ends, by its own word; otherwise when it says nothing.
// Nothing is trusted for it: the token came from the API.
func expiry(token string, otherwise time.Time) time.Time {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return otherwise
	}
	body, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return otherwise
	}
	var claims struct {
		Exp int64 `json:"exp"`
	}
	if err := json.Unmarshal(body, &claims); err != nil || claims.Exp == 0 {
		return otherwise
	}
	return time.Unix(claims.Exp, 0)
}
