package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/tools/clientcmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"
	"sigs.k8s.io/yaml"
)

// release is set by the build: -ldflags "-X main.release=v1.2.3".
var release string

// version is the release, or what the build knows of the source instead.
func version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "v0.0.0-dev"
}

// kubernetesVersion is that of the libraries this program is made of.
func kubernetesVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			if dep.Path == "k8s.io/kubectl" {
				return "v1" + dep.Version[len("v0"):]
			}
		}
	}
	return "unknown"
}

// versions is what -o json and yaml print, with kubectl's field names.
type versions struct {
	ClientVersion     apiversion.Info  `json:"clientVersion"`
	KubernetesVersion string           `json:"kubernetesVersion"`
	ServerVersion     *apiversion.Info `json:"serverVersion,omitempty"`
}

func newVersionCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var clientOnly bool
	var output string
	cmd := &cobra.Command{
		Use:                   "version",
		DisableFlagsInUseLine: true,
		Short:                 "Print the versions of clusterctl and of the server",
		Long:                  "Print the version of clusterctl, of the Kubernetes API it speaks, and of the server of the current context.",
		Example: templates.Examples(`
			# Print both versions
			clusterctl version

			# Print the version of clusterctl; no server is needed
			clusterctl version --client`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "" && output != "json" && output != "yaml" {
				return fmt.Errorf("--output must be json or yaml, not %q", output)
			}
			v := versions{
				ClientVersion: apiversion.Info{
					GitVersion: version(), GoVersion: runtime.Version(), Compiler: runtime.Compiler,
					Platform: runtime.GOOS + "/" + runtime.GOARCH,
				},
				KubernetesVersion: kubernetesVersion(),
			}
			var serverErr error
			if !clientOnly {
				v.ServerVersion, serverErr = serverVersion(f)
			}
			if err := printVersions(streams, v, output); err != nil {
				return err
			}
			return serverErr
		},
	}
	cmd.Flags().BoolVar(&clientOnly, "client", false, "Print the version of clusterctl only; no server is needed")
	cmd.Flags().StringVarP(&output, "output", "o", "", "One of: json, yaml")
	return cmd
}

func serverVersion(f cmdutil.Factory) (*apiversion.Info, error) {
	client, err := f.ToDiscoveryClient()
	if clientcmd.IsEmptyConfig(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	client.Invalidate()
	return client.ServerVersion()
}

func printVersions(streams genericiooptions.IOStreams, v versions, output string) error {
	var b []byte
	var err error
	switch output {
	case "json":
		b, err = json.MarshalIndent(v, "", "  ")
	case "yaml":
		b, err = yaml.Marshal(v)
	default:
		fmt.Fprintf(streams.Out, "Client Version: %s (Kubernetes %s)\n", v.ClientVersion.GitVersion, v.KubernetesVersion)
		if v.ServerVersion != nil {
			fmt.Fprintf(streams.Out, "Server Version: %s\n", v.ServerVersion.GitVersion)
		}
		return nil
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(streams.Out, string(b))
	return err
}
