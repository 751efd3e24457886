package deployment

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// Input is all that Decide looks at. Decide changes none of it.
type Input struct {
	Deployment *appsv1.Deployment
	// Sets are the ReplicaSets that the Deployment controls.
	Sets []*appsv1.ReplicaSet
	// Running reports whether the ReplicaSet has a pod that has not ended; it is
	// asked by the Recreate strategy only.
	Running func(rs *appsv1.ReplicaSet) bool
	Now     time.Time
}

// Plan is what one pass does, in the order of the fields.
type Plan struct {
	// Create is the ReplicaSet for a new template, nil if there is one already
	// or if it may not exist yet.
	Create *appsv1.ReplicaSet
	// Update holds changed copies of ReplicaSets: scaled, annotated.
	Update []Change
	// Delete holds ReplicaSets beyond the history limit.
	Delete []*appsv1.ReplicaSet
	// Revision is the revision annotation that the Deployment should carry;
	// empty: leave it.
	Revision string
	// Status is the new status; Recheck the time after which time alone may
	// change it (progress deadline), 0 for never.
	Status  appsv1.DeploymentStatus
	Recheck time.Duration
}

// Change is one ReplicaSet to write.
type Change struct {
	Set *appsv1.ReplicaSet
	// From is the number of replicas before; equal to the new one when only
	// metadata changes.
	From int32
}

// rollout is the working state of one Decide call. Its ReplicaSets are private
// copies that are changed in place and compared with the originals at the end.
type rollout struct {
	d    *appsv1.Deployment
	orig map[*appsv1.ReplicaSet]*appsv1.ReplicaSet // copy → original
	all  []*appsv1.ReplicaSet                      // copies, oldest first; without fresh
	old  []*appsv1.ReplicaSet
	// current runs the Deployment's present template; nil if there is none yet.
	// It may be fresh: made in this pass.
	current *appsv1.ReplicaSet
	fresh   bool
	// moved: the current ReplicaSet got a new revision number in this pass.
	moved bool
	// rolling: this pass took a step of a rollout, so its progress is judged.
	rolling bool
	now     time.Time
}

// Decide computes the next step of a Deployment.
func Decide(in Input) (Plan, error) {
	r := newRollout(in)
	d := r.d

	if d.DeletionTimestamp != nil {
		return r.plan(nil), nil
	}
	if scalingEvent(d, r.all) || d.Spec.Paused {
		r.adoptRevision()
		r.scale()
		if d.Spec.Paused {
			return r.plan(r.surplusHistory()), nil
		}
		return r.plan(nil), nil
	}

	var err error
	r.rolling = true
	if d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		err = r.recreate(in.Running)
	} else {
		err = r.roll()
	}
	if err != nil {
		return Plan{}, err
	}
	plan := r.plan(nil)
	if complete(d, &plan.Status) {
		plan.Delete = r.surplusHistory()
	}
	return plan, nil
}

func newRollout(in Input) *rollout {
	r := &rollout{d: in.Deployment, orig: map[*appsv1.ReplicaSet]*appsv1.ReplicaSet{}, now: in.Now}
	for _, rs := range in.Sets {
		dup := rs.DeepCopy()
		r.orig[dup] = rs
		r.all = append(r.all, dup)
	}
	slices.SortFunc(r.all, byAge)
	for _, rs := range r.all {
		// The oldest match wins, so that every pass and every leader picks the
		// same one if there should be two.
		if r.current == nil && sameTemplate(&rs.Spec.Template, &r.d.Spec.Template) {
			r.current = rs
		} else {
			r.old = append(r.old, rs)
		}
	}
	return r
}

func byAge(a, b *appsv1.ReplicaSet) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
}

// ensureCurrent makes the ReplicaSet of the present template if it is missing.
func (r *rollout) ensureCurrent() error {
	if r.current == nil {
		rs, err := newReplicaSet(r.d)
		if err != nil {
			return err
		}
		r.current, r.fresh = rs, true
	}
	r.adoptRevision()
	return nil
}

// adoptRevision gives the current ReplicaSet the newest revision number and
// the Deployment's annotations.
func (r *rollout) adoptRevision() {
	if r.current == nil {
		return
	}
	newest := int64(0)
	for _, rs := range r.old {
		newest = max(newest, revisionOf(rs))
	}
	r.moved = revisionOf(r.current) <= newest
	annotate(r.current, r.d, newest+1, r.fresh)
	r.current.Spec.MinReadySeconds = r.d.Spec.MinReadySeconds
}

