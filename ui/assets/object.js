// One object: what it is, what happened to it, who changed it; of a pod its
// story and its logs too.

import {ApiError, get} from './api.js';
import {age, bytes, fill, h, lasted, span, stamp, state} from './dom.js';
import {KINDS, linkTo, objectPath} from './kinds.js';
import {logs} from './logs.js';
import {eventList, tableOf} from './pages.js';
import {fieldChanges, story} from './story.js';
import {facts, plain, said} from './table.js';

// CHANGES is how many of its latest changes are asked for.
const CHANGES = 100;

// object is the live page of one object.
export function object(at, resource, namespace, name) {
  const {view} = at;
  const path = objectPath(resource, namespace, name);
  const note = h('div', {role: 'status'}, 'Loading…');
  const top = h('div');
  const middle = h('div');
  const past = h('div');
  const raw = h('pre', {class: 'raw'});
  const known = {object: null, events: [], history: null, historyError: null};
  let begun = false;

  const draw = () => {
    const o = known.object;
    if (!o) return;
    fill(top, (SUMMARIES[resource] || summary)(o, known));
    fill(past, changes(known));
    fill(raw, JSON.stringify(shown(o), null, 2));
  };
  let asking = false;
  const askHistory = async () => {
    if (asking) return;
    asking = true;
    await view.wait(300); // several changes make one question
    asking = false;
    try {
      known.history = await get(path + '?history=' + CHANGES, {signal: view.signal});
      known.historyError = null;
    } catch (err) {
      if (view.ended) return;
      known.historyError = err;
    }
    draw();
  };
  const query = {fieldSelector: 'metadata.name=' + name};
  view.watch(path.slice(0, path.lastIndexOf('/')), {query}, (status) => {
    const found = [...status.items.values()].at(-1);
    if (status.error) fill(note, said(status.error));
    else fill(note, found ? null : h('p', {class: 'refused'}, begun ? 'It was deleted. What follows is what was last seen.' : said(new ApiError(404, 'There is no such object.'))));
    if (found && found.metadata.resourceVersion !== known.object?.metadata.resourceVersion) {
      known.object = found;
      draw();
      askHistory();
    }
    if (!found && begun) askHistory();
    if (found && !begun) {
      begun = true;
      fill(middle, (PARTS[resource] || (() => null))(at, path, found));
    }
  });
  const mine = {'involvedObject.name': name, 'involvedObject.kind': KIND_NAMES[resource]};
  const events = eventList({view, namespace}, {
    caption: 'Events', most: 50, query: {fieldSelector: Object.entries(mine).map((p) => p.join('=')).join(',')}, all: !namespace,
    tell: ({items}) => { known.events = [...items.values()].filter((e) => !known.object || e.involvedObject.uid === known.object.metadata.uid || resource === 'nodes'); draw(); },
  });
  return [
    h('h1', {}, h('span', {class: 'dim'}, KIND_NAMES[resource] + ' ' + (namespace ? namespace + ' / ' : '')), name),
    note, top, middle, events, past,
    h('details', {}, h('summary', {}, 'The object as the API has it'), raw),
  ];
}

const KIND_NAMES = {
  nodes: 'Node', pods: 'Pod', deployments: 'Deployment', statefulsets: 'StatefulSet', daemonsets: 'DaemonSet', replicasets: 'ReplicaSet',
  jobs: 'Job', cronjobs: 'CronJob', services: 'Service', persistentvolumeclaims: 'PersistentVolumeClaim',
};

// shown leaves out what is noise to a reader.
function shown(o) {
  const {managedFields, ...metadata} = o.metadata;
  return {...o, metadata};
}

function labels(map) {
  return Object.entries(map || {}).map(([k, v]) => [h('span', {class: 'label'}, k + (v ? '=' + v : '')), ' ']);
}

function owners(o) {
  return (o.metadata.ownerReferences || []).map((r) => {
    const resource = r.kind.toLowerCase() + 's';
    const text = r.kind + ' ' + r.name;
    return Object.hasOwn(KINDS, resource) ? h('a', {href: linkTo(resource, {namespace: o.metadata.namespace, name: r.name})}, text) : text;
  });
}

