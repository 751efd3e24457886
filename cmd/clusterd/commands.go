package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "clusterd",
		Short: "clusterd runs a node of a Kubernetes-compatible cluster",
		Long: `clusterd runs a node of a Kubernetes-compatible cluster.

Create a cluster on one machine, let others join, and use it with clusterctl or kubectl.`,
		Example: `  # Try it on this machine, with nothing to configure:
  sudo clusterd dev

  # A cluster: on the first machine,
  sudo clusterd init
  # and on each other one the line that it printed:
  sudo clusterd join 192.0.2.7:6443 --token cd1.…`,
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("clusterd {{.Version}}\n")
	root.AddCommand(initCommand(), joinNodeCommand(), doctorCommand(), runCommand(), keysCommand(), devCommand(), standaloneCommand(), containersCommand(), ingressCommand(), resetCommand(), upgradeGuardCommand(), versionCommand())
	groupFlags(root)
	return root
}

func initCommand() *cobra.Command {
	cfg := defaultConfig()
	var prepare bool
	var ttl time.Duration
	var uses int
	var restore restoreFlags
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Create a cluster on this machine and run it; prints the join commands",
		Example: `  sudo clusterd init
  sudo clusterd init --name n1 --advertise 192.0.2.7

  # With systemd, which runs ` + "`clusterd run`" + `:
  sudo clusterd init --prepare && sudo systemctl enable --now clusterd

  # From a snapshot of another cluster, on any machine:
  sudo clusterd init --from-snapshot cluster.backup
  sudo clusterd init --from-snapshot https://s3.example.org/backups/c-20261127T030000Z.backup --identity backup.key --snapshot-store-credentials keys`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if ttl <= 0 || ttl > maxTokenTTL {
				return fmt.Errorf("--token-ttl %s: give a duration of at most %s", ttl, maxTokenTTL)
			}
			if uses < 0 {
				return fmt.Errorf("--token-uses %d: give how many machines may join with each command (0 = unlimited)", uses)
			}
			if err := start(cmd, &cfg); err != nil {
				return err
			}
			if restore.file == "" {
				if err := prepareInit(cfg); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "# Addresses of pods: %s, of Services: %s; this node's: %s\n", cfg.ClusterCIDR, cfg.ServiceCIDR, cfg.Advertise)
			} else {
				for _, fixed := range []string{"cluster-cidr", "service-cidr"} {
					if cmd.Flags().Changed(fixed) {
						return fmt.Errorf("--%s: the snapshot says it; leave the flag out", fixed)
					}
				}
				content, err := restore.read(cmd.Context(), &cfg.SnapshotConfig)
				if err != nil {
					return err
				}
				if err := prepareRestore(cfg, content); err != nil {
					return err
				}
				printRestoreSummary(cmd.ErrOrStderr(), cfg, content)
				cfg.File = ""                                 // what it says is in the data directory now
				if err := cfg.load(cmd.Flags()); err != nil { // the snapshot's settings
					return err
				}
			}
			if prepare {
				fmt.Fprintf(cmd.OutOrStdout(), "%s is ready to begin a cluster: start it with %s, then make a token with `clusterctl token create`.\n", cfg.Name, startCommand(cfg.Data))
				return nil
			}
			return runFirst(cmd, cfg, func(ctx context.Context, m *Main) error {
				if err := m.printJoinLines(ctx, cmd.OutOrStdout(), ttl, uses); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "# See the cluster, in another terminal (Ctrl-C here stops clusterd, not its pods; `clusterd run` goes on):\n%s\n", lookCommand(cfg.Data))
				return nil
			})
		},
	}
	cfg.addFlags(cmd.Flags())
	cfg.addClusterFlags(cmd.Flags())
	restore.add(cmd.Flags())
	cmd.Flags().BoolVar(&prepare, "prepare", false, "set up the data directory and exit")
	cmd.Flags().DurationVar(&ttl, "token-ttl", defaultTokenTTL, "lifetime of the printed tokens")
	cmd.Flags().IntVar(&uses, "token-uses", initTokenUses, "how many machines may join with each of the printed commands (0 = unlimited)")
	return cmd
}

