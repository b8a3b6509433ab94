// Show the attention of the patch under the pointer. Attention is encoded as 8-bit images: row h*Q+q is the attention of
// token q in head h, as square roots of values relative to the row's maximum. `peaks` has two maxima per row: one for
// [CLS] and registers, one for patches. `read` is the attention of the classifier's input ([CLS] or the mean patch).
const state = { image: 0, layer: 0, head: 0, patch: null, direction: "from", isHeld: false };
const decoded = new Map();

// The pixels of a grey image, as bytes.
async function decodeImage(source) {
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.width; canvas.height = image.height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const rgba = context.getImageData(0, 0, image.width, image.height).data;
  const values = new Uint8Array(image.width * image.height);
  for (let i = 0; i < values.length; i++) values[i] = rgba[4 * i];
  return { bytes: values, tokens: image.width };
}

// All layers of an image, decoded once.
function layersOf(number) {
  if (!decoded.has(number)) {
    decoded.set(number, Promise.all(data.images[number].layers.map(async ({ layer, read, all }) => {
      const open = async (packed) => packed && { ...packed, ...(await decodeImage(packed.image)) };
      return { layer, read: await open(read), all: await open(all) };
    })));
  }
  return decoded.get(number);
}

// The map of every head for the selected token: values over the grid, and the number of patches they may cover.
function mapsOf({ read, all }) {
  const { prefix, grid, allowed } = data, count = grid[0] * grid[1];
  const token = state.patch === null ? 0 : prefix + state.patch;
  const isRead = !all || (state.patch === null && direction() === "from");
  const { heads, rows, peaks, bytes, tokens } = isRead ? read : all;
  const allowedCount = allowed && state.patch !== null ? allowed[direction()][state.patch] : count;
  return Array.from({ length: heads }, (_, head) => {
    const values = new Float64Array(count);
    for (let n = 0; n < count; n++) {
      const from = isRead ? 0 : direction() === "from" ? token : prefix + n;
      const to = isRead || direction() === "from" ? prefix + n : token;
      const row = head * rows + from;
      values[n] = (bytes[row * tokens + to] / data.levels) ** 2 * peaks[to < prefix ? 0 : 1][row];
    }
    return { values, tokens, allowedCount, isMean: !isRead && heads < read.heads };
  });
}

// Only a token can be attended to, not a mean of tokens.
function direction() { return state.patch === null && data.reads !== "[CLS]" ? "from" : state.direction; }

function entropy({ values, allowedCount }) {
  const sum = values.reduce((a, b) => a + b, 0) || 1;
  return -values.reduce((a, v) => a + (v > 0 ? (v / sum) * Math.log(v / sum) : 0), 0) / Math.log(Math.max(allowedCount, 2));
}

const t = (name) => data.messages[root.lang][name];
const textOf = (element) => [...element.querySelectorAll(`.${root.lang}`)].map((part) => part.textContent).join("");
const cells = [];  // by layer and head: { button, canvas, note }

// Create the small maps again if their number changes.
function createCells(layers, counts) {
  if (cells.length === layers.length && counts.every((count, n) => cells[n].length === count)) return;
  cells.length = 0;
  const box = $("heads"), most = Math.max(...counts);
  box.style.gridTemplateColumns = `max-content repeat(${most}, minmax(1.6rem, 7rem))`;
  const label = (text) => { const name = document.createElement("span"); name.className = "label"; name.textContent = text; return name; };
  box.replaceChildren(label(""), ...Array.from({ length: most }, (_, head) => label(most === data.heads.length ? data.heads[head] : "")));
  layers.forEach(({ layer }, n) => {
    box.append(label(layer));
    cells.push(Array.from({ length: counts[n] }, (_, head) => {
      const button = document.createElement("button"), canvas = document.createElement("canvas"), note = document.createElement("small");
      button.type = "button"; button.className = "cell"; canvas.className = "map";
      button.onclick = () => { state.layer = n; state.head = head; draw(); };
      button.append(canvas, note);
      box.append(button);
      return { button, canvas, note };
    }));
    for (let rest = counts[n]; rest < most; rest++) box.append(document.createElement("span"));
  });
}

