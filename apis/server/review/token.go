package review

import (
	"context"
	"fmt"
	"net/http"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
)

// Token says whose a token is.
type Token = Storage[*authenticationv1.TokenReview]

// NewToken answers by what requests with the token would be answered by: a is
// given a request that carries nothing else. audiences are those of this
// server, for reviews that name none.
func NewToken(a authenticator.Request, audiences []string) *Token {
	return &Token{
		singular: "tokenreview",
		new:      func() *authenticationv1.TokenReview { return &authenticationv1.TokenReview{} },
		answer: func(ctx context.Context, _ user.Info, asked *authenticationv1.TokenReview) error {
			if asked.Spec.Token == "" {
				return errors.NewBadRequest("token is required for TokenReview in authentication")
			}
			wanted := authenticator.Audiences(asked.Spec.Audiences)
			if len(wanted) == 0 {
				wanted = audiences
			}
			asked.Status = authenticationv1.TokenReviewStatus{}
			req := (&http.Request{Header: http.Header{"Authorization": {"Bearer " + asked.Spec.Token}}}).WithContext(authenticator.WithAudiences(ctx, wanted))
			response, ok, err := a.AuthenticateRequest(req)
			if err != nil {
				asked.Status.Error = err.Error()
			}
			if !ok || err != nil {
				return nil
			}
			// An authenticator that knows no audiences vouches for this server's.
			means := response.Audiences
			if means == nil {
				means = authenticator.Audiences(audiences).Intersect(wanted)
			}
			if len(means) == 0 {
				asked.Status.Error = fmt.Sprintf("the token is good, but not for the audiences %q", wanted)
				return nil
			}
			asked.Status.Authenticated = true
			asked.Status.Audiences = means
			asked.Status.User = userInfo(response.User)
			return nil
		},
	}
}

func userInfo(who user.Info) authenticationv1.UserInfo {
	info := authenticationv1.UserInfo{Username: who.GetName(), UID: who.GetUID(), Groups: who.GetGroups()}
	for key, values := range who.GetExtra() {
		if info.Extra == nil {
			info.Extra = map[string]authenticationv1.ExtraValue{}
		}
		info.Extra[key] = slices.Clone(values)
	}
	return info
}
