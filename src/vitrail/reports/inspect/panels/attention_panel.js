// Attention under the pointer. Maps travel as 8-bit images: row h*Q+q is what token q of head h looks at, in levels of
// square roots of shares of the row's largest value, which stands in `peaks`: one for [CLS] and registers, one for
// patches. `read` is what the classification head reads ([CLS], else the mean patch).
const state = { image: 0, layer: 0, head: 0, patch: null, way: "from", held: false };
const decoded = new Map();

// The numbers of one image, as bytes, one for each pixel.
async function bytes(source) {
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.width; canvas.height = image.height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const rgba = context.getImageData(0, 0, image.width, image.height).data;
  const found = new Uint8Array(image.width * image.height);
  for (let i = 0; i < found.length; i++) found[i] = rgba[4 * i];
  return { found, tokens: image.width };
}

// Every layer of an image, decoded once.
function layersOf(number) {
  if (!decoded.has(number)) {
    decoded.set(number, Promise.all(data.images[number].layers.map(async ({ layer, read, all }) => {
      const open = async (packed) => packed && { ...packed, ...(await bytes(packed.image)) };
      return { layer, read: await open(read), all: await open(all) };
    })));
  }
  return decoded.get(number);
}

// What every head of a layer shows for the token that is asked: values over the grid, and over how many they are spread.
function mapsOf({ read, all }) {
  const { prefix, grid, allowed } = data, count = grid[0] * grid[1];
  const asked = state.patch === null ? 0 : prefix + state.patch;
  const isRead = !all || (state.patch === null && way() === "from");
  const { heads, rows, peaks, found, tokens } = isRead ? read : all;
  const among = allowed && state.patch !== null ? allowed[way()][state.patch] : count;
  return Array.from({ length: heads }, (_, head) => {
    const values = new Float64Array(count);
    for (let n = 0; n < count; n++) {
      const from = isRead ? 0 : way() === "from" ? asked : prefix + n;
      const to = isRead || way() === "from" ? prefix + n : asked;
      const row = head * rows + from;
      values[n] = (found[row * tokens + to] / data.levels) ** 2 * peaks[to < prefix ? 0 : 1][row];
    }
    return { values, tokens, among, isMean: !isRead && heads < read.heads };
  });
}

// Nobody looks at a mean: who looks at it can only be asked of a token.
function way() { return state.patch === null && data.reads !== "[CLS]" ? "from" : state.way; }

function entropy({ values, among }) {
  const sum = values.reduce((a, b) => a + b, 0) || 1;
  return -values.reduce((a, v) => a + (v > 0 ? (v / sum) * Math.log(v / sum) : 0), 0) / Math.log(Math.max(among, 2));
}

const say = (name) => data.messages[root.lang][name];
const spoken = (element) => [...element.querySelectorAll(`.${root.lang}`)].map((part) => part.textContent).join("");
const cells = [];  // by layer and head: { button, canvas, words }

// The small maps, made anew only where their number changes.
function frame(layers, counts) {
  if (cells.length === layers.length && counts.every((count, n) => cells[n].length === count)) return;
  cells.length = 0;
  const box = $("heads"), most = Math.max(...counts);
  box.style.gridTemplateColumns = `max-content repeat(${most}, minmax(1.6rem, 7rem))`;
  const label = (text) => { const name = document.createElement("span"); name.className = "label"; name.textContent = text; return name; };
  box.replaceChildren(label(""), ...Array.from({ length: most }, (_, head) => label(most === data.heads.length ? data.heads[head] : "")));
  layers.forEach(({ layer }, n) => {
    box.append(label(layer));
    cells.push(Array.from({ length: counts[n] }, (_, head) => {
      const button = document.createElement("button"), canvas = document.createElement("canvas"), words = document.createElement("small");
      button.type = "button"; button.className = "cell"; canvas.className = "map";
      button.onclick = () => { state.layer = n; state.head = head; draw(); };
      button.append(canvas, words);
      box.append(button);
      return { button, canvas, words };
    }));
    for (let rest = counts[n]; rest < most; rest++) box.append(document.createElement("span"));
  });
}