func joinNodeCommand() *cobra.Command {
	cfg := defaultConfig()
	var token, tokenFile string
	var ask, prepare bool
	cmd := &cobra.Command{
		Use:   "join ADDRESS {--token TOKEN | --ask}",
		Short: "Join this machine to a cluster and run it",
		Long: `Join this machine to a cluster and run it. The token determines its role: a
server, which stores the cluster's state together with the others, or an agent,
which runs pods and holds no state of the cluster.

Anybody who has the token can join. A token on the command line is removed from the
process list at once; from a file, the standard input or the variable
` + tokenEnv + ` it never appears there.

Without a token, --ask shows a code and waits: a user who may create tokens lets
this machine in with "clusterctl members approve CODE --role ROLE".`,
		Example: `  sudo clusterd join 192.0.2.7:6443 --token cd1.…
  sudo clusterd join 192.0.2.7:6443 --ask
  sudo clusterd join 192.0.2.7:6443 --token-file token --name n2 --prepare
  ssh n1 clusterctl token create --role agent -o json | jq -r .token | sudo clusterd join 192.0.2.7:6443 --token-file -`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("give the address of one member, as printed by `clusterd init`: clusterd join ADDRESS --token TOKEN")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var t *pki.Token
			if ask && (token != "" || tokenFile != "") {
				return errors.New("--ask is for machines without a token: give it or a token")
			}
			if !ask {
				text, err := readToken(token, tokenFile, cmd.InOrStdin())
				if err != nil {
					return err
				}
				parsed, err := pki.ParseToken(text)
				if err != nil {
					return err
				}
				t = &parsed
			}
			server, err := serverAddress(args[0])
			if err != nil {
				return err
			}
			cfg.Toward = server
			if err := start(cmd, &cfg); err != nil {
				return err
			}
			if err := prepareJoin(cmd.Context(), &cfg, server, t, cmd.ErrOrStderr()); err != nil {
				return err
			}
			if prepare {
				fmt.Fprintf(cmd.OutOrStdout(), "%s is a member: start it with %s.\n", cfg.Name, startCommand(cfg.Data))
				return nil
			}
			return runFirst(cmd, cfg, nil)
		},
	}
	cfg.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&token, "token", "", "the join token")
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "file with the join token (- = standard input)")
	cmd.Flags().BoolVar(&ask, "ask", false, "join without a token: show a code and wait until it is approved")
	cmd.Flags().BoolVar(&prepare, "prepare", false, "join, set up the data directory and exit")
	return cmd
}

func runCommand() *cobra.Command {
	cfg := defaultConfig()
	cmd := &cobra.Command{
		Use:     "run",
		Short:   "Run a node that `init` or `join` has set up",
		Example: `  sudo clusterd run --data /var/lib/clusterd`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := start(cmd, &cfg); err != nil {
				return err
			}
			return run(cmd.Context(), cfg, nil)
		},
	}
	cfg.addFlags(cmd.Flags())
	return cmd
}

