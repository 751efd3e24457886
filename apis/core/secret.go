package core

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// Secret is the kind Secret.
func Secret() kind.Kind {
	return kind.Typed[*corev1.Secret]{
		GVK:        corev1.SchemeGroupVersion.WithKind("Secret"),
		Resource:   "secrets",
		Singular:   "secret",
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.Secret{} },
		NewList: func() runtime.Object { return &corev1.SecretList{} },

		Default:        defaultSecret,
		Validate:       validateSecret,
		ValidateUpdate: validateSecretUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Type", corev1.Secret{}.SwaggerDoc()["type"]),
			cells.Number("Data", corev1.Secret{}.SwaggerDoc()["data"]),
			cells.Age,
		},
		Row: func(s *corev1.Secret, now time.Time) []any {
			return []any{s.Name, string(s.Type), int64(len(s.Data)), cells.Since(s.CreationTimestamp, now)}
		},
		Warnings:            secretWarnings,
		Fields:              func(s *corev1.Secret) fields.Set { return fields.Set{"type": string(s.Type)} },
		UnconditionalUpdate: true,
	}.Kind()
}

// defaultSecret also moves stringData, which is only for writing, into data.
func defaultSecret(s *corev1.Secret) {
	if s.Type == "" {
		s.Type = corev1.SecretTypeOpaque
	}
	if len(s.StringData) > 0 && s.Data == nil {
		s.Data = make(map[string][]byte, len(s.StringData))
	}
	for key, value := range s.StringData {
		s.Data[key] = []byte(value)
	}
	s.StringData = nil
}

// secretWarnings names a pair of a certificate and a key that no server can use.
func secretWarnings(s *corev1.Secret) []string {
	if s.Type != corev1.SecretTypeTLS {
		return nil
	}
	if _, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]); err != nil {
		return []string{err.Error()}
	}
	return nil
}

// Messages never carry a value of the secret.
const redacted = "<secret contents redacted>"

func validateSecret(s *corev1.Secret) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&s.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	data := field.NewPath("data")
	size := 0
	for key, value := range s.Data {
		errs = append(errs, check.Text(data.Key(key), key, validation.IsConfigMapKey)...)
		size += len(value)
	}
	if size > corev1.MaxSecretSize {
		errs = append(errs, field.TooLong(data, "", corev1.MaxSecretSize))
	}

	switch s.Type {
	case corev1.SecretTypeServiceAccountToken:
		if s.Annotations[corev1.ServiceAccountNameKey] == "" {
			errs = append(errs, field.Required(field.NewPath("metadata", "annotations").Key(corev1.ServiceAccountNameKey), ""))
		}
	case corev1.SecretTypeDockercfg:
		errs = append(errs, validateJSON(s.Data, corev1.DockerConfigKey)...)
	case corev1.SecretTypeDockerConfigJson:
		errs = append(errs, validateJSON(s.Data, corev1.DockerConfigJsonKey)...)
	case corev1.SecretTypeBasicAuth:
		_, hasName := s.Data[corev1.BasicAuthUsernameKey]
		_, hasPassword := s.Data[corev1.BasicAuthPasswordKey]
		if !hasName && !hasPassword {
			errs = append(errs, field.Required(data.Key(corev1.BasicAuthUsernameKey), ""), field.Required(data.Key(corev1.BasicAuthPasswordKey), ""))
		}
	case corev1.SecretTypeSSHAuth:
		if len(s.Data[corev1.SSHAuthPrivateKey]) == 0 {
			errs = append(errs, field.Required(data.Key(corev1.SSHAuthPrivateKey), ""))
		}
	case corev1.SecretTypeTLS:
		for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
			if _, ok := s.Data[key]; !ok {
				errs = append(errs, field.Required(data.Key(key), ""))
			}
		}
	}
	return errs
}

func validateJSON(data map[string][]byte, key string) field.ErrorList {
	at := field.NewPath("data").Key(key)
	value, ok := data[key]
	if !ok {
		return field.ErrorList{field.Required(at, "")}
	}
	var into map[string]any
	if err := json.Unmarshal(value, &into); err != nil {
		// The error says where, not what: a syntax error holds one character.
		return field.ErrorList{field.Invalid(at, redacted, fmt.Sprintf("not a JSON object: %v", err))}
	}
	return nil
}

func validateSecretUpdate(s, old *corev1.Secret) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, apivalidation.ValidateImmutableField(s.Type, old.Type, field.NewPath("type"))...)
	if isTrue(old.Immutable) {
		const msg = "field is immutable when `immutable` is set"
		if !isTrue(s.Immutable) {
			errs = append(errs, field.Forbidden(field.NewPath("immutable"), msg))
		}
		if !equality.Semantic.DeepEqual(s.Data, old.Data) {
			errs = append(errs, field.Forbidden(field.NewPath("data"), msg))
		}
	}
	return append(errs, validateSecret(s)...)
}
