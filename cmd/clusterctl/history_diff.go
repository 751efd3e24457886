package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"time"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	utilcomp "k8s.io/kubectl/pkg/util/completion"
	"k8s.io/kubectl/pkg/util/templates"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/past"
)

func newHistoryDiffCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var from, to string
	var managed bool
	cmd := &cobra.Command{
		Use:   "diff (TYPE NAME | TYPE/NAME) [--from TIME] [--to TIME]",
		Short: "Show how an object differs between two points in time",
		Long: templates.LongDesc(`
			Show how an object differs between two points in time, as a unified diff of YAML.

			A point in time is a revision (1234), a relative time (-10m) or an absolute time
			(2006-01-02T15:04:05Z). The default of --from is just before the last change of the
			desired state (not of the status, nor of controllers' annotations); that of --to is
			now. If the object did not exist at one of them, everything is added or removed.`),
		Example: templates.Examples(`
			# Show what the last change did
			clusterctl history diff deploy/web

			# Show what happened in the last ten minutes
			clusterctl history diff deploy/web --from=-10m

			# Compare two revisions
			clusterctl history diff deploy/web --from 1200 --to 1234`),
		Args:              objectArgs,
		ValidArgsFunction: utilcomp.ResourceTypeAndNameCompletionFunc(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			for flag, text := range map[string]string{"--from": from, "--to": to} {
				if text == "" {
					continue
				}
				if _, err := past.ParseMoment(text); err != nil {
					return fmt.Errorf("%s %w", flag, err)
				}
			}
			o, err := newObjectPath(f, args)
			if err != nil {
				return err
			}
			if from == "" {
				if from, err = o.beforeLastChange(cmd.Context()); err != nil {
					return err
				}
			}
			text, err := o.diff(cmd.Context(), from, to, managed)
			if err != nil {
				return err
			}
			fmt.Fprint(streams.Out, text)
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "Point in time to compare from (default: before the last change)")
	cmd.Flags().StringVar(&to, "to", "", "Point in time to compare to (default: now)")
	cmd.Flags().BoolVar(&managed, "show-managed-fields", false, "Compare the managed fields too")
	return cmd
}

// beforeLastChange is the revision before the latest change of the intent.
func (o *objectPath) beforeLastChange(ctx context.Context) (string, error) {
	h, err := o.history(ctx, past.MaxChanges)
	if err != nil {
		return "", err
	}
	states, err := statesOf(h)
	if err != nil {
		return "", err
	}
	for i := len(h.Changes) - 1; i >= 0; i-- {
		c := h.Changes[i]
		before := c.Revision - 1
		if before < h.OldestRevision {
			break
		}
		if c.Type != past.Modified || states[i] == nil {
			return fmt.Sprint(before), nil
		}
		if states[i+1] != nil && !reflect.DeepEqual(intent(states[i]), intent(states[i+1])) {
			return fmt.Sprint(before), nil
		}
	}
	return "", fmt.Errorf("no change of what was asked for in %s is known since revision %d of %s: give --from", o, h.OldestRevision, h.OldestTime.UTC().Format(time.RFC3339))
}

// statesOf are the states before and after each change: state i is the one
// before change i, the last one the present. Nil: it did not exist, or is not
// known.
func statesOf(h *past.History) ([]*unstructured.Unstructured, error) {
	states := make([]*unstructured.Unstructured, 1, len(h.Changes)+1)
	if len(h.Base) > 0 {
		base, err := objectOf(h.Base)
		if err != nil {
			return nil, err
		}
		states[0] = base
	}
	for _, c := range h.Changes {
		if c.Type == past.Deleted || len(c.Object) == 0 {
			states = append(states, nil)
			continue
		}
		state, err := objectOf(c.Object)
		if err != nil {
			return nil, err
		}
		states = append(states, state)
	}
	return states, nil
}

// get reads the object as of a moment, "" for now; nil when it did not exist.
func (o *objectPath) get(ctx context.Context, moment string) (*unstructured.Unstructured, error) {
	path := o.path
	if moment != "" {
		path += "?" + url.Values{past.AtParameter: {moment}}.Encode()
	}
	u := &unstructured.Unstructured{}
	err := o.api.do(ctx, http.MethodGet, path, nil, &u.Object)
	if isCode(err, http.StatusNotFound) {
		return nil, nil
	}
	return u, err
}

// diff compares the object's YAML at two moments.
func (o *objectPath) diff(ctx context.Context, from, to string, managed bool) (string, error) {
	texts := make([]string, 2)
	for i, moment := range []string{from, to} {
		u, err := o.get(ctx, moment)
		if err != nil {
			return "", err
		}
		if u == nil {
			continue
		}
		if !managed {
			u.SetManagedFields(nil)
		}
		b, err := yaml.Marshal(u.Object)
		if err != nil {
			return "", err
		}
		texts[i] = string(b)
	}
	if texts[0] == "" && texts[1] == "" {
		return "", errors.New(o.String() + " existed at neither point in time")
	}
	out := diff.Diff(o.String()+" at "+from, []byte(texts[0]), o.String()+" at "+orNow(to), []byte(texts[1]))
	_, out, _ = bytes.Cut(out, []byte("\n")) // the line that names the command
	return string(out), nil
}

func orNow(moment string) string {
	if moment == "" {
		return "now"
	}
	return moment
}