function common(o) {
  return [['Age', age(o.metadata.creationTimestamp)], ['Owner', owners(o).length ? owners(o) : null], ['Labels', Object.keys(o.metadata.labels || {}).length ? labels(o.metadata.labels) : null]];
}

function conditions(o) {
  const all = o.status?.conditions || [];
  return all.length ? h('section', {class: 'list'}, h('h2', {}, 'Conditions'),
    plain('Conditions', ['Type', 'Status', 'Since', 'Reason', 'Message'], all.map((c) => [c.type, c.status, c.lastTransitionTime ? age(c.lastTransitionTime) : '–', c.reason || '–', c.message || '–']))) : null;
}

function summary(o) {
  const s = o.spec || {};
  const t = o.status || {};
  return [facts([
    ...common(o), ['Replicas', s.replicas === undefined ? null : (t.readyReplicas || 0) + ' ready of ' + s.replicas],
    ['Scheduled', t.desiredNumberScheduled === undefined ? null : (t.numberReady || 0) + ' ready of ' + t.desiredNumberScheduled],
    ['Schedule', s.schedule], ['Cluster IP', s.clusterIP], ['Type', s.type], ['Selector', labels(s.selector?.matchLabels || (typeof s.selector === 'object' ? s.selector : null))],
    ['Images', (s.template?.spec?.containers || []).map((c) => h('div', {}, c.name + ': ', h('code', {}, c.image)))],
    ['Volume', s.volumeName], ['Phase', t.phase && state(t.phase)],
  ].filter(([, v]) => !Array.isArray(v) || v.length)), conditions(o)];
}

function pod(o, {events, history}) {
  const t = o.status || {};
  const all = [...(t.initContainerStatuses || []), ...(t.containerStatuses || []), ...(t.ephemeralContainerStatuses || [])];
  return [
    facts([['Phase', state(t.phase || 'Unknown')], ['Node', o.spec.nodeName && h('a', {href: linkTo('nodes', {name: o.spec.nodeName})}, o.spec.nodeName)], ['Address', t.podIP], ...common(o)]),
    h('section', {}, h('h2', {}, 'Story'), timeline(story(o, events, history))),
    all.length ? h('section', {class: 'list'}, h('h2', {}, 'Containers'),
      plain('Containers', ['Name', 'State', 'Ready', 'Restarts', 'Image', 'Last end'], all.map((c) => {
        const [word, more] = Object.entries(c.state || {waiting: {}})[0];
        const last = c.lastState?.terminated;
        return [c.name, state(more.reason || word[0].toUpperCase() + word.slice(1)), c.ready ? 'yes' : 'no', c.restartCount, h('code', {}, c.image), last ? [last.reason + ' (' + last.exitCode + '), ', age(last.finishedAt)] : '–'];
      }))) : null,
    conditions(o),
  ];
}

// timeline draws a story; between stations the time that passed.
function timeline(steps) {
  let before = null;
  return h('ol', {class: 'story'}, steps.map((s) => {
    const exact = before && before.precise && s.precise;
    const passed = before && s.at !== null && s.at >= before.at ? (exact ? '+' + lasted(s.at - before.at) : s.at - before.at < 1000 ? '< 1 s' : '≈ +' + span(s.at - before.at)) : '';
    if (s.at !== null) before = s;
    const words = {done: '', now: 'here now', failed: 'stuck', later: ''}[s.state];
    return h('li', {class: s.state}, h('div', {class: 'step'}, h('strong', {}, s.name), ' ', words ? h('span', {class: 'badge ' + s.state}, words) : null,
      h('span', {class: 'when'}, s.at === null ? '' : h('time', {datetime: new Date(s.at).toISOString(), title: stamp(s.at)}, new Date(s.at).toLocaleTimeString())), h('span', {class: 'passed'}, passed)),
    h('div', {class: 'text'}, s.text));
  }));
}

