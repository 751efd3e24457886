package bucket

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/xml"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"
	"unicode"

	"github.com/minio/minio-go/v7"
)

// tooSlow is why an operation that takes longer than it may ends.
type tooSlow time.Duration

func (t tooSlow) Error() string { return fmt.Sprintf("not done after %s", time.Duration(t)) }

// rights are what the keys of a store must permit.
const rights = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject"

// longest is how long words of a store may be in an error.
const longest = 300

// explained is an error with its fix. Unwrap is what it was.
type explained struct {
	error
	text string
}

func (e explained) Error() string { return e.text }
func (e explained) Unwrap() error { return e.error }

// explain adds what can be done about an error of a store.
func (b *Bucket) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	why, fix := b.reason(ctx, err)
	if fix != "" {
		why += ": " + fix
	}
	return explained{err, fmt.Sprintf("%s %s: %s", b.cfg.Flag, b.cfg.Location, why)}
}

func (b *Bucket) reason(ctx context.Context, err error) (why, fix string) {
	why = tame(err.Error())
	var resp minio.ErrorResponse
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var name x509.HostnameError
	var record tls.RecordHeaderError
	var syntax *xml.SyntaxError
	var op *net.OpError
	var dns *net.DNSError
	var late net.Error
	var slow tooSlow
	switch {
	case errors.As(context.Cause(ctx), &slow) && time.Duration(slow) == short:
		return slow.Error(), "check the store and the network path to it"
	case errors.As(context.Cause(ctx), &slow):
		return slow.Error(), "check the store and the network path to it, or give more --snapshot-store-timeout"
	case errors.As(err, &resp):
		why = fmt.Sprintf("HTTP status %d, %s: %s", resp.StatusCode, tame(resp.Code), why)
		return why, b.fixOf(resp)
	case errors.As(err, &unknown):
		return why, "name the file of the CA with --snapshot-store-ca"
	case errors.As(err, &name):
		return why, "write the host as the store's certificate names it"
	case errors.As(err, &invalid):
		return why, "renew the store's certificate, or check the clock of this machine"
	case errors.As(err, &record), strings.Contains(why, "server gave HTTP response to HTTPS client"):
		return why, "the store speaks no TLS there: check the port, or write http:// if the network is trusted"
	case errors.As(err, &syntax):
		return "what answers speaks no S3 (" + why + ")", "check the host and port"
	case errors.As(err, &dns):
		return why, "check the host, and this machine's DNS"
	case errors.As(err, &op) && op.Op == "dial":
		return why, "check that the store runs at that address"
	case errors.As(err, &late) && late.Timeout() && ctx.Err() == nil:
		return fmt.Sprintf("no byte moved for %s", b.stall()), "check the store and the network path to it"
	}
	return why, ""
}

func (b *Bucket) fixOf(resp minio.ErrorResponse) string {
	switch resp.Code {
	case "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken":
		return "check the key and the secret of " + b.source()
	case "RequestTimeTooSkewed":
		return "set the clock of this machine, or the store's"
	case "NoSuchBucket":
		return fmt.Sprintf("create the bucket %s, or correct %s", b.cfg.Bucket, b.cfg.Flag)
	case "PermanentRedirect", "AuthorizationHeaderMalformed", "InvalidRegion":
		return "give the bucket's region with --snapshot-store-region"
	case "XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage":
		return "make room in the store, or keep fewer with --snapshot-keep"
	}
	switch resp.StatusCode {
	case http.StatusForbidden, http.StatusUnauthorized:
		return fmt.Sprintf("permit %s on the bucket %s to the key of %s", rights, b.cfg.Bucket, b.source())
	case http.StatusInsufficientStorage:
		return "make room in the store, or keep fewer with --snapshot-keep"
	case http.StatusBadRequest:
		if b.cfg.Plain {
			return "if the store speaks TLS there, write https://"
		}
	}
	if resp.StatusCode >= 500 {
		return "look at the store"
	}
	return ""
}

// source is where the keys come from.
func (b *Bucket) source() string {
	if b.cfg.Credentials != "" {
		return "--snapshot-store-credentials " + b.cfg.Credentials
	}
	return "AWS_ACCESS_KEY_ID"
}

func (b *Bucket) stall() time.Duration {
	if b.cfg.Stall > 0 {
		return b.cfg.Stall
	}
	return defaultStall
}

// tame makes a store's words fit for a line: they are kept in the cluster's store, and
// shown on terminals.
func tame(text string) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) > longest {
		text = strings.ToValidUTF8(text[:longest], "") + "…"
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
}
