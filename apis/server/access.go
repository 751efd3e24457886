package server

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/apis/apiserver"
	apiserverinstall "k8s.io/apiserver/pkg/apis/apiserver/install"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	"k8s.io/apiserver/pkg/authentication/token/tokenfile"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/plugin/pkg/authenticator/token/oidc"
	"k8s.io/apiserver/plugin/pkg/authenticator/token/webhook"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/clusterd/clusterd/apis/server/chain"
)

// Access are the files by which an operator says who else is known, and what
// is written down of what they did. All are optional.
type Access struct {
	// TokenFile holds lines TOKEN,USER,UID[,"GROUP,GROUP"].
	TokenFile string
	// Authentication is an AuthenticationConfiguration: issuers of OpenID
	// Connect tokens, with how their claims become users.
	Authentication string
	// TokenWebhook is a kubeconfig of a service that is asked about tokens.
	TokenWebhook string

	// Authorization is who is asked what they may do, and in which order.
	Authorization chain.Options

	// AuditPolicy says what of a request is written down; without it nothing
	// is.
	AuditPolicy string
	// AuditLog is the file it is written to, "-" for standard output.
	AuditLog string
	// AuditMaxAge is for how many days, AuditMaxBackups how many, and
	// AuditMaxSize up to how many MB each, files are kept; 0: no bound.
	AuditMaxAge, AuditMaxBackups, AuditMaxSize int
	// AuditWebhook is a kubeconfig of a service that audit events are sent to.
	AuditWebhook string
}

// apiserverCodecs reads the files of k8s.io/apiserver's own kinds.
func apiserverCodecs() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	apiserverinstall.Install(scheme)
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict)
}

// foreignTokens are the authenticators of tokens that were not issued here.
type foreignTokens struct {
	static  []authenticator.Token
	issuers []apiserver.JWTAuthenticator
	own     string // issuer of this server, which no other may claim to be
	// running are the issuers' authenticators once start was called: they keep
	// asking for keys, so they need a time to live in.
	running atomic.Pointer[[]authenticator.Token]
}

var _ authenticator.Token = &foreignTokens{}

func newForeignTokens(config Config) (*foreignTokens, error) {
	f := &foreignTokens{own: config.Issuer}
	if file := config.Access.TokenFile; file != "" {
		tokens, err := tokenfile.NewCSV(file)
		if err != nil {
			return nil, fmt.Errorf("token file %s: %w", file, err)
		}
		f.static = append(f.static, tokens)
	}
	if file := config.Access.Authentication; file != "" {
		issuers, err := readIssuers(file, config.Issuer)
		if err != nil {
			return nil, fmt.Errorf("authentication configuration %s: %w", file, err)
		}
		f.issuers = issuers
	}
	if file := config.Access.TokenWebhook; file != "" {
		client, err := clientcmd.BuildConfigFromFlags("", file)
		if err != nil {
			return nil, fmt.Errorf("token webhook %s: %w", file, err)
		}
		hook, err := webhook.New(client, "v1", config.Audiences, *webhook.DefaultRetryBackoff())
		if err != nil {
			return nil, fmt.Errorf("token webhook %s: %w", file, err)
		}
		f.static = append(f.static, hook)
	}
	return f, nil
}

func readIssuers(file, own string) ([]apiserver.JWTAuthenticator, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	obj, err := runtime.Decode(apiserverCodecs().UniversalDecoder(), data)
	if err != nil {
		return nil, err
	}
	configuration, ok := obj.(*apiserver.AuthenticationConfiguration)
	if !ok {
		return nil, fmt.Errorf("is a %T, want an AuthenticationConfiguration", obj)
	}
	if configuration.Anonymous != nil {
		return nil, fmt.Errorf("anonymous: cannot be set: unauthenticated requests reach the paths of health and version and no others; remove the field")
	}
	if faults := validation.ValidateAuthenticationConfiguration(authenticationcel.NewDefaultCompiler(), configuration, []string{own}); len(faults) > 0 {
		return nil, faults.ToAggregate()
	}
	return configuration.JWT, nil
}

// start begins to ask the issuers for their keys, until ctx ends.
func (f *foreignTokens) start(ctx context.Context) error {
	var running []authenticator.Token
	for _, issuer := range f.issuers {
		o := oidc.Options{
			JWTAuthenticator: issuer, Compiler: authenticationcel.NewDefaultCompiler(),
			SupportedSigningAlgs: oidc.AllValidSigningAlgorithms(), DisallowedIssuers: []string{f.own},
		}
		if ca := issuer.Issuer.CertificateAuthority; ca != "" {
			provider, err := dynamiccertificates.NewStaticCAContent("oidc-authenticator", []byte(ca))
			if err != nil {
				return fmt.Errorf("authority of the issuer %s: %w", issuer.Issuer.URL, err)
			}
			o.CAContentProvider = provider
		}
		a, err := oidc.New(ctx, o)
		if err != nil {
			return fmt.Errorf("issuer %s: %w", issuer.Issuer.URL, err)
		}
		running = append(running, a)
	}
	f.running.Store(&running)
	return nil
}

// AuthenticateToken asks all in turn; the first that knows the token decides.
func (f *foreignTokens) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	all := f.static
	if running := f.running.Load(); running != nil {
		all = append(append([]authenticator.Token(nil), *running...), all...)
	}
	var faults []error
	for _, a := range all {
		response, ok, err := a.AuthenticateToken(ctx, token)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		if ok {
			return response, true, nil
		}
	}
	if len(faults) > 0 {
		return nil, false, faults[0]
	}
	return nil, false, nil
}

// applyAudit makes c write down what a policy says.
func applyAudit(access Access, c *genericapiserver.Config) error {
	if access.AuditPolicy == "" {
		if access.AuditLog != "" || access.AuditWebhook != "" {
			return fmt.Errorf("audit: without a policy nothing would be written down: give the file of an audit Policy")
		}
		return nil
	}
	o := options.NewAuditOptions()
	o.PolicyFile = access.AuditPolicy
	o.LogOptions.Path = access.AuditLog
	o.LogOptions.MaxAge, o.LogOptions.MaxBackups, o.LogOptions.MaxSize = access.AuditMaxAge, access.AuditMaxBackups, access.AuditMaxSize
	o.WebhookOptions.ConfigFile = access.AuditWebhook
	for _, err := range o.Validate() {
		return fmt.Errorf("audit: %w", err)
	}
	if err := o.ApplyTo(c); err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	return nil
}
