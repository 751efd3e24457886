// Package scheduler assigns unscheduled pods to nodes. One goroutine decides, pod by pod,
// on an in-memory snapshot; bindings are written concurrently while it continues with the
// assumed result. It decides nothing but the node, and writes nothing but bindings, one
// condition and events.
package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Name is the schedulerName of pods that name none, and of the default profile.
const Name = corev1.DefaultSchedulerName

type scheduler struct {
	client  kubernetes.Interface
	clock   clock.WithTicker
	events  map[string]record.EventRecorder // by the profile's name
	lister  corelisters.PodLister
	budgets policylisters.PodDisruptionBudgetLister

	podInformer, nodeInformer, nsInformer        cache.SharedIndexInformer
	claimInformer, volumeInformer, classInformer cache.SharedIndexInformer
	csiNodes, csiDrivers, capacities             cache.SharedIndexInformer
	deviceInformers                              resourceinformers.Interface

	groups groups

	storage    *storageView
	volumeNews news        // a claim changed, or a pod went
	devices    *deviceView // mu guards it
	deviceNews news        // a claim to devices changed

	queue    *queue
	reporter *loop.Controller
	why      sync.Map // loop.Key → *reason: what reporter is to write

	mu       sync.Mutex // guards snapshot
	snapshot *snapshot
}

// reason is why the pod with that UID has no node.
type reason struct {
	uid     types.UID
	message string
	// node is the one the pod is nominated for, victims the pods that go for
	// its sake.
	node    string
	victims []*corev1.Pod
	// astray is a claim whose devices are given back for the pod's sake.
	astray *resourcev1.ResourceClaim
}

// New returns the loop. It watches Pods, Nodes, Namespaces, claims, volumes,
// their classes, what CSI drivers tell, devices with the claims to them, and
// PodGroups. The planner works on what the loop knows, while it runs.
func New(env loop.Env, cfg Config) (loop.Loop, *Planner) {
	s := newScheduler(env, cfg)
	return loop.Loop{Name: "scheduler", Run: s.run}, &Planner{s: s}
}

func newScheduler(env loop.Env, cfg Config) *scheduler {
	core, classes := env.Informers.Core().V1(), env.Informers.Storage().V1().StorageClasses()
	s := &scheduler{
		client:       env.Client,
		clock:        env.Clock,
		events:       map[string]record.EventRecorder{},
		lister:       core.Pods().Lister(),
		budgets:      env.Informers.Policy().V1().PodDisruptionBudgets().Lister(),
		podInformer:  core.Pods().Informer(),
		nodeInformer: core.Nodes().Informer(),
		nsInformer:   core.Namespaces().Informer(),
		queue:        newQueue(env.Clock),
		snapshot:     newSnapshot(),
	}
	s.claimInformer, s.volumeInformer, s.classInformer = core.PersistentVolumeClaims().Informer(), core.PersistentVolumes().Informer(), classes.Informer()
	storage := env.Informers.Storage().V1()
	s.csiNodes, s.csiDrivers, s.capacities = storage.CSINodes().Informer(), storage.CSIDrivers().Informer(), storage.CSIStorageCapacities().Informer()
	s.storage = &storageView{
		claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), classes: classes.Lister(),
		csiNodes: storage.CSINodes().Lister(), csiDrivers: storage.CSIDrivers().Lister(), capacities: storage.CSIStorageCapacities().Lister(),
	}
	s.snapshot.storage = s.storage
	s.deviceInformers = env.Informers.Resource().V1()
	s.devices = newDeviceView(s.deviceInformers.DeviceClasses().Lister(), s.deviceInformers.ResourceSlices().Lister(), s.deviceInformers.DeviceTaintRules().Lister())
	s.snapshot.devices = s.devices
	if len(cfg.profiles) > 0 {
		s.snapshot.profiles = profilesOf(cfg.profiles...)
		s.queue.first, s.queue.most = cfg.firstBackoff, cfg.maxBackoff
	}
	for name := range s.snapshot.profiles {
		s.events[name] = env.Events.For(name)
	}
	s.groups = newGroups()
	podGroups := env.Informers.Scheduling().V1beta1().PodGroups()
	s.groups.lister, s.groups.informer = podGroups.Lister(), podGroups.Informer()
	s.groups.reporter = loop.New("scheduler-groups", env, 2, s.reportGroup)
	s.queue.priorityOf = s.groups.priorityOf
	s.reporter = loop.New("scheduler-reports", env, 4, s.writeReason)
	return s
}

