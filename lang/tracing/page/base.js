// ---- Small helpers: reading untrusted values, elements, numbers as text, colours ----
// Whatever comes from a trace reaches the page as text nodes only; nothing here takes HTML.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const number = (value) => (isNumber(value) ? value : null);
const count = (value) => (isNumber(value) && value > 0 ? Math.round(value) : 0);
const list = (value) => (Array.isArray(value) ? value : []);
const record = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
const text = (value) => (typeof value === "string" ? value : value == null ? "" : String(value));
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const byId = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick`) and children, all of them text or elements. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** The first index whose key is above `value`, in a list sorted by `key`. */
function upperBound(items, value, key) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(items[middle]) > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** `task` at most once per frame, however often it is asked for. */
function eachFrame(task) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      task();
    });
  };
}

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const grouped = (value) => (isNumber(value) ? GROUPED.format(value) : "–");
const counted = (value, one, many = `${one}s`) => `${grouped(value)} ${value === 1 ? one : many}`;

function percent(share) {
  if (!isNumber(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.01) return "<0.01%";
  const digits = value === 0 || value >= 99.995 ? 0 : value < 1 ? 2 : value < 10 || value > 99 ? 1 : 0;
  return `${value.toFixed(digits)}%`;
}

/** Seconds with the unit that suits them. */
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size === 0) return "0";
  if (size < 1e-3) return `${(seconds * 1e6).toPrecision(size < 1e-5 ? 2 : 3)} µs`;
  if (size < 1) return `${trimmed(seconds * 1e3)} ms`;
  if (size < 120) return `${trimmed(seconds)} s`;
  if (size < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

const trimmed = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));

/** The first line of a text, not longer than `length`. */
function glimpse(value, length = 80) {
  // The cut comes first: a text may be of megabytes.
  const start = text(value).slice(0, length * 4).replace(/\s+/gu, " ").trim();
  return start.length > length ? `${[...start].slice(0, length - 1).join("")}…` : start;
}

/** What the canvases draw with, read from the style sheet so that colours are written once. */
let palette = {};
const PALETTE_NAMES = [
  "bg", "panel", "raised", "ink", "muted", "faint", "line", "line-strong", "accent", "accent-soft", "hover",
  "gen-1", "gen-2", "gen-3", "select-1", "select-2", "select-3", "score-1", "score-2", "score-3",
  "other-1", "other-2", "other-3", "failed", "failed-soft", "cancelled", "found", "stripe", "once", "reused",
  "mono", "sans",
];

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  palette = Object.fromEntries(PALETTE_NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  palette.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  palette.em = parseFloat(style.fontSize) || 14;
}

/** Fit a canvas to its box in device pixels; its context, scaled to CSS pixels. */
function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const pixels = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Texts cut to a width. Widths are remembered: a canvas measures slowly. */
class Measure {
  constructor() {
    this.widths = new Map();
  }

  width(context, value) {
    const key = context.font + value;
    let width = this.widths.get(key);
    if (width === undefined) {
      if (this.widths.size > 20000) this.widths.clear();
      width = context.measureText(value).width;
      this.widths.set(key, width);
    }
    return width;
  }

  cut(context, value, width) {
    const full = this.width(context, value);
    if (full <= width) return value;
    const signs = [...value];
    let kept = Math.floor((signs.length * width) / full);
    // Letters are not equally wide: what was reckoned may be a few too many.
    while (kept > 0 && context.measureText(`${signs.slice(0, kept).join("")}…`).width > width) kept -= 1;
    return kept < 1 ? "" : `${signs.slice(0, kept).join("")}…`;
  }
}
const measure = new Measure();

/** A word to screen readers about what just changed. */
function announce(message) {
  byId("live").textContent = message;
}
