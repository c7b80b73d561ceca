// Devices: the mesh of every replica, what each rank holds of the picture, and how long it computes and waits.

import { $, arrange, bytes, count, h, milliseconds, write } from "./dom.js";

// Mesh axes from the slowest-varying to the fastest.
const AXES = ["data", "cfg", "pipe", "ring", "ulysses", "tensor"];
const COLOURS = 8;
const HISTORY = 60;

// The style of this view comes with it, and before it.
await new Promise((done) => {
  document.head.append(h("link", { rel: "stylesheet", href: "static/devices.css", load: done, error: done }));
});

const cards = new Map(); // by replica
const nothing = h("p", { class: "hint" }, "The server has no replica.");

const colour = (rank) => `rank c${rank % COLOURS}`;

/** The ranks as nested boxes, one level for each axis. */
function mesh(degrees, ranks) {
  const axes = AXES.filter((axis) => degrees[axis] > 1);
  for (const axis of Object.keys(degrees)) if (!AXES.includes(axis) && degrees[axis] > 1) axes.push(axis);
  const product = axes.reduce((size, axis) => size * degrees[axis], 1);
  const square = (rank) => h("span", { class: colour(rank) }, String(rank));
  // A mesh of another size than there are ranks is not understood: the ranks alone.
  if (product !== ranks.length || !axes.length) return h("div", { class: "axis" }, ranks.map(({ rank }) => square(rank)));
  const level = (place, begin, size) => {
    if (place === axes.length) return square(ranks[begin].rank);
    const axis = axes[place];
    const share = size / degrees[axis];
    const parts = [...Array(degrees[axis]).keys()].map((index) => level(place + 1, begin + index * share, share));
    return h("div", { class: "axis" }, h("span", { class: "name" }, `${axis} ${degrees[axis]}`), h("div", {}, parts));
  };
  return level(0, 0, product);
}

/** Pictures with a tile for each rank; ranks that hold the same tiles have pictures of their own. */
function tilings(ranks) {
  const all = Math.max(1, ...ranks.map(({ tiles }) => tiles?.[1] ?? 0));
  const pictures = [];
  for (const rank of ranks) {
    const [begin, end] = rank.tiles ?? [0, all];
    const free = pictures.find((held) => held.every((other) => other.end <= begin || end <= other.begin));
    const held = { rank: rank.rank, begin, end };
    if (free) free.push(held);
    else pictures.push([held]);
  }
  return pictures.map((held) => tiling(held, all));
}

function tiling(held, all) {
  const bands = held.map(({ rank, begin, end }) => {
    const band = h("span", { class: colour(rank) }, String(rank));
    band.style.top = `${(100 * begin) / all}%`;
    band.style.height = `${(100 * (end - begin)) / all}%`;
    return band;
  });
  const text = held.map(({ rank, begin, end }) => `rank ${rank}: ${begin} to ${end} of ${all}`).join(", ");
  return h("div", { class: "tiling", role: "img", "aria-label": `Tiles: ${text}`, title: text }, bands);
}

function newRow(rank) {
  const columns = Object.fromEntries(["tiles", "step", "waiting", "memory"].map((name) => [name, h("td", { class: name })]));
  const computing = h("span", { class: "computing" });
  const waits = h("span", { class: "waits" });
  const past = h("canvas", { width: 2 * HISTORY, height: 24 });
  const row = h(
    "tr",
    {},
    h("th", { scope: "row" }, h("span", { class: colour(rank.rank) }, String(rank.rank)), ` ${rank.device}`),
    columns.tiles,
    h("td", { class: `bars c${rank.rank % COLOURS}`, "aria-hidden": "true" }, h("div", { class: "bar-of" }, computing, waits), past),
    columns.step,
    columns.waiting,
    columns.memory,
  );
  return Object.assign(row, { columns, computing, waits, past, history: [] });
}

const HEADINGS = ["Rank", "Tiles", "", "Step", "Waiting", "Memory"];

function newCard(replica) {
  const state = h("span", { class: "badge" });
  const what = h("p", { class: "hint" });
  const message = h("p", { class: "error" });
  const body = h("tbody");
  const head = h("tr", {}, HEADINGS.map((name) => h("th", { scope: "col" }, name || h("span", { class: "hidden" }, "Bars"))));
  const diagram = h("div", { class: "diagram" });
  const figures = h("dl", { class: "figures" });
  const card = h(
    "section",
    { class: "panel replica", "aria-label": `Replica ${replica.name}` },
    h("div", { class: "bar" }, h("h3", {}, replica.name), state),
    what,
    message,
    diagram,
    h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "hidden" }, "Ranks"), h("thead", {}, head), body)),
    h("p", { class: "legend", "aria-hidden": "true" }, h("i", { class: "computing" }), " computing ", h("i", { class: "waits" }), " waiting for other ranks; on the right the last steps"),
    figures,
  );
  return Object.assign(card, { state, what, message, body, diagram, figures, rows: [], named: new Map() });
}

