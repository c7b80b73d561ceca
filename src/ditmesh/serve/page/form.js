// The form: what it offers follows from the model's card, what it sends is a job's request.

import { $, count, h, session, write } from "./dom.js";

const LARGEST_SEED = 2n ** 63n - 1025n;
const PREVIEWS = 10; // of a picture, at most
const RATIOS = [[1, 1], [4, 3], [3, 2], [16, 9], [3, 4], [2, 3], [9, 16]];
const ROLES = { image: "Input image", mask: "Mask", control: "Control image", "ip-image": "IP-Adapter image" };
const CUSTOM = "custom";

const form = $("form");
const fields = form.elements;
let cards = [];
let card = null;
let replicas = [];
const inputs = new Map(); // by role: {data: data URL} or {digest}, and scale

export const randomSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);

export const cardOf = (model) => cards.find(({ id }) => id === model) ?? cards[0];

/** Says which replicas serve the chosen model, and how. */
export function setReplicas(list) {
  replicas = list;
  serve();
}

function serve() {
  const serving = replicas.filter(({ models }) => models.includes(fields.model.value));
  const lines = (serving.length ? serving : replicas).map(({ name, strategy, mesh, ranks, state }) => {
    const degrees = Object.entries(mesh).filter(([, degree]) => degree > 1);
    const how = strategy || degrees.map((each) => each.join("=")).join(", ") || "one device";
    return `${name}: ${how}, ${count(ranks.length, "rank")}${state === "ready" ? "" : `, ${state}`}`;
  });
  write($("served"), lines.join("\n"));
}

/** What is wrong with the form, and where. */
class Invalid extends Error {
  constructor(message, field) {
    super(message);
    this.param = field;
  }
}

function sizes({ width, height, size_multiple: multiple }) {
  if (!width || !height) return [];
  const near = (length) => Math.max(multiple, Math.round(length / multiple) * multiple);
  const all = RATIOS.map(([across, down]) => [
    near(Math.sqrt((width * height * across) / down)),
    near(Math.sqrt((width * height * down) / across)),
  ]);
  return [...new Set([[width, height], ...all].map((size) => size.join("x")))];
}

const sizeName = (size) => size.replace("x", " × ");

/** Takes the models that there are; what the user has entered stays. */
export function setModels(list) {
  const chosen = fields.model.value || session.get("form")?.model;
  cards = list;
  fields.model.replaceChildren(...cards.map(({ id }) => h("option", {}, id)));
  if (cards.some(({ id }) => id === chosen)) fields.model.value = chosen;
  if (cards.length) setModel(cardOf(fields.model.value));
}

function setModel(next) {
  const former = card;
  const known = former && sizes(former).includes(fields.size.value) ? former : null;
  card = next;
  // A value that is the former model's default becomes the new one's.
  for (const name of ["steps", "guidance"]) {
    if (fields[name].value === String(former?.[name] ?? "")) fields[name].value = next[name] ?? "";
    fields[name].placeholder = next[name] == null ? "model’s own" : "";
  }
  const size = fields.size.value;
  const offered = sizes(next);
  fields.size.replaceChildren(
    ...(offered.length ? [] : [h("option", { value: "" }, "model’s own")]),
    ...offered.map((each) => h("option", { value: each }, sizeName(each))),
    h("option", { value: CUSTOM }, "other …"),
  );
  const usual = known && size === `${known.width}x${known.height}`;
  if (size === CUSTOM || (!usual && offered.includes(size))) fields.size.value = size;
  for (const name of ["width", "height"]) {
    fields[name].step = fields[name].min = next.size_multiple;
    fields[name].placeholder = next[name] ?? "";
  }
  $("prompt-field").hidden = next.labels.length > 0;
  $("label-field").hidden = next.labels.length === 0;
  $("negative-field").hidden = next.labels.length > 0;
  $("labels").replaceChildren(...next.labels.map((value) => h("option", { value })));
  $("frames-field").hidden = $("fps-field").hidden = !next.video;
  fields.format.closest("div").hidden = next.video;
  setLoras(next.loras, former?.loras);
  setInputs(next.inputs, former?.inputs);
  changed();
}

function setLoras(names, former) {
  $("loras").hidden = names.length === 0;
  if (String(names) === String(former)) return;
  $("loras").replaceChildren(
    $("loras").querySelector("legend"),
    ...names.map((name) =>
      h(
        "div",
        { class: "lora" },
        h("label", { class: "check" }, h("input", { type: "checkbox", name: "lora", value: name }), ` ${name}`),
        h("input", { type: "number", step: "0.05", value: "1", "aria-label": `Scale of ${name}` }),
      ),
    ),
  );
}

