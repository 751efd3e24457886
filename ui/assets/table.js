// Tables that stay true: rows are made anew only when their object changed, so
// that selecting text and following links works while they live.

import {age, fill, h, state} from './dom.js';

// ROWS is how many rows are shown before one asks for more.
const ROWS = 200;

// TableView shows {items, columns, …} of View.watch with the server's columns.
export class TableView {
  #rows = new Map();
  #shown = ROWS;
  #last = null;

  // caption says what it lists; link makes a row's link of its object's
  // metadata; wide names further columns of the server's to show; extra adds
  // columns: {name, cell(row)}.
  constructor({caption, link, wide = [], empty = 'There are none.'}) {
    this.link = link;
    this.wide = wide;
    this.empty = empty;
    this.head = h('thead');
    this.body = h('tbody');
    this.note = h('p', {class: 'note', role: 'status'}, 'Loading…');
    this.count = h('span', {class: 'dim'});
    this.filter = h('input', {type: 'search', class: 'filter', placeholder: 'Filter', 'aria-label': 'Filter ' + caption, oninput: () => this.#last && this.update(this.#last)});
    this.el = h('section', {class: 'list'},
      h('div', {class: 'row'}, h('h2', {}, caption, ' ', this.count), this.filter),
      h('table', {}, h('caption', {class: 'hidden'}, caption), this.head, this.body), this.note);
  }

  update(status) {
    this.#last = status;
    if (status.error) {
      this.#say(said(status.error));
      if (status.error.code === 403) { fill(this.body); this.#rows.clear(); fill(this.count); return; }
    }
    const columns = this.#columns(status);
    fill(this.head, h('tr', {}, columns.map((c) => h('th', {scope: 'col', title: c.description || undefined}, c.name))));
    const wanted = this.filter.value.trim().toLowerCase();
    let all = [...status.items.entries()].map(([key, row]) => ({key, row, meta: row.object.metadata}));
    all.sort((a, b) => (a.meta.namespace || '').localeCompare(b.meta.namespace || '') || a.meta.name.localeCompare(b.meta.name, undefined, {numeric: true}));
    const total = all.length + status.more;
    if (wanted) all = all.filter((r) => (r.meta.namespace + ' ' + r.row.cells.join(' ')).toLowerCase().includes(wanted));
    fill(this.count, wanted ? all.length + ' of ' + total : total);
    const shown = all.slice(0, this.#shown);
    const old = this.#rows;
    this.#rows = new Map();
    shown.forEach(({key, row, meta}, i) => {
      const mark = meta.resourceVersion + ' ' + row.cells.join('\u0000');
      let kept = old.get(key);
      if (!kept || kept.mark !== mark) kept = {mark, tr: this.#row(row, meta, columns)};
      this.#rows.set(key, kept);
      if (this.body.children[i] !== kept.tr) this.body.insertBefore(kept.tr, this.body.children[i] || null);
    });
    while (this.body.children.length > shown.length) this.body.lastElementChild.remove();
    if (status.error) return;
    if (!total) this.#say(this.empty);
    else if (all.length > shown.length) this.#say(h('button', {onclick: () => { this.#shown += ROWS; this.update(status); }}, 'Show more of ' + all.length));
    else if (status.more) this.#say('The first ' + status.items.size + ' of ' + total + ' are listed: choose a namespace.');
    else this.#say('');
  }

  #say(...what) { fill(this.note, ...what); }

  // columns are the server's of priority 0 and those asked for, with their
  // place in a row's cells; a namespace column where objects have one.
  #columns(status) {
    const shown = status.columns.map((c, i) => ({...c, i})).filter((c) => c.priority === 0 || this.wide.includes(c.name));
    const first = status.items.values().next().value;
    const namespaced = first ? Boolean(first.object.metadata.namespace) : false;
    return namespaced ? [...shown.slice(0, 1), {name: 'Namespace', i: -1}, ...shown.slice(1)] : shown;
  }

  #row(row, meta, columns) {
    return h('tr', {}, columns.map((c, n) => {
      const text = c.i < 0 ? meta.namespace : row.cells[c.i];
      let content = String(text ?? '');
      if (n === 0 && this.link) content = h('a', {href: this.link(meta)}, content);
      else if (c.name === 'Age' && meta.creationTimestamp) content = age(meta.creationTimestamp);
      else if (c.name === 'Status' || c.name === 'Type' && /^(Normal|Warning)$/.test(content)) content = state(content);
      return h(n === 0 ? 'th' : 'td', {'data-label': c.name, scope: n === 0 ? 'row' : undefined}, content);
    }));
  }
}

// said puts an error into words for a reader.
export function said(err) {
  switch (err.code) {
    case 403: return h('span', {class: 'refused'}, 'You may not see this: ' + err.message);
    case 401: return h('span', {class: 'refused'}, 'The login has ended: sign in again.');
    case 0: return h('span', {class: 'refused'}, 'The server does not answer. What is shown is what was last seen; it is asked again.');
  }
  return h('span', {class: 'refused'}, err.message);
}

// facts shows names and values.
export function facts(pairs) {
  return h('dl', {class: 'facts'}, pairs.filter(([, v]) => v !== undefined && v !== null && v !== '').map(([k, v]) => h('div', {}, h('dt', {}, k), h('dd', {}, v))));
}

// plain shows a small table of values: header texts, and rows of cells.
export function plain(caption, header, rows) {
  return h('table', {}, h('caption', {class: 'hidden'}, caption),
    h('thead', {}, h('tr', {}, header.map((x) => h('th', {scope: 'col'}, x)))),
    h('tbody', {}, rows.map((cells) => h('tr', {}, cells.map((c, i) => h(i ? 'td' : 'th', {'data-label': header[i], scope: i ? undefined : 'row'}, c ?? '–'))))));
}
