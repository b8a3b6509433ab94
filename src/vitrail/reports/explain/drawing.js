// Drawing helpers of the page of `vitrail explain`: elements, messages, colours, maps, strips of numbers, equations.
"use strict";

const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Messages: `message` in the current language, for text that is redrawn; `bilingual` in both, for text that is not.

const format = (text, fields) => text.replace(/\{(\w+)\}/g, (_, name) => fields[name]);
const message = (name, fields = {}) => format(page.messages[name][document.documentElement.lang], fields);

function bilingual(name, fields = {}) {
  const fragment = document.createDocumentFragment();
  for (const language of ["en", "ko"]) fragment.append(el("span", { class: language, lang: language }, format(page.messages[name][language], fields)));
  return fragment;
}

// Numbers

function numberText(x) {
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const size = Math.abs(x);
  if (size >= 1e6) return x.toExponential(1).replace("-", "−");
  const text = size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : size >= 0.095 || size < 1e-9 ? x.toFixed(2) : x.toPrecision(2);
  return (size > 1e-9 && size < 1e-4 ? x.toExponential(0) : text).replace("-", "−");
}
const percent = (x) => `${x >= 0.99995 ? "100" : (100 * x).toFixed(1)} %`;
const norm = (x) => Math.hypot(...x);
const cosine = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0) / (norm(a) * norm(b) || 1);
const largest = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);

// Colours: a sequential map for shares, and a diverging map for signed numbers whose zero is the panel's background.

const SHARES = [[0, 34, 78], [35, 62, 108], [87, 93, 109], [124, 123, 120], [166, 155, 117], [211, 193, 100], [254, 232, 56]];
const LIGHT = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [253, 184, 99], [179, 88, 6]];
const DARK = [[120, 180, 240], [58, 100, 150], [38, 43, 50], [158, 96, 26], [255, 178, 92]];
const isDark = window.matchMedia("(prefers-color-scheme: dark)");

function interpolate(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((level, c) => Math.round(level + (stops[low + 1][c] - level) * (at - low)));
}
const colourTable = (stops) => Array.from({ length: 256 }, (_, i) => interpolate(stops, i / 255));
const COLOUR_TABLES = { shares: colourTable(SHARES), light: colourTable(LIGHT), dark: colourTable(DARK) };
const colourOf = (kind, share) => COLOUR_TABLES[kind === "signed" ? (isDark.matches ? "dark" : "light") : kind][Math.round(255 * Math.min(Math.max(share, 0), 1)) || 0];

