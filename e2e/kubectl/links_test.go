package kubectl

import (
	"strings"
	"testing"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXServiceLinks: a pod finds the Services that were there before it in
// its environment, unless it does not want to.
func TestE2EXServiceLinks(t *testing.T) {
	t.Parallel()
	k := start(t, "links")
	features.Conforms(k, 312)
	k.ok("create", "service", "clusterip", "my-db", "--tcp=5432:5432")
	ip := k.field("service/my-db", "{.spec.clusterIP}")
	// The node learns of Services by a watch of its own; its name server, by the same one.
	k.apply(simple("asker", "sleep"))
	k.ready("asker")
	k.eventuallyHas([]string{"exec", "asker", "--", "/hello", "lookup", "host", "my-db." + k.ns + ".svc.cluster.local"}, ip)
	k.apply(strings.Replace(simple("linked", "sleep"), "args:", `env: [{name: URL, value: "db://$(MY_DB_SERVICE_HOST)"}], args:`, 1))
	k.apply(simple("plain", "sleep", "enableServiceLinks: false"))
	k.ready("linked")
	k.ready("plain")
	k.has(k.exec("linked", "main", "env"), "MY_DB_SERVICE_HOST="+ip+"\n", "MY_DB_PORT_5432_TCP=tcp://"+ip+":5432\n", "URL=db://"+ip+"\n")
	k.lacks(k.exec("plain", "main", "env"), "MY_DB")
	k.ok("delete", "pod", "asker", "linked", "plain", "--wait=false")
}
