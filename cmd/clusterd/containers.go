package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/clusterd/clusterd/agent/checkpoint"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
)

// podmonTimeout is how long podmon may take to answer.
const podmonTimeout = 20 * time.Second

func containersCommand() *cobra.Command {
	data, output := DefaultData, "table"
	var uid, name string
	cmd := &cobra.Command{
		Use:     "containers",
		Aliases: []string{"ps"},
		Short:   "List the containers of this node, also while clusterd is down",
		Long: `List the containers of this node, also while clusterd is down.

The list comes from podmon, which supervises the containers, not from the cluster: each
pod's sandbox, and the containers that run or have exited and are kept for their exit
codes and logs. Nothing is changed, and nothing is started. A pod that this node started
by itself because no API answered is unconfirmed until one does.`,
		Example: `  sudo clusterd containers
  sudo clusterd containers --pod default/web-1 -o wide

  # The last lines of a container, without an API:
  sudo tail "$(sudo clusterd containers --pod default/web-1 -o json | jq -r '.[] | select(.name == "main") | .logPath')"`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains([]string{"table", "wide", "json"}, output) {
				return fmt.Errorf("--output %q: table, wide or json", output)
			}
			if os.Geteuid() != 0 {
				return errors.New("clusterd containers needs root, because podmon answers root alone: run it with sudo")
			}
			list, err := runtimeRecords(cmd.Context(), data)
			if err != nil {
				return err
			}
			list = slices.DeleteFunc(list, func(h pod.RuntimeRecord) bool {
				return uid != "" && h.PodUID != uid || name != "" && h.Pod != name && h.Namespace+"/"+h.Pod != name
			})
			if output == "json" {
				return printJSON(cmd.OutOrStdout(), list)
			}
			return printRecords(cmd.OutOrStdout(), list, output == "wide", time.Now())
		},
	}
	f := cmd.Flags()
	f.StringVar(&data, "data", data, "data directory of the node")
	f.StringVar(&uid, "pod-uid", "", "only of the pod with this UID")
	f.StringVar(&name, "pod", "", "only of pods with this name: NAME or NAMESPACE/NAME")
	f.StringVarP(&output, "output", "o", output, "table, wide or json")
	return cmd
}

// runtimeRecords asks the podmon of a data directory.
func runtimeRecords(ctx context.Context, data string) ([]pod.RuntimeRecord, error) {
	if st, err := os.Stat(data); err != nil || !st.IsDir() {
		return nil, fmt.Errorf("--data %q: there is no such directory: name the one that `clusterd run` was given", data)
	}
	ctx, cancel := context.WithTimeout(ctx, podmonTimeout)
	defer cancel()
	dir := nodedir.Dir(data).Path("podmon")
	sandboxes, containers, err := runtime.Look(ctx, dir)
	if errors.Is(err, runtime.ErrNoPodmon) {
		return nil, fmt.Errorf("no podmon serves in %s, so no container of this node runs: start clusterd, or name another folder with --data", dir)
	}
	if err != nil {
		return nil, err
	}
	list := pod.RuntimeRecords(sandboxes, containers)
	started, err := checkpoint.ReadUnconfirmed(nodedir.Dir(data).Path(checkpointDir))
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].Unconfirmed = slices.Contains(started.Pods, types.UID(list[i].PodUID))
	}
	return list, nil
}

func printJSON(w io.Writer, list []pod.RuntimeRecord) error {
	if list == nil {
		list = []pod.RuntimeRecord{}
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(list)
}

// shortID is how much of an id a table shows; it names the thing well enough.
const shortID = 12

func printRecords(out io.Writer, list []pod.RuntimeRecord, wide bool, now time.Time) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	head := []string{"NAMESPACE", "POD", "CONTAINER", "TYPE", "ATTEMPT", "STATE", "PID", "AGE", "LOG"}
	if wide {
		head = append(head, "ID", "SANDBOX", "POD-UID", "IMAGE", "CGROUP")
	}
	fmt.Fprintln(w, strings.Join(head, "\t"))
	for _, h := range list {
		pid := ""
		if h.Running {
			pid = strconv.Itoa(h.Pid)
		}
		age := ""
		if h.StartedAt != nil {
			age = duration.HumanDuration(now.Sub(*h.StartedAt))
		}
		row := []string{h.Namespace, h.Pod, h.Name, h.Type, strconv.Itoa(int(h.Attempt)), stateWord(h), pid, age, h.LogPath}
		if wide {
			row = append(row, h.ID[:min(len(h.ID), shortID)], h.SandboxID[:min(len(h.SandboxID), shortID)], h.PodUID, h.Image, h.CgroupParent)
		}
		for i := range row {
			if row[i] == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

// stateWord is the state in a word or two: "Running", "Exited(137,OOMKilled)".
func stateWord(h pod.RuntimeRecord) string {
	switch {
	case h.Running && h.Unconfirmed:
		return "Running(unconfirmed)"
	case h.Running:
		return "Running"
	case h.ExitCode == nil:
		return "Exited"
	case h.Reason != "":
		return fmt.Sprintf("Exited(%d,%s)", *h.ExitCode, h.Reason)
	}
	return fmt.Sprintf("Exited(%d)", *h.ExitCode)
}
