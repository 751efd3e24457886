package server

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/apis/apiserver"
	apiserverinstall "k8s.io/apiserver/pkg/apis/apiserver/install"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	"k8s.io/apiserver/pkg/authentication/token/tokenfile"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/plugin/pkg/authenticator/token/oidc"
	"k8s.io/apiserver/plugin/pkg/authenticator/token/webhook"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// apiserverCodecs reads the files of k8s.io/apiserver's own kinds.
func apiserverCodecs() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	apiserverinstall.Install(scheme)
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict)
}

// foreignTokens are the authenticators of tokens that were not issued here.
type foreignTokens struct {
	static []authenticator.Token
	file   string // the AuthenticationConfiguration; "": there is none
	own    string // issuer of this server, which no other may claim to be
	// read is what was in file last, issuers what it said.
	read    []byte
	issuers []apiserver.JWTAuthenticator
	// running are the issuers' authenticators once start was called: they keep
	// asking for keys, so they need a time to live in.
	running atomic.Pointer[[]issuer]
	// wrong is how many wrong files it has seen.
	wrong atomic.Int64
}

// issuer is one that is asked for its keys.
type issuer struct {
	authenticator.Token
	config apiserver.JWTAuthenticator
	stop   context.CancelFunc
}

var _ authenticator.Token = &foreignTokens{}

func newForeignTokens(config Config) (*foreignTokens, error) {
	f := &foreignTokens{own: config.Issuer, file: config.Access.Authentication}
	if file := config.Access.TokenFile; file != "" {
		tokens, err := tokenfile.NewCSV(file)
		if err != nil {
			return nil, fmt.Errorf("token file %s: %w", file, err)
		}
		f.static = append(f.static, tokens)
	}
	if f.file != "" {
		if err := f.readIssuers(); err != nil {
			return nil, fmt.Errorf("authentication configuration %s: %w", f.file, err)
		}
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

func (f *foreignTokens) readIssuers() error {
	data, err := os.ReadFile(f.file)
	if err != nil {
		return err
	}
	f.read = data
	f.issuers, err = parseIssuers(data, f.own)
	return err
}

func parseIssuers(data []byte, own string) ([]apiserver.JWTAuthenticator, error) {
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
func (f *foreignTokens) start(ctx context.Context) error { return f.apply(ctx, f.issuers) }

// apply has these issuers from now on. Those that are as they were go on, with
// the keys that they have.
func (f *foreignTokens) apply(ctx context.Context, issuers []apiserver.JWTAuthenticator) (err error) {
	var before, next, fresh []issuer
	if running := f.running.Load(); running != nil {
		before = *running
	}
	defer func() {
		if err != nil {
			end(fresh)
		}
	}()
	kept := map[int]bool{}
	for _, config := range issuers {
		at := -1
		for i := range before {
			if !kept[i] && equality.Semantic.DeepEqual(before[i].config, config) {
				at = i
			}
		}
		if at >= 0 {
			kept[at] = true
			next = append(next, before[at])
			continue
		}
		made, err := f.newIssuer(ctx, config)
		if err != nil {
			return err
		}
		next, fresh = append(next, made), append(fresh, made)
	}
	f.running.Store(&next)
	for i := range before {
		if !kept[i] {
			before[i].stop()
		}
	}
	return nil
}

func end(all []issuer) {
	for _, one := range all {
		one.stop()
	}
}

func (f *foreignTokens) newIssuer(ctx context.Context, config apiserver.JWTAuthenticator) (issuer, error) {
	o := oidc.Options{
		JWTAuthenticator: config, Compiler: authenticationcel.NewDefaultCompiler(),
		SupportedSigningAlgs: oidc.AllValidSigningAlgorithms(), DisallowedIssuers: []string{f.own},
	}
	if ca := config.Issuer.CertificateAuthority; ca != "" {
		provider, err := dynamiccertificates.NewStaticCAContent("oidc-authenticator", []byte(ca))
		if err != nil {
			return issuer{}, fmt.Errorf("authority of the issuer %s: %w", config.Issuer.URL, err)
		}
		o.CAContentProvider = provider
	}
	ctx, stop := context.WithCancel(ctx)
	a, err := oidc.New(ctx, o)
	if err != nil {
		stop()
		return issuer{}, fmt.Errorf("issuer %s: %w", config.Issuer.URL, err)
	}
	return issuer{a, config, stop}, nil
}

// accessReload is how often the file is looked at.
const accessReload = 5 * time.Second

// run reads the file again whenever it has changed, until ctx ends. A file that
// is wrong is logged, and the issuers stay as they were.
func (f *foreignTokens) run(ctx context.Context) {
	if f.file == "" {
		return
	}
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		logger := klog.FromContext(ctx)
		changed, err := f.reload(ctx)
		if err != nil {
			f.wrong.Add(1)
			logger.Error(err, "The authentication configuration is wrong, the one before still holds", "file", f.file)
		} else if changed {
			logger.Info("The authentication configuration has changed", "file", f.file)
		}
	}, accessReload)
}

// reload takes over a file that has changed. It tells of a wrong file once.
func (f *foreignTokens) reload(ctx context.Context) (changed bool, err error) {
	data, err := os.ReadFile(f.file)
	if err != nil || bytes.Equal(data, f.read) {
		return false, err
	}
	f.read = data
	issuers, err := parseIssuers(data, f.own)
	if err != nil {
		return false, err
	}
	return true, f.apply(ctx, issuers)
}

// AuthenticateToken asks all in turn; the first that knows the token decides.
func (f *foreignTokens) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	var all []authenticator.Token
	if running := f.running.Load(); running != nil {
		for _, one := range *running {
			all = append(all, one)
		}
	}
	var faults []error
	for _, a := range append(all, f.static...) {
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
