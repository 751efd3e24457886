package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/sched"
)

// foreignMetrics are of libraries: TestE2EDeploy finds them on a server.
var foreignMetrics = []string{"up", "process_resident_memory_bytes", "apiserver_request_total", "apiserver_request_duration_seconds"}

// TestMonitoring: each metric of the rules and the dashboard exists, so that an
// alert cannot be silent because of its name; and each alert says what to do.
func TestMonitoring(t *testing.T) {
	known := metricNames()
	check := func(where, expr string) {
		names := metricsIn(expr)
		if len(names) == 0 {
			t.Errorf("%s: no metric in %q", where, expr)
		}
		for _, name := range names {
			if !known[name] {
				t.Errorf("%s: there is no metric %s", where, name)
			}
		}
	}
	folder := filepath.Join("..", "..", "packaging", "monitoring")
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr         string
				Labels, Annotations map[string]string
			}
		}
	}
	b, err := os.ReadFile(filepath.Join(folder, "rules.yaml"))
	if err == nil {
		err = yaml.Unmarshal(b, &rules)
	}
	if err != nil || len(rules.Groups) == 0 {
		t.Fatalf("%v %+v", err, rules)
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			check(r.Alert, r.Expr)
			if r.Annotations["summary"] == "" || r.Annotations["cure"] == "" || !slices.Contains([]string{"warning", "critical"}, r.Labels["severity"]) {
				t.Errorf("%s: a severity, a summary and a cure are required: %+v", r.Alert, r)
			}
		}
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	b, err = os.ReadFile(filepath.Join(folder, "grafana.json"))
	if err == nil {
		err = json.Unmarshal(b, &dashboard)
	}
	if err != nil || len(dashboard.Panels) == 0 {
		t.Fatalf("%v %+v", err, dashboard)
	}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			check(p.Title, target.Expr)
		}
	}
}

var (
	described = regexp.MustCompile(`fqName: "([a-z_]+)"`)
	words     = regexp.MustCompile(`[a-z_]+`)
	quoted    = regexp.MustCompile(`"[^"]*"`)
	suffix    = regexp.MustCompile(`_(bucket|count|sum)$`)
)

// metricNames are what a server tells, by the collectors' own descriptions.
func metricNames() map[string]bool {
	m := storeMetrics
	all := []prometheus.Collector{m.commit, m.apply, m.snapshot, m.commands, m.bytes, m.leaders, m.fsync, m.watchLag, m.behind, m.cut, m.damage, m.heldBack, m.state}
	all = append(all, sched.Collectors()...)
	all = append(all, pod.Metrics()...)
	all = append(all, agent.Connections{}, encryptionMetrics)
	known := map[string]bool{}
	for _, name := range foreignMetrics {
		known[name] = true
	}
	for _, c := range all {
		ch := make(chan *prometheus.Desc, 100)
		c.Describe(ch)
		close(ch)
		for desc := range ch {
			known[described.FindStringSubmatch(desc.String())[1]] = true
		}
	}
	return known
}

// metricsIn are the names in an expression that could only be metrics'.
func metricsIn(expr string) (names []string) {
	for _, word := range words.FindAllString(quoted.ReplaceAllString(expr, ""), -1) {
		if word == "up" || strings.Contains(word, "_") && !slices.Contains([]string{"histogram_quantile", "group_right"}, word) {
			names = append(names, suffix.ReplaceAllString(word, ""))
		}
	}
	return names
}
