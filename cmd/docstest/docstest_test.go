package docstest

import (
	"fmt"
	"testing"

	"github.com/spf13/cobra"
)

func TestFind(t *testing.T) {
	page := "clusterd outside\n```console\n" +
		"n1$ sudo clusterd init --name 'a b' && sudo systemctl start clusterd   # clusterd remark\n" +
		"$ ssh n1 \"$(clusterctl token create --ttl 10m)\" | clusterd join x \\\n  --token-file - >log\n" +
		"# clusterd is begun\nA=b bin/clusterctl get pods; kubectl get nodes\n" +
		"for n in 1 2; do clusterctl image pin x; done\n" +
		"```\nclusterd outside\n"
	var got []string
	for _, s := range find("p", page, []string{"clusterd", "clusterctl"}) {
		got = append(got, fmt.Sprintf("%d %q", s.Line, s.Args))
	}
	want := []string{
		`3 ["clusterd" "init" "--name" "a b"]`,
		`4 ["clusterctl" "token" "create" "--ttl" "10m"]`,
		`4 ["clusterd" "join" "x" "--token-file" "-"]`,
		`7 ["clusterctl" "get" "pods"]`,
		`8 ["clusterctl" "image" "pin" "x"]`,
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("found\n%v, want\n%v", got, want)
	}
}

func TestResolve(t *testing.T) {
	tree := func() *cobra.Command {
		root := &cobra.Command{Use: "prog"}
		group := &cobra.Command{Use: "group", Run: func(*cobra.Command, []string) {}}
		leaf := &cobra.Command{Use: "leaf", Args: cobra.ExactArgs(1), Run: func(*cobra.Command, []string) {}}
		leaf.Flags().Int("number", 0, "")
		group.AddCommand(leaf)
		root.AddCommand(group)
		return root
	}
	for _, tt := range []struct {
		args []string
		ok   bool
	}{
		{[]string{"group", "leaf", "x", "--number", "3"}, true},
		{[]string{"group", "leaf", "x", "--number", "NUMBER"}, true},
		{[]string{"group", "leaf", "x", "--number", "three"}, false},
		{[]string{"group", "leaf", "x", "--nubmer", "3"}, false},
		{[]string{"group", "leaf"}, false},
		{[]string{"group", "laef", "x"}, false},
		{[]string{"gruop"}, false},
	} {
		if err := Resolve(tree(), append([]string{"prog"}, tt.args...)); (err == nil) != tt.ok {
			t.Errorf("%q: %v", tt.args, err)
		}
	}
}
