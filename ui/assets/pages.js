// The places of the page, but those of one object.

import {age, bytes, fill, h, state} from './dom.js';
import {KINDS, linkTo, listPath} from './kinds.js';
import {eventTime} from './story.js';
import {TableView, facts, plain, said} from './table.js';

// tableOf is a live table of one kind.
export function tableOf({view, namespace}, resource, {query, caption = KINDS[resource].title, all = false, empty} = {}) {
  const table = new TableView({caption, link: (meta) => linkTo(resource, meta), wide: KINDS[resource].wide, empty});
  view.watch(listPath(resource, all ? '' : namespace), {table: true, query}, (status) => table.update(status));
  return table.el;
}

export function list(at, resource) { return [heading(KINDS[resource].title, at, resource), tableOf(at, resource)]; }

export function workloads(at) {
  return [heading('Workloads', at), ['deployments', 'statefulsets', 'daemonsets', 'jobs', 'cronjobs'].map((r) => tableOf(at, r))];
}

function heading(text, at, resource) {
  return h('h1', {}, text, !KINDS[resource]?.cluster && at.namespace ? h('span', {class: 'dim'}, ' in ' + at.namespace) : null);
}

// overview counts, and names what needs attention.
export function overview(at) {
  const {view, namespace} = at;
  const cards = h('div', {class: 'cards'});
  const card = (title, href) => {
    const text = h('div', {class: 'big'}, '…');
    const more = h('div', {class: 'dim'});
    cards.append(h('a', {class: 'card', href}, h('h2', {}, title), text, more));
    return {text, more};
  };
  const counted = (title, resource, tell) => {
    const c = card(title, '#/' + (KINDS[resource].workload ? 'workloads' : resource));
    view.watch(listPath(resource, namespace), {table: true}, (status) => {
      if (status.error?.code === 403) { fill(c.text, '–'); fill(c.more, 'You may not see these.'); return; }
      if (status.error) { fill(c.more, said(status.error)); return; }
      const column = (name) => status.columns.findIndex((x) => x.name === name);
      tell(c, [...status.items.values()], column, status.more);
    });
  };
  counted('Nodes', 'nodes', (c, rows, column) => {
    const ready = rows.filter((r) => /^Ready\b/.test(r.cells[column('Status')])).length;
    fill(c.text, ready + ' of ' + rows.length, h('span', {class: 'unit'}, ' Ready'));
    fill(c.more, tally(rows.map((r) => r.cells[column('Status')])));
  });
  counted('Pods', 'pods', (c, rows, column, more) => {
    fill(c.text, rows.length + more, h('span', {class: 'unit'}, rows.length + more === 1 ? ' pod' : ' pods'));
    fill(c.more, tally(rows.map((r) => r.cells[column('Status')])));
  });
  counted('Deployments', 'deployments', (c, rows, column) => {
    const whole = rows.filter((r) => { const [a, b] = String(r.cells[column('Ready')]).split('/'); return a === b; }).length;
    fill(c.text, whole + ' of ' + rows.length, h('span', {class: 'unit'}, ' whole'));
    fill(c.more, rows.length > whole ? rows.length - whole + ' wait for pods' : '');
  });
  const servers = card('Members', '#/members');
  view.poll('/clusterd/v1/members', 5000, (answer, err) => {
    if (err) { fill(servers.text, '–'); fill(servers.more, err.code === 403 ? 'You may not see these.' : said(err)); return; }
    const voters = answer.members.filter((m) => m.role === 'voter');
    fill(servers.text, voters.filter((m) => m.gossip === 'alive').length + ' of ' + voters.length, h('span', {class: 'unit'}, ' voters alive'));
    fill(servers.more, answer.leader ? 'led by ' + answer.leader : state('Error', 'no leader'), answer.warnings?.length ? ', ' + answer.warnings.length + ' warnings' : '');
  });
  const room = card('Store', '#/store');
  view.poll('/clusterd/v1/store', 5000, (answer, err) => {
    if (err) { fill(room.text, '–'); fill(room.more, err.code === 403 ? 'You may not see it.' : said(err)); return; }
    fill(room.text, bytes(answer.keyspace.bytes));
    fill(room.more, h('meter', {min: 0, max: answer.quotaBytes, high: answer.quotaBytes * 0.8, value: answer.keyspace.bytes, 'aria-label': 'Of the quota'}), ' of ' + bytes(answer.quotaBytes));
  });
  return [h('h1', {}, 'Overview', namespace ? h('span', {class: 'dim'}, ' of ' + namespace) : null), cards, eventList(at, {caption: 'Warnings', query: {fieldSelector: 'type=Warning'}, most: 20, empty: 'No warnings are known.'})];
}

// tally counts words: 12 Running, 1 Pending.
function tally(words) {
  const n = new Map();
  for (const w of words) n.set(w, (n.get(w) || 0) + 1);
  return [...n].sort((a, b) => b[1] - a[1]).slice(0, 5).map(([word, count]) => [h('span', {class: 'tally'}, count + ' ', state(word)), ' ']);
}

export function events(at) { return [heading('Events', at), eventList(at, {caption: 'Newest first', most: 300})]; }