let drawing = 0;
async function draw() {
  const number = ++drawing;
  const layers = await layersOf(state.image);
  if (number !== drawing) return;  // a later call draws
  const maps = layers.map(mapsOf);
  createCells(layers, maps.map((heads) => heads.length));
  const shownHead = Math.min(state.head, maps[state.layer].length - 1);
  const mapName = (n, head, isMean) => `${t("layer")} ${layers[n].layer}` + (isMean ? "" : ` · ${t("head")} ${data.heads[head]}`);
  maps.forEach((heads, n) => heads.forEach((map, head) => {
    const { button, canvas, note } = cells[n][head];
    paintHeat(canvas, map.values, data.grid, data.ramp);
    note.textContent = entropy(map).toFixed(2);
    button.title = mapName(n, head, map.isMean);
    button.setAttribute("aria-label", `${button.title}, ${t("entropy-column")} ${note.textContent}`);
    button.setAttribute("aria-pressed", String(n === state.layer && head === shownHead));
  }));
  const map = maps[state.layer][shownHead], wide = data.grid[1];
  const peak = paintHeat($("laid"), map.values, data.grid, data.ramp), sum = map.values.reduce((a, b) => a + b, 0);
  const row = Math.floor(state.patch / wide), column = state.patch % wide;
  const tokenName = state.patch === null ? textOf($("class")) : `${t("row")} ${row}, ${t("column")} ${column}`;
  $("asked").textContent = `${tokenName} · ${t(direction())} · ${mapName(state.layer, shownHead, map.isMean)}`
    + ` · ${t("largest")} ${(peak * map.tokens).toFixed(1)} × ${t("uniform")} · ${t("entropy-column")} ${entropy(map).toFixed(2)}`
    + (direction() === "from" ? ` · ${t("on-patches")} ${(100 * sum).toFixed(0)} %` : "");
  markPatch();
}

function markPatch() {
  const mark = $("mark"), [high, wide] = data.grid;
  mark.hidden = state.patch === null;
  if (mark.hidden) return;
  mark.style.width = `${100 / wide}%`; mark.style.height = `${100 / high}%`;
  mark.style.left = `${(100 * (state.patch % wide)) / wide}%`; mark.style.top = `${(100 * Math.floor(state.patch / wide)) / high}%`;
}

function showPatch(patch, isHeld) {
  if (patch === state.patch && isHeld === state.isHeld) return;
  state.patch = patch; state.isHeld = isHeld; draw();
}

const stage = $("stage");
const hasPatches = data.images[0].layers.every(({ all }) => all);
if (hasPatches) {
  stage.onpointermove = (event) => { if (!state.isHeld && event.pointerType === "mouse") showPatch(positionUnder(event, stage, data.grid), false); };
  stage.onpointerleave = () => { if (!state.isHeld) showPatch(null, false); };
  stage.onclick = (event) => {
    const patch = positionUnder(event, stage, data.grid);
    if (state.isHeld && patch === state.patch) showPatch(patch, false);
    else followPatch(patch);
  };
  stage.onkeydown = (event) => {
    if (event.key === "Escape") showPatch(null, false);
    const [high, wide] = data.grid, middle = Math.floor(high / 2) * wide + Math.floor(wide / 2);
    const next = neighbour(state.patch ?? middle, event.key, data.grid);
    if (next === undefined) return;
    event.preventDefault();
    followPatch(state.patch === null ? middle : next);
  };
  let isStarted = false;  // first, the page shows the input of the classifier
  patchListeners.push((patch) => { if (isStarted) showPatch(patch, true); isStarted = true; });
}
for (const radio of document.querySelectorAll("input[name=way]")) {
  radio.disabled = !hasPatches;
  radio.onchange = () => { state.direction = radio.value; draw(); };
}
$("class").onclick = () => showPatch(null, false);
state.layer = data.images[0].layers.length - 1;
languageListeners.push(draw);
imageListeners.push((number) => {
  stage.querySelector(".under").className = `under p${number}`;
  stage.setAttribute("aria-label", data.images[number].name);
  state.image = number; state.patch = null; state.isHeld = false;
  draw();
});
