package main

import (
	"errors"
	"fmt"
	"strings"

	cliflag "k8s.io/component-base/cli/flag"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/chain"
)

// AccessConfig names the files about who is known beside the holders of
// certificates and service accounts, and about what is written down of what
// they do. The same files belong on every server.
type AccessConfig struct {
	// TokenAuthFile holds lines TOKEN,USER,UID[,"GROUP,GROUP"].
	TokenAuthFile string `json:"tokenAuthFile,omitempty"`
	// AuthenticationConfig is an AuthenticationConfiguration: issuers of OpenID
	// Connect tokens.
	AuthenticationConfig string `json:"authenticationConfig,omitempty"`
	// TokenWebhookConfig is a kubeconfig of a token authentication webhook.
	TokenWebhookConfig string `json:"tokenWebhookConfig,omitempty"`
	// AuthorizationMode is who is asked what a user may do, in this order, of
	// Node, RBAC, ABAC and Webhook. Node and RBAC have to be among them.
	AuthorizationMode string `json:"authorizationMode,omitempty"`
	// AuthorizationConfig is an AuthorizationConfiguration, in the place of
	// authorizationMode. It is read again when it changes.
	AuthorizationConfig string `json:"authorizationConfig,omitempty"`
	// AuthorizationPolicyFile holds the ABAC policy, one JSON object a line.
	AuthorizationPolicyFile string `json:"authorizationPolicyFile,omitempty"`
	// AuthorizationWebhookConfigFile is a kubeconfig of the service that Webhook
	// asks.
	AuthorizationWebhookConfigFile string `json:"authorizationWebhookConfigFile,omitempty"`
	// EnableAdmissionPlugins and DisableAdmissionPlugins are names of admission
	// plugins, separated by commas, beside and without the default ones.
	EnableAdmissionPlugins  string `json:"enableAdmissionPlugins,omitempty"`
	DisableAdmissionPlugins string `json:"disableAdmissionPlugins,omitempty"`
	// AdmissionControlConfigFile is an AdmissionConfiguration: what single
	// plugins are to know.
	AdmissionControlConfigFile string `json:"admissionControlConfigFile,omitempty"`
	// MaxStreamsPerUser is how many watches and streams (logs, exec, port-forward, proxy) a
	// user may have open at one server, nodes and administrators ten times as many.
	MaxStreamsPerUser int `json:"maxStreamsPerUser,omitempty"`
	// AuditPolicyFile is an audit Policy; without it nothing is written down.
	AuditPolicyFile string `json:"auditPolicyFile,omitempty"`
	// AuditLogPath is the file for it. Default: DATA/audit.log; "-" is standard
	// output.
	AuditLogPath string `json:"auditLogPath,omitempty"`
	// AuditLogMaxAge is in days, AuditLogMaxSize in MB.
	AuditLogMaxAge    int `json:"auditLogMaxAge,omitempty"`
	AuditLogMaxBackup int `json:"auditLogMaxBackup,omitempty"`
	AuditLogMaxSize   int `json:"auditLogMaxSize,omitempty"`
	// AuditWebhookConfigFile is a kubeconfig of a service that gets the events.
	AuditWebhookConfigFile string `json:"auditWebhookConfigFile,omitempty"`
}

func defaultAccess() AccessConfig {
	return AccessConfig{MaxStreamsPerUser: server.DefaultStreams, AuditLogMaxAge: 30, AuditLogMaxBackup: 10, AuditLogMaxSize: 100}
}

