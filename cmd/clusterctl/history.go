package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	utilcomp "k8s.io/kubectl/pkg/util/completion"
	"k8s.io/kubectl/pkg/util/templates"

	"github.com/clusterd/clusterd/apis/past"
)

func newHistoryCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out string
	limit := past.DefaultChanges
	cmd := &cobra.Command{
		Use:   "history (TYPE NAME | TYPE/NAME)",
		Short: "Show the changes of an object: who, when, what",
		Long: templates.LongDesc(`
			Show the changes of one object, one line each, oldest first: the revision, the
			time, who made it, and what it changed. Deletions are shown too, also of an
			object that does not exist any more.

			The servers' configuration bounds the history by age and size; older changes are not
			shown. Anybody who may get an object may see its history. Values of Secrets are not
			shown.`),
		Example: templates.Examples(`
			# Show what happened to a Deployment
			clusterctl history deploy/web

			# Show every field that the last five changes touched
			clusterctl history deploy/web --limit 5 -o wide

			# Show what the Deployment was before revision 1234
			clusterctl get deploy/web -o yaml --at 1233`),
		Args:              objectArgs,
		ValidArgsFunction: utilcomp.ResourceTypeAndNameCompletionFunc(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			wide := out == "wide"
			if wide {
				out = ""
			}
			if err := output(out).validate(); err != nil {
				return errors.New("--output must be json, yaml or wide, not " + strconv.Quote(out))
			}
			if limit < 1 || limit > past.MaxChanges {
				return fmt.Errorf("--limit %d: give a number between 1 and %d", limit, past.MaxChanges)
			}
			o, err := newObjectPath(f, args)
			if err != nil {
				return err
			}
			h, err := o.history(cmd.Context(), limit)
			if err != nil {
				return err
			}
			return output(out).print(streams.Out, h, func(w io.Writer) error { return historyTable(w, streams.ErrOut, h, wide) })
		},
	}
	cmd.Flags().StringVarP(&out, "output", "o", "", "One of: json, yaml, wide")
	cmd.Flags().IntVar(&limit, "limit", limit, "Maximum number of changes to show, latest ones")
	cmd.AddCommand(newHistoryDiffCommand(f, streams))
	return cmd
}

// objectArgs wants one object: TYPE NAME or TYPE/NAME.
func objectArgs(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 2 && !strings.Contains(args[0]+args[1], "/"):
		return nil
	case len(args) == 1 && strings.Count(args[0], "/") == 1:
		if resource, name, _ := strings.Cut(args[0], "/"); resource != "" && name != "" {
			return nil
		}
	}
	return cmdutil.UsageErrorf(cmd, "give one object, as TYPE/NAME (deploy/web) or TYPE NAME (deploy web)")
}

// objectPath is where the API serves one object, which need not exist.
type objectPath struct {
	api      *api
	path     string
	resource schema.GroupResource
	name     string
}

func newObjectPath(f cmdutil.Factory, args []string) (*objectPath, error) {
	resource, name := args[0], ""
	if len(args) == 2 {
		name = args[1]
	} else {
		resource, name, _ = strings.Cut(args[0], "/")
	}
	namespace, _, err := f.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return nil, err
	}
	mapper, err := f.ToRESTMapper()
	if err != nil {
		return nil, err
	}
	mapping, err := mappingFor(mapper, resource)
	if err != nil {
		return nil, err
	}
	a, err := newAPI(f)
	if err != nil {
		return nil, err
	}
	gvr := mapping.Resource
	elements := []string{"/apis", gvr.Group, gvr.Version}
	if gvr.Group == "" {
		elements = []string{"/api", gvr.Version}
	}
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		elements = append(elements, "namespaces", url.PathEscape(namespace))
	}
	elements = append(elements, gvr.Resource, url.PathEscape(name))
	return &objectPath{api: a, path: strings.Join(elements, "/"), resource: gvr.GroupResource(), name: name}, nil
}

// mappingFor finds what a user calls a resource: pods, po, deploy.apps,
// deployments.v1.apps.
func mappingFor(mapper meta.RESTMapper, text string) (*meta.RESTMapping, error) {
	full, group := schema.ParseResourceArg(strings.ToLower(text))
	var kind schema.GroupVersionKind
	err := errors.New("not tried")
	if full != nil {
		kind, err = mapper.KindFor(*full)
	}
	if err != nil {
		kind, err = mapper.KindFor(group.WithVersion(""))
	}
	if meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("the server doesn't have a resource type %q; `clusterctl api-resources` lists those it has", text)
	}
	if err != nil {
		return nil, err
	}
	return mapper.RESTMapping(kind.GroupKind(), kind.Version)
}

