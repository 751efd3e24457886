package server

import (
	"fmt"

	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options"

	"github.com/clusterd/clusterd/apis/server/chain"
)

// Access are the files by which an operator says who else is known, and what
// is written down of what they did. All are optional.
type Access struct {
	// TokenFile holds lines TOKEN,USER,UID[,"GROUP,GROUP"].
	TokenFile string
	// Authentication is an AuthenticationConfiguration: issuers of OpenID
	// Connect tokens, with how their claims become users. It is read again when it
	// changes.
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
