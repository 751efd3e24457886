package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	configv1 "k8s.io/kube-scheduler/config/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// Config is the scheduler's configuration. Its zero value is the default: one
// profile, default-scheduler, with all rules.
type Config struct {
	profiles                 []*profile // none: the default one
	firstBackoff, maxBackoff time.Duration
	// Ignored names what a file said and nothing follows from, in words for who
	// wrote it.
	Ignored []string
}

// ReadConfig reads a KubeSchedulerConfiguration (kubescheduler.config.k8s.io/v1),
// YAML or JSON. What it asks for and this scheduler cannot do is an error that
// names the field; what has no meaning here is listed in Ignored.
func ReadConfig(data []byte) (Config, error) {
	var file configv1.KubeSchedulerConfiguration
	if err := yaml.UnmarshalStrict(data, &file); err != nil {
		return Config{}, fmt.Errorf("read the KubeSchedulerConfiguration: %w", err)
	}
	if want := configv1.SchemeGroupVersion.String(); file.APIVersion != want || file.Kind != "KubeSchedulerConfiguration" {
		return Config{}, fmt.Errorf("apiVersion %q, kind %q: %s and KubeSchedulerConfiguration are required", file.APIVersion, file.Kind, want)
	}
	if len(file.Extenders) > 0 {
		return Config{}, fmt.Errorf("extenders[0] (%s): extenders are not called here; what one decides can be said with taints, labels, and a second scheduler under its own schedulerName", file.Extenders[0].URLPrefix)
	}
	cfg := Config{Ignored: ignored(&file)}
	var err error
	if cfg.firstBackoff, cfg.maxBackoff, err = backoffs(&file); err != nil {
		return Config{}, err
	}
	if err := percentage("percentageOfNodesToScore", file.PercentageOfNodesToScore); err != nil {
		return Config{}, err
	}
	names := map[string]bool{}
	for i := range file.Profiles {
		p, ignored, err := readProfile(&file.Profiles[i], len(file.Profiles) == 1, file.PercentageOfNodesToScore)
		if err != nil {
			return Config{}, fmt.Errorf("profiles[%d].%w", i, err)
		}
		if names[p.name] {
			return Config{}, fmt.Errorf("profiles[%d].schedulerName %q: another profile has this name", i, p.name)
		}
		names[p.name] = true
		for _, what := range ignored {
			cfg.Ignored = append(cfg.Ignored, fmt.Sprintf("profiles[%d].%s", i, what))
		}
		cfg.profiles = append(cfg.profiles, p)
	}
	if len(cfg.profiles) == 0 {
		p := defaultProfile()
		p.percent = int(ptr.Deref(file.PercentageOfNodesToScore, 0))
		cfg.profiles = []*profile{p}
	} else if !names[Name] {
		cfg.Ignored = append(cfg.Ignored, "no profile is called "+Name+": pods without a schedulerName stay Pending")
	}
	return cfg, nil
}

// ignored names what is set and means nothing in this program.
func ignored(file *configv1.KubeSchedulerConfiguration) (out []string) {
	for field, set := range map[string]bool{
		"parallelism: one goroutine decides":                              file.Parallelism != nil,
		"leaderElection: the raft leader schedules":                       ptr.Deref(file.LeaderElection.LeaderElect, false),
		"clientConnection: the scheduler asks inside the process":         file.ClientConnection != (configv1.KubeSchedulerConfiguration{}).ClientConnection,
		"enableProfiling, enableContentionProfiling: clusterd's own hold": ptr.Deref(file.EnableProfiling, false) || ptr.Deref(file.EnableContentionProfiling, false),
		"delayCacheUntilActive: only the leader has a cache":              file.DelayCacheUntilActive,
	} {
		if set {
			out = append(out, field)
		}
	}
	slices.Sort(out)
	return out
}

func backoffs(file *configv1.KubeSchedulerConfiguration) (first, most time.Duration, err error) {
	first, most = firstBackoff, maxBackoff
	if s := file.PodInitialBackoffSeconds; s != nil {
		if *s <= 0 || *s > 3600 {
			return 0, 0, fmt.Errorf("podInitialBackoffSeconds %d: between 1 and 3600 is required", *s)
		}
		first = time.Duration(*s) * time.Second
		most = max(most, first)
	}
	if s := file.PodMaxBackoffSeconds; s != nil {
		most = time.Duration(*s) * time.Second
		if *s > 3600 || most < first {
			return 0, 0, fmt.Errorf("podMaxBackoffSeconds %d: between podInitialBackoffSeconds (%s) and 3600 is required", *s, first)
		}
	}
	return first, most, nil
}

func percentage(field string, value *int32) error {
	if p := ptr.Deref(value, 0); p < 0 || p > 100 {
		return fmt.Errorf("%s %d: between 0 and 100 is required", field, p)
	}
	return nil
}

