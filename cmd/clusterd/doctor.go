package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/clusterd/clusterd/agent/host"
	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/cmd/clusterd/doctor"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/netsetup/overlay"
)

// doctorTimeout is how long the cluster may take to answer.
const doctorTimeout = 10 * time.Second

// errUnwell ends `clusterd doctor` with a failure after it has printed the findings.
var errUnwell = errors.New("problems found, see above")

func doctorCommand() *cobra.Command {
	cfg := defaultConfig()
	var server, output string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check this machine and its cluster, and suggest fixes",
		Long: `Check this machine and its cluster, and suggest fixes.

The machine: kernel features, cgroups, memory, the disk of the data directory and its
sync time, the address, ports, firewalls and the clock. On a server also the cluster:
quorum, members, the store, the nodes. Nothing is changed; tests run in a temporary
network namespace and a temporary file.

The exit status is 1 if there is a problem, and 0 if there are only warnings.`,
		Example: `  sudo clusterd doctor

  # Before joining, with the server that the join line names:
  sudo clusterd doctor --server 192.0.2.7:6443

  # For a script:
  sudo clusterd doctor -o json | jq '.machine[] | select(.level != "ok")'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "" && output != "json" {
				return fmt.Errorf("--output %q: json, or nothing for text", output)
			}
			if server != "" {
				var err error
				if server, err = serverAddress(server); err != nil {
					return err
				}
				cfg.Toward = server
			}
			configured := cfg.load(cmd.Flags())
			machine := examine(cmd.Context(), cfg, configured, server)
			cluster := examineCluster(cmd.Context(), cfg)
			if output == "json" {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				if err := enc.Encode(map[string][]doctor.Finding{"machine": machine, "cluster": cluster}); err != nil {
					return err
				}
			} else {
				doctor.Print(cmd.OutOrStdout(), "This machine:", machine)
				if cluster != nil {
					doctor.Print(cmd.OutOrStdout(), "\nThe cluster, as this server sees it:", cluster)
				}
			}
			if doctor.Count(machine, doctor.Problem)+doctor.Count(cluster, doctor.Problem) > 0 {
				return errUnwell
			}
			return nil
		},
	}
	f := cmd.Flags()
	cfg.addFlags(f)
	f.StringVar(&server, "server", "", "a server of the cluster to join, ADDRESS or ADDRESS:PORT")
	f.StringVarP(&output, "output", "o", "", "json (default: text)")
	return cmd
}

// examine judges this machine by its configuration, or by the defaults if that
// cannot be used.
func examine(ctx context.Context, cfg Config, configured error, server string) []doctor.Finding {
	if configured != nil {
		return []doctor.Finding{{Check: "config", Level: doctor.Problem, Says: configured.Error(), Fix: "correct the flag, or the key of " + cfg.file() + "; then ask again"}}
	}
	dir := nodedir.Dir(cfg.Data)
	past, _ := clockFloor(nil)
	machine, err := host.Look()
	if err != nil {
		return []doctor.Finding{{Check: "machine", Level: doctor.Problem, Says: err.Error()}}
	}
	return slices.Concat(doctor.JudgeMachine(doctor.Look(ctx, doctor.Ask{
		Name: cfg.Name, Addr: cfg.addr(), Data: cfg.Data, Member: dir.Member(), Running: dir.Held(), Past: past, Server: server, Encrypted: cfg.PodEncryption == podEncryptionWireGuard,
		Ranges: map[string][]netip.Prefix{"pods": cfg.podRanges(), "Services": cfg.serviceRanges()},
		Ports:  listened(cfg, dir),
	})), examineKeys(cfg), examineSwap(cfg, machine.Swaps))
}

// listened are the ports that the node listens on, or has the kernel listen on.
func listened(cfg Config, dir nodedir.Dir) []doctor.Port {
	at := func(network string, port uint16, flag string) doctor.Port {
		return doctor.Port{Network: network, Addr: netip.AddrPortFrom(cfg.addr().Addr(), port), Flag: flag}
	}
	ports := []doctor.Port{at("tcp", cfg.Port, "--port")}
	if role, err := dir.Role(); err != nil || role == pki.Server { // gossip is servers'
		ports = append(ports, at("udp", cfg.Port, "--port"))
	}
	if cfg.KubeletPort != 0 {
		ports = append(ports, at("tcp", cfg.KubeletPort, "--kubelet-port"))
	}
	if cfg.ReadOnlyPort != 0 {
		ports = append(ports, at("tcp", cfg.ReadOnlyPort, "--read-only-port"))
	}
	switch {
	case dir.Member(): // the kernel goes on listening there while clusterd is stopped
	case cfg.PodEncryption == podEncryptionWireGuard:
		ports = append(ports, at("udp", overlay.DefaultWireGuardPort, ""))
	default:
		ports = append(ports, at("udp", overlay.DefaultPort, ""))
	}
	return ports
}

// examineCluster asks the cluster that this machine is a server of; nil: it is
// none.
func examineCluster(ctx context.Context, cfg Config) []doctor.Finding {
	dir := nodedir.Dir(cfg.Data)
	if role, err := dir.Role(); err != nil || role != pki.Server {
		return nil
	}
	c := doctor.Cluster{Now: time.Now()}
	if cert, err := dir.ReadNodeCert(); err == nil {
		c.Expires = cert.NotAfter
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	c.Err = askCluster(ctx, dir.Kubeconfig(), &c)
	return doctor.JudgeCluster(c)
}

func askCluster(ctx context.Context, kubeconfig string, c *doctor.Cluster) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	for path, into := range map[string]any{v1.Members: &c.Members, v1.Store: &c.Store} {
		b, err := client.RESTClient().Get().AbsPath(path).DoRaw(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if err := json.Unmarshal(b, into); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	c.Nodes = nodes.Items
	return nil
}

// runFirst runs a node that was just made. When it fails for a cause that may
// be the machine's, it names the doctor.
func runFirst(cmd *cobra.Command, cfg Config, ready func(context.Context, *Main) error) error {
	err := run(cmd.Context(), cfg, ready)
	var gone *goneError
	var again *reexecError
	if err != nil && !errors.As(err, &gone) && !errors.As(err, &again) {
		fmt.Fprintln(cmd.ErrOrStderr(), "clusterd: if the cause is unclear, `clusterd doctor` checks this machine")
	}
	return err
}
