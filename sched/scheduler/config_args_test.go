package scheduler

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/sched/replicaset"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// What kube-scheduler writes out as its defaults is taken, and changes no decision.
func TestDefaultsWrittenOut(t *testing.T) {
	args := "apiVersion: kubescheduler.config.k8s.io/v1, kind: "
	cfg, err := ReadConfig([]byte(configHead + `
clientConnection: {acceptContentTypes: "", burst: 100, contentType: application/vnd.kubernetes.protobuf, kubeconfig: /etc/kubernetes/scheduler.conf, qps: 50}
leaderElection: {leaderElect: true, leaseDuration: 15s, renewDeadline: 10s, resourceLock: leases, resourceName: kube-scheduler, resourceNamespace: kube-system, retryPeriod: 2s}
enableContentionProfiling: true
enableProfiling: true
parallelism: 16
percentageOfNodesToScore: 0
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 10
profiles:
- schedulerName: default-scheduler
  pluginConfig:
  - {name: DefaultPreemption, args: {` + args + `DefaultPreemptionArgs, minCandidateNodesAbsolute: 100, minCandidateNodesPercentage: 10}}
  - {name: DynamicResources, args: {` + args + `DynamicResourcesArgs, filterTimeout: 10s, bindingTimeout: 10m0s}}
  - {name: InterPodAffinity, args: {` + args + `InterPodAffinityArgs, hardPodAffinityWeight: 1, ignorePreferredTermsOfExistingPods: false}}
  - {name: NodeAffinity, args: {` + args + `NodeAffinityArgs}}
  - {name: NodeResourcesBalancedAllocation, args: {` + args + `NodeResourcesBalancedAllocationArgs, resources: [{name: cpu, weight: 1}, {name: memory, weight: 1}]}}
  - {name: NodeResourcesFit, args: {` + args + `NodeResourcesFitArgs, scoringStrategy: {type: LeastAllocated, resources: [{name: cpu, weight: 1}, {name: memory, weight: 1}]}}}
  - {name: PodTopologySpread, args: {` + args + `PodTopologySpreadArgs, defaultingType: System}}
  - {name: VolumeBinding, args: {` + args + `VolumeBindingArgs, bindTimeoutSeconds: 600}}
  plugins:
    bind: {}
    filter: {}
    multiPoint:
      enabled:
      - {name: SchedulingGates, weight: 0}
      - {name: PrioritySort, weight: 0}
      - {name: NodeUnschedulable, weight: 0}
      - {name: NodeName, weight: 0}
      - {name: TaintToleration, weight: 3}
      - {name: NodeDeclaredFeatures, weight: 0}
      - {name: NodeAffinity, weight: 2}
      - {name: NodePorts, weight: 0}
      - {name: NodeResourcesFit, weight: 1}
      - {name: VolumeRestrictions, weight: 0}
      - {name: NodeVolumeLimits, weight: 0}
      - {name: VolumeBinding, weight: 0}
      - {name: VolumeZone, weight: 0}
      - {name: PodTopologySpread, weight: 2}
      - {name: InterPodAffinity, weight: 2}
      - {name: DynamicResources, weight: 2}
      - {name: DefaultPreemption, weight: 0}
      - {name: NodeResourcesBalancedAllocation, weight: 1}
      - {name: ImageLocality, weight: 1}
      - {name: DefaultBinder, weight: 0}
      - {name: GangScheduling, weight: 0}
    score: {}
`))
	if err != nil {
		t.Fatal(err)
	}
	p, standard := cfg.profiles[0], defaultProfile()
	for i, s := range standard.scores {
		if p.scores[i].Name != s.Name || p.scores[i].weight != s.weight {
			t.Errorf("%s has weight %d, not %s %d", p.scores[i].Name, p.scores[i].weight, s.Name, s.weight)
		}
	}
	if len(p.filters) != len(standard.filters) || len(p.scores) != len(standard.scores) || !p.preempts || p.args.volumeTimeout != volumeTimeout {
		t.Errorf("%d filters, %d scores, %+v", len(p.filters), len(p.scores), p.args)
	}
	if !slices.ContainsFunc(cfg.Ignored, func(s string) bool {
		return strings.HasPrefix(s, "profiles[0].plugins.multiPoint.enabled[5] (NodeDeclaredFeatures)")
	}) {
		t.Errorf("ignored are %q", cfg.Ignored)
	}
}

func oneProfile(t *testing.T, pluginConfig string) *profile {
	t.Helper()
	cfg, err := ReadConfig([]byte(configHead + "profiles: [{pluginConfig: [" + pluginConfig + "]}]"))
	if err != nil {
		t.Fatal(err)
	}
	return cfg.profiles[0]
}

