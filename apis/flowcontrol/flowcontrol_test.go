package flowcontrol

import (
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newSchema() *flowcontrolv1.FlowSchema {
	s := &flowcontrolv1.FlowSchema{
		ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: "7"},
		Spec: flowcontrolv1.FlowSchemaSpec{
			PriorityLevelConfiguration: flowcontrolv1.PriorityLevelConfigurationReference{Name: "slow"},
			Rules: []flowcontrolv1.PolicyRulesWithSubjects{{
				Subjects: []flowcontrolv1.Subject{{Kind: flowcontrolv1.SubjectKindUser, User: &flowcontrolv1.UserSubject{Name: "*"}}},
				ResourceRules: []flowcontrolv1.ResourcePolicyRule{{
					Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"pods"}, Namespaces: []string{"*"},
				}},
			}},
		},
	}
	FlowSchema().Default(s)
	return s
}

func TestValidateFlowSchema(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*flowcontrolv1.FlowSchema)
		want   []string
	}{
		{"plain", func(*flowcontrolv1.FlowSchema) {}, nil},
		{"precedence", func(s *flowcontrolv1.FlowSchema) { s.Spec.MatchingPrecedence = 10001 },
			[]string{"spec.matchingPrecedence: Invalid value: 10001: must not be greater than 10000"}},
		{"negative precedence", func(s *flowcontrolv1.FlowSchema) { s.Spec.MatchingPrecedence = -1 },
			[]string{"spec.matchingPrecedence: Invalid value: -1: must be a positive value"}},
		{"first", func(s *flowcontrolv1.FlowSchema) { s.Spec.MatchingPrecedence = 1 },
			[]string{"spec.matchingPrecedence: Invalid value: 1: only the schema named 'exempt' may have matchingPrecedence 1"}},
		{"no level", func(s *flowcontrolv1.FlowSchema) { s.Spec.PriorityLevelConfiguration.Name = "" },
			[]string{"spec.priorityLevelConfiguration.name: Required value"}},
		{"distinguisher", func(s *flowcontrolv1.FlowSchema) {
			s.Spec.DistinguisherMethod = &flowcontrolv1.FlowDistinguisherMethod{Type: "ByMood"}
		}, []string{`spec.distinguisherMethod.type: Unsupported value: "ByMood": supported values: "ByNamespace", "ByUser"`}},
		{"empty rule", func(s *flowcontrolv1.FlowSchema) { s.Spec.Rules[0] = flowcontrolv1.PolicyRulesWithSubjects{} },
			[]string{
				"spec.rules[0].subjects: Required value: subjects must contain at least one value",
				"spec.rules[0]: Required value: at least one of resourceRules and nonResourceRules has to be non-empty",
			}},
		{"subject of two kinds", func(s *flowcontrolv1.FlowSchema) {
			s.Spec.Rules[0].Subjects[0].Group = &flowcontrolv1.GroupSubject{Name: "g"}
		}, []string{"spec.rules[0].subjects[0].group: Forbidden: group is forbidden when subject kind is not 'Group'"}},
		{"subject of none", func(s *flowcontrolv1.FlowSchema) { s.Spec.Rules[0].Subjects[0].User = nil },
			[]string{"spec.rules[0].subjects[0].user: Required value: user is required when subject kind is 'User'"}},
		{"account", func(s *flowcontrolv1.FlowSchema) {
			s.Spec.Rules[0].Subjects[0] = flowcontrolv1.Subject{Kind: flowcontrolv1.SubjectKindServiceAccount, ServiceAccount: &flowcontrolv1.ServiceAccountSubject{Name: "*"}}
		}, []string{"spec.rules[0].subjects[0].serviceAccount.namespace: Required value"}},
		{"star and more", func(s *flowcontrolv1.FlowSchema) { s.Spec.Rules[0].ResourceRules[0].Verbs = []string{"*", "get"} },
			[]string{`spec.rules[0].resourceRules[0].verbs: Invalid value: ["*","get"]: if '*' is present, must not specify other values`}},
		{"verb", func(s *flowcontrolv1.FlowSchema) { s.Spec.Rules[0].ResourceRules[0].Verbs = []string{"read"} },
			[]string{`spec.rules[0].resourceRules[0].verbs[0]: Invalid value: "read": must be '*' or one of get, list, create, update, patch, delete, deletecollection, watch, proxy`}},
		{"no namespace", func(s *flowcontrolv1.FlowSchema) { s.Spec.Rules[0].ResourceRules[0].Namespaces = nil },
			[]string{"spec.rules[0].resourceRules[0].namespaces: Required value: resource rules that are not cluster scoped must supply at least one namespace"}},
		{"paths", func(s *flowcontrolv1.FlowSchema) {
			s.Spec.Rules[0].NonResourceRules = []flowcontrolv1.NonResourcePolicyRule{{
				Verbs: []string{"*"}, NonResourceURLs: []string{"/ok", "/all/*", "none", "/hea*", "/a//b", "/c/"},
			}}
		}, []string{
			`spec.rules[0].nonResourceRules[0].nonResourceURLs[2]: Invalid value: "none": must start with slash`,
			`spec.rules[0].nonResourceRules[0].nonResourceURLs[3]: Invalid value: "/hea*": wildcard can only do suffix matching: '*' is only allowed as the last part, after a slash`,
			`spec.rules[0].nonResourceRules[0].nonResourceURLs[4]: Invalid value: "/a//b": must not contain double slash`,
			`spec.rules[0].nonResourceRules[0].nonResourceURLs[5]: Invalid value: "/c/": must not end with slash: to match all below it, end with /*`,
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSchema()
			test.change(s)
			checktest.Faults(t, FlowSchema().Validate(s), test.want...)
		})
	}
}

