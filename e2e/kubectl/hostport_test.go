package kubectl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXHostPort: a port of the node leads to the pod. Pods that differ in
// address or protocol share a number; another one has to wait for a node.
func TestE2EXHostPort(t *testing.T) {
	t.Parallel()
	k := start(t, "hostport")
	features.Conforms(k, 229)
	with := func(name, port string) string {
		return strings.Replace(simple(name, "serve"), "args:", "ports: [{containerPort: 8080, "+port+"}], args:", 1)
	}
	k.apply(with("loop", "hostPort: 18080, hostIP: 127.0.0.1"))
	loop := k.ready("loop")
	address := loop.Status.HostIP
	k.apply(with("outer", "hostPort: 18080, hostIP: "+address))
	k.apply(with("udp", "hostPort: 18080, protocol: UDP, hostIP: "+address))
	k.apply(with("any", "hostPort: 18081"))
	for _, name := range []string{"outer", "udp", "any"} {
		k.ready(name)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: k.dial}}
	answer := func(at string) (string, error) {
		req, err := http.NewRequestWithContext(k.Context(), http.MethodGet, "http://"+at+"/hostname", nil)
		if err != nil {
			return "", err
		}
		res, err := client.Do(req)
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		return string(b), err
	}
	for at, pod := range map[string]string{
		"127.0.0.1:18080": "loop", address + ":18080": "outer", address + ":18081": "any", "127.0.0.1:18081": "any",
	} {
		k.eventually("the page at "+at, func(context.Context) error {
			page, err := answer(at)
			if err == nil && !strings.Contains(page, pod) {
				err = fmt.Errorf("it is of %q, want %s", page, pod)
			}
			return err
		})
	}
	// A pod, too, gets there by the node's address, even the one behind it.
	k.has(k.exec("any", "main", "fetch", "http://"+address+":18081/hostname"), "any")

	k.apply(with("second", "hostPort: 18081"))
	k.podIs("second", "told why it waits", func(p *corev1.Pod) bool {
		return condition(p, corev1.PodScheduled) == corev1.ConditionFalse
	})
	k.eventuallyHas([]string{"describe", "pod", "second"}, "free ports")
	k.ok("delete", "pod", "any", "--grace-period=1")
	k.ready("second")
	k.eventually("the port has passed on", func(context.Context) error {
		page, err := answer(address + ":18081")
		if err == nil && !strings.Contains(page, "second") {
			err = errors.New(page)
		}
		return err
	})
	k.ok("delete", "pod", "--all", "--wait=false")
}
