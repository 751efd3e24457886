// A pod's story: from what the API knows of it, the stations on its way, each
// with its time. Pure: values in, values out.

// story takes the pod, its events, and the changes that the store remembers of
// it (null: not known), and returns the stations in order:
// {name, at, precise, text, state}. state is done, now (it waits here), failed,
// or later. at is milliseconds, precise when it is more than a second's stamp.
export function story(pod, events, history) {
  const changes = states(history);
  const steps = [asked(pod, changes), admitted(pod), committed(changes, history), scheduled(pod, changes, events), pulled(pod, events), started(pod), ready(pod, changes)];
  if (pod.metadata.deletionTimestamp || ['Succeeded', 'Failed'].includes(pod.status?.phase)) steps.push(ended(pod));
  // The first station that is not done is where it waits.
  let waits = steps.find((s) => s.state === 'failed') !== undefined;
  for (const s of steps) {
    if (s.state !== 'open') continue;
    s.state = waits ? 'later' : 'now';
    waits = true;
  }
  return steps;
}

// states are the pod's remembered changes, {type, at, who, revision, object}.
function states(history) {
  return (history?.changes || []).map((c) => ({
    type: c.type, at: Date.parse(c.time), who: c.origin || '', revision: c.revision, object: c.object || {},
  }));
}

function when(text) {
  const t = Date.parse(text);
  return Number.isNaN(t) ? null : t;
}

function asked(pod, changes) {
  const owner = (pod.metadata.ownerReferences || []).find((o) => o.controller);
  const created = changes.find((c) => c.type === 'ADDED');
  const who = created?.who || pod.metadata.managedFields?.[0]?.manager || 'somebody';
  const text = (owner ? 'for ' + owner.kind + ' ' + owner.name + ' ' : '') + 'by ' + who;
  return {name: 'Asked', at: when(pod.metadata.creationTimestamp), text, state: 'done'};
}

function admitted(pod) {
  const parts = ['service account ' + (pod.spec.serviceAccountName || 'default')];
  if (pod.status?.qosClass) parts.push('quality of service ' + pod.status.qosClass);
  if (pod.spec.priority) parts.push('priority ' + pod.spec.priority);
  return {name: 'Admitted', at: when(pod.metadata.creationTimestamp), text: parts.join(', '), state: 'done'};
}

function committed(changes, history) {
  const created = changes.find((c) => c.type === 'ADDED');
  if (created) return {name: 'Committed', at: created.at, precise: true, text: 'by a majority of the servers, revision ' + created.revision, state: 'done'};
  const why = history ? 'before the history begins' + (history.oldestTime ? ' (' + history.oldestTime + ')' : '') : 'when is not known';
  return {name: 'Committed', at: null, text: why, state: 'done'};
}

function condition(pod, type) {
  return (pod.status?.conditions || []).find((c) => c.type === type);
}

function scheduled(pod, changes, events) {
  if (pod.spec.nodeName) {
    const bound = changes.find((c, i) => c.object.spec?.nodeName && (i === 0 ? c.type === 'ADDED' : !changes[i - 1].object.spec?.nodeName));
    const c = condition(pod, 'PodScheduled');
    return {
      name: 'Scheduled', at: bound ? bound.at : when(c?.lastTransitionTime), precise: Boolean(bound),
      text: 'on node ' + pod.spec.nodeName + (bound?.who ? ' by ' + bound.who : ''), state: 'done',
    };
  }
  const c = condition(pod, 'PodScheduled');
  const last = latest(events, ['FailedScheduling']);
  const text = c?.message || last?.message || 'waits for the scheduler';
  return {name: 'Scheduled', at: null, text, state: c?.reason === 'Unschedulable' ? 'failed' : 'open'};
}

function latest(events, reasons) {
  return events.filter((e) => reasons.includes(e.reason)).sort((a, b) => eventTime(a) - eventTime(b)).at(-1);
}

// eventTime is when an event happened last.
export function eventTime(e) {
  return when(e.series?.lastObservedTime) ?? when(e.lastTimestamp) ?? when(e.eventTime) ?? when(e.firstTimestamp) ?? when(e.metadata?.creationTimestamp) ?? 0;
}

function containers(pod) {
  return [...(pod.status?.initContainerStatuses || []), ...(pod.status?.containerStatuses || [])];
}

// imageTrouble are the reasons a container waits with when its image is why.
const imageTrouble = ['ErrImagePull', 'ImagePullBackOff', 'ErrImageNeverPull', 'InvalidImageName', 'ImageInspectError'];

