// One picture: large, with its receipt, and what can be done with it.

import { file, show } from "./api.js";
import { $, arrange, h, seconds, time, write } from "./dom.js";
import { cardOf, randomSeed, useRequest } from "./form.js";
import { entryOf, formerOf, neighbours, pathOf, remember, seedOf, submit } from "./jobs.js";

const dialog = $("picture");
let shown = null; // {job, index}

const ROWS = [
  ["Seed", ({ seed }) => seed],
  ["Negative prompt", ({ negative_prompt: text }) => text],
  ["Size", ({ width, height }) => width && `${width} × ${height}`],
  ["Steps", ({ steps }) => steps],
  ["Guidance", ({ guidance }) => guidance],
  ["Strength", ({ strength }) => strength],
  ["Class", ({ label }) => label],
  ["Model", ({ model }) => model],
  ["Pipeline", ({ pipeline }) => pipeline],
  ["Type", ({ dtype }) => dtype],
  ["Ranks", ({ devices, device }) => devices && `${devices} (${device})`],
  ["Configuration", ({ config }) => config && (settings(Object.entries(config).filter(telling)) || "one device")],
  ["Time", ({ seconds: taken }) => taken != null && seconds(taken)],
  ["Files", ({ files }) => files?.map(({ role, digest, scale }) => `${role} ${digest.slice(0, 12)} × ${scale}`).join(", ")],
  ["Weights", ({ weights_digest: digest }) => digest?.slice(0, 16)],
  ["Versions", ({ versions }) => versions && settings(Object.entries(versions), " ")],
  [
    "Environment",
    ({ environment, versions }) =>
      environment && settings(Object.entries(environment).filter(([name]) => !(name in (versions ?? {}))), ": "),
  ],
];

// Settings that say something by themselves; all of them are in the JSON.
const USUAL = [null, false, 1, "exact", "auto", "broadcast", "estimated", "whole"];
const BESIDES = ["warmup", "tiles", "shared_memory", "strict"];
const telling = ([name, value]) => !USUAL.includes(value) && !BESIDES.includes(name);

const settings = (entries, sign = "=") =>
  entries
    .map(([name, value]) => (value === true ? name : name + sign + (value?.constructor === Object ? JSON.stringify(value) : value)))
    .join(", ");

/** Shows picture `index` of a job. */
export function open(id, index) {
  const { job } = entryOf(id);
  const image = job.images.find((each) => each.index === index);
  if (!image) return;
  shown = { job, index };
  const { request } = job;
  const path = pathOf(id, index);
  const video = request.format === "mp4";
  const media = video ? h("video", { controls: true, loop: true }) : h("img", { alt: request.prompt });
  media.style.aspectRatio = image.width ? `${image.width} / ${image.height}` : "";
  media.classList.toggle("small", Math.max(image.width ?? 0, image.height ?? 0) <= 128);
  show(media, path);
  dialog.querySelector(".stage").replaceChildren(media);
  write($("picture-title"), request.prompt);
  const receipt = { ...request, seed: image.seed, width: image.width, height: image.height, ...image.receipt };
  const rows = [...ROWS.map(([name, value]) => [name, value(receipt)]), ["Created", time(job.created)]];
  if (job.expires) rows.push(["Kept until", time(job.expires)]);
  arrange(
    $("receipt"),
    rows
      .filter(([, value]) => value != null && value !== false && value !== "")
      .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]),
  );
  write($("receipt-json"), JSON.stringify(image.receipt ?? request, null, 2));
  $("download").href = `${path}?download=1`;
  write($("action-status"), formerOf(id)?.verdict?.long ?? "");
  if (!dialog.open) dialog.showModal();
}

/** Generates the shown picture again; `seed`: another one, or its own. */
async function repeat(seed) {
  const { job: from, index } = shown;
  const { request } = from;
  write($("action-status"), "");
  try {
    const job = await submit({ ...request, n: 1, seed: seed ?? seedOf(request, index) });
    if (seed) {
      write($("action-status"), `Queued with seed ${seed}.`);
    } else {
      write($("action-status"), "Queued again with the same seed.");
      remember(job.id, { job: from.id, index });
    }
  } catch (error) {
    write($("action-status"), error.message);
  }
}

/** A picture's values, as they were before they became a file. */
async function values(path) {
  const blob = await file(path);
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}

/** How two pictures differ: {short, long}. Their files do anyway: a receipt holds the time it took. */
function verdict(one, other, reproducible) {
  if (one.width !== other.width || one.height !== other.height) {
    return { short: "another size", long: "The new image has a different size." };
  }
  let pixels = 0;
  let most = 0;
  for (let place = 0; place < one.data.length; place += 4) {
    let difference = 0;
    for (let channel = place; channel < place + 4; channel += 1) {
      difference = Math.max(difference, Math.abs(one.data[channel] - other.data[channel]));
    }
    if (difference) pixels += 1;
    most = Math.max(most, difference);
  }
  if (!pixels) return { short: "same bytes", long: "Same again: all bytes of the new image are equal." };
  return {
    short: `${pixels} pixels differ`,
    long:
      `Same again: ${pixels} of ${one.width * one.height} pixels differ, by at most ${most} of 255.` +
      (reproducible ? "" : " Batches of another size may round otherwise; in reproducible mode they do not."),
  };
}

/** Compares a picture that was generated again with the former one. */
export async function compare({ job }, known) {
  try {
    const [one, other] = await Promise.all([values(pathOf(job.id, 0)), values(pathOf(known.job, known.index))]);
    known.verdict = verdict(one, other, job.images[0].receipt?.config?.reproducible);
  } catch (error) {
    known.verdict = { short: "not compared", long: `The images could not be compared: ${error.message}` };
  }
  remember(job.id, known);
  if (shown && [known.job, job.id].includes(shown.job.id)) write($("action-status"), known.verdict.long);
}

function turn(by) {
  const next = neighbours(shown.job.id, shown.index)[by];
  if (next) open(...next);
}

$("again").addEventListener("click", () => repeat(null));
$("vary").addEventListener("click", () => repeat(randomSeed()));
$("use").addEventListener("click", () => {
  const { job, index } = shown;
  dialog.close();
  useRequest(job.request, seedOf(job.request, index));
});
$("close").addEventListener("click", () => dialog.close());
$("download").addEventListener("click", async (event) => {
  // A link cannot send a key.
  if ($("forget-key").hidden) return;
  event.preventDefault();
  const { job, index } = shown;
  const blob = await file(pathOf(job.id, index));
  const name = `${job.id}-${index}.${blob.type.split("/")[1]}`;
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
dialog.addEventListener("close", () => {
  shown = null;
  dialog.querySelector(".stage").replaceChildren();
});
dialog.addEventListener("keydown", (event) => {
  if (event.target.closest("pre, video")) return;
  if (event.key === "ArrowLeft") turn(0);
  if (event.key === "ArrowRight") turn(1);
});
