package core

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

const (
	minTokenSeconds = 10 * 60
	maxTokenSeconds = 1 << 32
	maxFileMode     = 0o777
)

// validateVolumes checks the volumes of a pod and returns them by name, for
// what mounts them.
func validateVolumes(volumes []corev1.Volume, at *field.Path, owner specOwner) (map[string]corev1.VolumeSource, field.ErrorList) {
	var errs field.ErrorList
	known := map[string]corev1.VolumeSource{}
	for i := range volumes {
		v, at := &volumes[i], at.Index(i)
		errs = append(errs, check.RequiredText(at.Child("name"), v.Name, validation.IsDNS1123Label)...)
		if _, taken := known[v.Name]; taken {
			errs = append(errs, field.Duplicate(at.Child("name"), v.Name))
		}
		if v.Name != "" {
			known[v.Name] = v.VolumeSource
		}
		errs = append(errs, validateVolumeSource(&v.VolumeSource, at, owner)...)
	}
	return known, errs
}

func validateVolumeSource(source *corev1.VolumeSource, at *field.Path, owner specOwner) field.ErrorList {
	set := volumeSources(source)
	if len(set) == 0 {
		return field.ErrorList{field.Required(at, "must specify a volume type")}
	}
	var errs field.ErrorList
	for _, name := range set[1:] {
		errs = append(errs, field.Forbidden(at.Child(name), "may not specify more than 1 volume type"))
	}
	// Of several sources, the first is checked: the others are faults already.
	at = at.Child(set[0])
	switch set[0] {
	case "emptyDir":
		if limit := source.EmptyDir.SizeLimit; limit != nil && limit.Sign() < 0 {
			errs = append(errs, field.Forbidden(at.Child("sizeLimit"), "SizeLimit field must be a valid resource quantity"))
		}
	case "hostPath":
		errs = append(errs, validateHostPath(source.HostPath, at)...)
	case "configMap":
		v := source.ConfigMap
		errs = append(errs, check.RequiredText(at.Child("name"), v.Name, nil)...)
		errs = append(errs, validateMode(v.DefaultMode, at.Child("defaultMode"))...)
		errs = append(errs, validateKeyPaths(v.Items, at.Child("items"))...)
	case "secret":
		v := source.Secret
		errs = append(errs, check.RequiredText(at.Child("secretName"), v.SecretName, nil)...)
		errs = append(errs, validateMode(v.DefaultMode, at.Child("defaultMode"))...)
		errs = append(errs, validateKeyPaths(v.Items, at.Child("items"))...)
	case "downwardAPI":
		errs = append(errs, validateMode(source.DownwardAPI.DefaultMode, at.Child("defaultMode"))...)
		errs = append(errs, validateDownwardFiles(source.DownwardAPI.Items, at.Child("items"))...)
	case "projected":
		errs = append(errs, validateProjected(source.Projected, at)...)
	case "persistentVolumeClaim":
		errs = append(errs, check.RequiredText(at.Child("claimName"), source.PersistentVolumeClaim.ClaimName, nil)...)
	case "nfs":
		errs = append(errs, check.RequiredText(at.Child("server"), source.NFS.Server, nil)...)
		errs = append(errs, check.RequiredText(at.Child("path"), source.NFS.Path, nil)...)
		if source.NFS.Path != "" && !strings.HasPrefix(source.NFS.Path, "/") {
			errs = append(errs, field.Invalid(at.Child("path"), source.NFS.Path, "must be an absolute path"))
		}
	case "csi":
		errs = append(errs, check.RequiredText(at.Child("driver"), source.CSI.Driver, check.Subdomain)...)
	case "image":
		if owner == specOfPod { // a template may leave it empty, to be filled in later
			errs = append(errs, check.RequiredText(at.Child("reference"), source.Image.Reference, nil)...)
		}
		errs = append(errs, check.OneOfOrEmpty(at.Child("pullPolicy"), source.Image.PullPolicy, corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)...)
	case "ephemeral":
		template := at.Child("volumeClaimTemplate")
		if source.Ephemeral.VolumeClaimTemplate == nil {
			errs = append(errs, field.Required(template, ""))
			break
		}
		errs = append(errs, ValidateClaimSpec(&source.Ephemeral.VolumeClaimTemplate.Spec, template.Child("spec"))...)
	}
	return errs
}