function setInputs(roles, former) {
  $("inputs").hidden = roles.length === 0;
  if (String(roles) === String(former)) return;
  for (const role of inputs.keys()) if (!roles.includes(role)) inputs.delete(role);
  $("inputs").replaceChildren(...roles.map(inputField));
}

function inputField(role) {
  const shown = h("span", { class: "chosen" });
  const file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp", id: `input-${role}` });
  const amount = h("input", {
    type: "number", step: "0.05", min: "0", max: role === "image" && "1", id: `amount-${role}`, placeholder: "model’s own",
  });
  const remove = h("button", { type: "button", class: "quiet", hidden: true }, "Remove");
  const set = (input) => {
    if (input) inputs.set(role, input);
    else inputs.delete(role);
    remove.hidden = !input;
    if (!input) file.value = "";
    shown.replaceChildren(
      ...(input?.data ? [h("img", { src: input.data, alt: ROLES[role] })] : input ? ["that of an earlier job"] : []),
    );
  };
  file.addEventListener("change", () => {
    const reader = new FileReader();
    reader.onload = () => set({ data: reader.result });
    if (file.files[0]) reader.readAsDataURL(file.files[0]);
  });
  remove.addEventListener("click", () => set(null));
  const field = h(
    "div",
    { class: "input" },
    h("label", { for: file.id }, ROLES[role]),
    h("div", { class: "pair" }, shown, file, remove),
    // The mask goes with the picture and has no amount of its own.
    role !== "mask" && h("label", { for: amount.id }, role === "image" ? "Strength" : "Scale"),
    role !== "mask" && amount,
  );
  field.set = set;
  field.dataset.role = role;
  return field;
}

function number(name, whole = true) {
  const field = fields[name];
  if (field.validity.badInput) throw new Invalid(`${name} is no number; enter one, or leave it empty.`, name);
  if (field.value === "") return undefined;
  if (whole && !Number.isInteger(field.valueAsNumber)) {
    throw new Invalid(`${name} ${field.value} is no whole number; enter one.`, name);
  }
  return field.valueAsNumber;
}

function size() {
  if (fields.size.value !== CUSTOM) return fields.size.value.split("x").map(Number);
  const multiple = card?.size_multiple ?? 1;
  return ["width", "height"].map((name) => {
    const length = number(name) ?? card?.[name];
    if (length && length % multiple) {
      const below = length - (length % multiple);
      const ways = [below, below + multiple].filter(Boolean).join(" or ");
      throw new Invalid(`${name} ${length} is no multiple of ${multiple}; use ${ways}.`, name);
    }
    return length;
  });
}

function seed() {
  const text = fields.seed.value.trim();
  if (fields.lock.checked && text !== "") {
    if (!/^\d+$/.test(text) || BigInt(text) > LARGEST_SEED) {
      throw new Invalid(`seed ${text} is no whole number from 0 to ${LARGEST_SEED}; enter one, or leave it empty.`, "seed");
    }
    return text;
  }
  return randomSeed();
}

/** The request that the form describes. Raises `Invalid`. */
function body() {
  const prompt = card?.labels.length ? fields.label.value.trim() : fields.prompt.value.trim();
  if (!prompt) throw new Invalid("Enter a prompt.", "prompt");
  if (card?.labels.length && !card.labels.includes(prompt)) {
    throw new Invalid(`${card.id} has no class "${prompt}"; choose one of its ${card.labels.length}.`, "prompt");
  }
  const [width, height] = size();
  const steps = number("steps");
  const negative = !card?.labels.length && fields.negative_prompt.value.trim();
  const amount = (role) => Number.parseFloat($(`amount-${role}`)?.value ?? "");
  const strength = inputs.has("image") ? amount("image") : Number.NaN;
  const given = [...inputs].map(([role, input]) => {
    const scale = role === "image" ? Number.NaN : amount(role);
    return { role, ...input, ...(Number.isNaN(scale) ? {} : { scale }) };
  });
  const loras = [...$("loras").querySelectorAll("input[type=checkbox]:checked")].map((box) => ({
    name: box.value,
    scale: Number.parseFloat(box.closest(".lora").querySelector("[type=number]").value || "1"),
  }));
  return {
    model: fields.model.value,
    prompt,
    n: number("n") ?? 1,
    seed: seed(),
    format: card?.video ? "mp4" : fields.format.value,
    previews: fields.previews.checked ? Math.ceil((steps ?? card?.steps ?? PREVIEWS) / PREVIEWS) : 0,
    ...(negative && { negative_prompt: negative }),
    ...(width && { width }),
    ...(height && { height }),
    ...(steps && { steps }),
    ...(fields.guidance.value !== "" && { guidance: number("guidance", false) }),
    ...(fields.deadline.value !== "" && { deadline_ms: Math.ceil(1000 * number("deadline", false)) }),
    ...(loras.length && { loras }),
    ...(given.length && { inputs: given }),
    ...(!Number.isNaN(strength) && { strength }),
    ...(card?.video && number("frames") && { frames: number("frames") }),
    ...(card?.video && number("fps") && { fps: number("fps") }),
  };
}

