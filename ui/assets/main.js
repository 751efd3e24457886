// The frame: who is here, which view is shown, in which namespace, light or dark.

import {signIn, whoAmI} from './api.js';
import {fill, h} from './dom.js';
import {View} from './live.js';
import {KINDS} from './kinds.js';
import {said} from './table.js';
import {events, list, members, overview, store, workloads} from './pages.js';
import {object} from './object.js';

const bar = document.getElementById('bar');
const main = document.getElementById('main');

let user = null;
let namespace = ''; // '': all
let view = new View();

const PLACES = [['', 'Overview'], ['nodes', 'Nodes'], ['workloads', 'Workloads'], ['pods', 'Pods'], ['services', 'Services'], ['members', 'Members'], ['store', 'Store'], ['events', 'Events']];

function place() {
  return location.hash.replace(/^#\/?/, '').split('/').map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
}

// show draws the view of the address.
function show() {
  view.end();
  view = new View();
  if (!user) return login();
  const [where, ...rest] = place();
  drawBar(where);
  const at = {view, namespace, user};
  let page;
  if (where === '') page = overview(at);
  else if (where === 'workloads') page = workloads(at);
  else if (where === 'members') page = members(at);
  else if (where === 'store') page = store(at);
  else if (where === 'events') page = events(at);
  else if (Object.hasOwn(KINDS, where) && rest.length === 0) page = list(at, where);
  else if (Object.hasOwn(KINDS, where) && rest.length === (KINDS[where].cluster ? 1 : 2)) page = object(at, where, ...(KINDS[where].cluster ? ['', ...rest] : rest));
  else page = [h('h1', {}, 'No such place'), h('p', {}, h('a', {href: '#/'}, 'To the overview'))];
  fill(main, page);
  document.title = (where ? [where, ...rest].join(' ') : 'overview') + ' – clusterd';
}

function drawBar(where) {
  const owner = KINDS[where]?.workload || where === 'cronjobs' ? 'workloads' : where;
  const ns = h('input', {
    class: 'ns', value: namespace, placeholder: 'all namespaces', 'aria-label': 'Namespace', list: 'namespaces', spellcheck: 'false', autocapitalize: 'none',
    onchange: () => { namespace = ns.value.trim(); show(); },
  });
  const known = h('datalist', {id: 'namespaces'});
  view.watch('/api/v1/namespaces', {table: true}, ({items}) => fill(known, [...items.values()].map((r) => h('option', {value: r.object.metadata.name}))));
  fill(bar,
    h('a', {class: 'brand', href: '#/'}, 'clusterd'),
    h('nav', {'aria-label': 'Places'}, PLACES.map(([to, text]) => h('a', {href: '#/' + to, 'aria-current': to === owner ? 'page' : undefined}, text))),
    h('div', {class: 'who'}, ns, known, themeButton(), h('span', {class: 'dim', title: [user.username, ...(user.groups || [])].join(', ')}, user.username.replace(/^system:serviceaccount:([^:]+):/, '$1/')),
      h('button', {onclick: () => { signIn(''); user = null; show(); }}, 'Sign out')));
}

const THEMES = ['auto', 'light', 'dark'];

function themeButton() {
  const button = h('button', {
    title: 'Colours: as the system, light, dark',
    onclick: () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]),
  });
  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = {auto: '◐', light: '☀', dark: '☾'}[name];
    button.setAttribute('aria-label', 'Colours: ' + name);
  };
  theme(document.documentElement.dataset.theme || 'auto');
  return button;
}

// login asks for a token; what the browser's own certificate opens needs none.
function login(error) {
  document.title = 'Sign in – clusterd';
  fill(bar, h('span', {class: 'brand'}, 'clusterd'), themeButton());
  const token = h('input', {type: 'password', id: 'token', autocomplete: 'current-password', required: true, spellcheck: 'false'});
  const note = h('p', {class: 'note', role: 'alert'}, error || '');
  const form = h('form', {
    class: 'login',
    onsubmit: (event) => {
      event.preventDefault();
      enter(token.value).catch((err) => {
        signIn('');
        fill(note, err.code === 401 ? 'The server does not know this token, or it has expired.' : said(err));
      });
    },
  },
  h('h1', {}, 'Sign in'),
  h('label', {for: 'token'}, 'Token of a service account, or of your identity provider'), token,
  h('button', {class: 'primary'}, 'Sign in'), note,
  h('p', {class: 'dim'}, 'A token that may look at everything but Secrets, for an hour:'),
  h('pre', {}, 'clusterctl create serviceaccount viewer\nclusterctl create clusterrolebinding viewer --clusterrole view --serviceaccount default:viewer\nclusterctl create token viewer'),
  h('p', {class: 'dim'}, 'A client certificate that this browser holds signs in by itself. The token is kept in this page alone and forgotten when it is reloaded.'));
  fill(main, form);
  token.focus();
}

async function enter(token) {
  signIn(token);
  user = await whoAmI();
  show();
}

window.addEventListener('hashchange', () => { show(); window.scrollTo(0, 0); });
enter('').catch((err) => login(err.code === 401 ? '' : said(err)));
