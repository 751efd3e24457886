package tools

import (
	"encoding/json"
	"strings"
	"testing"
)

const chart = "testdata/shop"

// TestE2EHelm takes a release through its life: a chart with a definition of a
// kind and an object of it, a claim, a Deployment, a Service, an Ingress and hooks.
func TestE2EHelm(t *testing.T) {
	k := start(t, "tools-helm")
	t.Cleanup(func() { k.ok("clusterctl", "delete", "crd", "shelves.shop.example", "--ignore-not-found") })

	refuse := func(what string, args []string, words ...string) {
		t.Helper()
		out := k.fails("helm", args...)
		k.has(out, words...)
		if left := k.ok("clusterctl", "get", "deploy,svc,pvc,ingress", "-o", "name"); left != "" {
			t.Errorf("%s left %s", what, left)
		}
	}
	refuse("a chart with a kind that is not served", []string{"install", "shop", chart, "--set", "stray=true", "--rollback-on-failure"},
		`no matches for kind "Oven" in version "nowhere.example/v1"`)
	refuse("a chart with a bad manifest", []string{"install", "shop", chart, "--set", "replicas=-1", "--rollback-on-failure"},
		`spec.replicas: Invalid value: -1`)
	refuse("a server-side dry run", []string{"install", "shop", chart, "--set", "stray=true", "--dry-run=server"}, `no matches for kind "Oven" in version "nowhere.example/v1"`)

	// Installed: helm waits until all of it is as its status says it must be.
	out := k.ok("helm", "install", "shop", chart, "--wait", "--timeout", testTimeout.String())
	k.has(out, "STATUS: deployed", "REVISION: 1", "shop says opened (revision 1).")
	k.is("the Deployment's ready pods", k.field("deploy/shop", "{.status.readyReplicas}"), "1")
	k.is("the claim", k.field("pvc/shop-data", "{.status.phase}"), "Bound")
	k.is("the Shelf", k.field("shelves/shop", "{.spec.boards}"), "1")
	k.has(k.ok("clusterctl", "logs", "job/shop-pre-install"), "pre-install revision 1")
	k.has(k.ok("clusterctl", "get", "ingress", "shop"), "shop.example")
	k.is("who applied the Deployment", k.field("deploy/shop", "{.metadata.managedFields[?(@.operation=='Apply')].manager}"), "helm")

	k.has(k.ok("helm", "test", "shop", "--logs", "--timeout", testTimeout.String()), "Phase:          Succeeded", "opened")
	k.is("releases", k.release("status"), "deployed")
	k.has(k.ok("helm", "status", "shop"), "STATUS: deployed", "TEST SUITE:     shop-page")
	manifest := k.ok("helm", "get", "manifest", "shop")
	k.has(manifest, "kind: Ingress", "kind: Shelf", `value: "opened"`)
	k.lacks(manifest, "pre-install")
	k.has(k.ok("helm", "get", "hooks", "shop"), "shop-pre-install", "shop-page")
	if again := k.fails("helm", "install", "shop", chart); !strings.Contains(again, "cannot reuse a name that is still in use") {
		t.Errorf("a second release of the name: %s", again)
	}

	out = k.ok("helm", "upgrade", "shop", chart, "--set", "message=grown,replicas=2", "--wait", "--timeout", testTimeout.String())
	k.has(out, "STATUS: deployed", "REVISION: 2")
	k.is("ready pods after the upgrade", k.field("deploy/shop", "{.status.readyReplicas}"), "2")
	k.is("boards after the upgrade", k.field("shelves/shop", "{.spec.boards}"), "2")
	k.has(k.ok("clusterctl", "logs", "job/shop-post-upgrade"), "post-upgrade revision 2")
	k.has(k.ok("helm", "test", "shop", "--logs", "--timeout", testTimeout.String()), "grown")
	k.has(k.ok("helm", "get", "values", "shop"), "message: grown")

	// An image that does not exist: the upgrade fails, and what was before is back.
	out = k.fails("helm", "upgrade", "shop", chart, "--set", "image=clusterd.local/none:1", "--rollback-on-failure", "--timeout", "20s")
	k.has(out, "release shop failed, and has been rolled back due to rollback-on-failure being set")
	k.is("the image after the rollback", k.field("deploy/shop", "{.spec.template.spec.containers[0].image}"), image)
	k.eventuallyIs("deploy/shop", "{.status.readyReplicas} {.status.replicas}", "2 2")
	// A change that is refused changes nothing.
	out = k.fails("helm", "upgrade", "shop", chart, "--reset-values", "--set", "replicas=-1")
	k.has(out, "spec.replicas: Invalid value: -1")
	k.is("replicas after the refusal", k.field("deploy/shop", "{.spec.replicas}"), "2")

	k.has(k.ok("helm", "rollback", "shop", "1", "--wait", "--timeout", testTimeout.String()), "Rollback was a success")
	k.is("message after the rollback", k.field("deploy/shop", "{.spec.template.spec.containers[0].env[0].value}"), "opened")
	k.is("replicas after the rollback", k.field("deploy/shop", "{.status.readyReplicas}"), "1")
	var history []struct {
		Revision            int
		Status, Description string
	}
	if err := json.Unmarshal([]byte(k.ok("helm", "history", "shop", "-o", "json")), &history); err != nil {
		t.Fatal(err)
	}
	want := []string{"superseded", "superseded", "failed", "superseded", "failed", "deployed"}
	for i, h := range history {
		if len(history) != len(want) || h.Revision != i+1 || h.Status != want[i] {
			t.Fatalf("history %+v, want %q", history, want)
		}
	}
	k.is("the last revision", history[len(history)-1].Description, "Rollback to 1")
	// Each revision is a Secret; every one of them is there.
	k.is("release Secrets", strings.TrimSpace(k.ok("clusterctl", "get", "secrets", "--field-selector=type=helm.sh/release.v1", "-l", "owner=helm,name=shop", "-o", "go-template={{len .items}}")), "6")

	k.has(k.ok("helm", "uninstall", "shop", "--wait", "--timeout", testTimeout.String()), `release "shop" uninstalled`)
	k.is("what is left", k.ok("clusterctl", "get", "deploy,svc,pvc,ingress,shelves,pods", "-l", "app=shop", "-o", "name")+k.ok("clusterctl", "get", "deploy,svc,pvc,ingress,shelves", "-o", "name"), "")
	k.is("the definition, which helm leaves", k.field("crd/shelves.shop.example", "{.metadata.name}"), "shelves.shop.example")
	k.is("releases after all", strings.TrimSpace(k.ok("helm", "list", "-A", "-q")), "")
}

// release is a field of the one release of the namespace, as helm lists it.
func (k *kit) release(field string) string {
	k.Helper()
	var list []map[string]any
	if err := json.Unmarshal([]byte(k.ok("helm", "list", "-o", "json")), &list); err != nil || len(list) != 1 {
		k.Fatalf("%v %v", list, err)
	}
	s, _ := list[0][field].(string)
	return s
}
