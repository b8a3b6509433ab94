// The walk: what is chosen and changed (`state`, which the address holds), what the model makes of it (`now`, beside what
// it made of the unchanged image, `before`), and the stations, each of which is built once and drawn when it is seen.
"use strict";

const page = JSON.parse($("data").textContent);
const { config, rules, labels } = page;
const root = document.documentElement;
const [HIGH, WIDE] = config.resolution, [ROWS, COLUMNS] = config.grid, [TALL, BROAD] = config.patch;
const { channels: CHANNELS, prefix: PREFIX, tokens: TOKENS, width: WIDTH, heads: HEADS, depth: DEPTH, mlp: HIDDEN, classes: CLASSES } = config;
const PATCHES = ROWS * COLUMNS, FLAT = CHANNELS * TALL * BROAD, NARROW = WIDTH / HEADS;
const HAS_CLASS = config.pool === "cls";
const FIRST = [HAS_CLASS ? "[CLS]" : "", PREFIX > Number(HAS_CLASS) ? "R" : ""].filter(Boolean).join(" + ");  // tokens before the patches
const MOST_IN_ADDRESS = 3072;  // bytes of an image

// Weights and images, from the page itself.

function bytesOf(text) {
  const raw = atob(text.replace(/-/g, "+").replace(/_/g, "/")), found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}
const textOf = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");

const model = { config, tensors: {} };
const images = page.images.map((image) => ({ ...image, pixels: bytesOf(image.pixels) }));
const EMBEDDED = images.length;

function openWeights() {
  const all = new Float32Array(bytesOf($("weights").textContent).buffer);
  let at = 0;
  for (const [name, count] of page.tensors) model.tensors[name] = all.subarray(at, (at += count));
}

// State, and the address that holds it

const integer = (low, high, start) => ({ start, write: String, read: (text) => { const n = Number(text); return /^-?\d{1,9}$/.test(text) && n >= low && n <= high ? n : undefined; } });
const choice = (options) => ({ start: options[0], write: String, read: (text) => (options.includes(text) ? text : undefined) });
const some = (isMember) => ({ start: null, write: (set) => [...set].sort().join("_"), read: (text) => new Set(text.split("_").filter(isMember)) });
const numbers = (count) => {
  const isMember = (text) => /^\d{1,6}$/.test(text) && Number(text) < count;
  return { start: null, write: (set) => [...set].sort((a, b) => a - b).join("_"), read: (text) => new Set(text.split("_").filter(isMember).map(Number)) };
};
const pixelsIn = { start: null, write: (bytes) => (bytes.length <= MOST_IN_ADDRESS ? textOf(bytes) : ""), read: (text) => { try { const bytes = bytesOf(text); return bytes.length === HIGH * WIDE * CHANNELS ? bytes : undefined; } catch { return undefined; } } };

const FIELDS = {
  lang: choice(["en", "ko"]),
  station: choice(page.stations),
  image: integer(0, EMBEDDED, 0),
  own: pixelsIn,
  name: { start: "", write: String, read: (text) => text.slice(0, 200) },
  drawn: pixelsIn,
  down: integer(-HIGH, HIGH, 0),
  right: integer(-WIDE, WIDE, 0),
  patch: integer(0, PATCHES - 1, page.start.patch),
  token: choice(HAS_CLASS ? ["patch", "cls"] : ["patch"]),
  layer: integer(0, DEPTH - 1, 0),
  head: integer(0, HEADS - 1, 0),
  key: integer(0, TOKENS - 1, Math.min(page.start.key, TOKENS - 1)),
  pixel: integer(0, FLAT - 1, 0),
  feature: integer(0, WIDTH - 1, 0),
  unit: integer(0, HIDDEN - 1, 0),
  class: integer(-1, CLASSES - 1, -1),
  positions: choice(["on", "off"]),
  shuffle: integer(0, 999999999, 0),
  temperature: integer(-16, 16, 0),  // fourths of a power of two
  hidden: numbers(PATCHES),
  heads: some((text) => /^\d+\.\d+$/.test(text) && Number(text.split(".")[0]) < DEPTH && Number(text.split(".")[1]) < HEADS),
  attention: numbers(DEPTH),
  mlp: numbers(DEPTH),
};
const SETS = ["hidden", "heads", "attention", "mlp"];
const state = {};