func validateHostPath(v *corev1.HostPathVolumeSource, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("path"), v.Path, noBacksteps)
	if v.Type != nil {
		errs = append(errs, check.OneOfOrEmpty(at.Child("type"), *v.Type,
			corev1.HostPathDirectoryOrCreate, corev1.HostPathDirectory, corev1.HostPathFileOrCreate, corev1.HostPathFile,
			corev1.HostPathSocket, corev1.HostPathCharDev, corev1.HostPathBlockDev)...)
	}
	return errs
}

func validateMode(mode *int32, at *field.Path) field.ErrorList {
	if mode != nil && (*mode < 0 || *mode > maxFileMode) {
		return field.ErrorList{field.Invalid(at, *mode, "must be a number between 0 and 0777 (octal), both inclusive")}
	}
	return nil
}

func validateKeyPaths(items []corev1.KeyToPath, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, item := range items {
		at := at.Index(i)
		errs = append(errs, check.RequiredText(at.Child("key"), item.Key, nil)...)
		errs = append(errs, check.RequiredText(at.Child("path"), item.Path, localFile)...)
		errs = append(errs, validateMode(item.Mode, at.Child("mode"))...)
	}
	return errs
}

// localFile is the rule for a file inside a volume. Names that start with two
// dots are kept for the links that swap contents atomically.
func localFile(p string) []string {
	faults := descending(p)
	if len(faults) == 0 && strings.HasPrefix(p, "..") {
		faults = append(faults, "must not start with '..'")
	}
	return faults
}

func validateDownwardFiles(files []corev1.DownwardAPIVolumeFile, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, file := range files {
		at := at.Index(i)
		errs = append(errs, check.RequiredText(at.Child("path"), file.Path, localFile)...)
		errs = append(errs, validateMode(file.Mode, at.Child("mode"))...)
		switch {
		case file.FieldRef != nil && file.ResourceFieldRef != nil:
			errs = append(errs, field.Invalid(at, "resource", "fieldRef and resourceFieldRef can not be specified simultaneously"))
		case file.FieldRef != nil:
			errs = append(errs, validateFieldRef(file.FieldRef, volumeFields, at.Child("fieldRef"))...)
		case file.ResourceFieldRef != nil:
			errs = append(errs, check.RequiredText(at.Child("resourceFieldRef", "containerName"), file.ResourceFieldRef.ContainerName, nil)...)
			errs = append(errs, validateResourceFieldRef(file.ResourceFieldRef, at.Child("resourceFieldRef"))...)
		default:
			errs = append(errs, field.Required(at, "one of fieldRef and resourceFieldRef is required"))
		}
	}
	return errs
}

func validateProjected(v *corev1.ProjectedVolumeSource, at *field.Path) field.ErrorList {
	errs := validateMode(v.DefaultMode, at.Child("defaultMode"))
	paths := sets.New[string]()
	claim := func(path string, at *field.Path) {
		if path != "" && paths.Has(path) {
			errs = append(errs, field.Invalid(at, path, "conflicting duplicate paths"))
		}
		paths.Insert(path)
	}
	for i := range v.Sources {
		source, at := &v.Sources[i], at.Child("sources").Index(i)
		used := 0
		use := func(name string) *field.Path {
			if used++; used > 1 {
				errs = append(errs, field.Forbidden(at.Child(name), "may not specify more than 1 volume type"))
			}
			return at.Child(name)
		}
		if p := source.Secret; p != nil {
			at := use("secret")
			errs = append(errs, check.RequiredText(at.Child("name"), p.Name, nil)...)
			errs = append(errs, validateKeyPaths(p.Items, at.Child("items"))...)
			for _, item := range p.Items {
				claim(item.Path, at)
			}
		}
		if p := source.ConfigMap; p != nil {
			at := use("configMap")
			errs = append(errs, check.RequiredText(at.Child("name"), p.Name, nil)...)
			errs = append(errs, validateKeyPaths(p.Items, at.Child("items"))...)
			for _, item := range p.Items {
				claim(item.Path, at)
			}
		}
		if p := source.DownwardAPI; p != nil {
			at := use("downwardAPI")
			errs = append(errs, validateDownwardFiles(p.Items, at.Child("items"))...)
			for _, item := range p.Items {
				claim(item.Path, at)
			}
		}
		if p := source.ServiceAccountToken; p != nil {
			at := use("serviceAccountToken")
			errs = append(errs, validateTokenProjection(p, at)...)
			claim(p.Path, at)
		}
		if p := source.ClusterTrustBundle; p != nil {
			at := use("clusterTrustBundle")
			errs = append(errs, validateTrustProjection(p, at)...)
			claim(p.Path, at)
		}
		if p := source.PodCertificate; p != nil {
			at := use("podCertificate")
			errs = append(errs, validateCertificateProjection(p, at)...)
			for _, path := range []string{p.CredentialBundlePath, p.KeyPath, p.CertificateChainPath} {
				claim(path, at)
			}
		}
		if used == 0 {
			errs = append(errs, field.Required(at, "must specify a volume type"))
		}
	}
	return errs
}

