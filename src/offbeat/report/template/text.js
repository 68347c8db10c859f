"use strict";
// Everything that a model or a data set wrote becomes text nodes here: no markup is ever made of a string.

/**
 * An element. `props` are attributes; `text` is its text, `on…` are listeners; null and false leave one out.
 * Odd characters of all texts are made visible here, so that no caller can forget it.
 */
function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") node.textContent = visible(value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : visible(value));
  }
  const shown = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...shown.map((child) => (child instanceof Node ? child : visible(child))));
  return node;
}

const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** A control character or a mark of direction, in a form that is seen and does nothing. */
function oddName(character) {
  const code = character.codePointAt(0);
  return code < 0x20 ? String.fromCodePoint(0x2400 + code) : code === 0x7f ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** Plain text in which odd characters are visible. */
const visible = (text) => String(text).replace(ODD, oddName);

/** Nodes of a text: odd characters and what was searched for are marked. */
function marked(text, search) {
  const parts = [];
  const plain = (piece) => {
    let from = 0;
    for (const match of piece.matchAll(ODD)) {
      if (match.index > from) parts.push(document.createTextNode(piece.slice(from, match.index)));
      parts.push(el("span", { class: "odd", text: oddName(match[0]) }));
      from = match.index + match[0].length;
    }
    if (from < piece.length) parts.push(document.createTextNode(piece.slice(from)));
  };
  if (!search) {
    plain(text);
    return parts;
  }
  const found = new RegExp(search.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
  let from = 0;
  for (const match of text.matchAll(found)) {
    plain(text.slice(from, match.index));
    parts.push(el("mark", { text: visible(match[0]) }));
    from = match.index + match[0].length;
    if (parts.length > 4000) break;
  }
  plain(text.slice(from));
  return parts;
}

const DASH = "–";

/** A number with about `digits` significant digits. */
function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size < 1e-3 || size >= 1e7) return value.toExponential(Math.max(0, digits - 1)).replace(/\.?0*e\+?/, "e");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(places, 8), minimumFractionDigits: 0 });
}

/** [lowest, highest] of the numbers among the values; [Infinity, -Infinity] without any. */
function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || value === undefined || Number.isNaN(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

const percent = (value) => (value === null || value === undefined ? DASH : value > 0 && value < 0.005 ? "<1 %" : `${Math.round(100 * value)} %`);

function bytes(value) {
  if (value === null || value === undefined) return DASH;
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${num(value / size)} ${unit}`;
  return `${num(value)} B`;
}

function duration(value) {
  if (value === null || value === undefined) return DASH;
  if (value === 0) return "0 s";
  if (value < 1) return `${num(1000 * value)} ms`;
  if (value < 90) return `${num(value)} s`;
  if (value < 600) return `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A duration in one number: for cells. */
const brief = (value) => (value < 90 ? duration(value) : value < 5400 ? `${num(value / 60, 2)} min` : `${num(value / 3600, 2)} h`);

const date = (seconds) => (seconds ? new Date(1000 * seconds).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : DASH);
const many = (count, word) => `${num(count)} ${word}${count === 1 ? "" : "s"}`;

/** A colour of the page, as it is in the present theme. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The same colour, more or less transparent. */
function faint(name, share) {
  const hex = colour(name).replace("#", "");
  return `rgb(${parseInt(hex.slice(0, 2), 16)} ${parseInt(hex.slice(2, 4), 16)} ${parseInt(hex.slice(4, 6), 16)} / ${share})`;
}

/** The value that was packed into an element: base64 of zlib's format of JSON. */
async function unpack(id) {
  const packed = atob(document.getElementById(id).textContent);
  const raw = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** A table. `rows` are arrays of values or nodes; numbers are set to the right. */
function table(titles, rows, props = {}) {
  const numeric = titles.map((_, i) => rows.some((row) => typeof row[i] === "number"));
  const cell = (tag, value, i) => {
    const shown = typeof value === "number" ? num(value, 4) : value === null || value === undefined ? DASH : value;
    return el(tag, { class: numeric[i] ? "n" : null, scope: tag === "th" ? "col" : null }, shown);
  };
  return el("table", props, el("thead", {}, el("tr", {}, ...titles.map((title, i) => cell("th", title, i)))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, i) => cell("td", value, i))))));
}
