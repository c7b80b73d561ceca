// The page: its parts, the server's state, and the theme.

import { follow, request } from "./api.js";
import { $, write } from "./dom.js";
import * as form from "./form.js";
import * as jobs from "./jobs.js";

const NAMES = { system: "Auto", light: "Light", dark: "Dark" };
const THEMES = Object.keys(NAMES);

let state = null;
let stopState = null;
let models = "";

function theme() {
  const root = document.documentElement;
  const now = root.dataset.theme ?? "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  write($("theme"), NAMES[now]);
  $("theme").ariaLabel = `Theme: ${NAMES[now]}`;
  $("theme").onclick = () => {
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      if (next === "system") localStorage.removeItem("ditmesh.theme");
      else localStorage.setItem("ditmesh.theme", next);
    } catch {
      // Storage is forbidden: until the page is loaded again.
    }
    theme();
  };
}

async function loadModels() {
  const { data } = await request("v1/models");
  form.setModels(data);
}

function hear(next) {
  const before = state;
  state = next;
  const waits = [next.running && `${next.running} running`, next.queued && `${next.queued} queued`].filter(Boolean);
  write($("server"), [next.ready ? "ready" : "not ready", ...waits].join(" · "));
  $("server").dataset.ready = next.ready;
  $("server").title = `ditmesh ${next.version}`;
  form.setReplicas(next.replicas);
  // A model's card is complete when it is loaded.
  const known = JSON.stringify(next.replicas.map((replica) => [replica.state, replica.models]));
  if (known !== models) {
    models = known;
    loadModels().catch(() => (models = ""));
  }
  // Others may have sent jobs, from another tab perhaps.
  if (before && next.queued + next.running > before.queued + before.running) jobs.refreshSoon();
}

function connect() {
  if (document.hidden) {
    stopState?.();
    stopState = null;
  } else {
    stopState ??= follow("v1/server/events", ({ data }) => hear(data), (connected) => {
      if (connected && !$("offline").hidden) jobs.refresh();
      $("offline").hidden = connected;
    });
  }
}

theme();
form.start(jobs.submit);
document.addEventListener("visibilitychange", connect);
const picture = (name) => async (...what) => (await import("./picture.js"))[name](...what);
await Promise.allSettled([loadModels(), jobs.start(picture("open"), picture("compare"))]);
connect();
