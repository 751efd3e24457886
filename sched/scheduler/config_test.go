package scheduler

import (
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/sched/schedtest"
)

const configHead = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"

func TestReadConfig(t *testing.T) {
	all := func(change func(*plugins)) plugins {
		p := defaultPlugins()
		change(&p)
		return p
	}
	for _, tt := range []struct {
		name, yaml string
		want       map[string]plugins // by schedulerName
	}{
		{"nothing", "", map[string]plugins{Name: defaultPlugins()}},
		{"one without a name", "profiles: [{}]", map[string]plugins{Name: defaultPlugins()}},
		{"two", "profiles: [{schedulerName: default-scheduler}, {schedulerName: other, plugins: {postFilter: {disabled: [{name: '*'}]}}}]",
			map[string]plugins{Name: defaultPlugins(), "other": all(func(p *plugins) { p.preempts = false })}},
		{"a weight", "profiles: [{plugins: {score: {enabled: [{name: InterPodAffinity, weight: 7}]}}}]",
			map[string]plugins{Name: all(func(p *plugins) { p.weights["InterPodAffinity"] = 7 })}},
		{"a weight left out is 1", "profiles: [{plugins: {multiPoint: {enabled: [{name: TaintToleration}]}}}]",
			map[string]plugins{Name: all(func(p *plugins) { p.weights["TaintToleration"] = 1 })}},
		{"off at one point", "profiles: [{plugins: {score: {disabled: [{name: TaintToleration}]}}}]",
			map[string]plugins{Name: all(func(p *plugins) { p.weights["TaintToleration"] = 0 })}},
		{"off at all points", "profiles: [{plugins: {multiPoint: {disabled: [{name: TaintToleration}]}}}]",
			map[string]plugins{Name: all(func(p *plugins) { p.weights["TaintToleration"], p.filters["TaintToleration"] = 0, false })}},
		{"all but one", "profiles: [{plugins: {score: {disabled: [{name: '*'}], enabled: [{name: NodeResourcesFit, weight: 5}]}}}]",
			map[string]plugins{Name: all(func(p *plugins) { clear(p.weights); p.weights[resourcesFit] = 5 })}},
		{"off everywhere, on at one point", "profiles: [{plugins: {multiPoint: {disabled: [{name: InterPodAffinity}]}, score: {enabled: [{name: InterPodAffinity, weight: 3}]}}}]",
			map[string]plugins{Name: all(func(p *plugins) { p.weights["InterPodAffinity"], p.filters["InterPodAffinity"] = 3, false })}},
		{"absent ones may be off, fixed ones on", "profiles: [{plugins: {multiPoint: {disabled: [{name: NodeDeclaredFeatures}], enabled: [{name: DefaultBinder}]}}}]",
			map[string]plugins{Name: defaultPlugins()}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg, err := ReadConfig([]byte(configHead + tt.yaml))
			if err != nil {
				t.Fatal(err)
			}
			if len(cfg.profiles) != len(tt.want) {
				t.Errorf("%d profiles", len(cfg.profiles))
			}
			for _, p := range cfg.profiles {
				want, ok := tt.want[p.name]
				if !ok {
					t.Fatalf("profile %q", p.name)
				}
				for i := range filters {
					name := filters[i].Name
					if got := slices.ContainsFunc(p.filters, func(f Filter) bool { return f.Name == name }); got != want.filters[name] {
						t.Errorf("%s: filter %s is %t", p.name, name, got)
					}
				}
				for i := range scores {
					name, got := scores[i].Name, int64(0)
					for _, s := range p.scores {
						if s.Name == name {
							got = s.weight
						}
					}
					if got != want.weights[name] {
						t.Errorf("%s: score %s has weight %d, want %d", p.name, name, got, want.weights[name])
					}
				}
				if p.preempts != want.preempts {
					t.Errorf("%s: preempts %t", p.name, p.preempts)
				}
			}
		})
	}
}