func TestCandidatesOfAPreemption(t *testing.T) {
	for _, tt := range []struct {
		args        string
		nodes, want int
	}{
		{"", 5000, 100},
		{"minCandidateNodesPercentage: 10", 5000, 500},
		{"minCandidateNodesPercentage: 10", 500, 100},
		{"minCandidateNodesPercentage: 10, minCandidateNodesAbsolute: 0", 500, 50},
		{"minCandidateNodesPercentage: 1, minCandidateNodesAbsolute: 0", 50, 1},
		{"minCandidateNodesAbsolute: 7", 500, 7},
	} {
		p := oneProfile(t, "{name: DefaultPreemption, args: {"+tt.args+"}}")
		if got := p.args.candidates(tt.nodes); got != tt.want {
			t.Errorf("{%s}, %d nodes: %d, want %d", tt.args, tt.nodes, got, tt.want)
		}
	}
}

// Affinity that a profile adds counts for all its pods, beside their own.
func TestAddedAffinity(t *testing.T) {
	nodes := []*schedtest.NodeBuilder{schedtest.Node("a").Label("pool", "x"), schedtest.Node("b").Label("pool", "x").Label("disk", "ssd"), schedtest.Node("c").Label("disk", "ssd")}
	required := oneProfile(t, "{name: NodeAffinity, args: {addedAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: pool, operator: In, values: [x]}]}]}}}}")
	for _, tt := range []struct {
		pod       *schedtest.PodBuilder
		want, why string
	}{
		{schedtest.Pod("p"), "a b", "0/3 nodes are available: 1 node(s) didn't match scheduler-enforced node affinity"},
		{schedtest.Pod("p").Select("disk", "ssd"), "b", "0/3 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) didn't match scheduler-enforced node affinity"},
	} {
		s := world(nodes)
		s.profiles = profilesOf(required)
		v := runFilters(s, newPodInfo(tt.pod.Obj()))
		var names []string
		for _, n := range v.fit {
			names = append(names, n.name)
		}
		slices.Sort(names)
		if got := strings.Join(names, " "); got != tt.want || !strings.HasPrefix(v.explain(), tt.why) {
			t.Errorf("fits %q, want %q; %s", got, tt.want, v.explain())
		}
	}
	s := world(nodes)
	s.profiles = profilesOf(oneProfile(t, "{name: NodeAffinity, args: {addedAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 5, preference: {matchExpressions: [{key: pool, operator: DoesNotExist}]}}]}}}"))
	for range 20 {
		p := newPodInfo(schedtest.Pod("p").Obj())
		if got := best(s, p, runFilters(s, p).fit).name; got != "c" {
			t.Fatalf("chose %s, want c", got)
		}
	}
}

// Constraints of a profile count for replicas that have none, and stand for the spread
// by owner.
func TestDefaultConstraints(t *testing.T) {
	rs := schedtest.ReplicaSet("web", 3)
	hard := oneProfile(t, "{name: PodTopologySpread, args: {defaultingType: List, defaultConstraints: [{maxSkew: 1, topologyKey: rack, whenUnsatisfiable: DoNotSchedule}]}}")
	nodes := []*schedtest.NodeBuilder{schedtest.Node("a").Label("rack", "1"), schedtest.Node("b").Label("rack", "1"), schedtest.Node("c").Label("rack", "2")}
	for _, tt := range []struct {
		name string
		pod  *schedtest.PodBuilder
		want string
	}{
		{"a replica", schedtest.Pod("p").OwnedBy(rs, replicaset.Kind), "c"},
		{"one of another set", schedtest.Pod("p").OwnedBy(schedtest.ReplicaSet("db", 1), replicaset.Kind), "a b c"},
		{"a pod of its own", schedtest.Pod("p"), "a b c"},
		{"one with a constraint", schedtest.Pod("p").OwnedBy(rs, replicaset.Kind).Spread("rack", 9, corev1.DoNotSchedule, "a", "b"), "a b c"},
	} {
		s := world(nodes, schedtest.Pod("there").OwnedBy(rs, replicaset.Kind).On("a"))
		s.profiles = profilesOf(hard)
		var names []string
		for _, n := range runFilters(s, newPodInfo(tt.pod.Obj())).fit {
			names = append(names, n.name)
		}
		slices.Sort(names)
		if got := strings.Join(names, " "); got != tt.want {
			t.Errorf("%s fits %q, want %q", tt.name, got, tt.want)
		}
	}
	for args, want := range map[string]bool{"defaultingType: System": true, "defaultingType: List": false} {
		p := oneProfile(t, "{name: PodTopologySpread, args: {"+args+"}}")
		if got := slices.ContainsFunc(p.scores, func(s Score) bool { return s.Name == ownerSpread }); got != want {
			t.Errorf("%s: spread by owner %t", args, got)
		}
	}
	if got := oneProfile(t, "{name: VolumeBinding, args: {bindTimeoutSeconds: 7}}").args.volumeTimeout; got != 7*time.Second {
		t.Errorf("volumes are waited for %s, want 7s", got)
	}
}