// Paint one pixel per value: signed values symmetric around 0, shares from 0 to the largest. -Infinity is transparent.
function paint(canvas, values, columns, kind = "signed", peak = 0) {
  const rows = values.length / columns, image = new ImageData(columns, rows);
  let scale = peak || 1e-12;
  if (!peak) for (const value of values) if (Number.isFinite(value)) scale = Math.max(scale, Math.abs(value));
  for (let i = 0; i < values.length; i++) {
    image.data.set(colourOf(kind, kind === "signed" ? values[i] / scale / 2 + 0.5 : values[i] / scale), 4 * i);
    image.data[4 * i + 3] = values[i] === -Infinity ? 0 : 255;
  }
  canvas.width = columns; canvas.height = rows;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Paint pixels (H, W, C) on a canvas.
function paintPixels(canvas, pixels, [high, wide]) {
  const channels = pixels.length / high / wide, image = new ImageData(wide, high);
  for (let i = 0; i < high * wide; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = pixels[i * channels + (channels === 3 ? c : 0)];
    image.data[4 * i + 3] = 255;
  }
  canvas.width = wide; canvas.height = high;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Add a row of numbers, drawn as colours, with its formula before it. `marksChosen` outlines the chosen number.
function makeStrip(host, formula, marksChosen = false) {
  const canvas = el("canvas", { class: "strip", role: "img" }), note = el("span", { class: "note" }), at = el("i", { class: "at", hidden: true });
  const name = el("span", { class: "name" }, typeset(formula));
  host.append(el("div", { class: "line" }, name, el("div", { class: "bed" }, canvas, at), note));
  return {
    name,
    draw(values, { peak, text = "", chosen = -1 } = {}) {
      paint(canvas, values, values.length, "signed", peak);
      canvas.setAttribute("aria-label", message("strip", { name: name.textContent, count: values.length, low: numberText(Math.min(...values)), high: numberText(Math.max(...values)) }));
      note.textContent = text;
      at.hidden = !marksChosen || chosen < 0;
      at.style.left = `${(100 * chosen) / values.length}%`; at.style.width = `${100 / values.length}%`;
    },
  };
}

// Add a map of the patches. With `pick`, a patch can be chosen by pointer, finger or arrow keys (as an ARIA slider).
function makeMap(host, title, pick = null, sliderName = title) {
  const [rows, columns] = config.grid, canvas = el("canvas"), mark = el("i", { class: "mark" });
  const box = el("div", { class: "map", style: `aspect-ratio: ${config.resolution[1]} / ${config.resolution[0]}` }, canvas, mark);
  let at = 0;
  if (pick) {
    const take = (patch) => { at = patch; pick(patch); };  // the next key press may come before this one is drawn
    Object.entries({ tabindex: 0, role: "slider", "aria-valuemin": 0, "aria-valuemax": rows * columns - 1 }).forEach(([key, value]) => box.setAttribute(key, value));
    const under = (event) => {
      const frame = box.getBoundingClientRect(), inside = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
      return inside((event.clientY - frame.top) / frame.height, rows) * columns + inside((event.clientX - frame.left) / frame.width, columns);
    };
    box.addEventListener("pointerdown", (event) => take(under(event)));
    box.addEventListener("pointermove", (event) => { if (event.buttons) take(under(event)); });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
      if (step === undefined) return;
      event.preventDefault(); event.stopPropagation();
      take((at + step + rows * columns) % (rows * columns));
    });
  } else {
    canvas.setAttribute("role", "img");
  }
  host.append(box);
  return {
    box, canvas,
    mark(patch) {
      mark.hidden = patch === null || patch < 0;
      mark.style.left = `${(100 * (patch % columns)) / columns}%`; mark.style.top = `${(100 * Math.floor(patch / columns)) / rows}%`;
      mark.style.width = `${100 / columns}%`; mark.style.height = `${100 / rows}%`;
      if (!pick) return;
      at = Math.max(patch, 0);
      box.setAttribute("aria-label", message(sliderName));
      box.setAttribute("aria-valuenow", at);
      box.setAttribute("aria-valuetext", positionName(at));
    },
    draw(values, kind, chosen, peak = 0) {
      paint(canvas, values, columns, kind, peak);
      this.mark(chosen);
      const finite = values.filter(Number.isFinite);
      const text = message("map", { name: message(title), rows, columns, low: numberText(Math.min(...finite)), high: numberText(Math.max(...finite)) });
      if (pick) box.title = text;
      else canvas.setAttribute("aria-label", text);
    },
  };
}

// Equations: a subset of TeX (letters, numbers, _ ^ ', \frac \sqrt \sum and signs) as MathML. Lines may break at ~.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const SIGNS = { times: "×", cdot: "·", in: "∈", dots: "…", to: "→", mu: "μ", sigma: "σ", gamma: "γ", beta: "β", epsilon: "ε", R: "ℝ", sum: "∑", approx: "≈" };

const typesetLines = (text) => text.split("~").map(typeset);

function typeset(text) {
  const tokens = text.match(/\\[a-zA-Z]+|[A-Za-z]+|−?[0-9]+(?:\.[0-9]+)?|\S/g) ?? [];
  const make = (tag, ...children) => { const node = document.createElementNS(MATHML, tag); node.append(...children); return node; };
  let at = 0;
  const group = () => {
    if (tokens[at] !== "{") return atom();
    const parts = [];
    for (at++; at < tokens.length && tokens[at] !== "}";) parts.push(term());
    at++;
    return make("mrow", ...parts);
  };
  const atom = () => {
    const token = tokens[at++] ?? "";
    if (token === "\\frac") return make("mfrac", group(), group());
    if (token === "\\sqrt") return make("msqrt", group());
    if (token === "\\sum") return make("mo", SIGNS.sum);
    if (token[0] === "\\") return make(/^[a-z]+$/.test(token.slice(1)) && "μσγβε".includes(SIGNS[token.slice(1)]) ? "mi" : "mo", SIGNS[token.slice(1)]);
    if (/^−?[0-9]/.test(token)) return make("mn", token);
    if (/^[A-Za-z]/.test(token)) return make("mi", token);
    return make("mo", token === "-" ? "−" : token);
  };
  const term = () => {
    let base = atom(), below = null, above = null;
    while ("_^'".includes(tokens[at] ?? " ")) {
      const sign = tokens[at++];
      if (sign === "_") below = group();
      else above = sign === "'" ? make("mo", "′") : group();
    }
    if (below && above) return make("msubsup", base, below, above);
    return below ? make("msub", base, below) : above ? make("msup", base, above) : base;
  };
  const row = [];
  while (at < tokens.length) row.push(term());
  const math = make("math", make("mrow", ...row));
  math.setAttribute("displaystyle", "true");
  return math;
}
