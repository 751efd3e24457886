// The one place that makes elements. Text is always a text node: nothing that
// came from the cluster is ever parsed as HTML.

// h makes an element: h('a', {class: 'x', href: '#/pods', onclick: f}, 'text', element, …).
// Children that are null, undefined or false are left out; lists are flattened.
export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) el.addEventListener(name.slice(2), value);
    else if (name === 'href') el.setAttribute('href', ownLink(value));
    else if (name === 'value') el.value = value;
    else el.setAttribute(name, value === true ? '' : String(value));
  }
  el.append(...nodes(children));
  return el;
}

// ownLink lets links lead to places of this page only.
function ownLink(to) {
  return String(to).startsWith('#') ? to : '#/';
}

function nodes(children) {
  return children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false)
    .map((c) => (c instanceof Node ? c : String(c)));
}

// fill replaces what is in an element.
export function fill(el, ...children) {
  el.replaceChildren(...nodes(children));
  return el;
}

// age shows how long ago a time is, and goes on showing it.
export function age(time) {
  const t = Date.parse(time);
  if (Number.isNaN(t)) return h('span', {class: 'dim'}, '–');
  const el = h('time', {datetime: time, title: stamp(time)});
  el.dataset.age = t;
  el.textContent = span(Date.now() - t);
  return el;
}

setInterval(() => {
  for (const el of document.querySelectorAll('time[data-age]')) {
    const text = span(Date.now() - Number(el.dataset.age));
    if (el.textContent !== text) el.textContent = text;
  }
}, 1000);

// span writes milliseconds as people say them: 850ms, 12s, 5m, 3h, 2d.
export function span(ms) {
  if (ms < 0) ms = 0;
  const s = Math.floor(ms / 1000);
  if (s < 120) return s + 's';
  if (s < 7200) return Math.floor(s / 60) + 'm';
  if (s < 172800) return Math.floor(s / 3600) + 'h';
  return Math.floor(s / 86400) + 'd';
}

// lasted writes a short duration with the precision that it was measured with.
export function lasted(ms) {
  if (ms < 1000) return Math.round(ms) + ' ms';
  if (ms < 60000) return (ms / 1000).toFixed(1) + ' s';
  return span(ms);
}

// stamp is a time as this browser's user writes it.
export function stamp(time) {
  const d = new Date(time);
  return Number.isNaN(d.getTime()) ? '–' : d.toLocaleString();
}

// bytes writes a size.
export function bytes(n) {
  if (typeof n !== 'number' || n < 0) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return (i === 0 ? n : n.toFixed(n < 10 ? 1 : 0)) + ' ' + units[i];
}

// state is a word with a colour that says whether it is good.
export function state(word, text = word) {
  return h('span', {class: 'state ' + mood(word)}, text);
}

// mood is good, busy, bad or plain.
export function mood(word) {
  const w = String(word);
  if (/NotReady|Unknown|Fail|Error|BackOff|Evicted|OOM|Lost|dead|unreachable|silent|Invalid|Unexpected|OutOf|Cannot|NodePorts|DeadlineExceeded/i.test(w)) return 'bad';
  if (/Pending|Creating|Init|Terminating|Waiting|Stopping|SchedulingDisabled|Resizing|unseen|joining|Warning|PodInitializing|NotTriggerScaleUp/i.test(w)) return 'busy';
  if (/^(Ready|Running|Active|Bound|alive|answers|voter|Leader|Follower|Available|Complete|True)\b/.test(w)) return 'good';
  return 'plain';
}
