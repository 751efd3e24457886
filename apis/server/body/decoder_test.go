package body

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/clusterd/clusterd/apis"
)

// In protobuf, JSON within an object is bytes: what is in it is counted all the same.
func TestMembersInProtobuf(t *testing.T) {
	codecs := Serializer(apis.Codecs, apis.Scheme)
	info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	text := func(n int) []byte {
		return []byte("{" + repeated(n, ",", func(i int) string { return fmt.Sprintf(`"f:z%d":{}`, n-i) }) + "}")
	}
	owned := func(n int) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}, {
			Manager: "x", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(text(n))),
		}}}}
	}
	asked := func(n int) *resourcev1.ResourceClaim {
		c := &resourcev1.ResourceClaim{}
		c.Spec.Devices.Config = []resourcev1.DeviceClaimConfiguration{{DeviceConfiguration: resourcev1.DeviceConfiguration{
			Opaque: &resourcev1.OpaqueDeviceConfiguration{Driver: "d", Parameters: runtime.RawExtension{Raw: text(n)}},
		}}}
		return c
	}
	for _, test := range []struct {
		of   schema.GroupVersion
		obj  runtime.Object
		want string
	}{
		{corev1.SchemeGroupVersion, owned(maxMembers), ""},
		{corev1.SchemeGroupVersion, owned(maxMembers + 1), "metadata.managedFields[1].fieldsV1: too many"},
		{resourcev1.SchemeGroupVersion, asked(maxMembers), ""},
		{resourcev1.SchemeGroupVersion, asked(maxMembers + 1), "spec.devices.config[0].opaque.parameters: too many"},
	} {
		message, err := runtime.Encode(codecs.EncoderForVersion(info.Serializer, test.of), test.obj)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = codecs.DecoderToVersion(info.Serializer, test.of).Decode(message, nil, nil)
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.HasPrefix(err.Error(), test.want)) {
			t.Errorf("%T of %d bytes: %v, want %q", test.obj, len(message), err, test.want)
		}
	}
}
