// Jobs: what the server says of them, the queue, and the gallery.

import { follow, request, show } from "./api.js";
import { $, announce, arrange, count, h, seconds, session, write } from "./dom.js";
import { cardOf } from "./form.js";

const PAGE = 48;
// A browser holds few connections to one server.
const STREAMS = 3;
const POLL = 2000;
const QUIET = 10_000;
const ENDED = ["succeeded", "failed", "cancelled"];

const entries = new Map(); // by job id
const former = session.get("former") ?? {}; // jobs that repeat a picture: {job, index, seed, verdict}
let limit = PAGE;
let chosen = () => {};
let repeated = () => {};

const ended = ({ job }) => ENDED.includes(job.status);
export const pathOf = (id, index) => `v1/jobs/${id}/images/${index}`;
export const entryOf = (id) => entries.get(id);
export const formerOf = (id) => former[id];

export function remember(id, known) {
  former[id] = known;
  session.set("former", former);
  if (entries.has(id)) draw(entries.get(id));
}

/** Sends a request; its job. */
export async function submit(body) {
  const job = await request("v1/jobs", { method: "POST", body });
  take(job);
  arrangeAll();
  announce(job.status === "queued" ? `Queued, ${count(job.position ?? 0, "job")} before it.` : "Started.");
  return job;
}

async function cancel(entry) {
  entry.cancelling = true;
  draw(entry);
  try {
    take(await request(`v1/jobs/${entry.job.id}`, { method: "DELETE" }));
  } catch (error) {
    entry.cancelling = false;
    entry.note = error.message;
    draw(entry);
  }
  arrangeAll();
}

/** Reads the newest jobs from the server. */
export async function refresh() {
  const status = $("status").value;
  try {
    const [{ data }, active] = await Promise.all([
      request(`v1/jobs?limit=${limit}${status && `&status=${status}`}`),
      // Those that wait long may not be among the newest.
      ...["queued", "running"].map((each) => request(`v1/jobs?limit=${PAGE}&status=${each}`)),
    ]).then(([newest, ...others]) => [newest, others.flatMap((list) => list.data)]);
    const known = new Set([...data, ...active].map(({ id }) => id));
    for (const [id, entry] of entries) {
      if (!known.has(id)) {
        entry.stop?.();
        entries.delete(id);
      }
    }
    for (const job of [...data, ...active]) take(job);
    $("older").hidden = data.length < limit;
    $("gallery-error").hidden = true;
  } catch (error) {
    if (error.status === 0) return;
    $("gallery-error").hidden = false;
    write($("gallery-error"), error.message);
  }
  arrangeAll();
}

let soon = null;

/** The same, at most once a second. */
export function refreshSoon() {
  soon ??= setTimeout(() => {
    soon = null;
    refresh();
  }, 1000);
}

/** Takes what the server says of a job. */
function take(job) {
  let entry = entries.get(job.id);
  if (!entry) {
    entry = { job, parts: [], tiles: [], note: "", heard: Date.now() };
    entries.set(job.id, entry);
  }
  // An answer that was under way when the last event came.
  if (ended(entry) && !ENDED.includes(job.status)) return;
  const before = entry.drawn && entry.job.status;
  entry.job = job;
  entry.eta = { value: job.eta, since: Date.now() };
  if (ended(entry)) {
    entry.stop?.();
    entry.stop = null;
    entry.cancelling = false;
    if (before && before !== job.status) tell(entry);
    const known = former[job.id];
    if (known && !known.verdict && job.status === "succeeded") repeated(entry, known);
  }
  draw(entry);
}

function tell({ job }) {
  const sentences = {
    succeeded: `Done: ${count(job.images.length, "image")} of ${job.request.prompt}.`,
    failed: `Failed: ${job.error?.message}`,
    cancelled: "Cancelled.",
  };
  announce(sentences[job.status]);
}

function part(entry, index) {
  return (entry.parts[index] ??= { step: 0, steps: null, preview: null, frames: null });
}

/** One event of a job's stream; true after the last. */
function hear(entry, { event, data }) {
  const { job } = entry;
  entry.heard = Date.now();
  if (ENDED.includes(event)) {
    take(data);
    arrangeAll();
    return true;
  }
  if (event === "queued") {
    Object.assign(job, { status: "queued", position: data.position });
  } else if (event === "started") {
    if (job.status !== "running") announce("Started.");
    Object.assign(job, { status: "running", attempt: data.attempt ?? job.attempt, position: null });
    entry.note = "";
  } else if (event === "step") {
    const one = part(entry, data.image);
    const halfway = one.step < data.steps / 2 && data.step >= data.steps / 2;
    Object.assign(one, { step: data.step, steps: data.steps });
    Object.assign(job, { status: "running", position: null });
    entry.eta = { value: data.eta, since: Date.now() };
    entry.note = "";
    if (halfway && data.steps > 9) announce(`Step ${data.step} of ${data.steps}.`);
  } else if (event === "preview") {
    part(entry, data.image).preview = `data:image/jpeg;base64,${data.b64_json}`;
  } else if (event === "frames") {
    part(entry, data.image).frames = data.url.slice(1);
  } else if (event === "image") {
    const place = job.images.findIndex(({ index }) => index === data.index);
    if (place < 0) job.images.push(data);
    else job.images[place] = data;
    if (job.request.n > 1) announce(`Image ${data.index + 1} of ${job.request.n} is done.`);
  } else if (event === "paused") {
    entry.note = `Paused: ${data.reason}`;
    announce(entry.note);
  } else if (event === "restarted") {
    entry.parts = [];
    entry.note = `Restarted, attempt ${data.attempt}: ${data.reason}`;
    job.attempt = data.attempt;
    announce(entry.note);
  }
  draw(entry);
  if (["queued", "started"].includes(event)) arrangeAll();
  return false;
}

