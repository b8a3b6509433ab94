// State and control flow of the page of `vitrail explain`. `state` is what the user selected and changed, stored in the
// address. `now` is the model's result with these changes, `before` its result for the unchanged image. A station is the
// section of one step of the model; it is built once and redrawn while visible (stations.js).
"use strict";

const page = JSON.parse($("data").textContent);
const { config, preprocess, labels } = page;
const root = document.documentElement;
const [IMAGE_HEIGHT, IMAGE_WIDTH] = config.resolution, [ROWS, COLUMNS] = config.grid, [PATCH_HEIGHT, PATCH_WIDTH] = config.patch;
const { channels: CHANNELS, prefix: PREFIX, tokens: TOKENS, width: WIDTH, heads: HEADS, depth: DEPTH, mlp: HIDDEN, classes: CLASSES } = config;
const PATCH_COUNT = ROWS * COLUMNS, PATCH_SIZE = CHANNELS * PATCH_HEIGHT * PATCH_WIDTH, HEAD_WIDTH = WIDTH / HEADS;
const HAS_CLASS = config.pool === "cls";
const PREFIX_NAMES = [HAS_CLASS ? "[CLS]" : "", PREFIX > Number(HAS_CLASS) ? "R" : ""].filter(Boolean).join(" + ");  // names of the tokens before the patches
const MAX_ADDRESS_BYTES = 3072;  // of an image in the address

// Weights and images, decoded from the page

function bytesOf(text) {
  const raw = atob(text.replace(/-/g, "+").replace(/_/g, "/")), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}
const textOf = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");

const model = { config, tensors: {} };
const images = page.images.map((image) => ({ ...image, pixels: bytesOf(image.pixels) }));
const OWN_IMAGE = images.length;  // index of the user's own image

function openWeights() {
  const numbers = new Float32Array(bytesOf($("weights").textContent).buffer);
  let at = 0;
  for (const [name, count] of page.tensors) model.tensors[name] = numbers.subarray(at, (at += count));
}

// State, and its fields in the address: default value, encoder and decoder (undefined for an invalid value)

const integer = (low, high, start) => ({ start, write: String, read: (text) => { const n = Number(text); return /^-?\d{1,9}$/.test(text) && n >= low && n <= high ? n : undefined; } });
const choice = (options) => ({ start: options[0], write: String, read: (text) => (options.includes(text) ? text : undefined) });
const memberSet = (isMember) => ({ start: null, write: (set) => [...set].sort().join("_"), read: (text) => new Set(text.split("_").filter(isMember)) });
const indexSet = (count) => {
  const isMember = (text) => /^\d{1,6}$/.test(text) && Number(text) < count;
  return { start: null, write: (set) => [...set].sort((a, b) => a - b).join("_"), read: (text) => new Set(text.split("_").filter(isMember).map(Number)) };
};
const pixelsIn = { start: null, write: (bytes) => (bytes.length <= MAX_ADDRESS_BYTES ? textOf(bytes) : "none"), read: (text) => { try { const bytes = bytesOf(text); return bytes.length === IMAGE_HEIGHT * IMAGE_WIDTH * CHANNELS ? bytes : undefined; } catch { return undefined; } } };

const FIELDS = {
  lang: choice(["en", "ko"]),
  station: choice(page.stations),
  image: integer(0, OWN_IMAGE, 0),
  own: pixelsIn,
  name: { start: "", write: String, read: (text) => text.slice(0, 200) },
  drawn: pixelsIn,
  down: integer(-IMAGE_HEIGHT, IMAGE_HEIGHT, 0),
  right: integer(-IMAGE_WIDTH, IMAGE_WIDTH, 0),
  patch: integer(0, PATCH_COUNT - 1, page.start.patch),
  token: choice(HAS_CLASS ? ["patch", "cls"] : ["patch"]),
  layer: integer(0, DEPTH - 1, 0),
  head: integer(0, HEADS - 1, 0),
  key: integer(0, TOKENS - 1, Math.min(page.start.key, TOKENS - 1)),
  pixel: integer(0, PATCH_SIZE - 1, 0),
  feature: integer(0, WIDTH - 1, 0),
  unit: integer(0, HIDDEN - 1, 0),
  class: integer(-1, CLASSES - 1, -1),
  positions: choice(["on", "off"]),
  shuffle: integer(0, 999999999, 0),
  temperature: integer(-16, 16, 0),  // fourths of a power of two
  hidden: indexSet(PATCH_COUNT),
  heads: memberSet((text) => /^\d+\.\d+$/.test(text) && Number(text.split(".")[0]) < DEPTH && Number(text.split(".")[1]) < HEADS),
  attention: indexSet(DEPTH),
  mlp: indexSet(DEPTH),
};
const SETS = ["hidden", "heads", "attention", "mlp"];
const state = {};

