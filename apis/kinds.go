package apis

import (
	"github.com/clusterd/clusterd/apis/admissionregistration"
	"github.com/clusterd/clusterd/apis/apps"
	"github.com/clusterd/clusterd/apis/autoscaling"
	"github.com/clusterd/clusterd/apis/batch"
	"github.com/clusterd/clusterd/apis/certificates"
	"github.com/clusterd/clusterd/apis/coordination"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/discovery"
	"github.com/clusterd/clusterd/apis/flowcontrol"
	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/apis/node"
	"github.com/clusterd/clusterd/apis/policy"
	"github.com/clusterd/clusterd/apis/rbac"
	"github.com/clusterd/clusterd/apis/resource"
	"github.com/clusterd/clusterd/apis/scheduling"
	"github.com/clusterd/clusterd/apis/storage"
	"github.com/clusterd/clusterd/apis/storagemigration"
)

// Kinds returns the kinds clusterd serves, each in its storage version. This
// is THE list: scheme, discovery, storage and tests are made from it.
func Kinds() []Kind {
	return []Kind{
		core.Namespace(),
		core.Node(),
		core.Pod(),
		core.ConfigMap(),
		core.Secret(),
		core.ServiceAccount(),
		core.Service(),
		core.Endpoints(),
		core.Event(),
		core.LimitRange(),
		core.ResourceQuota(),
		core.PersistentVolume(),
		core.PersistentVolumeClaim(),
		core.PodTemplate(),
		core.ReplicationController(),
		admissionregistration.ValidatingWebhookConfiguration(),
		admissionregistration.MutatingWebhookConfiguration(),
		admissionregistration.ValidatingAdmissionPolicy(),
		admissionregistration.ValidatingAdmissionPolicyBinding(),
		admissionregistration.MutatingAdmissionPolicy(),
		admissionregistration.MutatingAdmissionPolicyBinding(),
		apps.ReplicaSet(),
		apps.Deployment(),
		apps.ControllerRevision(),
		apps.StatefulSet(),
		apps.DaemonSet(),
		autoscaling.HorizontalPodAutoscaler(),
		batch.Job(),
		batch.CronJob(),
		certificates.CertificateSigningRequest(),
		certificates.ClusterTrustBundle(),
		certificates.PodCertificateRequest(),
		coordination.Lease(),
		discovery.EndpointSlice(),
		flowcontrol.FlowSchema(),
		flowcontrol.PriorityLevelConfiguration(),
		networking.Ingress(),
		networking.IngressClass(),
		networking.IPAddress(),
		networking.NetworkPolicy(),
		networking.ServiceCIDR(),
		node.RuntimeClass(),
		policy.PodDisruptionBudget(),
		rbac.Role(),
		rbac.RoleBinding(),
		rbac.ClusterRole(),
		rbac.ClusterRoleBinding(),
		resource.DeviceClass(),
		resource.DeviceTaintRule(),
		resource.ResourceClaim(),
		resource.ResourceClaimTemplate(),
		resource.ResourceSlice(),
		scheduling.PriorityClass(),
		storage.StorageClass(),
		storage.VolumeAttachment(),
		storage.VolumeAttributesClass(),
		storage.CSIDriver(),
		storage.CSINode(),
		storage.CSIStorageCapacity(),
		storagemigration.StorageVersionMigration(),
	}
}