func devCommand() *cobra.Command {
	cfg := defaultConfig()
	cfg.Data = DefaultDevData
	cfg.Name = "dev"
	cfg.CgroupRoot = "/clusterd-dev"
	cfg.LogLevel = "warn"
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a single-node cluster on this machine, without configuration",
		Long: `Run a single-node cluster on this machine, without configuration.

All state is stored in one directory and used again the next time. The containers
end with the command.`,
		Example: `  sudo clusterd dev
  # then, in another terminal, what it printed:
  export KUBECONFIG=` + personKubeconfig(DefaultDevData) + `
  kubectl get nodes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := start(cmd, &cfg); err != nil {
				return err
			}
			if !nodedir.Dir(cfg.Data).Member() {
				if err := prepareInit(cfg); err != nil {
					return err
				}
			}
			began := time.Now()
			err := run(cmd.Context(), cfg, func(ctx context.Context, m *Main) error {
				out := cmd.OutOrStdout()
				fmt.Fprintf(out, "The API answers at https://%s after %.1f s.\n", cfg.addr(), time.Since(began).Seconds())
				if err := m.waitNodeReady(ctx); err != nil {
					return err
				}
				fmt.Fprintf(out, "The node takes pods after %.1f s.\n\n", time.Since(began).Seconds())
				kubeconfig, err := leaveKubeconfig(m.dir)
				if err != nil {
					return err
				}
				fmt.Fprintf(out, "  export KUBECONFIG=%s\n  kubectl get nodes\n\n", kubeconfig)
				fmt.Fprintf(out, "Ctrl-C stops it and its containers; `clusterd reset --data %s` removes all it wrote.\n", cfg.Data)
				return nil
			})
			return errors.Join(err, stopContainers(cfg))
		},
	}
	cfg.addFlags(cmd.Flags())
	cfg.addClusterFlags(cmd.Flags())
	cmd.Flags().Lookup("name").Usage = "name of this node" // it has a default of its own
	return cmd
}

func resetCommand() *cobra.Command {
	cfg := defaultConfig()
	var yes bool
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Stop this node's containers and remove everything clusterd made on this machine",
		Long: `Stop this node's containers and remove everything clusterd made on this machine:
processes, network namespaces, mounts, cgroups, network rules, links to logs and
the data directory, and what the node created in the directories of
--kubelet-root, --log-links and --pod-log-links. Volumes are unmounted, never emptied. If a step fails, the data
directory stays and the command can be repeated.

The machine remains a member of the cluster until you remove it there with
` + "`clusterctl members rm NAME`" + `.

On a terminal it asks for confirmation, unless --yes is given.`,
		Example: `  sudo clusterd reset
  sudo clusterd reset --data ` + DefaultDevData,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := needRoot(cmd); err != nil {
				return err
			}
			err := cfg.loadForReset(cmd.Flags(), func(err error) {
				fmt.Fprintf(cmd.ErrOrStderr(), "clusterd: %s cannot be used as it is (%v): what can be read of it counts, the rest is as by default\n", cfg.file(), err)
			})
			if err != nil {
				return err
			}
			if err := confirmReset(yes, cfg.Data, cmd.InOrStdin(), cmd.ErrOrStderr()); err != nil {
				return err
			}
			return reset(cmd.Context(), cfg, cmd.OutOrStdout())
		},
	}
	cfg.addFlags(cmd.Flags())
	showOnly(cmd, "data", "config", "cgroup-root", "kubelet-root", "log-links")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask for confirmation")
	return cmd
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  clusterd version",
		Args:    cobra.NoArgs,
		Run:     func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "clusterd", version()) },
	}
}

// startCommand starts a node that was prepared, and with the packaged unit at each boot.
func startCommand(data string) string {
	if filepath.Clean(data) == DefaultData {
		return "`systemctl enable --now clusterd` (now and at each boot) or `clusterd run`"
	}
	return "`clusterd run --data " + data + "`"
}

// start is what every command that touches the machine begins with.
func start(cmd *cobra.Command, cfg *Config) error {
	if err := needRoot(cmd); err != nil {
		return err
	}
	if err := cfg.load(cmd.Flags()); err != nil {
		return err
	}
	return errors.Join(cfg.checkMachine(), cfg.settleAddress(cmd.Context()))
}

func needRoot(cmd *cobra.Command) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("clusterd %s needs root: it makes namespaces, mounts and cgroups; run it with sudo", cmd.Name())
	}
	return nil
}

// run runs the node until ctx ends. onReady is called once the API answers.
func run(ctx context.Context, cfg Config, onReady func(context.Context, *Main) error) error {
	log, err := newLogger(cfg, cfg.withOwnLog(os.Stderr))
	if err != nil {
		return err
	}
	defer noteStopping(ctx, cfg, log)
	if err := cfg.keepFromProxy(); err != nil {
		return err
	}
	if role, err := nodedir.Dir(cfg.Data).Role(); err == nil && role == pki.Agent {
		return runAgentNode(ctx, cfg, log)
	}
	if err := cfg.switchFeatures(); err != nil {
		return err
	}
	m, err := New(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer m.close()
	return m.Run(ctx, onReady)
}

// retryUntil asks until the cluster answers or joinTimeout is over: a machine that
// boots together with its cluster may have to wait.
func retryUntil[T any](ctx context.Context, progress io.Writer, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	for reported := false; ; {
		res, err := ask(ctx)
		var no *join.Refusal
		if err == nil || errors.As(err, &no) {
			return res, err
		}
		if !reported {
			fmt.Fprintf(progress, "clusterd: %v; trying for up to %s …\n", err, joinTimeout)
			reported = true
		}
		select {
		case <-ctx.Done():
			return res, fmt.Errorf("could not join within %s: %w; is clusterd running there, and is its port open?", joinTimeout, err)
		case <-time.After(time.Second):
		}
	}
}

const joinTimeout = 30 * time.Second