// validateTrustProjection wants one bundle by its name, or those of a signer.
func validateTrustProjection(p *corev1.ClusterTrustBundleProjection, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("path"), p.Path, localFile)
	switch {
	case p.Name != nil && p.SignerName != nil:
		return append(errs, field.Invalid(at, *p.Name, "only one of name and signerName may be used"))
	case p.Name != nil:
		// Names of signers' bundles hold colons.
		errs = append(errs, check.RequiredText(at.Child("name"), strings.ReplaceAll(*p.Name, ":", "."), check.Subdomain)...)
		if p.LabelSelector != nil {
			errs = append(errs, field.Invalid(at.Child("labelSelector"), p.LabelSelector, "labelSelector must be unset if name is specified"))
		}
		return errs
	case p.SignerName != nil:
		domain, path, _ := strings.Cut(*p.SignerName, "/")
		errs = append(errs, check.RequiredText(at.Child("signerName"), *p.SignerName, func(string) []string {
			return append(check.Subdomain(domain), check.Subdomain(path)...)
		})...)
		return append(errs, check.LabelSelector(at.Child("labelSelector"), p.LabelSelector)...)
	}
	return append(errs, field.Required(at, "either name or signerName must be specified"))
}

// keyTypes are the keys that a node can make for a pod.
var keyTypes = []string{"ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519", "RSA3072", "RSA4096"}

// validateCertificateProjection wants a signer, a sort of key and a file.
func validateCertificateProjection(p *corev1.PodCertificateProjection, at *field.Path) field.ErrorList {
	errs := check.Signer(at.Child("signerName"), p.SignerName)
	errs = append(errs, check.OneOf(at.Child("keyType"), p.KeyType, slices.Clone(keyTypes)...)...)
	if s := p.MaxExpirationSeconds; s != nil {
		most := check.MaxPodCertificateOf(p.SignerName)
		at := at.Child("maxExpirationSeconds")
		switch {
		case *s < check.MinPodCertificate:
			errs = append(errs, field.Invalid(at, *s, fmt.Sprintf("if provided, maxExpirationSeconds must be >= %d", check.MinPodCertificate)))
		case *s > most:
			errs = append(errs, field.Invalid(at, *s, fmt.Sprintf("if provided, maxExpirationSeconds must be <= %d", most)))
		}
	}
	paths := 0
	for _, file := range []struct{ name, path string }{
		{"credentialBundlePath", p.CredentialBundlePath}, {"keyPath", p.KeyPath}, {"certificateChainPath", p.CertificateChainPath},
	} {
		if file.path != "" {
			paths++
			errs = append(errs, check.Text(at.Child(file.name), file.path, localFile)...)
		}
	}
	if paths == 0 {
		errs = append(errs, field.Required(at, "specify at least one of credentialBundlePath, keyPath, and certificateChainPath"))
	}
	return append(errs, check.SignerAnnotations(at.Child("userAnnotations"), p.UserAnnotations)...)
}

func validateTokenProjection(p *corev1.ServiceAccountTokenProjection, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("path"), p.Path, localFile)
	switch seconds := p.ExpirationSeconds; {
	case seconds == nil:
		errs = append(errs, field.Required(at.Child("expirationSeconds"), ""))
	case *seconds < minTokenSeconds:
		errs = append(errs, field.Invalid(at.Child("expirationSeconds"), *seconds, "may not specify a duration less than 10 minutes"))
	case *seconds > maxTokenSeconds:
		errs = append(errs, field.Invalid(at.Child("expirationSeconds"), *seconds, fmt.Sprintf("may not specify a duration larger than %d seconds", maxTokenSeconds)))
	}
	return errs
}
