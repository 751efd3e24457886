package kubectl

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/features"
)

// dish is a CRD of a group with versions, of which the first is stored; schema is
// that of the whole object, in each of them.
func dish(group, plural, schema string, versions ...string) string {
	kind := strings.ToUpper(plural[:1]) + strings.TrimSuffix(plural[1:], "s")
	var all strings.Builder
	for i, v := range versions {
		name, unserved := strings.CutPrefix(v, "!")
		fmt.Fprintf(&all, "  - {name: %s, served: %t, storage: %t, schema: {openAPIV3Schema: %s}}\n", name, !unserved, i == 0, schema)
	}
	return fmt.Sprintf(`apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[1]s.%[2]s}
spec:
  group: %[2]s
  scope: Namespaced
  names: {plural: %[1]s, singular: %[3]s, kind: %[4]s}
  versions:
%[5]s---
`, plural, group, strings.TrimSuffix(plural, "s"), kind, all.String())
}

// published waits until the OpenAPI description has a kind of a group and version,
// or has it no more.
func (k *kit) published(group, version, kind string, want bool) {
	k.Helper()
	parts := strings.Split(group, ".")
	slices.Reverse(parts)
	name := fmt.Sprintf("%q", strings.Join(parts, ".")+"."+version+"."+kind)
	paths := []string{"/openapi/v2"}
	if want { // upstream's library leaves version 3 of what is not served any more
		paths = append(paths, "/openapi/v3/apis/"+group+"/"+version)
	}
	for _, path := range paths {
		k.eventually(fmt.Sprintf("%s has %s: %t", path, name, want), func(context.Context) error {
			code, body := k.ask(http.MethodGet, path, "")
			if has := code == http.StatusOK && strings.Contains(body, name+":"); has != want {
				return fmt.Errorf("%d, %d bytes: %t", code, len(body), has)
			}
			return nil
		})
	}
}

// TestE2EXOpenAPI defines kinds and reads what the server says of them.
func TestE2EXOpenAPI(t *testing.T) {
	t.Parallel()
	k := start(t, "openapi")
	const one, other = "menu.example.com", "wines.example.com"
	const schema = `{type: object, description: What is eaten from., properties: {spec: {type: object, required: [size], properties: {size: {type: integer, description: Size in centimetres.}, inner: {type: object, properties: {depth: {type: integer, description: Depth of it.}}}}}}}`
	const nested = `{type: object, properties: {spec: {type: object, properties: {within: {type: object, description: Whatever is inside., x-kubernetes-embedded-resource: true, x-kubernetes-preserve-unknown-fields: true}}}}}`
	k.apply(dish(one, "plates", schema, "v1", "v2") + dish(one, "trays", `{type: object, x-kubernetes-preserve-unknown-fields: true}`, "v1") +
		dish(one, "boxes", nested, "v1") + dish(other, "glasses", schema, "v1"))
	k.sub("groups, kinds, versions", func(k *kit) {
		features.Conforms(k, 45, 46, 47)
		k.published(one, "v1", "Plate", true)
		k.published(one, "v2", "Plate", true)
		k.published(one, "v1", "Tray", true)
		k.published(other, "v1", "Glasse", true)
	})
	k.published(one, "v1", "Boxe", true)
	k.discovered(one, "v1", "plates", "trays", "boxes")
	object := func(kind, rest string) string {
		return "apiVersion: " + one + "/v1\nkind: " + kind + "\nmetadata: {name: x}\n" + rest
	}
	dry := []string{"create", "--dry-run=server", "-f", "-"}
	k.sub("a schema", func(k *kit) {
		features.Conforms(k, 43)
		k.okIn(object("Plate", "spec: {size: 3, inner: {depth: 1}}\n"), dry...)
		k.has(k.failsIn(object("Plate", "spec: {size: 3, colour: red}\n"), dry...), `unknown field "spec.colour"`)
		k.has(k.failsIn(object("Plate", "spec: {inner: {depth: 1}}\n"), dry...), "spec.size", "Required value")
		k.has(k.ok("explain", "plates"), "DESCRIPTION", "What is eaten from.")
		k.has(k.ok("explain", "plates.spec"), "size", "required", "Size in centimetres.")
		k.has(k.ok("explain", "plates.spec.inner.depth"), "Depth of it.")
		k.has(k.fails("explain", "plates.spec.none"), `"none" does not exist`)
	})
	k.sub("none", func(k *kit) {
		features.Conforms(k, 41, 44)
		k.okIn(object("Tray", "spec: {none: knows}\nmore: [1, 2]\n"), dry...)
		k.has(k.ok("explain", "trays"), "KIND:", "Tray", "DESCRIPTION")
	})
	k.sub("none further down", func(k *kit) {
		features.Conforms(k, 42)
		k.okIn(object("Boxe", "spec: {within: {apiVersion: v1, kind: Pod, metadata: {name: within}, none: knows}}\n"), dry...)
		k.has(k.ok("explain", "boxes.spec.within"), "within", "Whatever is inside.")
	})
	k.sub("a version that is not served any more", func(k *kit) {
		features.Conforms(k, 39)
		k.apply(dish(one, "plates", schema, "v1", "!v2"))
		k.published(one, "v2", "Plate", false)
		k.published(one, "v1", "Plate", true)
	})
	k.sub("a version with another name", func(k *kit) {
		features.Conforms(k, 40)
		k.apply(dish(one, "plates", schema, "v1", "v3"))
		k.published(one, "v3", "Plate", true)
		k.published(one, "v2", "Plate", false)
		k.published(one, "v1", "Plate", true)
	})
}
