package kubectl

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/features"
)

const bakery = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: ovens.bakery.example.com}
spec:
  group: bakery.example.com
  scope: Namespaced
  names: {plural: ovens, singular: oven, kind: Oven, shortNames: [ov]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    additionalPrinterColumns:
    - {name: Heat, type: integer, jsonPath: .spec.heat}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties:
              heat: {type: integer, default: 200, maximum: 900, description: Heat in degrees.}
          status: {type: object, properties: {ready: {type: boolean}}}
`

// TestE2EXCustomKind defines a kind, and uses it as one uses any other.
func TestE2EXCustomKind(t *testing.T) {
	t.Parallel()
	k := start(t, "custom")
	k.apply(bakery)
	t.Cleanup(func() { k.in("", "delete", "crd", "ovens.bakery.example.com", "--ignore-not-found") })
	k.established("ovens.bakery.example.com")
	oven := "apiVersion: bakery.example.com/v1\nkind: Oven\nmetadata: {name: big}\nspec: {}\n"
	k.eventually("the kind is discovered", func(context.Context) error {
		if out, errs, code := k.in(oven, "apply", "-f", "-"); code != 0 {
			return fmt.Errorf("%s%s", out, errs)
		}
		return nil
	})
	k.sub("tour", func(k *kit) {
		features.Conforms(k, 26, 33)
		k.eventuallyHas([]string{"get", "ov"}, "HEAT", "big", "200")
		k.eventuallyHas([]string{"explain", "oven.spec.heat"}, "Heat in degrees.")
		k.has(k.failsIn(strings.Replace(oven, "spec: {}", "spec: {heat: 901}", 1), "apply", "-f", "-"), "spec.heat", "should be less than or equal to 900")
		k.ok("patch", "oven", "big", "--subresource=status", "--type=merge", "-p", `{"status":{"ready":true}}`)
		k.is("ready", k.field("oven/big", "{.status.ready}"), "true")
		k.has(k.ok("api-resources", "--api-group=bakery.example.com"), "ovens", "Oven")
	})
	k.sub("what it owns goes with it", func(k *kit) {
		uid := k.field("oven/big", "{.metadata.uid}")
		k.apply(strings.Replace(configMap("owned", "", "v"), "{name: owned",
			"{name: owned, ownerReferences: [{apiVersion: bakery.example.com/v1, kind: Oven, name: big, uid: "+uid+"}]", 1))
		k.ok("delete", "oven", "big")
		k.eventually("its ConfigMap is collected", func(context.Context) error {
			if out, _, code := k.in("", "get", "configmap", "owned"); code == 0 {
				return fmt.Errorf("still there: %s", out)
			}
			return nil
		})
	})
}