function figure(card, name, value) {
  let data = card.named.get(name);
  if (!data) {
    data = h("dd");
    card.named.set(name, data);
    card.figures.append(h("div", {}, h("dt", {}, name), data));
  }
  write(data, String(value));
}

function drawHistory({ past, history }, longest) {
  const context = past.getContext("2d");
  const { color: computing, caretColor: waits } = getComputedStyle(past);
  context.clearRect(0, 0, past.width, past.height);
  history.forEach(([step, waiting], place) => {
    const height = (value) => Math.round((past.height * value) / longest);
    const left = 2 * place;
    context.fillStyle = waits;
    context.fillRect(left, past.height - height(step), 1.5, height(waiting));
    context.fillStyle = computing;
    context.fillRect(left, past.height - height(step - waiting), 1.5, height(step - waiting));
  });
}

function drawRanks(card, replica) {
  const { ranks } = replica;
  const held = JSON.stringify(ranks.map(({ rank, device }) => [rank, device]));
  if (held !== card.held) {
    card.held = held;
    card.rows = ranks.map(newRow);
    arrange(card.body, card.rows);
  }
  // Where the sequence is shared, tiles are known after the first step.
  const known = ranks.some(({ tiles }) => tiles) || (replica.mesh.ring ?? 1) * (replica.mesh.ulysses ?? 1) === 1;
  const shape = JSON.stringify([held, replica.mesh, known, ranks.map(({ tiles }) => tiles)]);
  if (shape !== card.shape) {
    card.shape = shape;
    const named = (name, what) => h("figure", {}, h("figcaption", {}, name), what);
    card.diagram.replaceChildren(
      ...(ranks.length ? [named("Mesh", mesh(replica.mesh, ranks))] : []),
      ...(ranks.length && known ? [named("Tiles of the image", h("div", { class: "tilings" }, tilings(ranks)))] : []),
    );
  }
  const calls = replica.calls !== card.calls;
  card.calls = replica.calls;
  for (const [place, { step_seconds: step, waiting_seconds: waiting }] of ranks.entries()) {
    const { history } = card.rows[place];
    if (calls && step) history.push([step, Math.min(waiting, step)]);
    if (history.length > HISTORY) history.shift();
  }
  const now = Math.max(1e-9, ...ranks.map((rank) => rank.step_seconds));
  const ever = Math.max(now, ...card.rows.flatMap(({ history }) => history.map(([step]) => step)));
  const all = Math.max(0, ...ranks.map(({ tiles }) => tiles?.[1] ?? 0));
  ranks.forEach((rank, place) => {
    const row = card.rows[place];
    const { tiles, step_seconds: step, waiting_seconds: waiting } = rank;
    write(row.columns.tiles, tiles ? `${tiles[0]}–${tiles[1]} of ${all}` : known ? "all" : "–");
    write(row.columns.step, step ? milliseconds(step) : "–");
    write(row.columns.waiting, step ? `${Math.round((100 * Math.min(waiting, step)) / step)} %` : "–");
    write(row.columns.memory, rank.memory_bytes ? bytes(rank.memory_bytes) : "–");
    row.computing.style.width = `${(100 * Math.max(0, step - waiting)) / ever}%`;
    row.waits.style.width = `${(100 * Math.min(waiting, step)) / ever}%`;
    drawHistory(row, ever);
  });
}

function drawCard(card, replica) {
  write(card.state, replica.state);
  card.state.dataset.state = replica.state;
  write(card.what, [replica.strategy, replica.models.join(", "), count(replica.ranks.length, "rank")].filter(Boolean).join(" · "));
  const restarted = replica.restarts ? `Restarted ${count(replica.restarts, "time")}` : "";
  card.message.hidden = !restarted && !replica.message;
  write(card.message, [restarted, replica.message].filter(Boolean).join(": "));
  drawRanks(card, replica);
  figure(card, "Jobs running", replica.running.length);
  figure(card, "Rows in the last batch", replica.batch);
  figure(card, "Rows per call", replica.calls ? (replica.rows / replica.calls).toFixed(2) : "–");
  figure(card, "Transformer calls", replica.calls.toLocaleString());
  if (replica.synchronous_steps) figure(card, "Synchronous steps", replica.synchronous_steps.toLocaleString());
  if (replica.drift != null) figure(card, "Drift", replica.drift.toPrecision(3));
  // Branches of guidance and samples share a link, which is not called as an axis is.
  const named = (axis) => (axis === "batch" ? "cfg" : axis);
  for (const [axis, sent] of Object.entries(replica.bytes)) figure(card, `Sent over ${named(axis)}`, bytes(sent));
}

/** Shows the server's state. */
export function update({ replicas }) {
  for (const replica of replicas) {
    if (!cards.has(replica.name)) cards.set(replica.name, newCard(replica));
    drawCard(cards.get(replica.name), replica);
  }
  arrange($("replicas"), replicas.length ? replicas.map(({ name }) => cards.get(name)) : [nothing]);
}

