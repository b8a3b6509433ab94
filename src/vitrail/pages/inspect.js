// Attention under the pointer. Maps travel as 8-bit images, one for each layer: row h*T+q is what token q of head h looks
// at, as shares of the row's largest value, which stands in `peaks`.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const state = { picture: 0, layer: 0, patch: null, way: "from" };
const decoded = new Map();

const ramp = (() => {
  const stops = [[0, 34, 78], [35, 62, 108], [87, 93, 109], [124, 123, 120], [166, 155, 117], [211, 193, 100], [254, 232, 56]];
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * (at - low)));
  });
})();

// The numbers of one layer's image, as bytes.
function bytes(source) {
  if (!decoded.has(source)) {
    decoded.set(source, new Promise((done) => {
      const image = new Image();
      image.onload = () => {
        const canvas = document.createElement("canvas");
        canvas.width = image.width; canvas.height = image.height;
        const context = canvas.getContext("2d", { willReadFrequently: true });
        context.drawImage(image, 0, 0);
        const rgba = context.getImageData(0, 0, image.width, image.height).data;
        done(Uint8Array.from({ length: image.width * image.height }, (_, i) => rgba[4 * i]));
      };
      image.src = source;
    }));
  }
  return decoded.get(source);
}

// Attention of every head for the chosen token: [{name, values}], values of N patches.
async function maps() {
  const picture = data.pictures[state.picture], layer = picture.layers[state.layer];
  const isClass = state.patch === null;
  const source = isClass && layer.first ? layer.first : layer.all;
  const heads = source.heads, tokens = picture.tokens, rows = source.rows;
  const raw = await bytes(source.image);
  const query = isClass ? 0 : picture.prefix + state.patch;
  const count = tokens - picture.prefix;
  return heads.map((name, head) => {
    const values = new Float32Array(count);
    for (let n = 0; n < count; n++) {
      const [q, k] = state.way === "to" && !isClass ? [picture.prefix + n, query] : [query, picture.prefix + n];
      const row = head * rows + q;
      values[n] = (raw[row * tokens + k] / 255) * source.peaks[row];
    }
    return { name, values };
  });
}

function paint(canvas, values, [high, wide], peak) {
  canvas.width = wide; canvas.height = high;
  const context = canvas.getContext("2d"), image = context.createImageData(wide, high);
  values.forEach((value, n) => {
    const [r, g, b] = ramp[Math.round(255 * Math.min(value / peak, 1))];
    image.data.set([r, g, b, 255], 4 * n);
  });
  context.putImageData(image, 0, 0);
}

function entropy(values) {
  const sum = values.reduce((a, b) => a + b, 0) || 1;
  return -values.reduce((a, v) => a + (v > 0 ? (v / sum) * Math.log(v / sum) : 0), 0) / Math.log(Math.max(values.length, 2));
}

let turn = 0;
async function draw() {
  const mine = ++turn;
  const picture = data.pictures[state.picture];
  const found = await maps();
  if (mine !== turn) return;
  const box = $("heads");
  box.replaceChildren(...found.map(({ name, values }) => {
    const figure = document.createElement("figure"), canvas = document.createElement("canvas"), words = document.createElement("figcaption");
    const peak = Math.max(...values, 1e-12);
    paint(canvas, values, picture.grid, peak);
    canvas.className = "map"; canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name}, entropy ${entropy(values).toFixed(2)}`);
    canvas.onclick = (event) => choose(under(event, canvas));
    words.textContent = `${name} · max ${(peak * picture.tokens).toFixed(1)}× · H ${entropy(values).toFixed(2)}`;
    figure.append(canvas, words);
    return figure;
  }));
  const where = state.patch === null ? "[CLS]" : `(${Math.floor(state.patch / picture.grid[1])}, ${state.patch % picture.grid[1]})`;
  $("asked").textContent = `${where} · ${$("layer").dataset.word} ${state.layer + 1}`;
  outline();
}

function outline() {
  const picture = data.pictures[state.picture], mark = $("mark");
  mark.hidden = state.patch === null;
  if (state.patch === null) return;
  const [high, wide] = picture.grid;
  mark.style.width = `${100 / wide}%`; mark.style.height = `${100 / high}%`;
  mark.style.left = `${(100 * (state.patch % wide)) / wide}%`; mark.style.top = `${(100 * Math.floor(state.patch / wide)) / high}%`;
}

function under(event, element) {
  const [high, wide] = data.pictures[state.picture].grid, box = element.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * wide), row = Math.floor(((event.clientY - box.top) / box.height) * high);
  return Math.max(0, Math.min(high - 1, row)) * wide + Math.max(0, Math.min(wide - 1, column));
}

let held = false;
function choose(patch) { held = true; state.patch = patch; draw(); }
const stage = $("stage");
if (stage) {
  stage.onmousemove = (event) => { if (!held) { const patch = under(event, stage); if (patch !== state.patch) { state.patch = patch; draw(); } } };
  stage.onclick = (event) => { const patch = under(event, stage); if (held && patch === state.patch) { held = false; } else choose(patch); };
  stage.onmouseleave = () => { if (!held && data.hasClass) { state.patch = null; draw(); } };
  stage.onkeydown = (event) => {
    const [high, wide] = data.pictures[state.picture].grid;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    choose(((state.patch ?? 0) + step + high * wide) % (high * wide));
  };
  $("layer").oninput = (event) => { state.layer = Number(event.target.value); draw(); };
  for (const radio of document.querySelectorAll("input[name=way]")) radio.onchange = () => { state.way = radio.value; draw(); };
  const back = $("class");
  if (back) back.onclick = () => { held = false; state.patch = null; draw(); };
  $("which").onchange = (event) => {
    state.picture = Number(event.target.value); state.patch = data.hasClass ? null : 0; held = false;
    $("shown").src = data.pictures[state.picture].source;
    draw();
  };
  state.layer = data.pictures[0].layers.length - 1; $("layer").value = state.layer;
  if (!data.hasClass) state.patch = 0;
  draw();
}
const language = $("language");
language.onclick = () => { document.documentElement.lang = document.documentElement.lang === "ko" ? "en" : "ko"; };