func (c *AccessConfig) addFlags(areas *cliflag.NamedFlagSets) {
	f := areas.FlagSet(areaAPI)
	f.StringVar(&c.TokenAuthFile, "token-auth-file", c.TokenAuthFile, `static token file: lines of TOKEN,USER,UID[,"GROUP,GROUP"]`)
	f.StringVar(&c.AuthenticationConfig, "authentication-config", c.AuthenticationConfig, "file with an AuthenticationConfiguration: OpenID Connect issuers")
	f.StringVar(&c.TokenWebhookConfig, "authentication-token-webhook-config-file", c.TokenWebhookConfig, "kubeconfig of a token authentication webhook")
	f.StringVar(&c.AuthorizationMode, "authorization-mode", c.AuthorizationMode, "ordered list of authorizers: Node, RBAC, ABAC, Webhook (default: Node,RBAC)")
	f.StringVar(&c.AuthorizationConfig, "authorization-config", c.AuthorizationConfig, "file with an AuthorizationConfiguration, instead of --authorization-mode; reloaded when it changes")
	f.StringVar(&c.AuthorizationPolicyFile, "authorization-policy-file", c.AuthorizationPolicyFile, "ABAC policy file, one JSON object per line")
	f.StringVar(&c.AuthorizationWebhookConfigFile, "authorization-webhook-config-file", c.AuthorizationWebhookConfigFile, "kubeconfig of the authorization webhook")
	f.StringVar(&c.EnableAdmissionPlugins, "enable-admission-plugins", c.EnableAdmissionPlugins, "admission plugins to enable in addition to the defaults, such as AlwaysPullImages,PodNodeSelector")
	f.StringVar(&c.DisableAdmissionPlugins, "disable-admission-plugins", c.DisableAdmissionPlugins, "default admission plugins to disable")
	f.StringVar(&c.AdmissionControlConfigFile, "admission-control-config-file", c.AdmissionControlConfigFile, "file with an AdmissionConfiguration: configuration of single admission plugins")
	f.IntVar(&c.MaxStreamsPerUser, "max-streams-per-user", c.MaxStreamsPerUser, "maximum number of open watches and streams per user and server; ten times as many for nodes and administrators")
	f = areas.FlagSet(areaAudit)
	f.StringVar(&c.AuditPolicyFile, "audit-policy-file", c.AuditPolicyFile, "file with an audit Policy (default: no audit log)")
	f.StringVar(&c.AuditLogPath, "audit-log-path", c.AuditLogPath, "audit log file, - for standard output (default: DATA/audit.log)")
	f.IntVar(&c.AuditLogMaxAge, "audit-log-maxage", c.AuditLogMaxAge, "days for which old audit log files are kept")
	f.IntVar(&c.AuditLogMaxBackup, "audit-log-maxbackup", c.AuditLogMaxBackup, "number of old audit log files that are kept")
	f.IntVar(&c.AuditLogMaxSize, "audit-log-maxsize", c.AuditLogMaxSize, "size in MB at which the audit log is rotated")
	f.StringVar(&c.AuditWebhookConfigFile, "audit-webhook-config-file", c.AuditWebhookConfigFile, "kubeconfig of an audit webhook")
}

// check names what would not be acted on.
func (c *AccessConfig) check() error {
	if c.AuditPolicyFile == "" && (c.AuditLogPath != "" || c.AuditWebhookConfigFile != "") {
		return errors.New("--audit-log-path and --audit-webhook-config-file do nothing without --audit-policy-file")
	}
	if c.MaxStreamsPerUser < 1 {
		return fmt.Errorf("--max-streams-per-user %d: it has to be at least 1", c.MaxStreamsPerUser)
	}
	for flag, n := range map[string]int{"--audit-log-maxage": c.AuditLogMaxAge, "--audit-log-maxbackup": c.AuditLogMaxBackup, "--audit-log-maxsize": c.AuditLogMaxSize} {
		if n < 0 {
			return fmt.Errorf("%s %d: it cannot be negative", flag, n)
		}
	}
	return nil
}

// access is the same for the API server; log is where the audit log is unless
// said otherwise.
func (c *AccessConfig) access(log string) server.Access {
	a := server.Access{
		Authorization: chain.Options{
			Modes: commaSeparated(c.AuthorizationMode), File: c.AuthorizationConfig,
			PolicyFile: c.AuthorizationPolicyFile, WebhookKubeconfig: c.AuthorizationWebhookConfigFile,
		},
		TokenFile: c.TokenAuthFile, Authentication: c.AuthenticationConfig, TokenWebhook: c.TokenWebhookConfig,
		AuditPolicy: c.AuditPolicyFile, AuditLog: c.AuditLogPath, AuditWebhook: c.AuditWebhookConfigFile,
		AuditMaxAge: c.AuditLogMaxAge, AuditMaxBackups: c.AuditLogMaxBackup, AuditMaxSize: c.AuditLogMaxSize,
	}
	if a.AuditPolicy != "" && a.AuditLog == "" {
		a.AuditLog = log
	}
	return a
}

// admission is which admission plugins there are, for the API server.
func (c *AccessConfig) admission() admission.Set {
	return admission.Set{Enable: commaSeparated(c.EnableAdmissionPlugins), Disable: commaSeparated(c.DisableAdmissionPlugins), File: c.AdmissionControlConfigFile}
}

// commaSeparated are the parts of a list with commas; empty: none.
func commaSeparated(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}