func TestReadConfigRefuses(t *testing.T) {
	for yaml, words := range map[string]string{
		"profile: []":                                                                                                                    `unknown field "profile"`,
		"extenders: [{urlPrefix: 'http://x/'}]":                                                                                          "extenders[0] (http://x/): extenders are not called here",
		"profiles: [{schedulerName: a}, {}]":                                                                                             "profiles[1].schedulerName: required",
		"profiles: [{schedulerName: a}, {schedulerName: a}]":                                                                             `profiles[1].schedulerName "a": another profile`,
		"profiles: [{schedulerName: A_b}]":                                                                                               `profiles[0].schedulerName "A_b": a lowercase RFC 1123`,
		"percentageOfNodesToScore: 101":                                                                                                  "percentageOfNodesToScore 101",
		"profiles: [{percentageOfNodesToScore: -1}]":                                                                                     "profiles[0].percentageOfNodesToScore -1",
		"podInitialBackoffSeconds: 0":                                                                                                    "podInitialBackoffSeconds 0",
		"podInitialBackoffSeconds: 5\npodMaxBackoffSeconds: 4":                                                                           "podMaxBackoffSeconds 4",
		"profiles: [{plugins: {filter: {enabled: [{name: Mine}]}}}]":                                                                     `profiles[0].plugins.filter.enabled[0]: there is no plugin "Mine" at this point; there are DynamicResources, InterPodAffinity, NodeAffinity`,
		"profiles: [{plugins: {score: {disabled: [{name: NodePorts}]}}}]":                                                                `profiles[0].plugins.score.disabled[0]: there is no plugin "NodePorts"`,
		"profiles: [{plugins: {multiPoint: {disabled: [{name: GangScheduling}]}}}]":                                                      "GangScheduling cannot be turned off",
		"profiles: [{plugins: {multiPoint: {disabled: [{name: DefaultBinder}]}}}]":                                                       "DefaultBinder cannot be turned off",
		"profiles: [{plugins: {score: {enabled: [{name: NodeAffinity, weight: -1}]}}}]":                                                  "enabled[0].weight -1",
		"profiles: [{plugins: {score: {enabled: [{name: NodeAffinity}, {name: NodeAffinity}]}}}]":                                        "NodeAffinity is in the list twice",
		"profiles: [{plugins: {bind: {enabled: [{name: Mine}]}}}]":                                                                       "profiles[0].plugins.bind: not a choice here",
		"profiles: [{pluginConfig: [{name: Mine, args: {}}]}]":                                                                           "profiles[0].pluginConfig[0] (Mine): there is no such plugin",
		"profiles: [{pluginConfig: [{name: VolumeBinding, args: {bindTimeoutSeconds: -1}}]}]":                                            "args.bindTimeoutSeconds -1",
		"profiles: [{pluginConfig: [{name: VolumeBinding, args: {shape: [{utilization: 0, score: 1}]}}]}]":                               "args.shape: nodes are not scored by their storage",
		"profiles: [{pluginConfig: [{name: DefaultPreemption, args: {minCandidateNodesPercentage: 101}}]}]":                              "minCandidateNodesPercentage 101",
		"profiles: [{pluginConfig: [{name: DefaultPreemption, args: {minCandidateNodesAbsolute: 0}}]}]":                                  "minCandidateNodesAbsolute 0, minCandidateNodesPercentage 0",
		"profiles: [{pluginConfig: [{name: DynamicResources, args: {filterTimeout: 1s}}]}]":                                              "args.filterTimeout 1s",
		"profiles: [{pluginConfig: [{name: NodeResourcesBalancedAllocation, args: {resources: [{name: example.com/gpu, weight: 1}]}}]}]": "args.resources[0] (example.com/gpu, weight 1)",
		"profiles: [{pluginConfig: [{name: NodeAffinity, args: {addedAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Near}]}]}}}}]}]": "args.addedAffinity.requiredDuringSchedulingIgnoredDuringExecution",
		"profiles: [{pluginConfig: [{name: PodTopologySpread, args: {defaultConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]}}]}]":                                           "args.defaultConstraints: they count with defaultingType List alone",
		"profiles: [{pluginConfig: [{name: PodTopologySpread, args: {defaultingType: List, defaultConstraints: [{maxSkew: 0, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]}}]}]":                     "args.defaultConstraints[0].maxSkew 0",
		"profiles: [{pluginConfig: [{name: PodTopologySpread, args: {defaultingType: List, defaultConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule, labelSelector: {}}]}}]}]":  "args.defaultConstraints[0].labelSelector, matchLabelKeys: leave them out",
		"profiles: [{pluginConfig: [{name: InterPodAffinity, args: {hardPodAffinityWeight: 101}}]}]":                                                                                                         "profiles[0].pluginConfig[0].args.hardPodAffinityWeight 101: between 0 and 100",
		"profiles: [{pluginConfig: [{name: InterPodAffinity, args: {hardWeight: 1}}]}]":                                                                                                                      `unknown field "hardWeight"`,
		"profiles: [{pluginConfig: [{name: InterPodAffinity}, {name: InterPodAffinity}]}]":                                                                                                                   "profiles[0].pluginConfig[1] (InterPodAffinity): it is in the list twice",
		"profiles: [{pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: X}}}]}]":                                                                                                         `profiles[0].pluginConfig[0].args.scoringStrategy.type "X"`,
		"profiles: [{pluginConfig: [{name: NodeResourcesFit, args: {strategy: {}}}]}]":                                                                                                                       `unknown field "strategy"`,
		"profiles: [{pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: RequestedToCapacityRatio, requestedToCapacityRatio: {shape: [{utilization: 5, score: 11}]}}}}]}]":                "shape[0]: utilization 5 and score 11",
	} {
		if _, err := ReadConfig([]byte(configHead + yaml)); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s\n%v\nwant %s", yaml, err, words)
		}
	}
	for _, head := range []string{"", "apiVersion: kubescheduler.config.k8s.io/v1beta3\nkind: KubeSchedulerConfiguration", "{"} {
		if _, err := ReadConfig([]byte(head)); err == nil {
			t.Errorf("%q passes", head)
		}
	}
}

