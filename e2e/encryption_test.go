package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ours "github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2ENoWireGuard: a cluster is to encrypt what pods send, and the kernel cannot.
// No node takes pods, and each says why. What passes where the kernel can is
// TestVMWireguard's.
func TestE2ENoWireGuard(t *testing.T) {
	need(t)
	e := startBare(t, 2, func(c *cluster.Config) { c.InitArgs = []string{"--pod-encryption", "wireguard"} })
	const why = "this kernel has no WireGuard"
	e.eventually("each node says why it takes no pods", func(ctx context.Context) error {
		if _, err := os.Stat("/sys/module/wireguard"); err == nil {
			t.Skip("this kernel has WireGuard: make test-vm VM_TESTS=TestVMWireguard")
		}
		list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list.Items) != 2 {
			return fmt.Errorf("%d nodes", len(list.Items))
		}
		for _, n := range list.Items {
			if nodeReady(&n) {
				return fmt.Errorf("%s is Ready", n.Name)
			}
			if _, told := n.Annotations[ours.WireGuard]; told {
				return fmt.Errorf("%s has a key: %v", n.Name, n.Annotations)
			}
			if !strings.Contains(fmt.Sprint(n.Status.Conditions), why) {
				return fmt.Errorf("%s does not say why: %+v", n.Name, n.Status.Conditions)
			}
			events, err := e.api.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "reason=NoWireGuard,involvedObject.name=" + n.Name})
			if err != nil {
				return err
			}
			if len(events.Items) == 0 || events.Items[0].Type != corev1.EventTypeWarning || !strings.Contains(events.Items[0].Message, "modprobe wireguard") {
				return errors.New("no event NoWireGuard of " + n.Name)
			}
		}
		return nil
	})
	// The second node has it from the cluster, not from a flag.
	for _, n := range e.Nodes() {
		config, err := os.ReadFile(filepath.Join(n.Data, "config.yaml"))
		if err != nil || !strings.Contains(string(config), "podEncryption: wireguard\n") {
			t.Errorf("%s: %v: %s", n.Name, err, config)
		}
	}
}