/** Fills the form with a former request; `seed` is that of one of its pictures. */
export function useRequest(request, pictureSeed) {
  if (cards.some(({ id }) => id === request.model)) {
    fields.model.value = request.model;
    setModel(cardOf(request.model));
  }
  fields.prompt.value = fields.label.value = request.prompt;
  fields.negative_prompt.value = request.negative_prompt ?? "";
  for (const name of ["steps", "guidance", "frames", "fps"]) fields[name].value = request[name] ?? card?.[name] ?? "";
  const wanted = `${request.width ?? card?.width}x${request.height ?? card?.height}`;
  fields.size.value = [...fields.size.options].some(({ value }) => value === wanted) ? wanted : CUSTOM;
  fields.width.value = request.width ?? "";
  fields.height.value = request.height ?? "";
  fields.deadline.value = request.deadline_ms ? request.deadline_ms / 1000 : "";
  fields.n.value = 1;
  fields.seed.value = pictureSeed;
  fields.lock.checked = true;
  if (request.format !== "mp4") fields.format.value = request.format;
  for (const box of $("loras").querySelectorAll("input[type=checkbox]")) {
    const adapter = request.loras.find(({ name }) => name === box.value);
    box.checked = Boolean(adapter);
    box.closest(".lora").querySelector("[type=number]").value = adapter?.scale ?? 1;
  }
  for (const field of $("inputs").children) {
    const { role } = field.dataset;
    const input = request.inputs.find((each) => each.role === role);
    field.set(input ? { digest: input.digest } : null);
    const amount = $(`amount-${role}`);
    if (amount) amount.value = (role === "image" ? request.strength : input?.scale) ?? "";
  }
  changed();
  fields.prompt.focus();
}

function changed() {
  $("custom-size").hidden = fields.size.value !== CUSTOM;
  const shownSize = fields.size.value === CUSTOM ? "other size" : sizeName(fields.size.value);
  const parts = [shownSize, fields.steps.value && count(fields.steps.value, "step"), count(fields.n.value, "image")];
  write($("settings-summary"), parts.filter(Boolean).join(", "));
  const kept = ["model", "prompt", "label", "negative_prompt", "size", "width", "height", "steps", "guidance", "deadline"];
  const values = [...kept, "seed", "n", "format"].map((name) => [name, fields[name].value]);
  const checked = ["lock", "previews"].map((name) => [name, fields[name].checked]);
  session.set("form", Object.fromEntries([...values, ...checked]));
}

/** What the form held before the page was loaded again. */
function restore() {
  const kept = session.get("form") ?? {};
  // The size's choices are there when the model is.
  fields.size.append(h("option", {}, kept.size ?? ""));
  for (const [name, value] of Object.entries(kept)) {
    if (typeof value === "boolean") fields[name].checked = value;
    else if (name !== "model") fields[name].value = value;
  }
}

function complain(error) {
  $("form-error").hidden = !error;
  write($("form-error"), error?.message ?? "");
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  const name = error?.param === "prompt" && card?.labels.length ? "label" : error?.param;
  const field = name && fields[name];
  if (!(field instanceof HTMLElement)) return;
  field.setAttribute("aria-invalid", "true");
  const closed = field.closest("details:not([open])");
  if (closed) closed.open = true;
  field.focus();
}

/** Makes the form work: `submit(request)` sends it. */
export function start(submit) {
  restore();
  if (matchMedia("(max-width: 52rem)").matches) $("settings").open = false;
  fields.model.addEventListener("change", () => {
    for (const name of ["steps", "guidance", "size"]) fields[name].value = "";
    card = null;
    setModel(cardOf(fields.model.value));
    serve();
  });
  form.addEventListener("input", changed);
  fields.seed.addEventListener("input", () => {
    fields.lock.checked = fields.seed.value !== "";
    changed();
  });
  $("dice").addEventListener("click", () => {
    fields.seed.value = randomSeed();
    fields.lock.checked = true;
    changed();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (form.ariaBusy === "true") return;
    form.ariaBusy = "true";
    try {
      const request = body();
      complain(null);
      await submit(request);
      fields.seed.value = request.seed;
      changed();
    } catch (error) {
      complain(error);
    } finally {
      form.ariaBusy = "false";
    }
  });
}