/** Streams for running and next jobs; none while the page is hidden. */
function attend() {
  const active = [...entries.values()].filter((entry) => !ended(entry)).sort(first);
  active.forEach((entry, place) => {
    const wanted = place < STREAMS && !document.hidden;
    if (wanted && !entry.stop) {
      entry.stop = follow(`v1/jobs/${entry.job.id}/events`, (event) => hear(entry, event));
    } else if (!wanted && entry.stop) {
      entry.stop();
      entry.stop = null;
    }
  });
}

const rank = ({ job }) => (job.status === "running" ? -1 : (job.position ?? 0));
const first = (one, other) => rank(one) - rank(other) || one.job.created - other.job.created;

// Jobs without a stream, or with a silent one: another client may have paused or cancelled them.
async function poll() {
  if (document.hidden) return;
  const active = [...entries.values()].filter((entry) => !ended(entry));
  const now = Date.now();
  const asked = active.filter((entry) => !entry.stop || now - entry.heard > QUIET).slice(0, STREAMS);
  for (const entry of asked) {
    try {
      entry.heard = now;
      take(await request(`v1/jobs/${entry.job.id}`));
    } catch (error) {
      if (error.status === 404) await refresh();
    }
  }
  if (asked.length) arrangeAll();
}

// --- what is seen

/** Steps of all pictures that are done, and that there are. */
function progress({ job, parts }) {
  const known = parts.find((one) => one?.steps)?.steps ?? job.request.steps ?? cardOf(job.request.model)?.steps;
  const steps = known ? known * job.request.n : job.steps;
  const done = parts.reduce((sum, one) => sum + (one?.step ?? 0), 0);
  return [Math.max(done, job.step ?? 0), Math.max(steps ?? 0, job.steps ?? 0)];
}

function left({ eta }) {
  if (eta?.value == null) return "";
  const rest = eta.value - (Date.now() - eta.since) / 1000;
  return rest > 0 ? `, ${seconds(rest)} left` : "";
}

function state(entry) {
  const { job, note } = entry;
  if (entry.cancelling) return "Cancelling at the next step";
  if (note) return note;
  if (job.status === "queued") return job.position ? `${count(job.position, "job")} before it` : "Next";
  const [done, steps] = progress(entry);
  return steps ? `Step ${done} of ${steps}${left(entry)}` : "Started";
}

const sizeOf = ({ request: { width, height, model } }) => {
  const card = cardOf(model);
  return [width ?? card?.width ?? 1, height ?? card?.height ?? 1];
};

function draw(entry) {
  entry.drawn = true;
  const { job } = entry;
  if (ended(entry)) entry.row = null;
  else drawRow(entry);
  const made = job.images.filter(({ url }) => url);
  // An ended job without a picture has one tile, which says why.
  const places = ended(entry) ? made.map(({ index }) => index) : [...Array(job.request.n).keys()];
  const apology = ended(entry) && (job.status === "failed" || !made.length);
  const wanted = [...places, ...(apology ? ["end"] : [])];
  entry.tiles = wanted.map((place) => entry.tiles.find((tile) => tile.place === place) ?? newTile(entry, place));
  for (const tile of entry.tiles) drawTile(entry, tile);
}

function drawRow(entry) {
  const { job } = entry;
  if (!entry.row) {
    const prompt = job.request.prompt;
    const bar = h("progress", { "aria-label": `Progress: ${prompt}` });
    const stop = h("button", { type: "button", "aria-label": `Cancel: ${prompt}`, click: () => cancel(entry) }, "Cancel");
    const text = h("span", { class: "state" });
    entry.row = h("li", {}, h("span", { class: "prompt" }, prompt), text, stop, bar);
    Object.assign(entry.row, { text, stop, bar });
  }
  const { row } = entry;
  const [done, steps] = progress(entry);
  const several = job.request.n > 1 ? `${job.request.n} images · ` : "";
  write(row.text, several + state(entry));
  row.dataset.status = job.status;
  row.stop.disabled = Boolean(entry.cancelling);
  row.bar.max = steps || 1;
  row.bar.value = done;
}