func (s *scheduler) run(ctx context.Context) error {
	logger := klog.FromContext(ctx).WithValues("loop", "scheduler")
	ctx = klog.NewContext(ctx, logger)

	ctx, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	defer group.Wait() //nolint:errcheck // its error is returned below, unless another came first
	defer cancel()
	waitingPods.Reset()
	for _, reporter := range []*loop.Controller{s.reporter, s.groups.reporter} {
		reporting := make(chan struct{})
		group.Go(func() error {
			return reporter.RunReady(ctx, func() { close(reporting) })
		})
		select {
		case <-reporting:
		case <-ctx.Done():
			return group.Wait()
		}
	}

	synced, err := s.watch()
	if err != nil && ctx.Err() != nil {
		return group.Wait() // the informers have stopped already
	}
	if err != nil {
		return fmt.Errorf("scheduler: add event handlers: %w", err)
	}
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return group.Wait()
	}
	logger.V(2).Info("loop started")

	var binds, waits errgroup.Group // a pod that waits for volumes or devices does not hold up others
	binds.SetLimit(bindsInFlight)
	for {
		pod, ok := s.queue.pop(ctx)
		if !ok {
			break
		}
		start := s.clock.Now()
		if pod.Spec.SchedulingGroup != nil {
			if places, handled := s.scheduleGroup(ctx, pod); handled {
				s.bindGroup(ctx, places, start, &binds, &waits)
				continue
			}
		}
		switch place := s.schedule(ctx, pod); {
		case place.node == "":
		case place.prepares():
			waits.Go(func() error {
				if err := s.prepare(ctx, place); err != nil {
					s.unbound(ctx, pod, place.node, err)
				} else {
					s.bind(ctx, pod, place.node, start)
				}
				return nil
			})
		default:
			binds.Go(func() error { s.bind(ctx, pod, place.node, start); return nil })
		}
	}
	_ = waits.Wait()
	_ = binds.Wait()
	return group.Wait()
}

// schedule chooses a node for the pod and assumes it there. The node is "" if
// there is nothing to bind; the pod is then parked or out of the queue.
func (s *scheduler) schedule(ctx context.Context, pod *corev1.Pod) placement {
	s.mu.Lock()
	if _, placed := s.snapshot.placed[pod.UID]; placed || !s.stillWaiting(pod) {
		s.mu.Unlock()
		s.queue.remove(pod.UID)
		return placement{}
	}
	p := newPodInfo(pod)
	v := runFilters(s.snapshot, p)
	if len(v.fit) > 0 {
		place := s.take(p, v)
		s.mu.Unlock()
		// Affinity of other waiting pods may be met now.
		s.queue.changed(podPlaced)
		return place
	}
	why := reason{uid: pod.UID, message: v.explain(), astray: p.devices.givesBack(pod)}
	if v.blocked == "" && asksWhy(pod) {
		why.message += "\n" + whyEach(s.snapshot, p)
	}
	if v.blocked == "" {
		s.makeRoom(p, &why)
	} else if n, ok := s.snapshot.nominated[pod.UID]; ok {
		why.node = n.node // no pod's loss helps
	}
	s.mu.Unlock()

	attempts.WithLabelValues("unschedulable").Inc()
	message := why.message
	s.eventsFor(pod).Event(pod, corev1.EventTypeWarning, "FailedScheduling", message)
	key := loop.KeyOf(pod)
	s.why.Store(key, &why) // a pointer: compared when it has been written
	s.reporter.Enqueue(key)
	if p.search.left > 0 {
		s.queue.goOn(pod.UID, p.search) // it need not wait for a change
	} else {
		s.queue.park(pod.UID, v.wokenBy)
	}
	klog.FromContext(ctx).V(3).Info("pod fits no node", "pod", klog.KObj(pod), "why", message)
	return placement{}
}

// makeRoom preempts for a pod that fits nowhere, if it may. The writes are the
// reporter's.
func (s *scheduler) makeRoom(p *podInfo, why *reason) {
	if !mayPreempt(s.snapshot, p) {
		if n, ok := s.snapshot.nominated[p.pod.UID]; ok {
			// The reporter may not have come to the reason before, which this one
			// replaces.
			why.node, why.victims = n.node, s.snapshot.leaving(p)
		}
		return
	}
	delete(s.snapshot.nominated, p.pod.UID)
	budgets, err := s.budgets.List(labels.Everything())
	if err != nil {
		return
	}
	p.search = s.queue.searched(p.pod.UID)
	c := preempt(s.snapshot, p, budgets)
	if c == nil || len(c.victims) == 0 {
		return
	}
	n := nomination{p: p, node: c.node.name}
	for _, victim := range c.victims {
		n.victims = append(n.victims, victim.pod.UID)
		why.victims = append(why.victims, victim.pod)
	}
	why.node = n.node
	s.snapshot.nominate(n)
}

// stillWaiting looks whether the cache agrees that the pod needs a node.
func (s *scheduler) stillWaiting(pod *corev1.Pod) bool {
	now, err := s.lister.Pods(pod.Namespace).Get(pod.Name)
	return err == nil && now.UID == pod.UID && s.ours(now)
}

