// A container's log that follows.

import {ask, lines} from './api.js';
import {fill, h} from './dom.js';
import {said} from './table.js';
import {View} from './live.js';

// KEPT is how many lines stay on the page; older ones go.
const KEPT = 5000;

// logs shows the logs of a pod's containers; it lives as long as view.
export function logs(view, path, pod) {
  const names = ['containers', 'initContainers', 'ephemeralContainers'].flatMap((k) => (pod.spec[k] || []).map((c) => c.name));
  const which = h('select', {'aria-label': 'Container', onchange: begin}, names.map((n) => h('option', {value: n}, n)));
  const before = h('input', {type: 'checkbox', onchange: begin});
  const wrap = h('input', {type: 'checkbox', onchange: () => out.classList.toggle('wrap', wrap.checked)});
  const out = h('pre', {class: 'log', tabindex: 0, role: 'log', 'aria-label': 'Log'});
  const note = h('p', {class: 'note', role: 'status'});
  let current = null;

  function begin() {
    current?.end();
    current = new View();
    keepOn(current);
  }

  // keepOn follows, and tries again while the container is not there yet or the
  // server is away.
  async function keepOn(mine) {
    while (!mine.ended) {
      try {
        return await follow(mine);
      } catch (err) {
        if (mine.ended) return;
        fill(note, said(err));
        if ([401, 403, 404].includes(err.code)) return;
      }
      await mine.wait(3000);
    }
  }

  async function follow(mine) {
    fill(out);
    fill(note, 'Following…');
    const query = new URLSearchParams({container: which.value, tailLines: 500});
    if (before.checked) query.set('previous', 'true');
    else query.set('follow', 'true');
    const response = await ask(path + '/log?' + query, {accept: '*/*', signal: mine.signal});
    let waiting = [];
    let due = 0;
    const show = () => {
      due = 0;
      if (mine.ended || !waiting.length) return;
      const end = out.scrollHeight - out.scrollTop - out.clientHeight < 24;
      out.append(...waiting.slice(-KEPT).map((text) => h('span', {}, text + '\n')));
      waiting = [];
      while (out.childElementCount > KEPT) out.firstElementChild.remove();
      if (end) out.scrollTop = out.scrollHeight;
    };
    for await (const line of lines(response)) {
      waiting.push(visible(line));
      if (waiting.length > 2 * KEPT) waiting = waiting.slice(-KEPT);
      due ||= setTimeout(show, 100);
    }
    show();
    if (!mine.ended) fill(note, 'The log ends here. ', h('button', {onclick: begin}, 'Again'));
  }

  view.signal.addEventListener('abort', () => current?.end());
  begin();
  return h('section', {class: 'logs'}, h('div', {class: 'row'}, h('h2', {}, 'Log'), which,
    h('label', {}, before, ' of the run before'), h('label', {}, wrap, ' wrap')), out, note);
}

// visible takes out what would colour or move a terminal, and shows what else
// is no text.
export function visible(line) {
  return line.replace(/\u001b\[[0-9;?]*[ -/]*[@-~]/g, '').replace(/\r$/, '')
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g, '\ufffd');
}