func annotate(rs *appsv1.ReplicaSet, d *appsv1.Deployment, revision int64, fresh bool) {
	annotations := maps.Clone(rs.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	for k, v := range d.Annotations {
		if !ownAnnotations[k] {
			annotations[k] = v
		}
	}
	if have := revisionOf(rs); have < revision {
		annotations[revisionAnnotation] = strconv.FormatInt(revision, 10)
		if !fresh && have > 0 {
			annotations[revisionHistoryAnnotation] = appendHistory(annotations[revisionHistoryAnnotation], have)
		}
	}
	rs.Annotations = annotations
}

// maxHistory bounds the list of former revisions, in bytes.
const maxHistory = 2000

func appendHistory(history string, revision int64) string {
	if history == "" {
		return strconv.FormatInt(revision, 10)
	}
	history += "," + strconv.FormatInt(revision, 10)
	for len(history) > maxHistory {
		_, rest, ok := strings.Cut(history, ",")
		if !ok {
			break
		}
		history = rest
	}
	return history
}

func (r *rollout) desired() int32 { return ptr.Deref(r.d.Spec.Replicas, 1) }

// sets returns all ReplicaSets, the fresh one included.
func (r *rollout) sets() []*appsv1.ReplicaSet {
	if r.fresh {
		return append(slices.Clone(r.all), r.current)
	}
	return r.all
}

// setReplicas scales and records on the ReplicaSet what the Deployment wants
// in all; proportional scaling reads that back when the Deployment is scaled.
func (r *rollout) setReplicas(rs *appsv1.ReplicaSet, n int32) {
	rs.Spec.Replicas = &n
	surge, _ := bounds(r.d)
	annotations := maps.Clone(rs.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[desiredAnnotation] = strconv.Itoa(int(r.desired()))
	annotations[maxAnnotation] = strconv.Itoa(int(r.desired() + surge))
	rs.Annotations = annotations
}

// bounds resolves maxSurge (rounded up) and maxUnavailable (rounded down) to
// pods. Both being 0 would stop every rollout; validation refuses it as
// written, and what percentages round to 0 becomes one unavailable.
func bounds(d *appsv1.Deployment) (surge, unavailable int32) {
	if d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		return 0, 0
	}
	replicas := int(ptr.Deref(d.Spec.Replicas, 1))
	quarter := intstr.FromString("25%")
	r := ptr.Deref(d.Spec.Strategy.RollingUpdate, appsv1.RollingUpdateDeployment{})
	s, err1 := intstr.GetScaledValueFromIntOrPercent(intstr.ValueOrDefault(r.MaxSurge, quarter), replicas, true)
	u, err2 := intstr.GetScaledValueFromIntOrPercent(intstr.ValueOrDefault(r.MaxUnavailable, quarter), replicas, false)
	if err1 != nil || err2 != nil || (s == 0 && u == 0) {
		s, u = max(s, 0), 1
	}
	return int32(s), int32(min(u, replicas))
}

// roll moves one step of a rolling update: up with the new ReplicaSet as far
// as maxSurge allows, or else down with the old ones as far as maxUnavailable
// allows.
func (r *rollout) roll() error {
	if err := r.ensureCurrent(); err != nil {
		return err
	}
	if r.growCurrent() {
		return nil
	}
	r.shrinkOld()
	return nil
}

// growCurrent scales the current ReplicaSet towards the desired number and
// reports whether it changed.
func (r *rollout) growCurrent() bool {
	have, want := replicas(r.current), r.desired()
	switch {
	case have > want:
		r.setReplicas(r.current, want)
	case have < want || r.fresh:
		surge, _ := bounds(r.d)
		room := want + surge - have - held(r.old)
		if r.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
			room = want - have
		}
		r.setReplicas(r.current, have+max(0, min(room, want-have)))
	}
	return replicas(r.current) != have
}