// eventList is a live list of events, the newest first.
export function eventList({view, namespace}, {caption, query, most, all = false, tell, empty = 'None are known; events are kept for an hour.'}) {
  const where = h('div');
  const note = h('p', {class: 'note', role: 'status'}, 'Loading…');
  const count = h('span', {class: 'dim'});
  const path = '/api/v1' + (namespace && !all ? '/namespaces/' + encodeURIComponent(namespace) : '') + '/events';
  view.watch(path, {query}, (status) => {
    tell?.(status);
    fill(note, status.error ? said(status.error) : status.items.size ? '' : empty);
    if (status.error?.code === 403) { fill(where); return; }
    const newest = [...status.items.values()].sort((a, b) => eventTime(b) - eventTime(a) || b.metadata.resourceVersion - a.metadata.resourceVersion);
    fill(count, status.items.size + status.more);
    fill(where, newest.length ? plain(caption, ['When', 'Type', 'Reason', 'About', 'Message'], newest.slice(0, most).map((e) => [
      age(new Date(eventTime(e)).toISOString()), state(e.type), e.reason, about(e.involvedObject),
      e.message + (e.count > 1 ? ' (' + e.count + ' times)' : ''),
    ])) : null);
  });
  return h('section', {class: 'list'}, h('h2', {}, caption, ' ', count), where, note);
}

function about(o) {
  const resource = o.kind.toLowerCase() + 's';
  const text = o.kind + ' ' + (o.namespace ? o.namespace + '/' : '') + o.name;
  return Object.hasOwn(KINDS, resource) ? h('a', {href: linkTo(resource, o)}, text) : text;
}

// members shows Raft's members and what gossip hears of them.
export function members({view}) {
  const where = h('div');
  const note = h('div', {role: 'status'});
  view.poll('/clusterd/v1/members', 2000, (answer, err) => {
    if (err) { fill(note, said(err)); return; }
    fill(note, answer.leader ? null : h('p', {class: 'refused'}, 'There is no leader: nothing can be changed until one is elected.'), (answer.warnings || []).map((w) => h('p', {class: 'refused'}, w)));
    const rows = [...answer.members].sort((a, b) => a.name.localeCompare(b.name, undefined, {numeric: true}));
    fill(where, facts([['Leader', answer.leader || 'none'], ['Term', answer.term], ['Voters', rows.filter((m) => m.role === 'voter').length + (answer.wantedVoters ? ' (asked for: ' + answer.wantedVoters + ')' : '')]]),
      plain('Members', ['Name', 'Part', 'Address', 'Gossip', 'Applied', 'Behind', 'Version'], rows.map((m) => [
        m.name, [state(m.role), m.leader ? h('span', {class: 'badge'}, 'leader') : null], m.address, state(m.gossip), m.applied, m.lag, m.version || '–'])));
  });
  return [h('h1', {}, 'Members'), h('p', {class: 'dim'}, 'What Raft counts, and what gossip hears of each machine, as the server that was asked sees it. It works without a leader.'), note, where];
}

// store shows the replicated store of every server, and who uses it.
export function store({view}) {
  const where = h('div');
  const use = h('div');
  const note = h('div', {role: 'status'});
  view.poll('/clusterd/v1/store', 3000, (s, err) => {
    if (err) { fill(note, said(err)); return; }
    fill(note, (s.warnings || []).map((w) => h('p', {class: 'refused'}, w)));
    fill(where,
      facts([['Live objects', bytes(s.keyspace.bytes)], ['Keys', s.keyspace.keys], ['Quota', [h('meter', {min: 0, max: s.quotaBytes, high: s.quotaBytes * 0.8, value: s.keyspace.bytes, 'aria-label': 'Used'}), ' ' + bytes(s.quotaBytes)]],
        ['Revision', s.keyspace.revision], ['History', bytes(s.keyspace.historyBytes) + ', from revision ' + s.keyspace.oldest], ['Disk free', bytes(s.diskFreeBytes)], ['Watches', s.watchers], ['Epoch', s.epoch?.number]]),
      h('h2', {}, 'Servers'),
      plain('Servers', ['Name', 'Part', 'State', 'Term', 'Applied', 'Behind', 'Hash', 'Live', 'Log', 'Snapshots'], s.servers.map((v) => [
        v.name, state(v.role), state(v.state), v.term, v.applied, v.lag, v.hash && h('code', {}, v.hash.slice(0, 8)), bytes(v.bytes), bytes(v.logBytes), bytes(v.snapshotBytes)])));
  });
  view.poll('/clusterd/v1/store/top', 5000, (t, err) => {
    if (err) return;
    fill(use, h('h2', {}, 'Largest folders'),
      plain('Largest folders', ['Folder', 'Objects', 'Size', 'Writes a minute'], t.folders.slice(0, 12).map((f) => [f.folder, f.live.keys, bytes(f.live.bytes), Math.round(f.writesPerSecond1m * 60)])),
      h('h2', {}, 'Busiest writers'),
      plain('Busiest writers', ['Who', 'Writes a minute', 'Bytes a minute', 'Writes since start', 'Of the history', 'Held back'], t.writers.slice(0, 12).map((w) => [w.origin || 'not known', Math.round(w.writesPerSecond1m * 60), bytes(Math.round(w.bytesPerSecond1m * 60)), w.writes, t.history && Math.round(100 * w.historyBytes / t.history.maxBytes) + ' %', w.heldBack ? 'yes' : 'no'])));
  });
  return [h('h1', {}, 'Store'), note, where, use];
}
