package kubestore

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	st "k8s.io/apiserver/pkg/storage/testing"
)

// suite is upstream's exported suite for implementations of storage.Interface,
// one line a function. Each runs on the raw storage and, unless rawOnly gives
// a reason, behind the watch cache.
var suite = []struct {
	name    string
	setup   setup
	run     func(f *fixture)
	rawOnly string
	alone   bool // it sets feature gates
	timed   bool // it fails where a busy machine takes its time, see inOwnProcess
}{
	{name: "RunTestCreate", run: func(f *fixture) { st.RunTestCreate(f.ctx, f.t, f.storage, f.checkStored) }},
	{name: "RunTestCreateWithTTL", run: func(f *fixture) { st.RunTestCreateWithTTL(f.ctx, f.t, f.storage) }},
	{name: "RunTestCreateWithKeyExist", run: func(f *fixture) { st.RunTestCreateWithKeyExist(f.ctx, f.t, f.storage) }},
	{name: "RunTestGet", setup: setup{frozen: true}, run: func(f *fixture) { st.RunTestGet(f.ctx, f.t, f.storage) }},
	{name: "RunTestUnconditionalDelete", run: func(f *fixture) { st.RunTestUnconditionalDelete(f.ctx, f.t, f.storage) }},
	{name: "RunTestConditionalDelete", run: func(f *fixture) { st.RunTestConditionalDelete(f.ctx, f.t, f.storage) }},
	{name: "RunTestDeleteWithSuggestion", run: func(f *fixture) { st.RunTestDeleteWithSuggestion(f.ctx, f.t, f.storage) }},
	{name: "RunTestDeleteWithSuggestionAndConflict", run: func(f *fixture) { st.RunTestDeleteWithSuggestionAndConflict(f.ctx, f.t, f.storage) }},
	{name: "RunTestDeleteWithConflict", run: func(f *fixture) { st.RunTestDeleteWithConflict(f.ctx, f.t, f.storage) }},
	{name: "RunTestDeleteWithSuggestionOfDeletedObject", run: func(f *fixture) { st.RunTestDeleteWithSuggestionOfDeletedObject(f.ctx, f.t, f.storage) }},
	{name: "RunTestValidateDeletionWithSuggestion", run: func(f *fixture) { st.RunTestValidateDeletionWithSuggestion(f.ctx, f.t, f.storage) }},
	{name: "RunTestValidateDeletionWithOnlySuggestionValid", run: func(f *fixture) { st.RunTestValidateDeletionWithOnlySuggestionValid(f.ctx, f.t, f.storage) }},
	{name: "RunTestPreconditionalDeleteWithSuggestion", run: func(f *fixture) { st.RunTestPreconditionalDeleteWithSuggestion(f.ctx, f.t, f.storage) }},
	{name: "RunTestPreconditionalDeleteWithOnlySuggestionPass", run: func(f *fixture) { st.RunTestPreconditionalDeleteWithOnlySuggestionPass(f.ctx, f.t, f.storage) }},
	{name: "RunTestDeleteWithConflictAndMissingExpectedTransformOrDecodeError", run: func(f *fixture) {
		st.RunTestDeleteWithConflictAndMissingExpectedTransformOrDecodeError(f.ctx, f.t, f.storage, f.secret.broken.Store)
	}},
	{name: "RunTestDeleteExpectedTransformOrDecodeError", run: func(f *fixture) {
		st.RunTestDeleteExpectedTransformOrDecodeError(f.ctx, f.t, f.storage, f.secret.broken.Store)
	}},
	{name: "RunTestDeleteExpectedTransformOrDecodeError/codec", run: func(f *fixture) {
		st.RunTestDeleteExpectedTransformOrDecodeError(f.ctx, f.t, f.storage, f.codec.broken.Store)
	}},
	{name: "RunTestDeleteWithSuggestionAndMissingExpectedTransformOrDecodeError", run: func(f *fixture) {
		st.RunTestDeleteWithSuggestionAndMissingExpectedTransformOrDecodeError(f.ctx, f.t, f.storage)
	}},
	{name: "RunTestGuaranteedUpdate", rawOnly: replacesTransformer, run: func(f *fixture) { st.RunTestGuaranteedUpdate(f.ctx, f.t, f.withTransformer(), f.checkStored) }},
	{name: "RunTestGuaranteedUpdateWithTTL", run: func(f *fixture) { st.RunTestGuaranteedUpdateWithTTL(f.ctx, f.t, f.storage) }},
	{name: "RunTestGuaranteedUpdateChecksStoredData", rawOnly: replacesTransformer, run: func(f *fixture) { st.RunTestGuaranteedUpdateChecksStoredData(f.ctx, f.t, f.withTransformer()) }},
	{name: "RunTestGuaranteedUpdateWithConflict", run: func(f *fixture) { st.RunTestGuaranteedUpdateWithConflict(f.ctx, f.t, f.storage) }},
	{name: "RunTestGuaranteedUpdateWithSuggestionAndConflict", run: func(f *fixture) { st.RunTestGuaranteedUpdateWithSuggestionAndConflict(f.ctx, f.t, f.storage) }},
	{name: "RunTestTransformationFailure", alone: true, setup: setup{strict: true}, rawOnly: replacesTransformer, run: func(f *fixture) { st.RunTestTransformationFailure(f.ctx, f.t, f.withTransformer()) }},

	{name: "RunTestList", run: func(f *fixture) {
		st.RunTestList(f.ctx, f.t, f.storage, f.compact, f.cached != nil, f.store.recorder)
	}},
	{name: "RunTestConsistentList", run: func(f *fixture) {
		st.RunTestConsistentList(f.ctx, f.t, f.storage, f.increaseRV, f.cached != nil, true, f.cached != nil)
	}},
	{name: "RunTestGetListNonRecursive", run: func(f *fixture) { st.RunTestGetListNonRecursive(f.ctx, f.t, f.increaseRV, f.storage) }},
	{name: "RunTestGetListRecursivePrefix", run: func(f *fixture) { st.RunTestGetListRecursivePrefix(f.ctx, f.t, f.storage) }},
	{name: "RunTestGetListWithErrorAggregation", rawOnly: replacesTransformer, run: func(f *fixture) {
		st.RunTestGetListWithErrorAggregation(f.ctx, f.t, f.withTransformer(), &corruptError{what: "test", err: errBroken})
	}},
	{name: "RunTestGetListWithoutErrorAggregation", alone: true, setup: setup{strict: true}, rawOnly: replacesTransformer, run: func(f *fixture) {
		st.RunTestGetListWithoutErrorAggregation(f.ctx, f.t, f.withTransformer(), &corruptError{what: "test", err: errBroken})
	}},
	{name: "RunTestListContinuation", run: func(f *fixture) { st.RunTestListContinuation(f.ctx, f.t, f.storage, f.calls()) }},
	{name: "RunTestListPaginationRareObject", run: func(f *fixture) { st.RunTestListPaginationRareObject(f.ctx, f.t, f.storage, f.calls()) }},
	{name: "RunTestListContinuationWithFilter", run: func(f *fixture) { st.RunTestListContinuationWithFilter(f.ctx, f.t, f.storage, f.calls()) }},
	{name: "RunTestListInconsistentContinuation", rawOnly: "the cache answers lists at resource version 0 in one piece", run: func(f *fixture) { st.RunTestListInconsistentContinuation(f.ctx, f.t, f.storage, f.compact) }},
	{name: "RunTestListResourceVersionMatch", rawOnly: replacesTransformer, run: func(f *fixture) { st.RunTestListResourceVersionMatch(f.ctx, f.t, f.withTransformer()) }},
	{name: "RunTestListPaging", run: func(f *fixture) { st.RunTestListPaging(f.ctx, f.t, f.storage) }},
	{name: "RunTestNamespaceScopedList", run: func(f *fixture) { st.RunTestNamespaceScopedList(f.ctx, f.t, f.storage) }},
	{name: "RunTestCompactRevision", run: func(f *fixture) { st.RunTestCompactRevision(f.ctx, f.t, f.storage, f.increaseRV, f.compact) }},
	{name: "RunTestKeySchema", run: func(f *fixture) { st.RunTestKeySchema(f.ctx, f.t, f.storage) }},
	{name: "RunTestStats", run: func(f *fixture) {
		enabled := f.cached != nil // by the cache itself
		st.RunTestStats(f.ctx, f.t, f.storage, f.codec, f.transformer, enabled)
	}},
	{name: "RunTestStats/sized", rawOnly: "the cache has sizes on already", run: func(f *fixture) {
		if err := f.raw.EnableResourceSizeEstimation(func(context.Context) ([]string, error) { return nil, nil }); err != nil {
			f.t.Fatal(err)
		}
		st.RunTestStats(f.ctx, f.t, f.storage, f.codec, f.transformer, true)
	}},

	{name: "RunTestWatch", run: func(f *fixture) { st.RunTestWatch(f.ctx, f.t, f.storage) }},
	{name: "RunTestClusterScopedWatch", setup: setup{clusterScoped: true}, run: func(f *fixture) { st.RunTestClusterScopedWatch(f.ctx, f.t, f.storage) }},
	{name: "RunTestNamespaceScopedWatch", run: func(f *fixture) { st.RunTestNamespaceScopedWatch(f.ctx, f.t, f.storage) }},
	{name: "RunTestDeleteTriggerWatch", run: func(f *fixture) { st.RunTestDeleteTriggerWatch(f.ctx, f.t, f.storage) }},
	{name: "RunTestWatchFromZero", run: func(f *fixture) {
		r := &restarting{f.storage, f}
		st.RunTestWatchFromZero(f.ctx, f.t, r, r.compact)
	}},
	{name: "RunTestWatchFromNonZero", run: func(f *fixture) { st.RunTestWatchFromNonZero(f.ctx, f.t, f.storage) }},
	{name: "RunTestDelayedWatchDelivery", timed: true, run: func(f *fixture) { st.RunTestDelayedWatchDelivery(f.ctx, f.t, f.storage) }},
	{name: "RunTestWatchError", rawOnly: replacesTransformer, run: func(f *fixture) { st.RunTestWatchError(f.ctx, f.t, f.withTransformer()) }},
	{name: "RunTestWatchWithUnsafeDelete", rawOnly: replacesTransformer, run: func(f *fixture) {
		st.RunTestWatchWithUnsafeDelete(f.ctx, f.t, f.withTransformer(), &corruptError{what: "test", err: errBroken})
	}},
	{name: "RunTestWatchContextCancel", rawOnly: "upstream leaves it out for the cache too", run: func(f *fixture) { st.RunTestWatchContextCancel(f.ctx, f.t, f.storage) }},
	{name: "RunTestWatcherTimeout", timed: true, run: func(f *fixture) { st.RunTestWatcherTimeout(f.ctx, f.t, f.storage) }},
	{name: "RunTestWatchDeleteEventObjectHaveLatestRV", run: func(f *fixture) { st.RunTestWatchDeleteEventObjectHaveLatestRV(f.ctx, f.t, f.storage) }},
	{name: "RunTestWatchInitializationSignal", timed: true, run: func(f *fixture) { st.RunTestWatchInitializationSignal(f.ctx, f.t, f.storage) }},
	{name: "RunOptionalTestProgressNotify", rawOnly: "the cache consumes progress, its readers get bookmarks", run: func(f *fixture) {
		st.RunOptionalTestProgressNotify(f.ctx, f.t, f.storage, f.increaseRV)
	}},
	{name: "RunTestWatchDispatchBookmarkEvents", timed: true, run: func(f *fixture) {
		st.RunTestWatchDispatchBookmarkEvents(f.ctx, f.t, f.storage, f.cached != nil)
	}},
	{name: "RunTestOptionalWatchBookmarksWithCorrectResourceVersion", timed: true, run: func(f *fixture) {
		if f.cached == nil {
			f.t.Skip("bookmarks to clients are the cache's work")
		}
		st.RunTestOptionalWatchBookmarksWithCorrectResourceVersion(f.ctx, f.t, f.storage)
	}},
	{name: "RunSendInitialEventsBackwardCompatibility", run: func(f *fixture) { st.RunSendInitialEventsBackwardCompatibility(f.ctx, f.t, f.storage) }},
	{name: "RunWatchSemantics", alone: true, timed: true, run: func(f *fixture) { st.RunWatchSemantics(f.ctx, f.t, f.seen()) }},
	{name: "RunWatchSemanticInitialEventsExtended", alone: true, timed: true, run: func(f *fixture) { st.RunWatchSemanticInitialEventsExtended(f.ctx, f.t, f.seen()) }},
	{name: "RunWatchListMatchSingle", alone: true, timed: true, run: func(f *fixture) { st.RunWatchListMatchSingle(f.ctx, f.t, f.seen()) }},
	{name: "RunWatchErrorIsBlockingFurtherEvents", rawOnly: replacesTransformer, run: func(f *fixture) {
		st.RunWatchErrorIsBlockingFurtherEvents(f.ctx, f.t, f.withTransformer())
	}},
}