function pulled(pod, events) {
  const statuses = containers(pod);
  const stuck = statuses.find((s) => imageTrouble.includes(s.state?.waiting?.reason));
  if (stuck) return {name: 'Pulled', at: null, text: stuck.name + ': ' + stuck.state.waiting.reason + ': ' + (stuck.state.waiting.message || ''), state: 'failed'};
  const wanted = (pod.spec.initContainers || []).length + (pod.spec.containers || []).length;
  const have = statuses.filter((s) => s.imageID).length;
  const last = latest(events, ['Pulled']);
  if (have >= wanted) return {name: 'Pulled', at: last ? eventTime(last) : null, text: last?.message || 'every image is on the node', state: 'done'};
  const pulling = latest(events, ['Pulling']);
  return {name: 'Pulled', at: null, text: pulling?.message || have + ' of ' + wanted + ' images', state: 'open'};
}

function started(pod) {
  const statuses = pod.status?.containerStatuses || [];
  const crash = statuses.find((s) => s.state?.waiting && !imageTrouble.includes(s.state.waiting.reason) && !['ContainerCreating', 'PodInitializing'].includes(s.state.waiting.reason));
  if (crash) return {name: 'Started', at: null, text: crash.name + ': ' + crash.state.waiting.reason + ': ' + (crash.state.waiting.message || ''), state: 'failed'};
  const times = statuses.map((s) => when(s.state?.running?.startedAt) ?? when(s.state?.terminated?.startedAt)).filter((t) => t !== null);
  const restarts = statuses.reduce((n, s) => n + (s.restartCount || 0), 0);
  const wanted = (pod.spec.containers || []).length;
  const text = times.length + ' of ' + wanted + ' containers' + (restarts ? ', restarted ' + restarts + (restarts === 1 ? ' time' : ' times') : '');
  if (wanted && times.length >= wanted) return {name: 'Started', at: Math.max(...times), text, state: 'done'};
  const waiting = statuses.find((s) => s.state?.waiting?.message);
  return {name: 'Started', at: null, text: waiting ? waiting.name + ': ' + waiting.state.waiting.message : text, state: 'open'};
}

function ready(pod, changes) {
  const c = condition(pod, 'Ready');
  if (c?.status === 'True') {
    const seen = changes.findLast((s, i) => i > 0 && isReady(s.object) && !isReady(changes[i - 1].object));
    return {name: 'Ready', at: seen ? seen.at : when(c.lastTransitionTime), precise: Boolean(seen), text: 'it takes traffic', state: 'done'};
  }
  if (['Succeeded', 'Failed'].includes(pod.status?.phase)) return {name: 'Ready', at: null, text: 'not any more', state: 'later'};
  return {name: 'Ready', at: null, text: c?.message || 'not yet', state: 'open'};
}

function isReady(object) {
  return (object.status?.conditions || []).some((c) => c.type === 'Ready' && c.status === 'True');
}

function ended(pod) {
  const finished = (pod.status?.containerStatuses || []).map((s) => when(s.state?.terminated?.finishedAt)).filter((t) => t !== null);
  const phase = pod.status?.phase;
  if (phase === 'Succeeded' || phase === 'Failed') {
    const bad = (pod.status.containerStatuses || []).find((s) => s.state?.terminated?.exitCode);
    const text = [phase, pod.status.reason, pod.status.message, bad && bad.name + ' exited with ' + bad.state.terminated.exitCode + ' (' + bad.state.terminated.reason + ')'].filter(Boolean).join(': ');
    return {name: 'Ended', at: finished.length ? Math.max(...finished) : null, text, state: phase === 'Failed' ? 'failed' : 'done'};
  }
  return {name: 'Ended', at: null, text: 'is being deleted, until ' + pod.metadata.deletionTimestamp + ' at the latest', state: 'open'};
}

// fieldChanges names the fields that differ between two states of an object,
// as spec.replicas: 2 → 3; most of them at most, and no values of Secrets.
export function fieldChanges(before, after, most = 4) {
  const secret = (after || before)?.kind === 'Secret';
  const found = [];
  const walk = (a, b, at) => {
    if (found.length > most || JSON.stringify(a) === JSON.stringify(b)) return;
    if (isMap(a) && isMap(b)) {
      for (const key of new Set([...Object.keys(a), ...Object.keys(b)])) {
        if (at === 'metadata' && ['managedFields', 'resourceVersion', 'generation'].includes(key)) continue;
        walk(a[key], b[key], at ? at + '.' + key : key);
      }
    } else if (Array.isArray(a) && Array.isArray(b) && a.length === b.length) {
      a.forEach((x, i) => walk(x, b[i], at + '[' + (x?.type || x?.name || i) + ']'));
    } else {
      found.push(at + ': ' + (secret ? 'changed' : brief(a) + ' → ' + brief(b)));
    }
  };
  walk(before || {}, after || {}, '');
  return found.length > most ? [...found.slice(0, most), '…'] : found;
}

function isMap(x) { return x !== null && typeof x === 'object' && !Array.isArray(x); }

function brief(x) {
  if (x === undefined) return 'nothing';
  const text = typeof x === 'string' ? x : JSON.stringify(x);
  return text.length > 60 ? text.slice(0, 57) + '…' : text;
}
