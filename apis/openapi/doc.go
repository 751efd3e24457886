// Package openapi holds the OpenAPI definitions of the API types clusterd
// serves. They are in no library, so they are generated from the comments of
// k8s.io/api; the server publishes them (explain, client-side validation) and
// derives the type converter of server-side apply from them.
//
// A kind of a group that is not listed below needs its package added here.
package openapi

//go:generate go tool openapi-gen --go-header-file header.txt --output-dir . --output-pkg github.com/clusterd/clusterd/apis/openapi --output-file zz_generated.openapi.go -r violations.list k8s.io/apimachinery/pkg/api/resource k8s.io/apimachinery/pkg/apis/meta/v1 k8s.io/apimachinery/pkg/runtime k8s.io/apimachinery/pkg/util/intstr k8s.io/apimachinery/pkg/version k8s.io/api/admissionregistration/v1 k8s.io/api/apps/v1 k8s.io/api/authentication/v1 k8s.io/api/authorization/v1 k8s.io/api/autoscaling/v1 k8s.io/api/autoscaling/v2 k8s.io/api/batch/v1 k8s.io/api/certificates/v1 k8s.io/api/coordination/v1 k8s.io/api/core/v1 k8s.io/api/discovery/v1 k8s.io/api/events/v1 k8s.io/api/flowcontrol/v1 k8s.io/api/networking/v1 k8s.io/api/node/v1 k8s.io/api/policy/v1 k8s.io/api/rbac/v1 k8s.io/api/resource/v1 k8s.io/api/scheduling/v1 k8s.io/api/scheduling/v1alpha3 k8s.io/api/scheduling/v1beta1 k8s.io/api/storage/v1 k8s.io/api/storagemigration/v1 k8s.io/metrics/pkg/apis/metrics/v1beta1
