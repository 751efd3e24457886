package certificates

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

// maxTrustBundle is the size of the largest bundle, in bytes.
const maxTrustBundle = 1 << 20

// ClusterTrustBundle is the kind ClusterTrustBundle: certificates of authorities,
// for pods to mount (KEP-3257).
func ClusterTrustBundle() kind.Kind {
	return kind.Typed[*certificatesv1.ClusterTrustBundle]{
		GVK:      certificatesv1.SchemeGroupVersion.WithKind("ClusterTrustBundle"),
		Resource: "clustertrustbundles",
		Singular: "clustertrustbundle",

		New:     func() runtime.Object { return &certificatesv1.ClusterTrustBundle{} },
		NewList: func() runtime.Object { return &certificatesv1.ClusterTrustBundleList{} },

		Validate: validateTrustBundle,
		ValidateUpdate: func(b, old *certificatesv1.ClusterTrustBundle) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&b.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, apivalidation.ValidateImmutableField(b.Spec.SignerName, old.Spec.SignerName, field.NewPath("spec", "signerName"))...)
			return append(errs, validateAnchors(b.Spec.TrustBundle, field.NewPath("spec", "trustBundle"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("SignerName", certificatesv1.ClusterTrustBundleSpec{}.SwaggerDoc()["signerName"]),
			cells.Age,
		},
		Row: func(b *certificatesv1.ClusterTrustBundle, now time.Time) []any {
			signer := b.Spec.SignerName
			if signer == "" {
				signer = "<none>"
			}
			return []any{b.Name, signer, cells.Since(b.CreationTimestamp, now)}
		},
		Fields: func(b *certificatesv1.ClusterTrustBundle) fields.Set {
			return fields.Set{"spec.signerName": b.Spec.SignerName}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validateTrustBundle(b *certificatesv1.ClusterTrustBundle) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&b.ObjectMeta, false, trustBundleName(b.Spec.SignerName), field.NewPath("metadata"))
	at := field.NewPath("spec")
	if b.Spec.SignerName != "" {
		errs = append(errs, validateSigner(b.Spec.SignerName, at.Child("signerName"))...)
	}
	return append(errs, validateAnchors(b.Spec.TrustBundle, at.Child("trustBundle"))...)
}

// trustBundleName is the rule for names: those of a signer's bundles begin with
// its name, with colons for slashes, so that no other signer can take them.
func trustBundleName(signer string) apivalidation.ValidateNameFunc {
	if signer == "" {
		return apivalidation.NameIsDNSSubdomain
	}
	prefix := strings.ReplaceAll(signer, "/", ":") + ":"
	return func(name string, generated bool) []string {
		rest, ok := strings.CutPrefix(name, prefix)
		if !ok {
			return []string{fmt.Sprintf("ClusterTrustBundle for signerName %s must be named with prefix %s", signer, prefix)}
		}
		return apivalidation.NameIsDNSSubdomain(rest, generated)
	}
}

// validateAnchors wants certificates of authorities in PEM, each once.
func validateAnchors(bundle string, at *field.Path) field.ErrorList {
	if len(bundle) > maxTrustBundle {
		return field.ErrorList{field.TooLong(at, "", maxTrustBundle)}
	}
	blocks, err := anchorBlocks(bundle)
	if err != nil {
		return field.ErrorList{field.Invalid(at, fmt.Sprintf("%d bytes", len(bundle)), err.Error())}
	}
	if len(blocks) == 0 {
		return field.ErrorList{field.Invalid(at, fmt.Sprintf("%d bytes", len(bundle)), "at least one trust anchor must be provided")}
	}
	var errs field.ErrorList
	seen := map[[sha256.Size]byte]int{}
	for i, block := range blocks {
		invalid := func(format string, args ...any) {
			errs = append(errs, field.Invalid(at, fmt.Sprintf("certificate %d", i), fmt.Sprintf(format, args...)))
		}
		if len(block.Headers) > 0 {
			invalid("PEM block has headers: remove them")
		}
		if first, ok := seen[sha256.Sum256(block.Bytes)]; ok {
			invalid("is the same as certificate %d", first)
			continue
		}
		seen[sha256.Sum256(block.Bytes)] = i
		certificate, err := x509.ParseCertificate(block.Bytes)
		switch {
		case err != nil:
			invalid("does not parse as X.509: %v", err)
		case !certificate.IsCA:
			invalid("is not a certificate of an authority: its basic constraints lack CA")
		}
	}
	return errs
}

// anchorBlocks are the PEM blocks of a bundle. What is between them is left out;
// an error names a block that is no certificate.
func anchorBlocks(bundle string) ([]*pem.Block, error) {
	var blocks []*pem.Block
	rest := []byte(bundle)
	for {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil {
			return blocks, nil
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("entry %d has bad block type: %q: only CERTIFICATE belongs here", len(blocks), block.Type)
		}
		blocks = append(blocks, block)
	}
}