func TestFixedObjects(t *testing.T) {
	for _, want := range append(bootstrap.MandatoryFlowSchemas, bootstrap.SuggestedFlowSchemas...) {
		s := want.DeepCopy()
		FlowSchema().Default(s)
		checktest.Faults(t, FlowSchema().Validate(s))
	}
	for _, want := range append(bootstrap.MandatoryPriorityLevelConfigurations, bootstrap.SuggestedPriorityLevelConfigurations...) {
		l := want.DeepCopy()
		PriorityLevelConfiguration().Default(l)
		checktest.Faults(t, PriorityLevelConfiguration().Validate(l))
	}
	// What keeps a cluster governable cannot be taken away.
	s := bootstrap.MandatoryFlowSchemaExempt.DeepCopy()
	s.Spec.Rules = nil
	if errs := FlowSchema().Validate(s); len(errs) != 1 || errs[0].Field != "spec" {
		t.Errorf("the schema exempt without rules: %v", errs)
	}
	l := bootstrap.MandatoryPriorityLevelConfigurationCatchAll.DeepCopy()
	l.Spec.Limited.NominalConcurrencyShares = ptr.To(int32(0))
	if errs := PriorityLevelConfiguration().Validate(l); len(errs) != 1 || errs[0].Field != "spec" {
		t.Errorf("the level catch-all without shares: %v", errs)
	}
}