function restore(text) {
  const given = new URLSearchParams(text.replace(/^#/, ""));
  for (const [name, field] of Object.entries(FIELDS)) {
    const found = given.has(name) ? field.read(given.get(name)) : undefined;
    state[name] = found ?? (SETS.includes(name) ? new Set() : field.start);
  }
  if (["ko", "en"].includes(text.slice(1))) state.lang = text.slice(1);
  else if (!given.has("lang") && navigator.language.startsWith("ko")) state.lang = "ko";
  if (state.own) images[EMBEDDED] = { name: state.name || "?", truth: null, pixels: state.own };
  if (!images[state.image]) state.image = 0;
  if (state.hidden.size >= PATCHES) state.hidden.clear();
}

function address() {
  const found = new URLSearchParams();
  for (const [name, field] of Object.entries(FIELDS)) {
    const value = state[name], isUsual = SETS.includes(name) ? !value.size : value === field.start || value === null;
    const isUnused = ["own", "name"].includes(name) && state.image !== EMBEDDED;
    const text = isUsual || isUnused ? "" : field.write(value);
    if (text !== "") found.set(name, text);
  }
  if (state.lang === "en") found.set("lang", "en");
  return `#${found}`;
}
const linkHoldsAll = () => HIGH * WIDE * CHANNELS <= MOST_IN_ADDRESS || (state.image !== EMBEDDED && !state.drawn);

// What the model is given, and what it makes of it

const wrap = (n, count) => ((n % count) + count) % count;
const temperature = () => 2 ** (state.temperature / 4);

function moved(pixels) {
  if (!state.down && !state.right) return pixels;
  const found = new Uint8Array(pixels.length);
  for (let row = 0; row < HIGH; row++) {
    for (let column = 0; column < WIDE; column++) {
      const from = (wrap(row - state.down, HIGH) * WIDE + wrap(column - state.right, WIDE)) * CHANNELS;
      for (let c = 0; c < CHANNELS; c++) found[(row * WIDE + column) * CHANNELS + c] = pixels[from + c];
    }
  }
  return found;
}

// The same order for the same number, on every machine.
function orderOf(seed) {
  if (!seed) return null;
  const order = Array.from({ length: PATCHES }, (_, i) => i);
  let s = seed >>> 0;
  for (let i = PATCHES - 1; i > 0; i--) {
    s = (Math.imul(s, 1664525) + 1013904223) >>> 0;
    const j = Math.floor((s / 2 ** 32) * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

let now = null, before = null, beforeOf = null;

function compute() {
  const own = images[state.image].pixels;
  if (beforeOf !== own) { before = forward(model, scaled(own, rules)); before.shares = softmax(before.logits, CLASSES); beforeOf = own; }
  const pixels = moved(state.drawn ?? own), order = orderOf(state.shuffle);
  const again = performance.now();
  const change = { positions: state.positions === "on", order, masked: state.hidden, heads: state.heads, attention: state.attention, mlp: state.mlp, temperature: temperature() };
  now = { ...forward(model, scaled(pixels, rules), change), pixels, order };
  clock("forward", again);
  now.shares = softmax(now.logits, CLASSES);
  now.best = largest(now.shares);
}

// One row of a step (T, D), or of one (H, T, K) for a head.
const rowOf = (step, t, width = WIDTH) => now.steps[step].subarray(t * width, (t + 1) * width);
const inLayer = (name) => `blocks.${state.layer}.${name}`;
const entering = (layer) => (layer ? `blocks.${layer - 1}` : "tokens");
const headRow = (name, t, width = NARROW, head = state.head) => rowOf(inLayer(name), head * TOKENS + t, width);
const inHand = () => (state.token === "cls" ? 0 : PREFIX + state.patch);
const onPatches = (row) => row.slice(PREFIX);
const label = (k) => labels[k];
const chosenClass = () => (state.class < 0 ? now.best : state.class);
const some3 = (row) => `(${[...row.slice(0, 3)].map(spoken).join(", ")}, \\dots)`;
const tokenName = (t) => (t >= PREFIX ? String(t - PREFIX) : HAS_CLASS && t === 0 ? "[CLS]" : `R${t - (HAS_CLASS ? 1 : 0)}`);

// Drawing: once a frame, and only what is seen

const seen = new Set(), stale = new Set();
let isDue = false, mustCompute = true, asked = 0;

function update(changes = {}, { computes = false } = {}) {
  Object.assign(state, changes);
  mustCompute ||= computes;
  asked ||= window.event?.timeStamp || performance.now();
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(render);
}
const change = (changes = {}) => update(changes, { computes: true });

function render() {
  isDue = false;
  const computed = mustCompute;
  if (mustCompute) compute();
  mustCompute = false;
  page.stations.forEach((name) => stale.add(name));
  drawPane();
  drawSeen();
  const since = asked;
  asked = 0;
  setTimeout(() => clock(computed ? "computed" : "redrawn", since), 0);  // when the frame is out
  keepAddress();
}

// How long the newest of its kind took, which benchmarks/explain.py reads.
function clock(name, start) {
  performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}

function drawSeen() {
  for (const name of page.stations) {
    if (!seen.has(name) || !stale.delete(name)) continue;
    STATIONS[name].draw();
  }
}

let waiting = 0;
function keepAddress() {
  clearTimeout(waiting);
  waiting = setTimeout(() => history.replaceState(null, "", address()), 120);
}

function toggle(set, member) {
  if (!set.delete(member)) set.add(member);
  change();
}

function hide(patch) {
  const isLast = !state.hidden.has(patch) && state.hidden.size === PATCHES - 1;
  tell(isLast ? "hide-last" : null);
  if (!isLast) toggle(state.hidden, patch);
}

let told = null;
function tell(name, fields = {}) {
  told = name && { name, fields };
  $("told").textContent = name ? say(name, fields) : "";
  $("told").hidden = !name;
}

// The pane that stays: the image as the model gets it, the answer, what is changed

let paneMap = null;
function buildPane() {
  paneMap = makeMap($("pane-image"), "patch-in-hand", (patch) => update({ patch, token: "patch" }));
  $("undo").onclick = undoAll;
  $("where").onchange = (event) => go(event.target.value);
  $("back").onclick = () => step(-1);
  $("forth").onclick = () => step(1);
}

// The pixels in the order in which the patches are read, hidden ones crossed out.
function shownPixels() {
  const found = new Uint8Array(now.pixels.length), checks = isDark.matches ? [48, 66] : [214, 236];
  for (let row = 0; row < HIGH; row++) {
    for (let column = 0; column < WIDE; column++) {
      const place = Math.floor(row / TALL) * COLUMNS + Math.floor(column / BROAD), from = now.order ? now.order[place] : place;
      const y = Math.floor(from / COLUMNS) * TALL + (row % TALL), x = (from % COLUMNS) * BROAD + (column % BROAD);
      for (let c = 0; c < CHANNELS; c++) {
        found[(row * WIDE + column) * CHANNELS + c] = state.hidden.has(place) ? checks[(row + column) % 2] : now.pixels[(y * WIDE + x) * CHANNELS + c];
      }
    }
  }
  return found;
}

// Classes by what the unchanged image gives them; the answer of now is always among them.
function ranked(count) {
  const order = Array.from(before.shares.keys()).sort((a, b) => before.shares[b] - before.shares[a]).slice(0, count);
  if (!order.includes(now.best)) order[order.length - 1] = now.best;
  return order;
}

function drawBars(host, classes) {
  while (host.children.length > classes.length) host.lastChild.remove();
  while (host.children.length < classes.length) {
    host.append(el("li", {}, el("span", { class: "label" }), el("span", { class: "track" }, el("i", { class: "now" }), el("i", { class: "was" })), el("span", { class: "share" })));
  }
  classes.forEach((k, i) => {
    const [name, track, share] = host.children[i].children;
    host.children[i].className = k === now.best ? "best" : "";
    name.textContent = name.title = label(k);
    track.children[0].style.width = percent(now.shares[k]).replace(" ", "");
    track.children[1].style.left = percent(before.shares[k]).replace(" ", "");
    share.textContent = percent(now.shares[k]);
  });
}

function changes() {
  const found = [], add = (name, fields, undo) => found.push({ name, fields, undo });
  const clear = (set, member) => () => { set.delete(member); change(); };
  if (state.drawn) add("change-drawn", {}, () => change({ drawn: null }));
  if (state.down || state.right) add("change-shift", { down: spoken(state.down).replace(".00", ""), right: spoken(state.right).replace(".00", "") }, () => change({ down: 0, right: 0 }));
  if (state.positions === "off") add("change-positions", {}, () => change({ positions: "on" }));
  if (state.shuffle) add("change-order", {}, () => change({ shuffle: 0 }));
  if (state.hidden.size) add("change-masked", { count: state.hidden.size }, () => { state.hidden.clear(); change(); });
  if (state.temperature) add("change-temperature", { value: spoken(temperature()) }, () => change({ temperature: 0 }));
  for (const one of [...state.heads].sort()) { const [layer, head] = one.split("."); add("change-head", { layer, head }, clear(state.heads, one)); }
  for (let layer = 0; layer < DEPTH; layer++) {
    const [attention, mlp] = [state.attention.has(layer), state.mlp.has(layer)];
    if (attention && mlp) add("change-layer", { layer }, () => { state.attention.delete(layer); state.mlp.delete(layer); change(); });
    else if (attention) add("change-attention", { layer }, clear(state.attention, layer));
    else if (mlp) add("change-mlp", { layer }, clear(state.mlp, layer));
  }
  return found;
}

function undoAll() {
  for (const name of SETS) state[name].clear();
  change({ drawn: null, down: 0, right: 0, positions: "on", shuffle: 0, temperature: 0 });
}

function drawPane() {
  paintPixels(paneMap.canvas, shownPixels(), [HIGH, WIDE]);
  paneMap.mark(state.patch);
  const was = largest(before.shares), image = images[state.image];
  $("best").textContent = label(now.best);
  $("best-share").textContent = percent(now.shares[now.best]);
  $("was").textContent = say("was", { label: label(was), share: percent(before.shares[was]) });
  $("truth").textContent = image.truth === null ? image.name : say("truth", { label: image.truth });
  const place = say("patch-at", { row: Math.floor(state.patch / COLUMNS), column: state.patch % COLUMNS });
  $("in-hand").textContent = say("in-hand", { token: state.token === "cls" ? "[CLS]" : place });
  drawBars($("bars"), ranked(Math.min(CLASSES, 6)));
  const made = changes();
  $("changes").replaceChildren(...made.map(({ name, fields, undo }) => {
    const text = say(name, fields);
    return el("li", {}, el("button", { type: "button", class: "chip", "aria-label": say("undo", { change: text }), onclick: undo }, `${text} ×`));
  }));
  $("undo").hidden = !made.length;
  $("undo-count").textContent = made.length ? `(${made.length})` : "";
  $("where").value = state.station;
  $("back").disabled = state.station === page.stations[0];
  $("forth").disabled = state.station === page.stations.at(-1);
}

// Controls

function choose(host, legend, name, options, pick) {
  const group = el("fieldset", { class: "choice" }, el("legend", {}, both(legend)));
  const inputs = options.map(({ value, words }) => {
    const input = el("input", { type: "radio", name, value, onchange: () => pick(value) });
    group.append(el("label", {}, input, words));
    return input;
  });
  host.append(group);
  return (value) => inputs.forEach((input) => { input.checked = input.value === String(value); });
}

function slide(host, words, low, high, pick, show = String) {
  const output = el("output");
  const input = el("input", { type: "range", min: low, max: high, step: 1, oninput: () => pick(Number(input.value)) });
  host.append(el("label", { class: "slide" }, el("span", {}, both(words)), input, output));
  return (value) => { input.value = value; output.textContent = show(value); input.setAttribute("aria-valuetext", output.textContent); };
}

function check(host, words, pick) {
  const input = el("input", { type: "checkbox", onchange: () => pick(input.checked) });
  const text = el("span", {}, words);
  host.append(el("label", { class: "check" }, input, text));
  return { input, text };
}

function press(host, words, pick) {
  const button = el("button", { type: "button", onclick: pick }, both(words));
  host.append(button);
  return button;
}

const shuffleNext = () => change({ shuffle: (Math.imul(state.shuffle + 7, 48271) >>> 0) % 999999937 || 1 });
function shuffleControl(host) {
  press(host, "shuffle", shuffleNext);
  return press(host, "shuffle-back", () => change({ shuffle: 0 }));
}

const layerChoices = () => Array.from({ length: DEPTH }, (_, n) => ({ value: n, words: String(n) }));
const headChoices = () => Array.from({ length: HEADS }, (_, n) => ({ value: n, words: String(n) }));

function pickClass(host) {
  const select = el("select", { onchange: () => update({ class: Number(select.value) }) });
  labels.forEach((text, k) => select.append(el("option", { value: k }, text)));
  host.append(el("label", { class: "slide" }, el("span", {}, both("class")), select));
  return () => { select.value = chosenClass(); };
}

// Files

async function openFile(file) {
  if (!file) return;
  let image = null;
  try { image = await decode(file, rules); } catch (error) {
    tell(error.message === "too many pixels" ? "too-large" : "not-image", { name: file.name });
    return;
  }
  const pixels = cropped(image, rules), isSame = image.width === WIDE && image.height === HIGH;
  images[EMBEDDED] = { name: file.name, truth: null, pixels };
  STATIONS.image.thumbs();
  const mode = say(CHANNELS === 1 ? "mode-grey" : "mode-colour");
  tell(isSame ? "image-same" : "image-read", { name: file.name, wide: image.width, high: image.height, to_wide: WIDE, to_high: HIGH, mode });
  change({ image: EMBEDDED, own: pixels, name: file.name, drawn: null });
}

// The stations

const show = (name) => $(`${name}-show`), control = (name) => $(`${name}-control`);
// The equation with the numbers of the token in hand; lines may break at ~.
const live = (name, text) => $(`${name}-live`).replaceChildren(...lined(text));
const caption = (host, name, fields) => { const made = el("p", { class: "caption" }, ...(name ? [both(name, fields)] : [])); host.append(made); return made; };

const STATIONS = {
  image: (() => {
    const canvas = el("canvas", { class: "paper", tabindex: 0, role: "application" }), cursor = el("i", { class: "mark", hidden: true });
    const box = el("div", { class: "map draw", style: `aspect-ratio: ${WIDE} / ${HIGH}` }, canvas, cursor), list = el("div", { class: "thumbs" });
    const at = { row: Math.floor(HIGH / 2), column: Math.floor(WIDE / 2) };
    let ink = 255, buttons = [];
    const dab = (row, column) => {
      const pixels = (state.drawn ?? images[state.image].pixels).slice(), reach = Math.max(1, Math.round(HIGH / 28));
      for (let y = row - reach; y <= row + reach; y++) {
        for (let x = column - reach; x <= column + reach; x++) {
          const share = 1 - Math.hypot(y - row, x - column) / (reach + 0.7);
          if (share <= 0 || y < 0 || x < 0 || y >= HIGH || x >= WIDE) continue;
          const to = (wrap(y - state.down, HIGH) * WIDE + wrap(x - state.right, WIDE)) * CHANNELS;
          for (let c = 0; c < CHANNELS; c++) pixels[to + c] = Math.round(pixels[to + c] + (ink - pixels[to + c]) * Math.min(1.4 * share, 1));
        }
      }
      change({ drawn: pixels });
    };
    const under = (event) => {
      const frame = canvas.getBoundingClientRect();
      return [Math.floor(((event.clientY - frame.top) / frame.height) * HIGH), Math.floor(((event.clientX - frame.left) / frame.width) * WIDE)];
    };
    const place = () => {
      cursor.style.left = `${(100 * at.column) / WIDE}%`; cursor.style.top = `${(100 * at.row) / HIGH}%`;
      cursor.style.width = `${100 / WIDE}%`; cursor.style.height = `${100 / HIGH}%`;
    };
    let showInk = null;
    return {
      thumbs() {
        buttons = images.map((image, number) => {
          const small = el("canvas", { "aria-hidden": true });
          paintPixels(small, image.pixels, [HIGH, WIDE]);
          return el("button", { type: "button", class: "thumb", onclick: () => { tell(null); change({ image: number, drawn: null }); } }, small);
        });
        list.replaceChildren(...buttons);
      },
      build() {
        const drawing = el("div", { class: "drawing" }, el("p", { class: "caption" }, both("draw")), box, el("p", { class: "hint" }, both("draw-help")));
        canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); dab(...under(event)); });
        canvas.addEventListener("pointermove", (event) => { if (event.buttons) dab(...under(event)); });
        canvas.addEventListener("focus", () => { cursor.hidden = false; place(); });
        canvas.addEventListener("blur", () => { cursor.hidden = true; });
        canvas.addEventListener("keydown", (event) => {
          const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
          if (step) { at.row = wrap(at.row + step[0], HIGH); at.column = wrap(at.column + step[1], WIDE); place(); } else if (event.key === " " || event.key === "Enter") dab(at.row, at.column);
          else return;
          event.preventDefault(); event.stopPropagation();
        });
        const inks = el("div", { class: "controls" }), arrows = el("div", { class: "controls" }), arrow = (words, sign, down, right) => {
          const button = press(arrows, words, () => change({ down: state.down + down, right: state.right + right }));
          button.prepend(`${sign} `);
        };
        showInk = choose(inks, "ink", "ink", [{ value: 255, words: both("ink-light") }, { value: 0, words: both("ink-dark") }], (value) => { ink = Number(value); showInk(ink); });
        showInk(ink);
        arrows.append(el("span", {}, both("shift")));
        arrow("shift-left", "←", 0, -1); arrow("shift-right", "→", 0, 1); arrow("shift-up", "↑", -1, 0); arrow("shift-down", "↓", 1, 0);
        drawing.append(inks);
        const file = el("input", { type: "file", accept: "image/*", onchange: () => { openFile(file.files[0]); file.value = ""; } });
        const choosing = el("div", { class: "choosing" }, el("p", { class: "caption" }, both("choose-image")), list, el("label", { class: "file" }, both("drop"), file));
        show("image").append(el("div", { class: "two" }, drawing, choosing));
        control("image").append(arrows);
        this.thumbs();
      },
      draw() {
        paintPixels(canvas, now.pixels, [HIGH, WIDE]);
        canvas.setAttribute("aria-label", `${say("draw")}. ${say("draw-help")}`);
        buttons.forEach((button, number) => {
          const text = say("image-number", { number, name: images[number].truth ?? images[number].name });
          button.setAttribute("aria-pressed", number === state.image); button.setAttribute("aria-label", text); button.title = text;
        });
        const c = Math.floor(state.pixel / (TALL * BROAD)), inside = state.pixel % (TALL * BROAD);
        const row = Math.floor(state.patch / COLUMNS) * TALL + Math.floor(inside / BROAD), column = (state.patch % COLUMNS) * BROAD + (inside % BROAD);
        const level = now.pixels[(row * WIDE + column) * CHANNELS + c];
        live("image", `x_{${row},${column}} = \\frac{${level} / 255 - ${rules.mean[c]}}{${rules.std[c]}} = ${spoken((level / 255 - rules.mean[c]) / rules.std[c])}`);
      },
    };
  })(),

  patches: {
    build() {
      this.map = makeMap(show("patches"), "patch-in-hand", (patch) => update({ patch, token: "patch" }));
      this.map.box.classList.add("large");
      this.hide = check(control("patches"), both("hide"), () => hide(state.patch));
      this.back = shuffleControl(control("patches"));
    },
    draw() {
      const zoom = Math.max(1, Math.round(280 / Math.max(HIGH, WIDE))), gap = Math.max(2, Math.round(zoom / 2)), canvas = this.map.canvas;
      const flat = el("canvas");
      paintPixels(flat, shownPixels(), [HIGH, WIDE]);
      canvas.width = WIDE * zoom; canvas.height = HIGH * zoom;
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      for (let place = 0; place < PATCHES; place++) {
        const x = (place % COLUMNS) * BROAD, y = Math.floor(place / COLUMNS) * TALL;
        context.drawImage(flat, x, y, BROAD, TALL, x * zoom + gap / 2, y * zoom + gap / 2, BROAD * zoom - gap, TALL * zoom - gap);
      }
      this.map.mark(state.patch);
      this.hide.input.checked = state.hidden.has(state.patch);
      this.back.disabled = !state.shuffle;
      live("patches", `N = \\frac{${HIGH} \\cdot ${WIDE}}{${TALL} \\cdot ${BROAD}} = ${PATCHES}`);
    },
  },

  flatten: {
    build() {
      const grids = el("div", { class: "cells-of" });
      this.square = []; this.row = [];
      const few = FLAT <= 64, make = (list, i) => { const cell = el("span", { class: few ? "cell" : "cell bare" }); list[i] = cell; return cell; };
      for (let c = 0; c < CHANNELS; c++) {
        const grid = el("div", { class: "cells", style: `grid-template-columns: repeat(${BROAD}, 1fr)` });
        for (let i = 0; i < TALL * BROAD; i++) grid.append(make(this.square, c * TALL * BROAD + i));
        grids.append(grid);
      }
      const row = el("div", { class: "cells flat" });
      for (let i = 0; i < FLAT; i++) row.append(make(this.row, i));
      this.about = caption(show("flatten"));
      show("flatten").append(el("div", { class: "unrolled", "aria-hidden": true }, grids, row));
      this.pixel = slide(control("flatten"), "pixel", 0, FLAT - 1, (pixel) => update({ pixel }));
    },
    draw() {
      const values = rowOf("patches", state.patch, FLAT), low = -Math.max(...rules.mean.map((m, c) => m / rules.std[c])), high = Math.max(...rules.mean.map((m, c) => (1 - m) / rules.std[c]));
      for (let i = 0; i < FLAT; i++) {
        const grey = Math.round((255 * (values[i] - low)) / (high - low));
        for (const cell of [this.square[i], this.row[i]]) {
          cell.style.background = `rgb(${grey} ${grey} ${grey})`; cell.style.color = grey > 120 ? "#000" : "#fff";
          cell.classList.toggle("chosen", i === state.pixel);
          if (FLAT <= 64) cell.textContent = values[i].toFixed(1).replace("-", "−");
        }
      }
      this.about.textContent = state.token === "cls" ? say("no-pixels") : "";
      this.pixel(state.pixel);
      live("flatten", `x_p^{${state.patch}} = ${some3(values)}, ~x_{p,${state.pixel}}^{${state.patch}} = ${spoken(values[state.pixel])}`);
    },
  },

  project: {
    build() {
      const row = el("div", { class: "sum" }), sign = (text) => row.append(el("span", { class: "sign", "aria-hidden": true }, text));
      this.parts = ["x", "E", "xE"].map((name, i) => {
        if (i) sign(i === 1 ? "×" : "=");
        const canvas = el("canvas", { class: "tile", role: "img", style: `aspect-ratio: ${BROAD * CHANNELS} / ${TALL}` });
        row.append(canvas);
        return canvas;
      });
      this.about = caption(show("project"));
      show("project").append(row);
      this.strip = makeStrip(show("project"), "x_p E + b", true);
      this.feature = slide(control("project"), "feature", 0, WIDTH - 1, (feature) => update({ feature }));
    },
    draw() {
      const values = rowOf("patches", state.patch, FLAT), weights = model.tensors["patch_embed.proj.weight"].subarray(state.feature * FLAT, (state.feature + 1) * FLAT);
      const products = values.map((value, i) => value * weights[i]), bias = model.tensors["patch_embed.proj.bias"][state.feature];
      // Channels side by side: a row of the tile is the same row of each.
      const tiled = (list) => Float32Array.from({ length: FLAT }, (_, i) => {
        const row = Math.floor(i / (BROAD * CHANNELS)), c = Math.floor((i % (BROAD * CHANNELS)) / BROAD), column = i % BROAD;
        return list[(c * TALL + row) * BROAD + column];
      });
      [values, weights, products].forEach((list, i) => {
        paint(this.parts[i], tiled(list), BROAD * CHANNELS);
        this.parts[i].setAttribute("aria-label", say("strip", { name: ["x", "E", "x E"][i], count: FLAT, low: spoken(Math.min(...list)), high: spoken(Math.max(...list)) }));
      });
      this.about.textContent = say("pattern", { feature: state.feature });
      this.strip.draw(rowOf("projected", state.patch), { chosen: state.feature });
      this.feature(state.feature);
      live("project", `x_p^{${state.patch}} E_{${state.feature}} + b_{${state.feature}} = ${spoken(products.reduce((a, b) => a + b, 0))} + (${spoken(bias)}) ~= ${spoken(rowOf("projected", state.patch)[state.feature])}`);
    },
  },

  cls: {
    build() {
      this.canvas = el("canvas", { class: "matrix", role: "img" });
      this.at = el("i", { class: "at across" });
      show("cls").append(el("div", { class: "bed tall" }, this.canvas, this.at));
      this.follow = choose(control("cls"), "follow", "token", [{ value: "patch", words: both("follow-patch") }, ...(HAS_CLASS ? [{ value: "cls", words: "[CLS]" }] : [])], (token) => update({ token }));
    },
    draw() {
      const all = new Float32Array(TOKENS * WIDTH);
      let at = 0;
      for (const name of ["cls_token", "reg_token"]) if (model.tensors[name]) { all.set(model.tensors[name], at); at += model.tensors[name].length; }
      all.set(now.steps.projected, PREFIX * WIDTH);
      paint(this.canvas, all, WIDTH);
      this.canvas.setAttribute("aria-label", say("strip", { name: `${TOKENS} × ${WIDTH}`, count: all.length, low: spoken(Math.min(...all)), high: spoken(Math.max(...all)) }));
      this.at.style.top = `${(100 * inHand()) / TOKENS}%`; this.at.style.height = `${100 / TOKENS}%`;
      this.follow(state.token);
      const first = HAS_CLASS ? `x_{class} = ${some3(model.tensors.cls_token)}, ~` : "";
      live("cls", `${first}x_p^{${state.patch}} E = ${some3(rowOf("projected", state.patch))}`);
    },
  },

  positions: {
    build() {
      const rows = el("div"), side = el("div", { class: "side-map" });
      this.strips = [state.token === "cls" ? "x_{class}" : "x_p E", "+ E_{pos}", "= z_0"].map((name) => makeStrip(rows, name));
      this.caption = caption(side, "similar-places");
      this.map = makeMap(side, "similar-places");
      caption(side, "similarity-scale");
      show("positions").append(el("div", { class: "two" }, rows, side));
      const { input } = check(control("positions"), both("positions"), (on) => change({ positions: on ? "on" : "off" }));
      this.input = input;
      input.disabled = !model.tensors.positions;
      this.back = shuffleControl(control("positions"));
    },
    draw() {
      const t = inHand(), table = model.tensors.positions ?? new Float32Array(TOKENS * WIDTH), isOn = state.positions === "on";
      const place = isOn ? table.subarray(t * WIDTH, (t + 1) * WIDTH) : new Float32Array(WIDTH), sum = rowOf("tokens", t);
      const own = sum.map((value, i) => value - place[i]), peak = Math.max(...sum.map(Math.abs), ...own.map(Math.abs));
      this.strips[0].name.replaceChildren(typeset(state.token === "cls" ? "x_{class}" : "x_p E"));
      [own, place, sum].forEach((row, i) => this.strips[i].draw(row, { peak, text: spoken(norm(row)) }));
      const similar = Float32Array.from({ length: PATCHES }, (_, n) => cosine(table.subarray(t * WIDTH, (t + 1) * WIDTH), table.subarray((PREFIX + n) * WIDTH, (PREFIX + n + 1) * WIDTH)));
      this.map.draw(similar, "signed", t - PREFIX, 1);
      this.input.checked = isOn && !this.input.disabled;
      this.back.disabled = !state.shuffle;
      live("positions", `z_0^{${t}} = ~${some3(own)} ~+ ${some3(place)} ~= ${some3(sum)}`);
    },
  },

  norm: {
    build() {
      this.strips = ["z_l", "LN(z_l)"].map((name) => makeStrip(show("norm"), name, true));
      this.layer = choose(control("norm"), "layer", "layer-norm", layerChoices(), (layer) => update({ layer: Number(layer) }));
    },
    draw() {
      const t = inHand(), z = rowOf(entering(state.layer), t), d = state.feature, { mean, deviation } = moments(z, 0, WIDTH, config.norm_epsilon), out = rowOf(inLayer("norm1"), t);
      this.strips[0].draw(z, { chosen: d, text: `μ ${spoken(mean)} · σ ${spoken(deviation)}` });
      const after = moments(out, 0, WIDTH, 0);
      this.strips[1].draw(out, { chosen: d, text: `μ ${spoken(after.mean)} · σ ${spoken(after.deviation)}` });
      this.layer(state.layer);
      const [scale, offset] = ["weight", "bias"].map((part) => model.tensors[`blocks.${state.layer}.norm1.${part}`][d]);
      live("norm", `\\frac{${spoken(z[d])} - (${spoken(mean)})}{${spoken(deviation)}} \\cdot ${spoken(scale)} ~+ (${spoken(offset)}) = ${spoken(out[d])}`);
    },
  },

  qkv: {
    build() {
      this.strips = ["q", "k", "v"].map((name) => makeStrip(show("qkv"), name));
      this.head = choose(control("qkv"), "head", "head-qkv", headChoices(), (head) => update({ head: Number(head) }));
    },
    draw() {
      const rows = ["q", "k", "v"].map((name) => headRow(name, inHand()));
      rows.forEach((row, i) => this.strips[i].draw(row, { text: spoken(norm(row)) }));
      this.head(state.head);
      live("qkv", rows.map((row, i) => `${"qkv"[i]} = ${some3(row)}`).join(", ~"));
    },
  },

  scores: {
    build() {
      const rows = el("div"), side = el("div", { class: "side-map" });
      this.strips = ["q_i", "k_j", "q_i k_j"].map((name) => makeStrip(rows, name));
      caption(side, "scores-map");
      this.map = makeMap(side, "scores-map", (patch) => update({ key: PREFIX + patch }), "compared-with");
      show("scores").append(el("div", { class: "two" }, rows, side));
      this.key = slide(control("scores"), "compared-with", 0, TOKENS - 1, (key) => update({ key }), tokenName);
    },
    draw() {
      const q = headRow("q", inHand()), k = headRow("k", state.key), products = q.map((value, i) => value * k[i]), row = headRow("scores", inHand(), TOKENS);
      [q, k, products].forEach((values, i) => this.strips[i].draw(values));
      this.map.draw(onPatches(row), "signed", state.key - PREFIX);
      this.key(state.key);
      live("scores", `s_{${inHand()},${state.key}} = \\frac{${spoken(products.reduce((a, b) => a + b, 0))}}{\\sqrt{${NARROW}}} = ${spoken(row[state.key])}`);
    },
  },

  softmax: {
    build() {
      const side = el("div", { class: "side-map" });
      caption(side, "weights-map");
      this.map = makeMap(side, "weights-map", (patch) => update({ key: PREFIX + patch }), "compared-with");
      show("softmax").append(side);
      this.note = caption(show("softmax"));
      this.temperature = slide(control("softmax"), "temperature", -16, 16, (value) => change({ temperature: value }), (value) => spoken(2 ** (value / 4)));
    },
    draw() {
      const row = headRow("weights", inHand(), TOKENS), scores = headRow("scores", inHand(), TOKENS), t = temperature();
      this.map.draw(onPatches(row), "shares", state.key - PREFIX);
      const spread = Math.exp(-row.reduce((sum, share) => sum + (share > 0 ? share * Math.log(share) : 0), 0));
      this.note.textContent = say("spread", { first: FIRST ? ` · ${FIRST} ${percent(row.slice(0, PREFIX).reduce((a, b) => a + b, 0))}` : "", largest: percent(Math.max(...row)), count: spread.toFixed(1) });
      this.temperature(state.temperature);
      const by = t === 1 ? "" : ` / ${spoken(t)}`, sum = scores.reduce((all, score) => all + Math.exp(score / t), 0);
      live("softmax", `A_{${inHand()},${state.key}} = \\frac{exp(${spoken(scores[state.key])}${by})}{${spoken(sum)}} = ${spoken(row[state.key])}`);
    },
  },

  mix: {
    build() {
      caption(show("mix"), "most-watched");
      this.strips = Array.from({ length: Math.min(4, TOKENS) }, () => makeStrip(show("mix"), "v_j"));
      this.rest = TOKENS > 4 ? makeStrip(show("mix"), "…") : null;
      this.sum = makeStrip(show("mix"), "SA_i");
      press(control("mix"), "hide-most", () => {
        const row = onPatches(headRow("weights", inHand(), TOKENS));
        hide(largest(row.map((share, n) => (state.hidden.has(n) ? -1 : share))));
      });
    },
    draw() {
      const row = headRow("weights", inHand(), TOKENS), order = [...row.keys()].sort((a, b) => row[b] - row[a]), top = order.slice(0, this.strips.length);
      const sum = headRow("heads", inHand()), brought = (j) => headRow("v", j).map((value) => row[j] * value);
      const peak = Math.max(...sum.map(Math.abs), ...top.flatMap((j) => [...brought(j).map(Math.abs)]));
      top.forEach((j, i) => {
        this.strips[i].name.replaceChildren(`${percent(row[j])} · `, typeset(`v_{${j < PREFIX && HAS_CLASS && !j ? "CLS" : tokenName(j)}}`));
        this.strips[i].draw(brought(j), { peak });
      });
      if (this.rest) {
        const others = order.slice(top.length), values = new Float32Array(NARROW);
        for (const j of others) brought(j).forEach((value, i) => { values[i] += value; });
        this.rest.name.textContent = say("others", { count: others.length });
        this.rest.draw(values, { peak });
      }
      this.sum.draw(sum, { peak, text: say("sum") });
      live("mix", `SA_{${inHand()}} = ${top.slice(0, 2).map((j) => `${spoken(row[j])} \\cdot v_{${j}}`).join(" + ")} + \\dots ~= ${some3(sum)}`);
    },
  },

  heads: {
    build() {
      const row = el("div", { class: "heads" });
      this.cells = Array.from({ length: HEADS }, (_, head) => {
        const cell = el("div", { class: "head" }), { input, text } = check(cell, both("head-on", { head }), () => toggle(state.heads, `${state.layer}.${head}`));
        const map = makeMap(cell, "weights-map");
        row.append(cell);
        return { input, text, map };
      });
      control("heads").append(row);
      this.strip = makeStrip(show("heads"), "MSA_i");
    },
    draw() {
      this.cells.forEach(({ input, map }, head) => {
        input.checked = !state.heads.has(`${state.layer}.${head}`);
        map.draw(onPatches(headRow("weights", inHand(), TOKENS, head)), "shares", inHand() - PREFIX);
        map.box.classList.toggle("off", !input.checked);
      });
      const row = rowOf(inLayer("msa"), inHand());
      this.strip.draw(row, { text: spoken(norm(row)) });
      live("heads", `MSA_{${inHand()}} = ${some3(row)}`);
    },
  },

  attended: sumStation("attended", "z_l", "+ MSA", "= z'", "attention-on", "attention", () => entering(state.layer), "msa", () => inLayer("middle")),

  mlp: {
    build() {
      this.about = caption(show("mlp"), "gelu-curve");
      this.canvas = el("canvas", { class: "curve", role: "img" });
      show("mlp").append(this.canvas);
      this.note = caption(show("mlp"));
      this.strips = ["z1", "GELU(z1)", "z2"].map((name, i) => makeStrip(show("mlp"), name, i < 2));
      this.unit = slide(control("mlp"), "unit", 0, HIDDEN - 1, (unit) => update({ unit }));
    },
    draw() {
      const t = inHand(), z1 = rowOf(inLayer("z1"), t, HIDDEN), activated = rowOf(inLayer("activated"), t, HIDDEN), z2 = rowOf(inLayer("z2"), t);
      [z1, activated, z2].forEach((row, i) => this.strips[i].draw(row, { chosen: i < 2 ? state.unit : -1 }));
      drawCurve(this.canvas, z1, state.unit);
      this.canvas.setAttribute("aria-label", `${say("gelu-curve")}: ${spoken(z1[state.unit])} → ${spoken(activated[state.unit])}`);
      this.note.textContent = say("quiet-units", { quiet: z1.filter((value) => value < 0).length, count: HIDDEN });
      this.unit(state.unit);
      live("mlp", `z1_{${state.unit}} = ${spoken(z1[state.unit])}, ~GELU(${spoken(z1[state.unit])}) = ${spoken(activated[state.unit])}, ~z2 = ${some3(z2)}`);
    },
  },

  added: sumStation("added", "z'", "+ MLP", "= z_{l+1}", "mlp-on", "mlp", () => inLayer("middle"), "z2", () => `blocks.${state.layer}`),

  layers: {
    build() {
      const row = el("div", { class: "heads" });
      const first = el("div", { class: "head" }, el("span", { class: "check" }, both("embedded")));
      row.append(first);
      this.maps = [makeMap(first, "similarity-scale")];
      this.inputs = Array.from({ length: DEPTH }, (_, layer) => {
        const cell = el("div", { class: "head" }), { input } = check(cell, both("layer-on", { layer }), (on) => {
          for (const set of [state.attention, state.mlp]) { if (on) set.delete(layer); else set.add(layer); }
          change();
        });
        this.maps.push(makeMap(cell, "similarity-scale"));
        row.append(cell);
        return input;
      });
      control("layers").append(row);
      caption(control("layers"), "similarity-scale");
    },
    draw() {
      const t = inHand(), parts = [];
      for (let n = 0; n <= DEPTH; n++) {
        const own = rowOf(entering(n), t), similar = Float32Array.from({ length: PATCHES }, (_, p) => cosine(own, rowOf(entering(n), PREFIX + p)));
        this.maps[n].draw(similar, "signed", t - PREFIX, 1);
        parts.push(`|z_{${n}}| = ${spoken(norm(own))}`);
      }
      this.inputs.forEach((input, layer) => { input.checked = !(state.attention.has(layer) && state.mlp.has(layer)); this.maps[layer + 1].box.classList.toggle("off", !input.checked); });
      live("layers", parts.join(", ~"));
    },
  },

  lens: {
    build() {
      this.head = el("th", { class: "number" });
      const body = el("tbody");
      this.rows = Array.from({ length: DEPTH + 1 }, (_, n) => {
        const name = el("th", { scope: "row" }, n ? both("after-layer", { layer: n - 1 }) : both("embedded")), answer = el("td"), fillTo = el("i", { class: "now" }), share = el("td", { class: "number" });
        body.append(el("tr", {}, name, answer, el("td", { class: "wide" }, el("span", { class: "track" }, fillTo)), share));
        return { answer, fillTo, share };
      });
      const columns = el("tr", {}, el("th", { scope: "col" }, both("layer")), el("th", { scope: "col" }, both("lens-would")), (this.of = el("th", { scope: "col", colspan: 2 })));
      show("lens").append(el("table", { class: "lens" }, el("thead", {}, columns), body));
      this.class = pickClass(control("lens"));
    },
    draw() {
      const k = chosenClass();
      this.of.textContent = say("lens-of", { label: label(k) });
      this.rows.forEach(({ answer, fillTo, share }, n) => {
        const shares = softmax(now.lens[n], CLASSES), best = largest(shares);
        answer.textContent = `${label(best)} ${percent(shares[best])}`;
        answer.className = best === now.best ? "same" : "";
        fillTo.style.width = percent(shares[k]).replace(" ", "");
        share.textContent = percent(shares[k]);
      });
      this.class();
      live("lens", `p_{${k}} = ${now.lens.map((logits) => `${spoken(softmax(logits, CLASSES)[k])} `).join("~\\to ")}`);
    },
  },

  read: {
    build() {
      this.strips = [HAS_CLASS ? "z_L^0" : "z_L", "y"].map((name) => makeStrip(show("read"), name, true));
      this.feature = slide(control("read"), "feature", 0, WIDTH - 1, (feature) => update({ feature }));
    },
    draw() {
      const d = state.feature, last = entering(DEPTH), y = now.steps.pooled, z = HAS_CLASS ? rowOf(last, 0) : rowOf(last, inHand());
      this.strips[0].draw(z, { chosen: d, text: spoken(norm(z)) });
      this.strips[1].draw(y, { chosen: d, text: spoken(norm(y)) });
      this.feature(d);
      const { mean, deviation } = moments(z, 0, WIDTH, config.norm_epsilon), [scale, offset] = ["weight", "bias"].map((part) => model.tensors[`norm.${part}`][d]);
      live("read", HAS_CLASS ? `y_{${d}} = \\frac{${spoken(z[d])} - (${spoken(mean)})}{${spoken(deviation)}} \\cdot ${spoken(scale)} ~+ (${spoken(offset)}) = ${spoken(y[d])}` : `y = ${some3(y)}`);
    },
  },

  logits: {
    build() {
      this.about = caption(show("logits"));
      this.strip = makeStrip(show("logits"), "y_d W_d");
      this.class = pickClass(control("logits"));
    },
    draw() {
      const k = chosenClass(), y = represent(model, now.steps.pooled), weights = model.tensors["head.weight"].subarray(k * WIDTH, (k + 1) * WIDTH);
      const parts = y.map((value, d) => value * weights[d]), bias = model.tensors["head.bias"][k];
      this.about.textContent = say("contributions", { label: label(k) });
      this.strip.draw(parts.slice().sort().reverse());
      this.class();
      live("logits", `logit_{${k}} = ${spoken(parts.reduce((a, b) => a + b, 0))} + (${spoken(bias)}) = ${spoken(now.logits[k])}`);
    },
  },

  answer: {
    build() {
      this.list = el("ol", { class: "bars" });
      show("answer").append(this.list, el("p", { class: "hint" }, both("now-and-before")));
      press(control("answer"), "undo-all", undoAll);
      press(control("answer"), "copy-link", async () => {
        history.replaceState(null, "", address());
        try { await navigator.clipboard.writeText(location.href); tell(linkHoldsAll() ? "copied" : "link-cannot", { name: state.drawn ? say("your-drawing") : images[state.image].name }); } catch { tell("not-copied"); }
      });
    },
    draw() {
      drawBars(this.list, ranked(Math.min(CLASSES, 12)));
      const k = now.best, peak = now.logits[k], sum = now.logits.reduce((all, logit) => all + Math.exp(logit - peak), 0) * Math.exp(peak);
      live("answer", `p_{${k}} = \\frac{exp(${spoken(now.logits[k])})}{${sum < 1e6 ? spoken(sum) : "\\sum_m exp(logit_m)"}} = ${spoken(now.shares[k])}`);
    },
  },
};

// A residual connection: what was, what is added, what becomes of it.
function sumStation(name, was, plus, is, words, part, from, added, to) {
  let strips = null, on = null, note = null;
  return {
    build() {
      strips = [was, plus, is].map((formula) => makeStrip(show(name), formula));
      note = caption(show(name));
      on = check(control(name), "", () => toggle(state[part], state.layer));
    },
    draw() {
      const t = inHand(), isOff = state[part].has(state.layer), a = rowOf(from(), t), c = rowOf(to(), t);
      const b = isOff ? new Float32Array(WIDTH) : rowOf(inLayer(added), t), peak = Math.max(...a.map(Math.abs), ...b.map(Math.abs), ...c.map(Math.abs));
      [a, b, c].forEach((row, i) => strips[i].draw(row, { peak, text: spoken(norm(row)) }));
      const angle = (180 / Math.PI) * Math.acos(Math.min(cosine(a, c), 1));
      note.textContent = say("lengths", { before: spoken(norm(a)), new: spoken(norm(b)), after: spoken(norm(c)), angle: angle.toFixed(0) });
      on.input.checked = !isOff;
      on.text.textContent = say(words, { layer: state.layer });
      live(name, `${some3(a)} ~+ ${some3(b)} ~= ${some3(c)}`);
    },
  };
}

// GELU, and every hidden unit on it.
function drawCurve(canvas, z1, unit) {
  const scale = window.devicePixelRatio || 1, wide = 480, high = 190, reach = Math.max(3, ...z1.map(Math.abs)), style = getComputedStyle(root);
  canvas.width = wide * scale; canvas.height = high * scale;
  const context = canvas.getContext("2d"), gelu = GELU[config.activation];
  context.scale(scale, scale);
  const x = (value) => wide / 2 + (value / reach) * (wide / 2 - 8), y = (value) => high - 26 - (value / reach) * (high - 40);
  context.strokeStyle = style.getPropertyValue("--line");
  context.beginPath(); context.moveTo(0, y(0)); context.lineTo(wide, y(0)); context.moveTo(x(0), 4); context.lineTo(x(0), high - 4); context.stroke();
  context.strokeStyle = style.getPropertyValue("--lead"); context.lineWidth = 1.5;
  context.beginPath();
  for (let i = 0; i <= 120; i++) { const value = reach * (i / 60 - 1); context[i ? "lineTo" : "moveTo"](x(value), y(gelu(value))); }
  context.stroke();
  const dot = (value, size, share) => { context.fillStyle = `rgb(${colourOf("signed", share)})`; context.beginPath(); context.arc(x(value), y(gelu(value)), size, 0, 7); context.fill(); };
  context.globalAlpha = 0.75;
  z1.forEach((value) => dot(value, 3, value < 0 ? 0.08 : 0.92));
  context.globalAlpha = 1;
  dot(z1[unit], 6, z1[unit] < 0 ? 0 : 1);
  context.strokeStyle = style.getPropertyValue("--ink"); context.stroke();
}

// Going from station to station

let arrived = 0;
function go(name, { focuses = true } = {}) {
  update({ station: name });
  arrived = performance.now();
  const target = $(`s-${name}`);
  target.scrollIntoView({ block: "start" });
  if (focuses) target.focus({ preventScroll: true });
}

function step(by) {
  const at = page.stations.indexOf(state.station) + by;
  if (at >= 0 && at < page.stations.length) go(page.stations[at]);
}

function isIdle(target) {
  return !target.closest?.("input, select, button, textarea, summary, a, [role=slider], [role=application]");
}

function speak(language) {
  root.lang = language;
  if (told) tell(told.name, told.fields);
  for (const option of $("where").options) option.textContent = option.dataset[language];
  document.title = page.title[language];
  update({ lang: language });
}

function start() {
  restore(location.hash);
  openWeights();
  buildPane();
  for (const math of document.querySelectorAll("[data-math]")) math.replaceChildren(...lined(math.dataset.math));
  for (const name of page.stations) STATIONS[name].build();
  speak(state.lang);
  $("language").onclick = () => speak(root.lang === "ko" ? "en" : "ko");
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) { const name = target.id.slice(2); if (isIntersecting) seen.add(name); else seen.delete(name); }
    if (now) drawSeen();
  }, { rootMargin: "200px" });
  for (const name of page.stations) near.observe($(`s-${name}`));
  // The station in hand is the last one whose heading has passed the upper third.
  let scrolling = 0;
  window.addEventListener("scroll", () => {
    cancelAnimationFrame(scrolling);
    scrolling = requestAnimationFrame(() => {
      const line = window.innerHeight * 0.45, passed = page.stations.filter((name) => $(`s-${name}`).getBoundingClientRect().top < line);
      const station = passed.at(-1) ?? page.stations[0];
      if (station === state.station || performance.now() - arrived < 500) return;
      state.station = station; $("where").value = station;
      $("back").disabled = station === page.stations[0]; $("forth").disabled = station === page.stations.at(-1);
      keepAddress();
    });
  }, { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !isIdle(event.target)) return;
    const by = { ArrowRight: 1, ArrowLeft: -1, " ": event.shiftKey ? -1 : 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    step(by);
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => { event.preventDefault(); openFile(event.dataTransfer.files[0]); });
  isDark.addEventListener("change", () => update());
  window.addEventListener("hashchange", () => { restore(location.hash); STATIONS.image.thumbs(); speak(state.lang); change(); go(state.station, { focuses: false }); });
  window.addEventListener("beforeprint", () => {
    page.stations.forEach((name) => STATIONS[name].draw());
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
  });
  const drawRest = () => { for (const name of page.stations) if (stale.delete(name)) STATIONS[name].draw(); };
  render();
  if (state.station === page.stations[0]) {
    setTimeout(drawRest, 50);  // when the first view stands
  } else {
    drawRest();  // it takes the room that it will have before another station is scrolled to
    go(state.station, { focuses: false });
  }
  root.dataset.ready = "true";
}

try {
  start();
} catch (error) {
  tell("failed", { why: error.message });
  throw error;
}