// eventsFor signs events with the name of the pod's profile.
func (s *scheduler) eventsFor(pod *corev1.Pod) record.EventRecorder {
	return s.events[s.snapshot.profiles.of(pod).name]
}

// ours reports whether the pod waits for this scheduler.
func (s *scheduler) ours(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && !pods.Finished(pod) &&
		len(pod.Spec.SchedulingGates) == 0 &&
		s.snapshot.profiles.of(pod) != nil
}

// writeReason writes the condition of a pod that fits nowhere.
func (s *scheduler) writeReason(ctx context.Context, key loop.Key) error {
	v, ok := s.why.Load(key)
	if !ok {
		return nil
	}
	why := v.(*reason)
	pod, err := s.lister.Pods(key.Namespace).Get(key.Name)
	if err == nil && pod.UID == why.uid && s.ours(pod) {
		if err := s.evict(ctx, pod, why.node, why.victims); err != nil {
			return err
		}
		if why.astray != nil {
			if err := s.giveBack(ctx, pod, why.astray); err != nil {
				return err
			}
		}
		if err := s.report(ctx, pod, why.message, why.node); err != nil {
			return fmt.Errorf("report unschedulable: %w", err)
		}
	}
	s.why.CompareAndDelete(key, v)
	return nil
}

// watch registers the handlers that keep snapshot and queue up to date.
func (s *scheduler) watch() ([]cache.InformerSynced, error) {
	var synced []cache.InformerSynced
	for _, add := range []func() (cache.ResourceEventHandlerRegistration, error){
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.nsInformer, s.onNamespace)
		},
		func() (cache.ResourceEventHandlerRegistration, error) { return loop.Handle(s.nodeInformer, s.onNode) },
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.claimInformer, func(_, _ *corev1.PersistentVolumeClaim) { s.onStorage() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.volumeInformer, func(_, _ *corev1.PersistentVolume) { s.onStorage() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.classInformer, func(_, _ *storagev1.StorageClass) { s.onStorage() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.csiNodes, func(_, _ *storagev1.CSINode) { s.onStorage() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.csiDrivers, func(_, _ *storagev1.CSIDriver) { s.onStorage() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.capacities, func(_, _ *storagev1.CSIStorageCapacity) { s.onStorage() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.deviceInformers.ResourceClaims().Informer(), s.onResourceClaim)
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.deviceInformers.ResourceSlices().Informer(), s.onResourceSlice)
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.deviceInformers.DeviceTaintRules().Informer(), func(_, _ *resourcev1.DeviceTaintRule) { s.onDevices() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.deviceInformers.DeviceClasses().Informer(), func(_, _ *resourcev1.DeviceClass) { s.onClasses() })
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return loop.Handle(s.groups.informer, s.onGroup)
		},
		func() (cache.ResourceEventHandlerRegistration, error) { return loop.Handle(s.podInformer, s.onPod) },
	} {
		registration, err := add()
		if err != nil {
			return nil, err
		}
		synced = append(synced, registration.HasSynced)
	}
	return synced, nil
}

func (s *scheduler) onStorage() {
	s.queue.changed(volumeChanged)
	s.volumeNews.tell()
}

// onClasses takes note that classes are others: of what they select, and which
// extended resources they give.
func (s *scheduler) onClasses() {
	s.mu.Lock()
	s.devices.byResource = nil
	s.mu.Unlock()
	s.queue.changed(deviceChanged)
}

// onDevices takes note that other devices are offered, or that their taints
// are others.
func (s *scheduler) onDevices() {
	s.mu.Lock()
	s.devices.stale = true
	s.mu.Unlock()
	s.queue.changed(deviceChanged)
}

func (s *scheduler) onResourceSlice(old, slice *resourcev1.ResourceSlice) {
	if old == nil || slice == nil || !apiequality.Semantic.DeepEqual(old.Spec, slice.Spec) {
		s.onDevices()
	}
}

func (s *scheduler) onResourceClaim(old, claim *resourcev1.ResourceClaim) {
	s.mu.Lock()
	s.devices.show(old, claim)
	s.mu.Unlock()
	if claimMatters(old, claim) {
		s.queue.changed(deviceChanged)
	}
	s.deviceNews.tell()
}

// claimMatters reports whether a pod may wait for the change of a claim: it came
// or went, got its devices or gave them back, or is used by fewer.
func claimMatters(old, claim *resourcev1.ResourceClaim) bool {
	return old == nil || claim == nil || old.UID != claim.UID || (old.DeletionTimestamp == nil) != (claim.DeletionTimestamp == nil) ||
		(old.Status.Allocation == nil) != (claim.Status.Allocation == nil) || len(claim.Status.ReservedFor) < len(old.Status.ReservedFor)
}

func (s *scheduler) onNamespace(old, ns *corev1.Namespace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ns == nil {
		s.snapshot.setNamespace(old.Name, nil)
		return
	}
	set := labels.Set(ns.Labels)
	if set == nil {
		set = labels.Set{}
	}
	s.snapshot.setNamespace(ns.Name, set)
}

func (s *scheduler) onNode(old, node *corev1.Node) {
	c := nodeChange(old, node)
	s.mu.Lock()
	if node == nil {
		s.snapshot.removeNode(old.Name)
	} else {
		s.snapshot.setNode(node)
	}
	var promised []types.UID
	if c&(nodeRemoved|nodeSpec|nodeLabels) != 0 {
		promised = s.snapshot.promisedOn(cmp.Or(node, old).Name)
	}
	s.mu.Unlock()
	for _, uid := range promised { // they may have lost the node, and can displace others now
		s.queue.wakeUp(uid)
	}
	if c != 0 {
		s.queue.changed(c)
	}
}

func (s *scheduler) onPod(old, pod *corev1.Pod) {
	if old != nil && old.Spec.SchedulingGroup != nil && (pod == nil || pod.UID != old.UID) {
		s.groupPodGone(old)
	}
	if pod != nil && pod.Spec.SchedulingGroup != nil {
		s.onGroupPod(old, pod)
	}
	if pod == nil {
		s.queue.remove(old.UID)
		s.gone(old)
		return
	}
	if old != nil && old.UID != pod.UID { // deleted and created again between two events
		s.queue.remove(old.UID)
		s.gone(old)
		old = nil
	}
	switch {
	case pod.Spec.NodeName != "" && pods.Finished(pod):
		s.queue.remove(pod.UID)
		s.gone(pod)
	case pod.Spec.NodeName != "":
		s.queue.remove(pod.UID)
		if s.unchanged(old, pod) {
			return
		}
		s.mu.Lock()
		s.snapshot.setPod(pod)
		s.mu.Unlock()
		s.queue.changed(placedChange(old, pod))
	case s.ours(pod):
		s.promise(pod)
		if old != nil && s.ours(old) && asksWhy(old) == asksWhy(pod) && resourceclaim.PodStatusEqual(old.Status.ResourceClaimStatuses, pod.Status.ResourceClaimStatuses) &&
			apiequality.Semantic.DeepEqual(old.Spec, pod.Spec) && apiequality.Semantic.DeepEqual(old.Labels, pod.Labels) {
			s.queue.refresh(pod)
			return
		}
		s.queue.add(pod)
	default:
		s.queue.remove(pod.UID)
		// On its way out: the room that it was promised is free.
		s.mu.Lock()
		promised := s.snapshot.release([]*corev1.Pod{pod})
		s.mu.Unlock()
		if promised {
			s.queue.changed(podGone)
		}
	}
}

// promise takes note of a nomination by an earlier leader.
func (s *scheduler) promise(pod *corev1.Pod) {
	node := pod.Status.NominatedNodeName
	if node == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.snapshot.nominated[pod.UID]; known || s.snapshot.placed[pod.UID] != "" {
		return
	}
	n := nomination{p: newPodInfo(pod), node: node}
	if on := s.snapshot.nodes[node]; on != nil {
		for uid, other := range on.pods {
			if other.pod.DeletionTimestamp != nil && priority(other) < priority(n.p) {
				n.victims = append(n.victims, uid)
			}
		}
	}
	s.snapshot.nominate(n)
}

// unchanged reports whether an update of a bound pod leaves everything that
// the snapshot counts as it is: most updates are of status only.
func (s *scheduler) unchanged(old, pod *corev1.Pod) bool {
	if old == nil || old.Spec.NodeName != pod.Spec.NodeName || old.Generation != pod.Generation ||
		(old.DeletionTimestamp == nil) != (pod.DeletionTimestamp == nil) || pods.Finished(old) {
		return false
	}
	// A resize is granted, or refused, in the status: the spec and with it the
	// generation changed before.
	return requests(old).equal(requests(pod)) &&
		apiequality.Semantic.DeepEqual(old.Labels, pod.Labels) && apiequality.Semantic.DeepEqual(old.OwnerReferences, pod.OwnerReferences)
}

// placedChange says what a change of a bound pod may be good for.
func placedChange(old, pod *corev1.Pod) change {
	if old == nil || old.Spec.NodeName == "" {
		return podPlaced
	}
	// Resized down, relabelled, or on its way out.
	return podPlaced | podGone
}

// gone frees what the pod had.
func (s *scheduler) gone(pod *corev1.Pod) {
	s.mu.Lock()
	promised := s.snapshot.release([]*corev1.Pod{pod})
	_, counted := s.snapshot.placed[pod.UID]
	s.snapshot.removePod(pod.UID)
	s.mu.Unlock()
	if counted || promised {
		s.queue.changed(podGone)
	}
	s.volumeNews.tell()
}