function newTile(entry, place) {
  const text = h("span", { class: "over" });
  const bar = h("progress", { "aria-hidden": "true" });
  const meta = h("p", { class: "meta" });
  // An ended job without a picture has nothing to open.
  const button = place !== "end" && { type: "button", click: () => chosen(entry.job.id, place) };
  const frame = h(button ? "button" : "div", { class: "frame", ...button }, text, bar);
  const tile = h("li", { class: "tile" }, frame, h("p", { class: "prompt" }, entry.job.request.prompt), meta);
  return Object.assign(tile, { place, text, bar, meta, frame, media: null });
}

function drawTile(entry, tile) {
  const { job, parts } = entry;
  const { request: asked } = job;
  const image = job.images.find(({ index, url }) => index === tile.place && url);
  const one = parts[tile.place];
  const [width, height] = image?.width ? [image.width, image.height] : sizeOf(job);
  tile.frame.style.aspectRatio = `${width} / ${height}`;
  tile.dataset.status = image ? "done" : job.status;
  tile.frame.disabled = !image;
  const path = image ? pathOf(job.id, tile.place) : one?.frames;
  if (path || one?.preview) {
    const video = path && asked.format === "mp4";
    if (!tile.media || (video && tile.media.tagName === "IMG")) {
      tile.media?.remove();
      tile.media = video ? h("video", { muted: true, loop: true, playsinline: true, preload: "metadata" }) : h("img");
      if (!video) tile.media.loading = "lazy";
      tile.media.classList.toggle("small", Math.max(width, height) <= 128);
      tile.frame.prepend(tile.media);
    }
    if (!video) tile.media.alt = image ? asked.prompt : "";
    if (path) show(tile.media, path);
    else tile.media.src = one.preview;
  }
  if (image) {
    write(tile.text, "");
    tile.frame.setAttribute("aria-label", `Open: ${asked.prompt}, seed ${image.seed}`);
    write(tile.meta, [`seed ${image.seed}`, former[job.id]?.verdict?.short].filter(Boolean).join(" · "));
  } else {
    write(tile.text, textOf(entry, tile));
    const several = tile.place === "end" && asked.n > 1;
    const first = tile.place === "end" ? 0 : tile.place;
    write(tile.meta, `seed ${seedOf(asked, first)}${several ? ` to ${seedOf(asked, asked.n - 1)}` : ""}`);
  }
  tile.bar.hidden = image || !one?.steps || ended(entry);
  tile.bar.max = one?.steps ?? 1;
  tile.bar.value = one?.step ?? 0;
}

function textOf(entry, { place }) {
  const { job, parts } = entry;
  if (place === "end") return job.error?.message ?? (job.status === "cancelled" ? "Cancelled" : "No image");
  const one = parts[place];
  if (job.status === "queued") return "Queued";
  if (!one?.steps) return "Waiting";
  return one.step < one.steps ? `${one.step} / ${one.steps}` : "Decoding";
}

export const seedOf = ({ seed }, index) => String(BigInt(seed ?? 0) + BigInt(index));

function arrangeAll() {
  const all = [...entries.values()];
  const active = all.filter((entry) => !ended(entry)).sort(first);
  const newest = all.sort((one, other) => other.job.created - one.job.created);
  arrange($("queue"), active.map(({ row }) => row));
  arrange($("gallery"), newest.flatMap(({ tiles }) => tiles));
  $("queue-section").hidden = active.length === 0;
  $("empty").hidden = newest.length > 0;
  attend();
  title(active);
}

function title(active) {
  const running = active.find(({ job }) => job.status === "running");
  const [done, steps] = running ? progress(running) : [0, 0];
  const share = steps ? `${Math.floor((100 * done) / steps)} % · ` : "";
  document.title = active.length ? `${share || "queued · "}ditmesh` : "ditmesh";
}

/** The pictures before and behind one in the gallery, as {id, place}. */
export function neighbours(id, place) {
  const all = [...entries.values()]
    .sort((one, other) => other.job.created - one.job.created)
    .flatMap((entry) => entry.tiles.filter((tile) => tile.dataset.status === "done").map((tile) => [entry.job.id, tile.place]));
  const here = all.findIndex(([job, index]) => job === id && index === place);
  return [all[here - 1], all[here + 1]];
}

/** Begins: `open(id, index)` shows a picture, `compare(entry, known)` is called when a repeated one is there. */
export function start(open, compare) {
  chosen = open;
  repeated = compare;
  $("status").addEventListener("change", refresh);
  $("older").addEventListener("click", () => {
    limit += PAGE;
    refresh();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? attend() : refresh()));
  setInterval(poll, POLL);
  setInterval(() => {
    for (const entry of entries.values()) if (entry.row) drawRow(entry);
    title([...entries.values()].filter((entry) => !ended(entry)).sort(first));
  }, 1000);
  return refresh();
}
