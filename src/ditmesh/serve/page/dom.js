// Elements, and how figures are written.

export const $ = (id) => document.getElementById(id);

/** An element. Properties that are functions listen, `class` and attributes are set, null and false are left out. */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value == null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** Sets a text only if it is another: selections and screen readers are left alone. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes `children` the children of `parent`, in this order; those that are there already are not touched. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let place = parent.firstElementChild;
  for (const child of children) {
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
}

export function seconds(value) {
  if (value < 1) return "less than 1 s";
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export const count = (number, noun) => `${number} ${noun}${Number(number) === 1 ? "" : "s"}`;

export const time = (value) => new Date(value * 1000).toLocaleString();

/** What a screen reader says next. */
export function announce(text) {
  $("announcer").textContent = text;
}

/** JSON in the session's storage; nothing where storage is forbidden. */
export const session = {
  get(name) {
    try {
      return JSON.parse(sessionStorage.getItem(`ditmesh.${name}`));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      if (value == null) sessionStorage.removeItem(`ditmesh.${name}`);
      else sessionStorage.setItem(`ditmesh.${name}`, JSON.stringify(value));
    } catch {
      // Forbidden or full: it is forgotten on reload.
    }
  },
};
