// The HTTP API: requests, the API key, pictures, and streams of events.

import { $, session, write } from "./dom.js";

export class ApiError extends Error {
  /** `message`: the server's sentence; `status`: 0 when it cannot be reached; `param`: the field that is wrong. */
  constructor(message, status, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

// Seeds have up to 63 bits, numbers here 53: large ones are kept as text. Inside of strings quotes are escaped, so
// that only fields are found.
const parse = (text) => JSON.parse(text.replace(/("seed":\s*)(\d{16,})/g, '$1"$2"'));
const serialise = (value) => JSON.stringify(value).replace(/("seed":)"(\d+)"/g, "$1$2");

let key = session.get("key");
let asked = null;

/** Shows the field for the API key; ends when one has been entered. */
function askForKey(sentence) {
  write($("key-error"), sentence);
  asked ??= new Promise((resolve) => {
    $("key-panel").hidden = false;
    $("key").focus();
    $("key-panel").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        key = $("key").value.trim();
        session.set("key", key);
        $("key").value = "";
        $("key-panel").hidden = true;
        $("forget-key").hidden = false;
        asked = null;
        resolve();
      },
      { once: true },
    );
  });
  return asked;
}

$("forget-key").hidden = !key;
$("forget-key").addEventListener("click", () => {
  session.set("key", null);
  location.reload();
});

/** A response that is no error. Where a key is asked for, it waits for one and tries again. */
async function answer(path, { headers, ...options } = {}) {
  for (;;) {
    const used = key;
    const authorization = used ? { Authorization: `Bearer ${used}` } : {};
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...headers, ...authorization } });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.", 0);
    }
    if (response.ok) return response;
    const said = await response.json().catch(() => ({}));
    const message = said.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
    if (response.status !== 401) throw new ApiError(message, response.status, said.error?.param);
    if (used === key) await askForKey(message);
  }
}

export async function request(path, { method, body } = {}) {
  const options = body ? { method, body: serialise(body), headers: { "Content-Type": "application/json" } } : { method };
  return parse(await (await answer(path, options)).text());
}

export const file = async (path) => (await answer(path)).blob();

// A stream that is alive says something more often than that, in milliseconds.
const SILENCE = 45_000;

/** Events of a stream: {id, event, data}. */
async function* events(path, after, signal) {
  const headers = { Accept: "text/event-stream", ...(after ? { "Last-Event-ID": String(after) } : {}) };
  const response = await answer(path, { headers, signal });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let fields = {};
  for (;;) {
    const timer = setTimeout(() => reader.cancel(), SILENCE);
    const { value, done } = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (fields.data !== undefined) yield { ...fields, data: parse(fields.data) };
        fields = {};
        continue;
      }
      const [, name, text] = /^([^:]*):? ?(.*)$/.exec(line);
      if (name === "data" && fields.data !== undefined) fields.data += `\n${text}`;
      else if (name) fields[name] = text;
    }
  }
}

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;

/**
 * Follows a stream until `handle(event)` returns true; connects again, with the last event's id, when it breaks off.
 * `connected(whether)` hears of it. Returns a function that ends it.
 */
export function follow(path, handle, connected = () => {}) {
  const controller = new AbortController();
  const { signal } = controller;
  const run = async () => {
    let last = 0;
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      try {
        for await (const event of events(path, last, signal)) {
          // The server's side of the stream has failed.
          if (event.event === "error") break;
          connected(true);
          pause = FIRST_PAUSE;
          last = event.id ?? last;
          try {
            if (handle(event)) return controller.abort();
          } catch (error) {
            // The page's own mistake: no reason to connect again.
            reportError(error);
          }
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 404) return connected(false, error);
      }
      if (signal.aborted) return;
      connected(false);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, pause);
        addEventListener("online", () => (clearTimeout(timer), resolve()), { once: true, signal });
      });
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  };
  run();
  return () => controller.abort();
}

const visible = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    if (!isIntersecting) continue;
    visible.unobserve(target);
    file(target.dataset.path)
      .then((blob) => {
        const url = URL.createObjectURL(blob);
        target.addEventListener("load", () => URL.revokeObjectURL(url), { once: true });
        target.src = url;
      })
      .catch(() => target.dispatchEvent(new Event("error")));
  }
});

/** Shows a file in an `img` or `video` when that is in sight. Neither can send a key: with one the file is fetched. */
export function show(element, path) {
  if (element.dataset.path === path) return;
  element.dataset.path = path;
  if (key) visible.observe(element);
  else element.src = path;
}
