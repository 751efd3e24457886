// What is on the page stays true: a list, then a watch from where it ended; the
// same again when the watch breaks. All that is live ends with the view.

import {ApiError, ask, get, lines} from './api.js';

const TABLE = 'application/json;as=Table;v=v1;g=meta.k8s.io,application/json';

// MOST is how many objects one list keeps: what is beyond is counted.
const MOST = 2000;

// View is the life of what is shown: everything begun in it ends with it.
export class View {
  #abort = new AbortController();
  get signal() { return this.#abort.signal; }
  get ended() { return this.#abort.signal.aborted; }
  end() { this.#abort.abort(); }

  // wait sleeps, or ends early with the view.
  wait(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.signal.addEventListener('abort', () => { clearTimeout(timer); resolve(); }, {once: true});
    });
  }

  // poll asks again and again, and tells what it hears: tell(answer, error).
  async poll(path, ms, tell) {
    while (!this.ended) {
      try {
        const answer = await get(path, {signal: this.signal});
        if (!this.ended) tell(answer, null);
      } catch (err) {
        if (this.ended) return;
        tell(null, err);
        if (err.code === 401 || err.code === 403 || err.code === 404) return;
      }
      await this.wait(ms);
    }
  }

  // watch keeps a list and tells of it, soon after each change:
  // tell({items, columns, more, error, live}). table asks for rows as the server prints
  // them, {cells, object}; else items are objects.
  async watch(path, {table = false, query = {}} = {}, tell) {
    const kept = new Map();
    const status = {items: kept, columns: [], more: 0, error: null, live: false};
    let due = 0;
    const soon = () => {
      if (due || this.ended) return;
      due = setTimeout(() => { due = 0; if (!this.ended) tell(status); }, 100);
    };
    const keep = (item, gone) => {
      const meta = (table ? item.object : item).metadata;
      const key = meta.uid || (meta.namespace || '') + '/' + meta.name;
      if (gone) kept.delete(key);
      else kept.set(key, item);
    };
    const accept = table ? TABLE : 'application/json';
    for (let tries = 0; !this.ended; tries++) {
      try {
        const list = await get(path + '?' + new URLSearchParams({...query, limit: MOST}), {accept, signal: this.signal});
        kept.clear();
        if (table && list.columnDefinitions) status.columns = list.columnDefinitions;
        for (const item of (table ? list.rows : list.items) || []) keep(item, false);
        status.more = list.metadata.remainingItemCount || 0;
        status.error = null;
        status.live = true;
        soon();
        tries = 0;
        await this.#follow(path, {...query}, accept, list.metadata.resourceVersion, (event) => {
          if (table) {
            if (event.object.columnDefinitions?.length) status.columns = event.object.columnDefinitions;
            for (const row of event.object.rows || []) keep(row, event.type === 'DELETED');
          } else {
            keep(event.object, event.type === 'DELETED');
          }
          soon();
        });
      } catch (err) {
        if (this.ended) return;
        status.live = false;
        if (err.code !== 410) status.error = err;
        soon();
        if (err.code === 401 || err.code === 403 || err.code === 404) return;
      }
      await this.wait(Math.min(500 * 2 ** tries, 10000));
    }
  }

  // follow watches from a revision until the stream ends for good.
  async #follow(path, query, accept, revision, change) {
    while (!this.ended) {
      const params = new URLSearchParams({...query, watch: '1', allowWatchBookmarks: 'true', resourceVersion: revision, timeoutSeconds: '300'});
      const began = Date.now();
      for await (const line of lines(await ask(path + '?' + params, {accept, signal: this.signal}))) {
        if (!line) continue;
        const event = JSON.parse(line);
        if (event.type === 'ERROR') throw new ApiError(event.object.code || 500, event.object.message);
        revision = revisionOf(event.object) || revision;
        if (event.type !== 'BOOKMARK') change(event);
      }
      if (Date.now() - began < 1000) await this.wait(1000); // a server that hangs up at once
    }
  }
}

function revisionOf(object) {
  return object.rows?.[0]?.object?.metadata?.resourceVersion || object.metadata?.resourceVersion;
}