let turn = 0;
async function draw() {
  const mine = ++turn;
  const layers = await layersOf(state.image);
  if (mine !== turn) return;
  const found = layers.map(mapsOf);
  frame(layers, found.map((heads) => heads.length));
  const chosen = Math.min(state.head, found[state.layer].length - 1);
  const call = (n, head, isMean) => `${say("layer")} ${layers[n].layer}` + (isMean ? "" : ` · ${say("head")} ${data.heads[head]}`);
  found.forEach((heads, n) => heads.forEach((map, head) => {
    const { button, canvas, words } = cells[n][head];
    paintHeat(canvas, map.values, data.grid, data.ramp);
    words.textContent = entropy(map).toFixed(2);
    button.title = call(n, head, map.isMean);
    button.setAttribute("aria-label", `${button.title}, ${say("entropy-column")} ${words.textContent}`);
    button.setAttribute("aria-pressed", String(n === state.layer && head === chosen));
  }));
  const map = found[state.layer][chosen], wide = data.grid[1];
  const peak = paintHeat($("laid"), map.values, data.grid, data.ramp), sum = map.values.reduce((a, b) => a + b, 0);
  const row = Math.floor(state.patch / wide), column = state.patch % wide;
  const who = state.patch === null ? spoken($("class")) : `${say("row")} ${row}, ${say("column")} ${column}`;
  $("asked").textContent = `${who} · ${say(way())} · ${call(state.layer, chosen, map.isMean)}`
    + ` · ${say("largest")} ${(peak * map.tokens).toFixed(1)} × ${say("uniform")} · ${say("entropy-column")} ${entropy(map).toFixed(2)}`
    + (way() === "from" ? ` · ${say("on-patches")} ${(100 * sum).toFixed(0)} %` : "");
  outline();
}

function outline() {
  const mark = $("mark"), [high, wide] = data.grid;
  mark.hidden = state.patch === null;
  if (mark.hidden) return;
  mark.style.width = `${100 / wide}%`; mark.style.height = `${100 / high}%`;
  mark.style.left = `${(100 * (state.patch % wide)) / wide}%`; mark.style.top = `${(100 * Math.floor(state.patch / wide)) / high}%`;
}

function ask(patch, held) {
  if (patch === state.patch && held === state.held) return;
  state.patch = patch; state.held = held; draw();
}

const stage = $("stage");
const canAsk = data.images[0].layers.every(({ all }) => all);
if (canAsk) {
  stage.onpointermove = (event) => { if (!state.held && event.pointerType === "mouse") ask(placeUnder(event, stage, data.grid), false); };
  stage.onpointerleave = () => { if (!state.held) ask(null, false); };
  stage.onclick = (event) => {
    const patch = placeUnder(event, stage, data.grid);
    if (state.held && patch === state.patch) ask(patch, false);
    else follow(patch);
  };
  stage.onkeydown = (event) => {
    if (event.key === "Escape") ask(null, false);
    const [high, wide] = data.grid, middle = Math.floor(high / 2) * wide + Math.floor(wide / 2);
    const next = placeBeside(state.patch ?? middle, event.key, data.grid);
    if (next === undefined) return;
    event.preventDefault();
    follow(state.patch === null ? middle : next);
  };
  let begun = false;  // at first the page shows what the classifier reads
  whenFollowed.push((patch) => { if (begun) ask(patch, true); begun = true; });
}
for (const radio of document.querySelectorAll("input[name=way]")) {
  radio.disabled = !canAsk;
  radio.onchange = () => { state.way = radio.value; draw(); };
}
$("class").onclick = () => ask(null, false);
state.layer = data.images[0].layers.length - 1;
whenLanguage.push(draw);
whenChosen.push((number) => {
  stage.querySelector(".under").className = `under p${number}`;
  stage.setAttribute("aria-label", data.images[number].name);
  state.image = number; state.patch = null; state.held = false;
  draw();
});