func TestValidatePriorityLevel(t *testing.T) {
	limited := func(q *flowcontrolv1.QueuingConfiguration, response flowcontrolv1.LimitResponseType) flowcontrolv1.PriorityLevelConfigurationSpec {
		return flowcontrolv1.PriorityLevelConfigurationSpec{
			Type:    flowcontrolv1.PriorityLevelEnablementLimited,
			Limited: &flowcontrolv1.LimitedPriorityLevelConfiguration{LimitResponse: flowcontrolv1.LimitResponse{Type: response, Queuing: q}},
		}
	}
	queue, reject := flowcontrolv1.LimitResponseTypeQueue, flowcontrolv1.LimitResponseTypeReject
	for _, test := range []struct {
		name string
		spec flowcontrolv1.PriorityLevelConfigurationSpec
		want []string
	}{
		{"reject", limited(nil, reject), nil},
		{"queue", limited(&flowcontrolv1.QueuingConfiguration{}, queue), nil},
		{"queue without queues", limited(nil, queue), []string{"spec.limited.limitResponse.queuing: Required value: must not be empty if limited.limitResponse.type is Queue"}},
		{"reject with queues", limited(&flowcontrolv1.QueuingConfiguration{}, reject), []string{"spec.limited.limitResponse.queuing: Forbidden: must be nil if limited.limitResponse.type is not Queue"}},
		{"hand", limited(&flowcontrolv1.QueuingConfiguration{Queues: 4, HandSize: 5}, queue), []string{"spec.limited.limitResponse.queuing.handSize: Invalid value: 5: should not be greater than queues (4)"}},
		{"bits", limited(&flowcontrolv1.QueuingConfiguration{Queues: 512, HandSize: 8}, queue), []string{"spec.limited.limitResponse.queuing.handSize: Invalid value: 8: required entropy bits deduced from queues (512) and handSize is 72, at most 60 is possible: take fewer queues or a smaller hand"}},
		{"many queues", limited(&flowcontrolv1.QueuingConfiguration{Queues: 20_000_000, HandSize: 1}, queue), []string{"spec.limited.limitResponse.queuing.queues: Invalid value: 20000000: must not be greater than 10000000"}},
		{"negative", limited(&flowcontrolv1.QueuingConfiguration{QueueLengthLimit: -1}, queue), []string{"spec.limited.limitResponse.queuing.queueLengthLimit: Invalid value: -1: must be positive"}},
		{"no type", flowcontrolv1.PriorityLevelConfigurationSpec{}, []string{"spec.type: Required value"}},
		{"exempt by another name", flowcontrolv1.PriorityLevelConfigurationSpec{Type: flowcontrolv1.PriorityLevelEnablementExempt}, []string{`spec.type: Invalid value: "Exempt": type must be 'Exempt' if and only if the name is 'exempt'`}},
		{"not limited", flowcontrolv1.PriorityLevelConfigurationSpec{Type: flowcontrolv1.PriorityLevelEnablementLimited}, []string{"spec.limited: Required value: must not be empty when type is Limited"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := &flowcontrolv1.PriorityLevelConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: test.spec}
			PriorityLevelConfiguration().Default(l)
			checktest.Faults(t, PriorityLevelConfiguration().Validate(l), test.want...)
		})
	}
	l := &flowcontrolv1.PriorityLevelConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: limited(nil, reject)}
	PriorityLevelConfiguration().Default(l)
	l.Spec.Limited.LendablePercent, l.Spec.Limited.BorrowingLimitPercent = ptr.To(int32(101)), ptr.To(int32(-1))
	checktest.Faults(t, PriorityLevelConfiguration().Validate(l),
		"spec.limited.lendablePercent: Invalid value: 101: must be between 0 and 100, inclusive",
		"spec.limited.borrowingLimitPercent: Invalid value: -1: must be greater than or equal to 0")
}

func TestConditions(t *testing.T) {
	s := newSchema()
	s.Status.Conditions = []flowcontrolv1.FlowSchemaCondition{
		{Type: flowcontrolv1.FlowSchemaConditionDangling, Status: flowcontrolv1.ConditionFalse},
		{Type: flowcontrolv1.FlowSchemaConditionDangling, Status: "Perhaps"},
	}
	checktest.Faults(t, FlowSchema().Status.ValidateUpdate(s, newSchema()),
		`status.conditions[1].type: Duplicate value: "Dangling"`,
		`status.conditions[1].status: Unsupported value: "Perhaps": supported values: "False", "True", "Unknown"`)
}
