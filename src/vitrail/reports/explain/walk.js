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
const pixelsIn = { start: null, write: (bytes) => (bytes.length <= MOST_IN_ADDRESS ? textOf(bytes) : "none"), read: (text) => { try { const bytes = bytesOf(text); return bytes.length === HIGH * WIDE * CHANNELS ? bytes : undefined; } catch { return undefined; } } };

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
  if (state.hidden.size >= PATCHES) state.hidden.clear();
  const lacks = ["own", "drawn"].some((name) => given.has(name) && !state[name]);
  if (lacks && state.image === EMBEDDED) images.length = EMBEDDED;
  if (!images[state.image]) state.image = 0;
  return !lacks;
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
  const masked = order ? new Set([...order.keys()].filter((place) => state.hidden.has(order[place]))) : state.hidden;
  const change = { positions: state.positions === "on", order, masked, heads: state.heads, attention: state.attention, mlp: state.mlp, temperature: temperature() };
  now = { ...forward(model, scaled(pixels, rules), change), pixels, order };
  clock("forward", again);
  now.shares = softmax(now.logits, CLASSES);
  now.best = largest(now.shares);
}

// Which patch of the image is read at a place.
const patchAt = (place) => (now.order ? now.order[place] : place);
// One row of a step (T, D), or of one (H, T, K) for a head.
const rowOf = (step, t, width = WIDTH) => now.steps[step].subarray(t * width, (t + 1) * width);
const inLayer = (name) => `blocks.${state.layer}.${name}`;
const entering = (layer) => (layer ? `blocks.${layer - 1}` : "tokens");
const headRow = (name, t, width = NARROW, head = state.head) => rowOf(inLayer(name), head * TOKENS + t, width);
// The paper counts patches from 1, so that patch 28 is token 28 after [CLS].
const patchNumber = () => state.patch + 1;
const inHand = () => (state.token === "cls" ? 0 : PREFIX + state.patch);
const onPatches = (row) => row.slice(PREFIX);
const label = (k) => labels[k];
const chosenClass = () => (state.class < 0 ? now.best : state.class);
const some3 = (row) => `(${[...row.slice(0, 3)].map(spoken).join(", ")}, \\dots)`;
const placeOf = (patch) => say("patch-at", { row: Math.floor(patch / COLUMNS) + 1, column: (patch % COLUMNS) + 1 });
const tokenName = (t) => `${t}: ${t >= PREFIX ? placeOf(t - PREFIX) : HAS_CLASS && t === 0 ? "[CLS]" : `R${t - Number(HAS_CLASS)}`}`;
const lengthOf = (row) => say("length", { value: spoken(norm(row)) });

// Drawing: once a frame, and only what is seen

const seen = new Set(), stale = new Set();
let isDue = false, due = 0, mustCompute = true, asked = 0;

function update(changes = {}, { computes = false } = {}) {
  Object.assign(state, changes);
  mustCompute ||= computes;
  asked ||= window.event?.timeStamp || performance.now();
  if (isDue) return;
  isDue = true;
  due = requestAnimationFrame(render);
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
  $("told-words").textContent = name ? say(name, fields) : "";
  $("told").hidden = !name;
}

// The pane that stays: the image as the model gets it, the answer, what is changed

let paneMap = null;
function buildPane() {
  paneMap = makeMap($("pane-image"), "patch-in-hand", (patch) => update({ patch, token: "patch" }));
  $("undo").onclick = undoAll;
  $("told-close").onclick = () => tell(null);
  $("where").onchange = (event) => go(event.target.value);
  $("back").onclick = () => step(-1);
  $("forth").onclick = () => step(1);
}

// The pixels in the order in which the patches are read, hidden ones crossed out.
function shownPixels() {
  const found = new Uint8Array(now.pixels.length), checks = isDark.matches ? [48, 66] : [214, 236];
  for (let row = 0; row < HIGH; row++) {
    for (let column = 0; column < WIDE; column++) {
      const place = Math.floor(row / TALL) * COLUMNS + Math.floor(column / BROAD), from = patchAt(place);
      const y = Math.floor(from / COLUMNS) * TALL + (row % TALL), x = (from % COLUMNS) * BROAD + (column % BROAD);
      for (let c = 0; c < CHANNELS; c++) {
        found[(row * WIDE + column) * CHANNELS + c] = state.hidden.has(from) ? checks[(row + column) % 2] : now.pixels[(y * WIDE + x) * CHANNELS + c];
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

const signed = (n) => String(n).replace("-", "−");
function changes() {
  const found = [], add = (name, fields, undo) => found.push({ name, fields, undo });
  const clear = (set, member) => () => { set.delete(member); change(); };
  if (state.drawn) add("change-drawn", {}, () => change({ drawn: null }));
  if (state.down || state.right) add("change-shift", { down: signed(state.down), right: signed(state.right) }, () => change({ down: 0, right: 0 }));
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
  $("in-hand").textContent = say("in-hand", { token: tokenName(inHand()) });
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
  const isWhole = restore(location.hash);
  openWeights();
  buildPane();
  for (const name of page.stations) STATIONS[name].build();
  speak(state.lang);
  if (!isWhole) tell("link-lacks");
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
  window.addEventListener("hashchange", (event) => {
    // location.hash may already be the former one again: keepAddress could have written it in between.
    tell(restore(new URL(event.newURL).hash) ? null : "link-lacks");
    STATIONS.image.thumbs(); speak(state.lang); change(); go(state.station, { focuses: false });
  });
  window.addEventListener("beforeprint", () => {
    page.stations.forEach((name) => STATIONS[name].draw());
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
  });
  const drawRest = () => { for (const name of page.stations) if (stale.delete(name)) STATIONS[name].draw(); };
  cancelAnimationFrame(due);
  render();
  if (state.station === page.stations[0]) {
    setTimeout(drawRest, 50);  // when the first view stands
  } else {
    drawRest();  // it takes the room that it will have before another station is scrolled to
    go(state.station, { focuses: false });
  }
  root.dataset.ready = "true";
}

// What the page runs last. An error that nobody foresaw is told in words.
function begin() {
  try {
    start();
  } catch (error) {
    tell("failed", { why: error.message });
    throw error;
  }
}