function node(o) {
  const t = o.status || {};
  const ready = (t.conditions || []).find((c) => c.type === 'Ready');
  const named = Object.fromEntries((t.addresses || []).map((a) => [a.type, a.address]));
  return [
    facts([['Status', state(ready?.status === 'True' ? 'Ready' : 'NotReady')], ['Takes pods', o.spec.unschedulable ? 'no: cordoned' : null], ['Address', named.InternalIP], ['Pod range', o.spec.podCIDR], ...common(o),
      ['System', [t.nodeInfo?.osImage, t.nodeInfo?.kernelVersion, t.nodeInfo?.architecture].filter(Boolean).join(', ')], ['Version', t.nodeInfo?.kubeletVersion],
      ['Taints', (o.spec.taints || []).length ? o.spec.taints.map((x) => [h('span', {class: 'label'}, x.key + (x.value ? '=' + x.value : '') + ':' + x.effect), ' ']) : null]]),
    h('section', {class: 'list'}, h('h2', {}, 'Room'), plain('Room', ['Resource', 'Capacity', 'For pods'], Object.keys(t.capacity || {}).map((k) => [k, quantity(k, t.capacity[k]), quantity(k, t.allocatable?.[k])]))),
    conditions(o),
  ];
}

function quantity(resource, text) {
  const ki = /^(\d+)Ki$/.exec(text || '');
  if (ki) return bytes(Number(ki[1]) * 1024);
  return /memory|storage|hugepages/.test(resource) && /^\d+$/.test(text || '') ? bytes(Number(text)) : text;
}

// changes shows who changed the object, the latest change first.
function changes({object, history, historyError}) {
  if (historyError) return h('section', {class: 'list'}, h('h2', {}, 'Who changed it'), said(historyError));
  if (!history) return null;
  let before = history.base || null;
  const rows = history.changes.map((c) => {
    const what = c.type === 'MODIFIED' ? (before ? fieldChanges(before, c.object) : ['what is not known: the state before has left the history']) : [];
    before = c.type === 'DELETED' ? null : c.object;
    return [h('code', {}, c.revision), age(c.time), {ADDED: 'made', MODIFIED: 'changed', DELETED: 'deleted'}[c.type] || c.type, (c.origin || 'not known') + (c.server ? ' at ' + c.server : ''), what.map((w) => h('div', {class: 'field'}, w))];
  }).reverse();
  return h('section', {class: 'list'}, h('h2', {}, 'Who changed it ', h('span', {class: 'dim'}, rows.length + (history.more ? ' latest' : ''))),
    rows.length ? plain('Changes', ['Revision', 'When', 'Change', 'Who', 'What'], rows.slice(0, 50)) : h('p', {class: 'note'}, 'Unchanged since the history begins, ' + stamp(history.oldestTime) + '.'));
}

// selector writes a label selector as the API's parameter.
function selector(s) {
  const parts = Object.entries(s?.matchLabels || {}).map(([k, v]) => k + '=' + v);
  for (const e of s?.matchExpressions || []) {
    parts.push({In: () => e.key + ' in (' + e.values.join(',') + ')', NotIn: () => e.key + ' notin (' + e.values.join(',') + ')', Exists: () => e.key, DoesNotExist: () => '!' + e.key}[e.operator]?.() || '');
  }
  return parts.filter(Boolean).join(',');
}

function podsOf(at, path, o) {
  const labelSelector = selector(o.spec.selector);
  return labelSelector ? tableOf({...at, namespace: o.metadata.namespace}, 'pods', {query: {labelSelector}}) : null;
}

const SUMMARIES = {pods: pod, nodes: node};

// PARTS are what some kinds have beside: made once, live by themselves.
const PARTS = {
  pods: (at, path, o) => logs(at.view, path, o),
  nodes: (at, path, o) => tableOf(at, 'pods', {query: {fieldSelector: 'spec.nodeName=' + o.metadata.name}, caption: 'Pods here', all: true}),
  deployments: podsOf, statefulsets: podsOf, daemonsets: podsOf, replicasets: podsOf, jobs: podsOf,
  services: (at, path, o) => (Object.keys(o.spec.selector || {}).length ? podsOf(at, path, {metadata: o.metadata, spec: {selector: {matchLabels: o.spec.selector}}}) : null),
};