func (r *rollout) shrinkOld() {
	if total(r.old) == 0 {
		return
	}
	_, unavailable := bounds(r.d)
	minAvailable := r.desired() - unavailable
	notYet := replicas(r.current) - serving(r.current)
	budget := total(r.sets()) - minAvailable - notYet
	// Pods that are not ready go first: they cost no availability.
	for _, rs := range r.old {
		if n := min(budget, replicas(rs)-serving(rs)); n > 0 {
			r.setReplicas(rs, replicas(rs)-n)
			budget -= n
		}
	}
	for _, rs := range r.old {
		if n := min(budget, replicas(rs)); n > 0 {
			r.setReplicas(rs, replicas(rs)-n)
			budget -= n
		}
	}
}

// serving is how many of the pods that rs is to keep are available. Status may
// lag behind a scale-down and still count pods that are about to go; counting
// them twice would take away more than maxUnavailable.
func serving(rs *appsv1.ReplicaSet) int32 { return min(rs.Status.AvailableReplicas, replicas(rs)) }

// recreate stops every old pod before the first new one.
func (r *rollout) recreate(running func(*appsv1.ReplicaSet) bool) error {
	r.adoptRevision()
	stopping := false
	for _, rs := range r.old {
		if replicas(rs) > 0 {
			r.setReplicas(rs, 0)
			stopping = true
		}
	}
	if stopping {
		return nil
	}
	for _, rs := range r.old {
		if running(r.orig[rs]) {
			return nil
		}
	}
	if err := r.ensureCurrent(); err != nil {
		return err
	}
	r.growCurrent()
	return nil
}

// scalingEvent reports whether the Deployment's number of replicas changed
// since its ReplicaSets were last scaled.
func scalingEvent(d *appsv1.Deployment, sets []*appsv1.ReplicaSet) bool {
	for _, rs := range sets {
		if replicas(rs) == 0 {
			continue
		}
		desired, err := strconv.Atoi(rs.Annotations[desiredAnnotation])
		if err == nil && int32(desired) != ptr.Deref(d.Spec.Replicas, 1) {
			return true
		}
	}
	return false
}

// scale answers a change of the Deployment's replicas, also in the middle of a
// rollout or while paused.
func (r *rollout) scale() {
	want := r.desired()
	if one := r.activeOrLatest(); one != nil {
		if replicas(one) != want || one.Annotations[desiredAnnotation] != strconv.Itoa(int(want)) {
			r.setReplicas(one, want)
		}
		return
	}
	if r.saturated() {
		for _, rs := range r.old {
			if replicas(rs) > 0 {
				r.setReplicas(rs, 0)
			}
		}
		return
	}
	if r.d.Spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType {
		r.scaleProportionally()
		return
	}
	for _, rs := range r.all {
		if replicas(rs) > 0 {
			r.setReplicas(rs, replicas(rs)) // take note; recreate goes on from here
		}
	}
}

// activeOrLatest returns the only ReplicaSet that has replicas, or the newest
// if none has; nil if several have.
func (r *rollout) activeOrLatest() *appsv1.ReplicaSet {
	var active []*appsv1.ReplicaSet
	for _, rs := range r.all {
		if replicas(rs) > 0 {
			active = append(active, rs)
		}
	}
	switch {
	case len(active) == 1:
		return active[0]
	case len(active) > 1:
		return nil
	case r.current != nil:
		return r.current
	case len(r.old) > 0:
		return r.old[len(r.old)-1]
	}
	return nil
}

func (r *rollout) saturated() bool {
	want := r.desired()
	return r.current != nil && replicas(r.current) == want && r.current.Status.AvailableReplicas == want &&
		r.current.Annotations[desiredAnnotation] == strconv.Itoa(int(want))
}

// scaleProportionally spreads a change over the ReplicaSets by their share, so
// that a bad rollout that is scaled up grows on its good side as well.
func (r *rollout) scaleProportionally() {
	var active []*appsv1.ReplicaSet
	for _, rs := range r.all {
		if replicas(rs) > 0 {
			active = append(active, rs)
		}
	}
	surge, _ := bounds(r.d)
	allowed := int32(0)
	if r.desired() > 0 {
		allowed = r.desired() + surge
	}
	missing := allowed - total(active)

	// Largest first; of equal ones the newest grows and the oldest shrinks.
	slices.SortFunc(active, func(a, b *appsv1.ReplicaSet) int {
		age := byAge(a, b)
		if missing > 0 {
			age = -age
		}
		return cmp.Or(-cmp.Compare(replicas(a), replicas(b)), age)
	})
	size := make([]int32, len(active))
	added := int32(0)
	for i, rs := range active {
		size[i] = replicas(rs)
		if missing != 0 {
			n := r.share(rs, missing, added, surge)
			size[i] += n
			added += n
		}
	}
	for i, rs := range active {
		if i == 0 && missing != 0 {
			size[i] = max(0, size[i]+missing-added) // what rounding left over
		}
		r.setReplicas(rs, size[i])
	}
}

