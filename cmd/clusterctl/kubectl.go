package main

import (
	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/kubectl/pkg/cmd/annotate"
	"k8s.io/kubectl/pkg/cmd/apiresources"
	"k8s.io/kubectl/pkg/cmd/apply"
	"k8s.io/kubectl/pkg/cmd/attach"
	"k8s.io/kubectl/pkg/cmd/auth"
	"k8s.io/kubectl/pkg/cmd/autoscale"
	"k8s.io/kubectl/pkg/cmd/certificates"
	"k8s.io/kubectl/pkg/cmd/clusterinfo"
	"k8s.io/kubectl/pkg/cmd/completion"
	"k8s.io/kubectl/pkg/cmd/config"
	"k8s.io/kubectl/pkg/cmd/cp"
	"k8s.io/kubectl/pkg/cmd/create"
	"k8s.io/kubectl/pkg/cmd/debug"
	"k8s.io/kubectl/pkg/cmd/delete"
	"k8s.io/kubectl/pkg/cmd/describe"
	"k8s.io/kubectl/pkg/cmd/diff"
	"k8s.io/kubectl/pkg/cmd/drain"
	"k8s.io/kubectl/pkg/cmd/edit"
	"k8s.io/kubectl/pkg/cmd/events"
	"k8s.io/kubectl/pkg/cmd/exec"
	"k8s.io/kubectl/pkg/cmd/explain"
	"k8s.io/kubectl/pkg/cmd/expose"
	"k8s.io/kubectl/pkg/cmd/get"
	"k8s.io/kubectl/pkg/cmd/kustomize"
	"k8s.io/kubectl/pkg/cmd/label"
	"k8s.io/kubectl/pkg/cmd/logs"
	"k8s.io/kubectl/pkg/cmd/options"
	"k8s.io/kubectl/pkg/cmd/patch"
	"k8s.io/kubectl/pkg/cmd/portforward"
	"k8s.io/kubectl/pkg/cmd/proxy"
	"k8s.io/kubectl/pkg/cmd/replace"
	"k8s.io/kubectl/pkg/cmd/rollout"
	"k8s.io/kubectl/pkg/cmd/run"
	"k8s.io/kubectl/pkg/cmd/scale"
	"k8s.io/kubectl/pkg/cmd/set"
	"k8s.io/kubectl/pkg/cmd/taint"
	"k8s.io/kubectl/pkg/cmd/top"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/cmd/wait"
	utilcomp "k8s.io/kubectl/pkg/util/completion"
	"k8s.io/kubectl/pkg/util/templates"
)

// kubectlCommands are kubectl's, grouped by what a user is about to do. There
// are no plugins: kubectl-* programs on the PATH belong to kubectl.
func kubectlCommands(f cmdutil.Factory, streams genericiooptions.IOStreams) templates.CommandGroups {
	getCmd := get.NewCmdGet(name, f, streams)
	getCmd.ValidArgsFunction = utilcomp.ResourceTypeAndNameCompletionFunc(f)
	debugCmd := debug.NewCmdDebug(f, streams)
	debugCmd.ValidArgsFunction = utilcomp.ResourceTypeAndNameCompletionFunc(f)
	return templates.CommandGroups{
		{
			Message: "Object Commands:",
			Commands: []*cobra.Command{
				getCmd,
				describe.NewCmdDescribe(name, f, streams),
				apply.NewCmdApply(name, f, streams),
				create.NewCmdCreate(f, streams),
				edit.NewCmdEdit(f, streams),
				delete.NewCmdDelete(f, streams),
				diff.NewCmdDiff(f, streams),
				patch.NewCmdPatch(f, streams),
				replace.NewCmdReplace(f, streams),
				label.NewCmdLabel(f, streams),
				annotate.NewCmdAnnotate(name, f, streams),
				wait.NewCmdWait(f, streams),
				explain.NewCmdExplain(name, f, streams),
				kustomize.NewCmdKustomize(streams),
			},
		},
		{
			Message: "Workload Commands:",
			Commands: []*cobra.Command{
				rollout.NewCmdRollout(name, f, streams),
				scale.NewCmdScale(f, streams),
				autoscale.NewCmdAutoscale(f, streams),
				run.NewCmdRun(f, streams),
				expose.NewCmdExposeService(f, streams),
				set.NewCmdSet(f, streams),
			},
		},
		{
			Message: "Troubleshooting Commands:",
			Commands: []*cobra.Command{
				logs.NewCmdLogs(f, streams),
				exec.NewCmdExec(f, streams),
				attach.NewCmdAttach(f, streams),
				portforward.NewCmdPortForward(f, streams),
				cp.NewCmdCp(f, streams),
				debugCmd,
				events.NewCmdEvents(f, streams),
				top.NewCmdTop(f, streams),
				proxy.NewCmdProxy(f, streams),
			},
		},
		{
			Message: "Node and Access Commands:",
			Commands: []*cobra.Command{
				drain.NewCmdCordon(f, streams),
				drain.NewCmdUncordon(f, streams),
				drain.NewCmdDrain(f, streams),
				taint.NewCmdTaint(f, streams),
				clusterinfo.NewCmdClusterInfo(f, streams),
				auth.NewCmdAuth(f, streams),
				certificates.NewCmdCertificate(f, streams),
			},
		},
	}
}

// otherCommands are about clusterctl itself and the server's vocabulary.
func otherCommands(f cmdutil.Factory, streams genericiooptions.IOStreams) []*cobra.Command {
	return []*cobra.Command{
		apiresources.NewCmdAPIResources(f, streams),
		apiresources.NewCmdAPIVersions(f, streams),
		completion.NewCmdCompletion(streams.Out, "# shell completion of clusterctl\n"),
		config.NewCmdConfig(f, clientcmd.NewDefaultPathOptions(), streams),
		options.NewCmdOptions(streams.Out),
		newVersionCommand(f, streams),
	}
}