// Set the state from the fragment of an address. Return false if the address lacks pixels of an image.
function restore(text) {
  const params = new URLSearchParams(text.replace(/^#/, ""));
  for (const [name, field] of Object.entries(FIELDS)) {
    const value = params.has(name) ? field.read(params.get(name)) : undefined;
    state[name] = value ?? (SETS.includes(name) ? new Set() : field.start);
  }
  if (["ko", "en"].includes(text.slice(1))) state.lang = text.slice(1);
  else if (!params.has("lang") && navigator.language.startsWith("ko")) state.lang = "ko";
  if (state.own) images[OWN_IMAGE] = { name: state.name || "?", truth: null, pixels: state.own };
  if (state.hidden.size >= PATCH_COUNT) state.hidden.clear();
  const lacks = ["own", "drawn"].some((name) => params.has(name) && !state[name]);
  if (lacks && state.image === OWN_IMAGE) images.length = OWN_IMAGE;
  if (!images[state.image]) state.image = 0;
  return !lacks;
}

function address() {
  const params = new URLSearchParams();
  for (const [name, field] of Object.entries(FIELDS)) {
    const value = state[name], isDefault = SETS.includes(name) ? !value.size : value === field.start || value === null;
    const isUnused = ["own", "name"].includes(name) && state.image !== OWN_IMAGE;
    const text = isDefault || isUnused ? "" : field.write(value);
    if (text !== "") params.set(name, text);
  }
  if (state.lang === "en") params.set("lang", "en");
  return `#${params}`;
}
const linkHoldsAll = () => IMAGE_HEIGHT * IMAGE_WIDTH * CHANNELS <= MAX_ADDRESS_BYTES || (state.image !== OWN_IMAGE && !state.drawn);

// Input and result of the model

const wrap = (n, count) => ((n % count) + count) % count;
const temperature = () => 2 ** (state.temperature / 4);

function shiftImage(pixels) {
  if (!state.down && !state.right) return pixels;
  const shifted = new Uint8Array(pixels.length);
  for (let row = 0; row < IMAGE_HEIGHT; row++) {
    for (let column = 0; column < IMAGE_WIDTH; column++) {
      const from = (wrap(row - state.down, IMAGE_HEIGHT) * IMAGE_WIDTH + wrap(column - state.right, IMAGE_WIDTH)) * CHANNELS;
      for (let c = 0; c < CHANNELS; c++) shifted[(row * IMAGE_WIDTH + column) * CHANNELS + c] = pixels[from + c];
    }
  }
  return shifted;
}

// Return a random order of the patches, the same for a seed on every machine.
function patchOrder(seed) {
  if (!seed) return null;
  const order = Array.from({ length: PATCH_COUNT }, (_, i) => i);
  let s = seed >>> 0;
  for (let i = PATCH_COUNT - 1; i > 0; i--) {
    s = (Math.imul(s, 1664525) + 1013904223) >>> 0;
    const j = Math.floor((s / 2 ** 32) * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

let now = null, before = null, beforePixels = null;

function compute() {
  const own = images[state.image].pixels;
  if (beforePixels !== own) { before = forward(model, scaled(own, preprocess)); before.shares = softmax(before.logits, CLASSES); beforePixels = own; }
  const pixels = shiftImage(state.drawn ?? own), order = patchOrder(state.shuffle);
  const start = performance.now();
  const masked = order ? new Set([...order.keys()].filter((place) => state.hidden.has(order[place]))) : state.hidden;
  const edits = { positions: state.positions === "on", order, masked, heads: state.heads, attention: state.attention, mlp: state.mlp, temperature: temperature() };
  now = { ...forward(model, scaled(pixels, preprocess), edits), pixels, order };
  recordDuration("forward", start);
  now.shares = softmax(now.logits, CLASSES);
  now.best = largest(now.shares);
}

// Return the patch of the image that the model reads at a position.
const patchAt = (place) => (now.order ? now.order[place] : place);
// Return row `t` of a step with shape (T, width).
const rowOf = (step, t, width = WIDTH) => now.steps[step].subarray(t * width, (t + 1) * width);
const inLayer = (name) => `blocks.${state.layer}.${name}`;
const layerInput = (layer) => (layer ? `blocks.${layer - 1}` : "tokens");
const headRow = (name, t, width = HEAD_WIDTH, head = state.head) => rowOf(inLayer(name), head * TOKENS + t, width);
// The paper numbers patches from 1: patch 28 is token 28, because [CLS] is token 0.
const patchNumber = () => state.patch + 1;
const followedToken = () => (state.token === "cls" ? 0 : PREFIX + state.patch);
const patchPart = (row) => row.slice(PREFIX);
const label = (k) => labels[k];
const chosenClass = () => (state.class < 0 ? now.best : state.class);
const firstThree = (row) => `(${[...row.slice(0, 3)].map(numberText).join(", ")}, \\dots)`;
const positionName = (patch) => message("patch-position", { row: Math.floor(patch / COLUMNS) + 1, column: (patch % COLUMNS) + 1 });
const tokenName = (t) => `${t}: ${t >= PREFIX ? positionName(t - PREFIX) : HAS_CLASS && t === 0 ? "[CLS]" : `R${t - Number(HAS_CLASS)}`}`;
const lengthOf = (row) => message("length", { value: numberText(norm(row)) });

// Drawing: at most once per frame, and only visible stations

const visible = new Set(), stale = new Set();
let isScheduled = false, frame = 0, mustCompute = true, eventTime = 0;

function update(changes = {}, { computes = false } = {}) {
  Object.assign(state, changes);
  mustCompute ||= computes;
  eventTime ||= window.event?.timeStamp || performance.now();
  if (isScheduled) return;
  isScheduled = true;
  frame = requestAnimationFrame(render);
}
const change = (changes = {}) => update(changes, { computes: true });

function render() {
  isScheduled = false;
  const computed = mustCompute;
  if (mustCompute) compute();
  mustCompute = false;
  page.stations.forEach((name) => stale.add(name));
  drawPane();
  drawSeen();
  const since = eventTime;
  eventTime = 0;
  setTimeout(() => recordDuration(computed ? "computed" : "redrawn", since), 0);  // after the frame
  saveAddress();
}

// Record a duration for benchmarks/explain.py, which reads the latest one of each name.
function recordDuration(name, start) {
  performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}

function drawSeen() {
  for (const name of page.stations) {
    if (!visible.has(name) || !stale.delete(name)) continue;
    STATIONS[name].draw();
  }
}

let waiting = 0;
function saveAddress() {
  clearTimeout(waiting);
  waiting = setTimeout(() => history.replaceState(null, "", address()), 120);
}

function toggle(set, member) {
  if (!set.delete(member)) set.add(member);
  change();
}

function toggleHidden(patch) {
  const isLast = !state.hidden.has(patch) && state.hidden.size === PATCH_COUNT - 1;
  showNotice(isLast ? "hide-last" : null);
  if (!isLast) toggle(state.hidden, patch);
}

let notice = null;
function showNotice(name, fields = {}) {
  notice = name && { name, fields };
  $("notice-text").textContent = name ? message(name, fields) : "";
  $("notice").hidden = !name;
}

// The pane, which stays in view: the input image, the prediction, and the list of changes

let paneMap = null;
function buildPane() {
  paneMap = makeMap($("pane-image"), "followed-patch", (patch) => update({ patch, token: "patch" }));
  $("undo").onclick = undoChanges;
  $("notice-close").onclick = () => showNotice(null);
  $("station-select").onchange = (event) => go(event.target.value);
  $("previous").onclick = () => step(-1);
  $("next").onclick = () => step(1);
}

// Return the pixels with patches in the order in which the model reads them, and a checkerboard for hidden patches.
function displayedPixels() {
  const pixels = new Uint8Array(now.pixels.length), checks = isDark.matches ? [48, 66] : [214, 236];
  for (let row = 0; row < IMAGE_HEIGHT; row++) {
    for (let column = 0; column < IMAGE_WIDTH; column++) {
      const place = Math.floor(row / PATCH_HEIGHT) * COLUMNS + Math.floor(column / PATCH_WIDTH), from = patchAt(place);
      const y = Math.floor(from / COLUMNS) * PATCH_HEIGHT + (row % PATCH_HEIGHT), x = (from % COLUMNS) * PATCH_WIDTH + (column % PATCH_WIDTH);
      for (let c = 0; c < CHANNELS; c++) {
        pixels[(row * IMAGE_WIDTH + column) * CHANNELS + c] = state.hidden.has(from) ? checks[(row + column) % 2] : now.pixels[(y * IMAGE_WIDTH + x) * CHANNELS + c];
      }
    }
  }
  return pixels;
}

// Return classes by their probability for the unchanged image. The current prediction is always among them.
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

const signedText = (n) => String(n).replace("-", "−");
// Return the active changes, each with its message and the function that undoes it.
function changes() {
  const active = [], addChange = (name, fields, undo) => active.push({ name, fields, undo });
  const clear = (set, member) => () => { set.delete(member); change(); };
  if (state.drawn) addChange("change-drawn", {}, () => change({ drawn: null }));
  if (state.down || state.right) addChange("change-shift", { down: signedText(state.down), right: signedText(state.right) }, () => change({ down: 0, right: 0 }));
  if (state.positions === "off") addChange("change-positions", {}, () => change({ positions: "on" }));
  if (state.shuffle) addChange("change-order", {}, () => change({ shuffle: 0 }));
  if (state.hidden.size) addChange("change-masked", { count: state.hidden.size }, () => { state.hidden.clear(); change(); });
  if (state.temperature) addChange("change-temperature", { value: numberText(temperature()) }, () => change({ temperature: 0 }));
  for (const key of [...state.heads].sort()) { const [layer, head] = key.split("."); addChange("change-head", { layer, head }, clear(state.heads, key)); }
  for (let layer = 0; layer < DEPTH; layer++) {
    const [attention, mlp] = [state.attention.has(layer), state.mlp.has(layer)];
    if (attention && mlp) addChange("change-layer", { layer }, () => { state.attention.delete(layer); state.mlp.delete(layer); change(); });
    else if (attention) addChange("change-attention", { layer }, clear(state.attention, layer));
    else if (mlp) addChange("change-mlp", { layer }, clear(state.mlp, layer));
  }
  return active;
}

function undoChanges() {
  for (const name of SETS) state[name].clear();
  change({ drawn: null, down: 0, right: 0, positions: "on", shuffle: 0, temperature: 0 });
}

function drawPane() {
  paintPixels(paneMap.canvas, displayedPixels(), [IMAGE_HEIGHT, IMAGE_WIDTH]);
  paneMap.mark(state.patch);
  const was = largest(before.shares), image = images[state.image];
  $("best").textContent = label(now.best);
  $("best-share").textContent = percent(now.shares[now.best]);
  $("was").textContent = message("unchanged", { label: label(was), share: percent(before.shares[was]) });
  $("truth").textContent = image.truth === null ? image.name : message("truth", { label: image.truth });
  $("followed").textContent = message("followed", { token: tokenName(followedToken()) });
  drawBars($("bars"), ranked(Math.min(CLASSES, 6)));
  const active = changes();
  $("changes").replaceChildren(...active.map(({ name, fields, undo }) => {
    const text = message(name, fields);
    return el("li", {}, el("button", { type: "button", class: "chip", "aria-label": message("undo", { change: text }), onclick: undo }, `${text} ×`));
  }));
  $("undo").hidden = !active.length;
  $("undo-count").textContent = active.length ? `(${active.length})` : "";
  $("station-select").value = state.station;
  $("previous").disabled = state.station === page.stations[0];
  $("next").disabled = state.station === page.stations.at(-1);
}

// Controls: each function adds one to `host`; most return a function that sets its value

function addChoice(host, legend, name, options, pick) {
  const group = el("fieldset", { class: "choice" }, el("legend", {}, bilingual(legend)));
  const inputs = options.map(({ value, text }) => {
    const input = el("input", { type: "radio", name, value, onchange: () => pick(value) });
    group.append(el("label", {}, input, text));
    return input;
  });
  host.append(group);
  return (value) => inputs.forEach((input) => { input.checked = input.value === String(value); });
}

function addSlider(host, title, low, high, pick, show = String) {
  const output = el("output");
  const input = el("input", { type: "range", min: low, max: high, step: 1, oninput: () => pick(Number(input.value)) });
  host.append(el("label", { class: "slide" }, el("span", {}, bilingual(title)), input, output));
  return (value) => { input.value = value; output.textContent = show(value); input.setAttribute("aria-valuetext", output.textContent); };
}

function addCheckbox(host, content, pick) {
  const input = el("input", { type: "checkbox", onchange: () => pick(input.checked) });
  const text = el("span", {}, content);
  host.append(el("label", { class: "check" }, input, text));
  return { input, text };
}

function addButton(host, title, pick) {
  const button = el("button", { type: "button", onclick: pick }, bilingual(title));
  host.append(button);
  return button;
}

const shuffleAgain = () => change({ shuffle: (Math.imul(state.shuffle + 7, 48271) >>> 0) % 999999937 || 1 });
function addShuffleButtons(host) {
  addButton(host, "shuffle", shuffleAgain);
  return addButton(host, "shuffle-back", () => change({ shuffle: 0 }));
}

const layerChoices = () => Array.from({ length: DEPTH }, (_, n) => ({ value: n, text: String(n) }));
const headChoices = () => Array.from({ length: HEADS }, (_, n) => ({ value: n, text: String(n) }));

function addClassSelect(host) {
  const select = el("select", { onchange: () => update({ class: Number(select.value) }) });
  labels.forEach((text, k) => select.append(el("option", { value: k }, text)));
  host.append(el("label", { class: "slide" }, el("span", {}, bilingual("class")), select));
  return () => { select.value = chosenClass(); };
}

// Image files of the user

async function openFile(file) {
  if (!file) return;
  let image = null;
  try { image = await decode(file, preprocess); } catch (error) {
    showNotice(error.message === "too many pixels" ? "too-large" : "not-image", { name: file.name });
    return;
  }
  const pixels = cropped(image, preprocess), isSame = image.width === IMAGE_WIDTH && image.height === IMAGE_HEIGHT;
  images[OWN_IMAGE] = { name: file.name, truth: null, pixels };
  STATIONS.image.thumbs();
  const mode = message(CHANNELS === 1 ? "mode-grey" : "mode-colour");
  showNotice(isSame ? "image-same" : "image-read", { name: file.name, wide: image.width, high: image.height, to_wide: IMAGE_WIDTH, to_high: IMAGE_HEIGHT, mode });
  change({ image: OWN_IMAGE, own: pixels, name: file.name, drawn: null });
}

// Navigation between stations

let lastJump = 0;
function go(name, { focuses = true } = {}) {
  update({ station: name });
  lastJump = performance.now();
  const target = $(`s-${name}`);
  target.scrollIntoView({ block: "start" });
  if (focuses) target.focus({ preventScroll: true });
}

function step(by) {
  const at = page.stations.indexOf(state.station) + by;
  if (at >= 0 && at < page.stations.length) go(page.stations[at]);
}

// Return whether a key press on an element may go to the next station, because the element does not use keys itself.
function isIdle(target) {
  return !target.closest?.("input, select, button, textarea, summary, a, [role=slider], [role=application]");
}

function setLanguage(language) {
  root.lang = language;
  if (notice) showNotice(notice.name, notice.fields);
  for (const option of $("station-select").options) option.textContent = option.dataset[language];
  document.title = page.title[language];
  update({ lang: language });
}

function start() {
  const isComplete = restore(location.hash);
  openWeights();
  buildPane();
  for (const name of page.stations) STATIONS[name].build();
  setLanguage(state.lang);
  if (!isComplete) showNotice("link-incomplete");
  $("language").onclick = () => setLanguage(root.lang === "ko" ? "en" : "ko");
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) { const name = target.id.slice(2); if (isIntersecting) visible.add(name); else visible.delete(name); }
    if (now) drawSeen();
  }, { rootMargin: "200px" });
  for (const name of page.stations) near.observe($(`s-${name}`));
  // The current station is the last one whose top is above 45 % of the window.
  let scrolling = 0;
  window.addEventListener("scroll", () => {
    cancelAnimationFrame(scrolling);
    scrolling = requestAnimationFrame(() => {
      const line = window.innerHeight * 0.45, passed = page.stations.filter((name) => $(`s-${name}`).getBoundingClientRect().top < line);
      const station = passed.at(-1) ?? page.stations[0];
      if (station === state.station || performance.now() - lastJump < 500) return;
      state.station = station; $("station-select").value = station;
      $("previous").disabled = station === page.stations[0]; $("next").disabled = station === page.stations.at(-1);
      saveAddress();
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
    // Read the event's address: saveAddress may have replaced location.hash by the previous one.
    showNotice(restore(new URL(event.newURL).hash) ? null : "link-incomplete");
    STATIONS.image.thumbs(); setLanguage(state.lang); change(); go(state.station, { focuses: false });
  });
  window.addEventListener("beforeprint", () => {
    page.stations.forEach((name) => STATIONS[name].draw());
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
  });
  const drawRest = () => { for (const name of page.stations) if (stale.delete(name)) STATIONS[name].draw(); };
  cancelAnimationFrame(frame);
  render();
  if (state.station === page.stations[0]) {
    setTimeout(drawRest, 50);  // after the first paint
  } else {
    drawRest();  // all stations need their final height before the page scrolls
    go(state.station, { focuses: false });
  }
  root.dataset.ready = "true";
}

// Entry point, called at the end of the script. Show an unexpected error on the page.
function begin() {
  try {
    start();
  } catch (error) {
    showNotice("failed", { why: error.message });
    throw error;
  }
}