// share is how much of missing (negative: surplus) falls to rs.
func (r *rollout) share(rs *appsv1.ReplicaSet, missing, added, surge int32) int32 {
	var n int32
	if r.desired() == 0 {
		n = -replicas(rs)
	} else {
		before, err := strconv.Atoi(rs.Annotations[maxAnnotation])
		if err != nil || before <= 0 {
			before = int(r.d.Status.Replicas)
		}
		if before <= 0 {
			return 0
		}
		size := float64(replicas(rs)) * float64(r.desired()+surge) / float64(before)
		n = int32(size+0.5) - replicas(rs)
	}
	left := missing - added
	if missing > 0 {
		return max(0, min(n, left))
	}
	return min(0, max(n, left))
}

// surplusHistory returns the old ReplicaSets beyond the history limit, oldest
// revision first. Those with pods, or with a spec not yet acted on, stay.
func (r *rollout) surplusHistory() []*appsv1.ReplicaSet {
	if r.d.Spec.RevisionHistoryLimit == nil {
		return nil
	}
	var alive []*appsv1.ReplicaSet
	for _, rs := range r.old {
		if rs.DeletionTimestamp == nil {
			alive = append(alive, rs)
		}
	}
	surplus := len(alive) - int(*r.d.Spec.RevisionHistoryLimit)
	if surplus <= 0 {
		return nil
	}
	slices.SortStableFunc(alive, func(a, b *appsv1.ReplicaSet) int {
		return cmp.Compare(revisionOf(a), revisionOf(b))
	})
	var out []*appsv1.ReplicaSet
	for _, rs := range alive[:surplus] {
		o := r.orig[rs]
		if o.Status.Replicas == 0 && replicas(o) == 0 && replicas(rs) == 0 && o.Generation <= o.Status.ObservedGeneration {
			out = append(out, o)
		}
	}
	return out
}

// plan collects what the steps above changed.
func (r *rollout) plan(remove []*appsv1.ReplicaSet) Plan {
	p := Plan{Delete: remove}
	if r.fresh {
		p.Create = r.current
	}
	for _, rs := range r.all {
		if o := r.orig[rs]; replicas(o) != replicas(rs) || o.Spec.MinReadySeconds != rs.Spec.MinReadySeconds || !maps.Equal(o.Annotations, rs.Annotations) {
			p.Update = append(p.Update, Change{Set: rs, From: replicas(o)})
		}
	}
	if r.current != nil {
		if v := r.current.Annotations[revisionAnnotation]; v != "" && v != r.d.Annotations[revisionAnnotation] {
			p.Revision = v
		}
	}
	p.Status, p.Recheck = r.status()
	return p
}

func replicas(rs *appsv1.ReplicaSet) int32 { return ptr.Deref(rs.Spec.Replicas, 1) }

func total(sets []*appsv1.ReplicaSet) (n int32) {
	for _, rs := range sets {
		n += replicas(rs)
	}
	return n
}

// held counts the pods that old ReplicaSets are to have or still have: until
// the ones that were scaled away are gone, new ones would exceed maxSurge.
func held(old []*appsv1.ReplicaSet) (n int32) {
	for _, rs := range old {
		n += max(replicas(rs), rs.Status.Replicas)
	}
	return n
}

func availableOf(sets []*appsv1.ReplicaSet) (n int32) {
	for _, rs := range sets {
		n += rs.Status.AvailableReplicas
	}
	return n
}

// scaleEvent is the sentence users read in `kubectl describe`.
func scaleEvent(name string, from, to int32) string {
	verb := "up"
	if to < from {
		verb = "down"
	}
	return fmt.Sprintf("Scaled %s replica set %s from %d to %d", verb, name, from, to)
}