// readProfile reads one profile, and names what means nothing here. The only one may
// leave out its name.
func readProfile(file *configv1.KubeSchedulerProfile, only bool, percent *int32) (p *profile, ignored []string, err error) {
	name := ptr.Deref(file.SchedulerName, "")
	switch errs := validation.IsDNS1123Subdomain(name); {
	case name == "" && only:
		name = Name
	case name == "":
		return nil, nil, errors.New("schedulerName: required where there are several profiles")
	case len(errs) > 0:
		return nil, nil, fmt.Errorf("schedulerName %q: %s", name, errs[0])
	}
	if file.PercentageOfNodesToScore != nil {
		percent = file.PercentageOfNodesToScore
	}
	if err := percentage("percentageOfNodesToScore", percent); err != nil {
		return nil, nil, err
	}
	set := defaultPlugins()
	if file.Plugins != nil {
		if ignored, err = set.read(file.Plugins); err != nil {
			return nil, nil, fmt.Errorf("plugins.%w", err)
		}
	}
	args, err := readArgs(file.PluginConfig)
	if err != nil {
		return nil, nil, err
	}
	return set.profile(name, int(ptr.Deref(percent, 0)), args), ignored, nil
}

// read turns plugins on and off, as upstream does: first what multiPoint says,
// then what is said of a single point. It names what has no meaning here.
func (p *plugins) read(file *configv1.Plugins) (ignored []string, err error) {
	for point, set := range map[string]configv1.PluginSet{
		"preEnqueue": file.PreEnqueue, "queueSort": file.QueueSort, "preFilter": file.PreFilter, "preScore": file.PreScore, "reserve": file.Reserve,
		"permit": file.Permit, "preBind": file.PreBind, "bind": file.Bind, "postBind": file.PostBind,
		"placementGenerate": file.PlacementGenerate, "placementScore": file.PlacementScore, "podGroupPostFilter": file.PodGroupPostFilter,
	} {
		if len(set.Enabled)+len(set.Disabled) > 0 {
			return nil, fmt.Errorf("%s: not a choice here; plugins are turned on and off in multiPoint, filter, postFilter and score", point)
		}
	}
	for _, at := range []struct {
		point
		set configv1.PluginSet
	}{
		{point{"multiPoint", true, true, true}, file.MultiPoint},
		{point{name: "filter", filters: true}, file.Filter},
		{point{name: "postFilter", preemption: true}, file.PostFilter},
		{point{name: "score", scores: true}, file.Score},
	} {
		for i, d := range at.set.Disabled {
			if err := at.check(d.Name, true); err != nil {
				return nil, fmt.Errorf("%s.disabled[%d]: %w", at.name, i, err)
			}
			p.turn(at.point, d.Name, 0)
		}
		seen := map[string]bool{}
		for i, e := range at.set.Enabled {
			if err := at.check(e.Name, false); err != nil {
				return nil, fmt.Errorf("%s.enabled[%d]: %w", at.name, i, err)
			}
			if seen[e.Name] {
				return nil, fmt.Errorf("%s.enabled[%d]: %s is in the list twice", at.name, i, e.Name)
			}
			seen[e.Name] = true
			if slices.Contains(absent, e.Name) {
				ignored = append(ignored, fmt.Sprintf("plugins.%s.enabled[%d] (%s): there is nothing here that it would look at", at.name, i, e.Name))
				continue
			}
			weight := ptr.Deref(e.Weight, 0)
			if weight < 0 {
				return nil, fmt.Errorf("%s.enabled[%d].weight %d: it cannot be negative", at.name, i, weight)
			}
			p.turn(at.point, e.Name, max(1, int64(weight)))
		}
	}
	return ignored, nil
}

// point is where plugins are turned on and off, with what it decides.
type point struct {
	name                        string
	filters, scores, preemption bool
}

// has reports whether the point decides about a plugin of that name.
func (at point) has(name string) bool { return slices.Contains(at.plugins(), name) }

// plugins are the names of those that the point decides about, sorted.
func (at point) plugins() (out []string) {
	for i := range filters {
		if at.filters {
			out = append(out, filters[i].Name)
		}
	}
	for i := range scores {
		if at.scores {
			out = append(out, scores[i].Name)
		}
	}
	if at.preemption {
		out = append(out, preemption)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// turn gives a plugin, or all ("*"), that weight where the point decides; 0: off.
func (p *plugins) turn(at point, name string, weight int64) {
	for n := range p.filters {
		if at.filters && (name == n || name == "*") {
			p.filters[n] = weight > 0
		}
	}
	for n := range p.weights {
		if at.scores && (name == n || name == "*") {
			p.weights[n] = weight
		}
	}
	if at.preemption && (name == preemption || name == "*") {
		p.preempts = weight > 0
	}
}

// Plugins of kube-scheduler that are no choice here: fixed ones are always on,
// whatever they are called here; absent ones never, and what they look at is not there.
var (
	fixed  = []string{"PrioritySort", "SchedulingGates", "DefaultBinder", "NodeName", "VolumeZone", "GangScheduling"}
	absent = []string{"NodeDeclaredFeatures"}
)

// check refuses what cannot be turned off, or on.
func (at point) check(name string, off bool) error {
	switch {
	case at.has(name), off && name == "*", slices.Contains(absent, name), !off && slices.Contains(fixed, name):
		return nil
	case slices.Contains(fixed, name):
		return fmt.Errorf("%s cannot be turned off", name)
	}
	return fmt.Errorf("there is no plugin %q at this point; there are %s", name, strings.Join(at.plugins(), ", "))
}
