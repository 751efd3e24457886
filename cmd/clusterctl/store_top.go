package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"
)

// storeLoad is how much somebody writes, or is written somewhere.
type storeLoad struct {
	Writes            int64   `json:"writes"`
	Bytes             int64   `json:"bytes"`
	WritesPerSecond1m float64 `json:"writesPerSecond1m"`
	BytesPerSecond1m  float64 `json:"bytesPerSecond1m"`
	WritesPerSecond5m float64 `json:"writesPerSecond5m"`
}

// storeHistory is how full the history of changes is; ages in milliseconds.
type storeHistory struct {
	Bytes    int64 `json:"bytes"`
	MaxBytes int64 `json:"maxBytes"`
	Age      int64 `json:"ageMillis"`
	MaxAge   int64 `json:"maxAgeMillis"`
}

// storeTop is the answer of GET /clusterd/v1/store/top.
type storeTop struct {
	Writers []struct {
		Origin string `json:"origin"`
		storeLoad
		HistoryBytes int64 `json:"historyBytes"`
		HeldBack     bool  `json:"heldBack"`
	} `json:"writers"`
	Folders []struct {
		Folder string `json:"folder"`
		Live   struct {
			Keys  int64 `json:"keys"`
			Bytes int64 `json:"bytes"`
		} `json:"live"`
		Quota int64 `json:"quota"`
		storeLoad
	} `json:"folders"`
	Live struct {
		Keys  int64 `json:"keys"`
		Bytes int64 `json:"bytes"`
	} `json:"live"`
	Quota   int64        `json:"quotaBytes"`
	History storeHistory `json:"history"`
}

func newStoreTopCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	limit := 10
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the largest writers and consumers of space of the store",
		Long: templates.LongDesc(`
			Show the users, nodes and controllers that write most to the store, each with its
			program and the rates of the last one and five minutes, and the kinds and namespaces
			that take the most space.

			HISTORY is a writer's share of the history of changes, from which watches resume. A
			writer that would fill it is throttled: its writes are refused for a while
			(storeWriterWindow).

			Writes are counted since the last snapshot that the contacted server took before it
			started; every server has seen the same writes. It works without a leader.`),
		Example: templates.Examples(`
			# Find the noisy client
			clusterctl store top

			# Show the three largest and noisiest only
			clusterctl store top --limit 3`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if limit < 1 {
				return fmt.Errorf("--limit %d: give a number above 0", limit)
			}
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			var raw json.RawMessage
			if err := a.do(cmd.Context(), http.MethodGet, pathOf("store", "top"), nil, &raw); err != nil {
				return fmt.Errorf("load of the store: %w", err)
			}
			var top storeTop
			if err := json.Unmarshal(raw, &top); err != nil {
				return fmt.Errorf("load of the store: %w", err)
			}
			return out.print(streams.Out, raw, func(w io.Writer) error { return topTables(w, &top, limit) })
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	cmd.Flags().IntVar(&limit, "limit", limit, "Maximum number of writers and places to show")
	return cmd
}

func topTables(w io.Writer, top *storeTop, limit int) error {
	var rows [][]string
	for i, writer := range top.Writers {
		if i == limit {
			break
		}
		held := "no"
		if writer.HeldBack {
			held = "yes"
		}
		row := append([]string{orUnknown(writer.Origin)}, writer.cells()...)
		rows = append(rows, append(row, top.History.share(writer.HistoryBytes), held))
	}
	if err := printTable(w, []string{"WRITER", "WRITES/S 1M", "WRITES/S 5M", "BYTES/S 1M", "WRITES", "WRITTEN", "HISTORY", "HELD BACK"}, rows); err != nil {
		return err
	}
	fmt.Fprintln(w)
	rows = nil
	for i, folder := range top.Folders {
		if i == limit {
			break
		}
		kind, namespace := placeOf(folder.Folder)
		quota := "-"
		if folder.Quota > 0 {
			quota = size(folder.Quota)
		}
		rows = append(rows, append([]string{kind, namespace, strconv.FormatInt(folder.Live.Keys, 10), size(folder.Live.Bytes), quota}, folder.cells()...))
	}
	if err := printTable(w, []string{"KIND", "NAMESPACE", "OBJECTS", "SIZE", "QUOTA", "WRITES/S 1M", "WRITES/S 5M", "BYTES/S 1M", "WRITES", "WRITTEN"}, rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nIn all %d objects, %s of %s.\n%s", top.Live.Keys, size(top.Live.Bytes), size(top.Quota), top.History.line())
	return err
}

// share is a part of what the history may hold.
func (h storeHistory) share(bytes int64) string {
	if h.MaxBytes == 0 {
		return "-" // an older server
	}
	return fmt.Sprintf("%.0f %%", 100*float64(bytes)/float64(h.MaxBytes))
}

// line says how far the history reaches back, and why no further.
func (h storeHistory) line() string {
	if h.MaxBytes == 0 {
		return ""
	}
	why := ""
	if h.Age < h.MaxAge && h.Bytes > h.MaxBytes/10*9 {
		why = ": it is full; raise storeHistorySize or find who writes so much"
	}
	age := time.Duration(h.Age) * time.Millisecond
	return fmt.Sprintf("The history has %s of %s and reaches %s back, of %s%s.\n", size(h.Bytes), size(h.MaxBytes),
		duration.HumanDuration(age), duration.HumanDuration(time.Duration(h.MaxAge)*time.Millisecond), why)
}

func (l storeLoad) cells() []string {
	return []string{
		fmt.Sprintf("%.2f", l.WritesPerSecond1m), fmt.Sprintf("%.2f", l.WritesPerSecond5m),
		size(int64(l.BytesPerSecond1m)), strconv.FormatInt(l.Writes, 10), size(l.Bytes),
	}
}

// placeOf is what a folder of the store holds: /registry/core/pods/default/ are
// pods in the namespace default. Others are the cluster's own records.
func placeOf(folder string) (kind, namespace string) {
	rest, ok := strings.CutPrefix(folder, "/registry/")
	if !ok {
		return folder, "-"
	}
	parts := strings.Split(strings.Trim(rest, "/"), "/")
	if len(parts) < 2 {
		return folder, "-"
	}
	kind, namespace = parts[1], "-"
	if parts[0] != "core" {
		kind += "." + parts[0]
	}
	if len(parts) > 2 {
		namespace = strings.Join(parts[2:], "/")
	}
	return kind, namespace
}