func TestReadConfigTellsWhatItIgnores(t *testing.T) {
	cfg, err := ReadConfig([]byte(configHead + "parallelism: 4\nleaderElection: {leaderElect: true}\npodMaxBackoffSeconds: 60\nprofiles: [{schedulerName: batch}]"))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(cfg.Ignored, "\n"); len(cfg.Ignored) != 3 || !strings.Contains(got, "parallelism") || !strings.Contains(got, "leaderElection") || !strings.Contains(got, "no profile is called default-scheduler") {
		t.Errorf("ignored: %s", got)
	}
	if cfg.firstBackoff != firstBackoff || cfg.maxBackoff != time.Minute {
		t.Errorf("back-off %s to %s", cfg.firstBackoff, cfg.maxBackoff)
	}
}

// TestProfiles: the same pod under several schedulerNames.
func TestProfiles(t *testing.T) {
	cfg, err := ReadConfig([]byte(configHead + `
profiles:
- schedulerName: default-scheduler
- schedulerName: packed
  plugins: {score: {enabled: [{name: NodeResourcesFit, weight: 5}]}}
  pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: MostAllocated}}}]
- schedulerName: fearless
  plugins: {filter: {disabled: [{name: TaintToleration}]}, postFilter: {disabled: [{name: DefaultPreemption}]}}
- schedulerName: shaped
  pluginConfig:
  - name: NodeResourcesFit
    args:
      scoringStrategy:
        type: RequestedToCapacityRatio
        resources: [{name: example.com/gpu, weight: 1}]
        requestedToCapacityRatio: {shape: [{utilization: 0, score: 0}, {utilization: 100, score: 10}]}
  plugins: {score: {disabled: [{name: NodeResourcesBalancedAllocation}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	gpu := func(p *schedtest.PodBuilder, n string) *schedtest.PodBuilder {
		p.P.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"example.com/gpu": resource.MustParse(n)}
		return p
	}
	node := schedtest.Node
	s := world([]*schedtest.NodeBuilder{node("empty").Has("example.com/gpu", "4"), node("used").Has("example.com/gpu", "4"), node("tainted").Taint("k", "v", corev1.TaintEffectNoSchedule).Has("cpu", "64").Has("memory", "256Gi")},
		gpu(schedtest.Pod("there").On("used"), "2").CPU("1"))
	s.profiles = profilesOf(cfg.profiles...)
	for _, tt := range []struct {
		scheduler, want string
		pod             *schedtest.PodBuilder
	}{
		{"", "empty", schedtest.Pod("p").CPU("1").Memory("1Gi")},
		{"default-scheduler", "empty", schedtest.Pod("p").CPU("1").Memory("1Gi")},
		{"packed", "used", schedtest.Pod("p").CPU("1").Memory("1Gi")},
		{"fearless", "tainted", schedtest.Pod("p").CPU("1").Memory("1Gi")},
		{"default-scheduler", "empty", gpu(schedtest.Pod("p"), "1")},
		{"shaped", "used", gpu(schedtest.Pod("p"), "1")},
	} {
		pod := tt.pod.Obj()
		pod.Spec.SchedulerName = tt.scheduler
		p := newPodInfo(pod)
		if got := best(s, p, runFilters(s, p).fit).name; got != tt.want {
			t.Errorf("under %q it is put on %s, want %s", tt.scheduler, got, tt.want)
		}
	}
	unknown := schedtest.Pod("p").Obj()
	unknown.Spec.SchedulerName = "somebody-else"
	sched := &scheduler{snapshot: s, queue: newQueue(nil)}
	if sched.ours(unknown) {
		t.Error("a pod of another scheduler is ours")
	}

	urgent := schedtest.Pod("urgent").CPU("4").Priority(9).Obj()
	if !mayPreempt(s, newPodInfo(urgent)) {
		t.Error("pods of the default profile do not preempt")
	}
	urgent.Spec.SchedulerName = "fearless"
	if mayPreempt(s, newPodInfo(urgent)) {
		t.Error("pods of a profile without preemption preempt")
	}
}

func TestWantedNodes(t *testing.T) {
	for _, tt := range []struct{ percent, nodes, want int }{{0, 5000, 100}, {50, 5000, 2500}, {1, 5000, 100}, {100, 30, 30}, {0, 30, 30}} {
		p := &profile{percent: tt.percent}
		if got := p.wanted(newPodInfo(schedtest.Pod("p").Obj()), tt.nodes); got != tt.want {
			t.Errorf("%d %% of %d: %d, want %d", tt.percent, tt.nodes, got, tt.want)
		}
	}
}

func TestShape(t *testing.T) {
	cfg, err := ReadConfig([]byte(configHead + "profiles: [{pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: RequestedToCapacityRatio, requestedToCapacityRatio: {shape: [{utilization: 20, score: 10}, {utilization: 70, score: 0}]}}}}]}]"))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		cpu  string
		want int64
	}{{"0.4", 100}, {"0.8", 100}, {"1.8", 50}, {"3.2", 0}} { // of 4: 10, 20, 45 and 80 %
		s := world([]*schedtest.NodeBuilder{schedtest.Node("n").Has("cpu", "4").Has("memory", "4")})
		p := newPodInfo(schedtest.Pod("p").CPU(tt.cpu).Obj())
		p.weight.memory = 0
		value := cfg.profiles[0].scores[0].prepare(s, p)(s.nodes["n"])
		if want := (tt.want + 100) / 2; value != want { // the empty memory scores 100
			t.Errorf("%s of 4 processors: %d, want %d", tt.cpu, value, want)
		}
	}
}