const replacesTransformer = "it replaces the transformer below a cache that has decoded the objects already; upstream's suite for the cache leaves it out too"

func TestUpstreamSuite(t *testing.T) {
	var score suiteScore
	t.Cleanup(func() { t.Log(score.String()) }) // after all subtests
	for _, c := range suite {
		t.Run("raw/"+c.name, func(t *testing.T) {
			score.note(t, "raw")
			if !c.alone {
				t.Parallel()
			}
			if c.timed && inOwnProcess(t) {
				return
			}
			c.run(newFixture(t, c.setup))
		})
		t.Run("cached/"+c.name, func(t *testing.T) {
			score.note(t, "cached")
			if c.rawOnly != "" {
				t.Skip(c.rawOnly)
			}
			if !c.alone {
				t.Parallel()
			}
			if c.timed && inOwnProcess(t) {
				return
			}
			behind := c.setup
			behind.cached = true
			c.run(newFixture(t, behind))
		})
	}
}

// ownProcess is set where this program runs one test of the suite.
const ownProcess = "KUBESTORE_TEST_OWN_PROCESS"

// inOwnProcess runs a test of upstream's that waits for no more than a part of a
// second, or a few, for what goroutines do: in a process of its own, which is begun
// again some times, as a failed test cannot be. It returns false in that process.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownProcess) != "" {
		return false
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	pattern := "^" + strings.ReplaceAll(regexp.QuoteMeta(t.Name()), "/", "$/^") + "$"
	var out []byte
	for range 5 {
		cmd := exec.CommandContext(t.Context(), program, "-test.run", pattern, "-test.v", "-test.timeout", "5m")
		cmd.Env = append(os.Environ(), ownProcess+"=1")
		out, err = cmd.CombinedOutput()
		if err == nil && bytes.Contains(out, []byte("--- SKIP: "+t.Name()+" ")) {
			t.Skipf("in its own process:\n%s", out)
		}
		if err == nil && bytes.Contains(out, []byte("--- PASS: "+t.Name()+" ")) {
			return true
		}
	}
	t.Fatalf("not once in 5 times: %v\n%s", err, out)
	return true
}