// String names the object as kubectl does: deployments.apps/web.
func (o *objectPath) String() string { return o.resource.String() + "/" + o.name }

// history asks for the latest changes.
func (o *objectPath) history(ctx context.Context, limit int) (*past.History, error) {
	var h past.History
	query := url.Values{past.HistoryParameter: {strconv.Itoa(limit)}}
	if err := o.api.do(ctx, http.MethodGet, o.path+"?"+query.Encode(), nil, &h); err != nil {
		return nil, err
	}
	if h.NewestRevision == 0 { // it has sent the object
		return nil, errors.New("the server keeps no history: it is not a clusterd server, or an older one than this clusterctl (compare with: clusterctl version)")
	}
	return &h, nil
}

// objectOf decodes a state in a history; an empty object for none.
func objectOf(raw json.RawMessage) (*unstructured.Unstructured, error) {
	u := &unstructured.Unstructured{Object: map[string]any{}}
	if len(raw) == 0 {
		return u, nil
	}
	return u, json.Unmarshal(raw, &u.Object)
}

// summarized is how many fields a line of the table names.
const summarized = 3

func historyTable(w, notes io.Writer, h *past.History, wide bool) error {
	var rows [][]string
	before, err := objectOf(h.Base)
	if err != nil {
		return err
	}
	known := len(h.Base) > 0
	for _, c := range h.Changes {
		after, err := objectOf(c.Object)
		if err != nil {
			return err
		}
		what, change := "", strings.ToLower(c.Type)
		switch {
		case c.Type == past.Modified && !known:
			what = "<not known: the state before has left the history>"
		case c.Type == past.Modified:
			fields := fieldChanges(before, after)
			what = summary(fields, after.GetKind() == "Secret", wide)
			if len(fields) > 0 && fields[0].inStatus() {
				change = "status"
			}
		}
		who := orUnknown(whoMade(c, before, after))
		rows = append(rows, []string{strconv.FormatInt(c.Revision, 10), c.Time.UTC().Format(time.RFC3339), change, who, cmp.Or(c.Server, "-"), what})
		before, known = after, len(c.Object) > 0
		if c.Type == past.Deleted {
			before, known = &unstructured.Unstructured{Object: map[string]any{}}, false
		}
	}
	if len(rows) > 0 {
		if err := printTable(w, []string{"REVISION", "TIME", "CHANGE", "USER", "SERVER", "FIELDS"}, rows); err != nil {
			return err
		}
	}
	switch begin := fmt.Sprintf("revision %d of %s", h.OldestRevision, h.OldestTime.UTC().Format(time.RFC3339)); {
	case h.More:
		fmt.Fprintln(notes, "Older changes are left out; --limit shows more.")
	case len(rows) == 0:
		fmt.Fprintf(notes, "Unchanged since the history begins, with %s.\n", begin)
	case h.Changes[0].Type != past.Added:
		fmt.Fprintf(notes, "Older changes are not known: the history begins with %s.\n", begin)
	}
	return nil
}

func orUnknown(s string) string {
	if s == "" {
		return "<unknown>"
	}
	return s
}

func summary(fields []fieldChange, secret, all bool) string {
	if len(fields) == 0 {
		return "<nothing visible>"
	}
	var texts []string
	for i, c := range fields {
		if i == summarized && !all {
			texts = append(texts, fmt.Sprintf("%d more", len(fields)-summarized))
			break
		}
		texts = append(texts, c.text(secret))
	}
	return strings.Join(texts, "; ")
}

// whoMade names who made a change: the user that the server recorded, and the
// field manager where that says more, such as the name a CI job gives itself.
func whoMade(c past.Change, before, after *unstructured.Unstructured) string {
	manager := ""
	if c.Type != past.Deleted {
		manager = managerOf(before, after)
	}
	_, agent := past.SplitOrigin(c.Origin)
	switch {
	case c.Origin == "":
		return manager
	case manager == "", manager == agent, agent == "":
		return c.Origin
	}
	return c.Origin + " (" + manager + ")"
}

// managerOf is the field manager whose entry is newer in after than in before.
func managerOf(before, after *unstructured.Unstructured) string {
	type entry struct{ manager, operation, subresource string }
	times := map[entry]time.Time{}
	for _, m := range before.GetManagedFields() {
		if m.Time != nil {
			times[entry{m.Manager, string(m.Operation), m.Subresource}] = m.Time.Time
		}
	}
	var newest time.Time
	name := ""
	for _, m := range after.GetManagedFields() {
		if m.Time == nil || m.Time.Time.Equal(times[entry{m.Manager, string(m.Operation), m.Subresource}]) || m.Time.Time.Before(newest) {
			continue
		}
		newest, name = m.Time.Time, m.Manager
	}
	return name
}
