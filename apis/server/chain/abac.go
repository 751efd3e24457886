package chain

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// abacVersion is the version of a policy's line. Lines without one are of the
// first form, which had no versions.
const abacVersion = "abac.authorization.kubernetes.io/v1beta1"

// abacRule is the spec of one line of an ABAC policy file. An empty field
// matches nothing but emptiness; "*" matches everything, as a user or a group
// everybody who is known.
type abacRule struct {
	User            string `json:"user,omitempty"`
	Group           string `json:"group,omitempty"`
	Readonly        bool   `json:"readonly,omitempty"`
	APIGroup        string `json:"apiGroup,omitempty"`
	Resource        string `json:"resource,omitempty"`
	Namespace       string `json:"namespace,omitempty"`
	NonResourcePath string `json:"nonResourcePath,omitempty"`
}

// abac permits what a line of a policy file permits.
type abac struct {
	unconditional
	rules []abacRule
}

var (
	_ authorizer.Authorizer   = &abac{}
	_ authorizer.RuleResolver = &abac{}
)

// readABAC reads a policy file: one JSON object a line, empty lines and those
// that begin with # aside. Errors name the line.
func readABAC(path string) (*abac, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the ABAC policy: %w", err)
	}
	z := &abac{}
	z.unconditional.z = z
	n := 0
	for line := range bytes.Lines(data) {
		n++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		rule, err := parseABAC(line)
		if err != nil {
			return nil, fmt.Errorf("ABAC policy %s:%d: %w", path, n, err)
		}
		z.rules = append(z.rules, rule)
	}
	return z, nil
}

func parseABAC(line []byte) (abacRule, error) {
	var version struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if err := json.Unmarshal(line, &version); err != nil {
		return abacRule{}, err
	}
	if version.APIVersion == "" && version.Kind == "" {
		var first abacFirst
		if err := strictly(line, &first); err != nil {
			return abacRule{}, fmt.Errorf("a line without apiVersion and kind is of the form before %s: %w", abacVersion, err)
		}
		return first.rule(), nil
	}
	var policy struct {
		APIVersion string   `json:"apiVersion"`
		Kind       string   `json:"kind"`
		Spec       abacRule `json:"spec"`
	}
	if err := strictly(line, &policy); err != nil {
		return abacRule{}, err
	}
	if policy.APIVersion != abacVersion || policy.Kind != "Policy" {
		return abacRule{}, fmt.Errorf("apiVersion %q, kind %q: each line must be a Policy of %s", policy.APIVersion, policy.Kind, abacVersion)
	}
	if policy.Spec.User == "" && policy.Spec.Group == "" {
		return abacRule{}, fmt.Errorf("spec.user or spec.group is required: the line permits nothing")
	}
	return policy.Spec.named(), nil
}

func strictly(line []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields()
	return decoder.Decode(into)
}

// abacFirst is a line of the form that had no version yet: what it leaves out
// it does not ask for.
type abacFirst struct {
	User      string `json:"user,omitempty"`
	Group     string `json:"group,omitempty"`
	Readonly  bool   `json:"readonly,omitempty"`
	Resource  string `json:"resource,omitempty"`
	Namespace string `json:"namespace,omitempty"`
}

// rule is what the line means as one of today.
func (f abacFirst) rule() abacRule {
	rule := abacRule{User: f.User, Group: f.Group, Readonly: f.Readonly, APIGroup: "*", Resource: f.Resource, Namespace: f.Namespace}
	if rule.User == "" && rule.Group == "" {
		rule.User = "*"
	}
	if rule.Resource == "" && rule.Namespace == "" {
		rule.NonResourcePath = "*"
	}
	if rule.Resource == "" {
		rule.Resource = "*"
	}
	if rule.Namespace == "" {
		rule.Namespace = "*"
	}
	return rule.named()
}

// named is r with "*" for a user or a group as what it stands for: everybody who
// has shown who they are.
func (r abacRule) named() abacRule {
	if r.User == "*" || r.Group == "*" {
		r.User, r.Group = "", user.AllAuthenticated
	}
	return r
}

// Authorize allows what a line permits, and has no opinion of all else.
func (z *abac) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	for _, rule := range z.rules {
		if rule.isAbout(a.GetUser()) && (!rule.Readonly || a.IsReadOnly()) && rule.covers(a) {
			return authorizer.DecisionAllow, "", nil
		}
	}
	return authorizer.DecisionNoOpinion, "No policy matched.", nil
}

// RulesFor lists what the file permits u in namespace.
func (z *abac) RulesFor(_ context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	var resources []authorizer.ResourceRuleInfo
	var paths []authorizer.NonResourceRuleInfo
	for _, rule := range z.rules {
		if !rule.isAbout(u) {
			continue
		}
		verbs := []string{"*"}
		if rule.Readonly {
			verbs = []string{"get", "list", "watch"}
		}
		if rule.Resource != "" && isOrAll(rule.Namespace, namespace) {
			resources = append(resources, &authorizer.DefaultResourceRuleInfo{Verbs: verbs, APIGroups: []string{rule.APIGroup}, Resources: []string{rule.Resource}})
		}
		if rule.NonResourcePath != "" {
			paths = append(paths, &authorizer.DefaultNonResourceRuleInfo{Verbs: verbs, NonResourceURLs: []string{rule.NonResourcePath}})
		}
	}
	return resources, paths, false, nil
}

// isAbout reports whether u is whom the rule is about: user and group both,
// where both are given.
func (r abacRule) isAbout(u user.Info) bool {
	if u == nil {
		return false
	}
	return (r.User == "" || r.User == u.GetName()) && (r.Group == "" || slices.Contains(u.GetGroups(), r.Group))
}

func (r abacRule) covers(a authorizer.Attributes) bool {
	if a.IsResourceRequest() {
		return isOrAll(r.Namespace, a.GetNamespace()) && isOrAll(r.Resource, a.GetResource()) && isOrAll(r.APIGroup, a.GetAPIGroup())
	}
	prefix, open := strings.CutSuffix(r.NonResourcePath, "*")
	return r.NonResourcePath == a.GetPath() || open && strings.HasPrefix(a.GetPath(), prefix)
}

func isOrAll(want, got string) bool { return want == "*" || want == got }
