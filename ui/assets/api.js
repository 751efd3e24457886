// Requests to the API with the rights of the user. The token lives in this
// variable alone: not in a cookie, which every request would carry, and not in
// storage, which other pages of this server could read. Reloading forgets it.

let token = '';

export function signIn(text) { token = text.trim(); }

// ApiError is an answer that is not what was asked for; code 0: no answer.
export class ApiError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

// ask sends a request and returns the response if it is a success.
export async function ask(path, {accept = 'application/json', method = 'GET', body, signal} = {}) {
  const headers = {Accept: accept};
  if (token) headers.Authorization = 'Bearer ' + token;
  if (body) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, {
      headers, method, signal, body: body && JSON.stringify(body),
      cache: 'no-store', redirect: 'error', credentials: 'same-origin',
    });
  } catch (err) {
    if (err.name === 'AbortError') throw err;
    throw new ApiError(0, 'The server does not answer.');
  }
  if (!response.ok) throw new ApiError(response.status, await complaint(response));
  return response;
}

export async function get(path, options) { return (await ask(path, options)).json(); }

async function complaint(response) {
  const text = await response.text().catch(() => '');
  try {
    const status = JSON.parse(text);
    return status.message || status.error || text;
  } catch {
    return text.slice(0, 500) || response.statusText || 'HTTP ' + response.status;
  }
}

// whoAmI asks the API whom it takes us for.
export async function whoAmI() {
  const review = await get('/apis/authentication.k8s.io/v1/selfsubjectreviews', {
    method: 'POST', body: {apiVersion: 'authentication.k8s.io/v1', kind: 'SelfSubjectReview'},
  });
  return review.status.userInfo;
}

// lines yields the lines of a response as they come.
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    const parts = (rest + value).split('\n');
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}
