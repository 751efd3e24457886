package server

import (
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	tokencache "k8s.io/apiserver/pkg/authentication/token/cache"
	tokenunion "k8s.io/apiserver/pkg/authentication/token/union"

	"github.com/clusterd/clusterd/apis/server/auth"
	"github.com/clusterd/clusterd/apis/server/inproc"
)

// tokenBelieved is how long a token that was good is good without being looked
// at again: what a token is bound to may have gone for so long.
const tokenBelieved = 10 * time.Second

// newAuthentication is who is asked who sends a request, in order: this
// process, certificates, tokens. The second result asks about tokens alone.
func newAuthentication(config Config, accounts *serviceAccounts, foreign *foreignTokens) (all, bearers authenticator.Request) {
	requests := []authenticator.Request{inproc.Authenticator()}
	if config.Authenticator != nil {
		requests = append(requests, config.Authenticator)
	}
	tokens := tokenunion.New(accounts.authenticator, accounts.bootstrap, foreign)
	cached := tokencache.New(tokens, false, tokenBelieved, 0)
	bearers = bearertoken.New(cached)
	requests = append(requests, bearers, websocket.NewProtocolAuthenticator(cached))
	return auth.Chain(requests...), group.NewAuthenticatedGroupAdder(bearers)
}