// suiteScore counts how the suite's tests end.
type suiteScore struct {
	mu            sync.Mutex
	total, passed map[string]int
}

// note counts t at its end.
func (s *suiteScore) note(t *testing.T, kind string) {
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.total == nil {
			s.total, s.passed = map[string]int{}, map[string]int{}
		}
		s.total[kind]++
		if !t.Failed() && !t.Skipped() {
			s.passed[kind]++
		}
	})
}

// String is the score in a line; each test that is left out says why.
func (s *suiteScore) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("k8s.io/apiserver's storage suite: %d of %d passed on the raw storage, %d of %d behind the watch cache",
		s.passed["raw"], s.total["raw"], s.passed["cached"], s.total["cached"])
}

// calls is the check of how often the store is read; the cache reads as it likes.
func (f *fixture) calls() st.CallsValidation {
	if f.cached != nil {
		return nil
	}
	f.transformer.GetReadsAndReset()
	return f.checkCalls
}

// seen is the storage with a Create that returns when a cache has seen it, as
// the watch tests expect.
func (f *fixture) seen() storage.Interface { return &seenStorage{Interface: f.storage} }

// seenStorage creates one object at a time: a cache that has just started
// closes a watch at once whose reader lets a burst of ten events queue up, and
// the watch tests run eighteen of them side by side.
type seenStorage struct {
	storage.Interface
	mu sync.Mutex
}

func (s *seenStorage) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.Interface.Create(ctx, key, obj, out, ttl); err != nil {
		return err
	}
	return s.Get(ctx, key, storage.GetOptions{ResourceVersion: out.(*example.Pod).ResourceVersion}, &example.Pod{})
}
