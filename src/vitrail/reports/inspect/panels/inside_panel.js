// Show every step inside a layer for the selected token. The softmax of the scores is computed here.
const { grid } = pageData.page;
const selected = { image: 0, patch: pageData.page.followed, token: "patch" };
const decoded = new Map();
const layerBox = $("inside-layer"), headBox = $("inside-head");
const t = (name, fields = {}) => data.messages[root.lang][name].replace(/{(\w+)}/g, (_, field) => fields[field]);
const numberText = (value) => Number(value.toPrecision(3)).toString();

// Values of the selected layer and image, decoded once.
function valuesOf(name, packed) {
  const key = `${selected.image} ${layerBox.value} ${name}`;
  if (!decoded.has(key)) decoded.set(key, unpack(packed));
  return decoded.get(key);
}

function tokenName(token) {
  if (data.class && token === 0) return t("of-class");
  if (token < data.prefix) return `R${token - data.class}`;
  const patch = token - data.prefix;
  return t("one-patch-only", { row: Math.floor(patch / grid[1]), column: patch % grid[1] });
}

function draw() {
  const layer = data.images[selected.image][layerBox.value], head = Number(headBox.value), count = layer.rows.length;
  const token = selected.token === "class" ? 0 : data.prefix + selected.patch;
  const row = layer.rows.indexOf(token), at = row < 0 ? count - 1 : row;
  $("inside-of").textContent = `${tokenName(layer.rows[at])} · ${t("layer")} ${layerBox.value} · ${t("head")} ${head}`;
  const notes = {};
  for (const [name, packed] of Object.entries(layer.vectors)) {
    const values = valuesOf(name, packed).slice(at * packed.width, (at + 1) * packed.width);
    paint(name, values, packed.step * 127);
    notes[name] = t("length", { length: numberText(layer.lengths[name][at]) });
  }
  for (const [name, statistics] of Object.entries(layer.norms)) {
    const fields = Object.fromEntries(Object.entries(statistics).map(([key, values]) => [key, numberText(values[at])]));
    notes[name] = t(Object.keys(statistics).join("-"), { ...fields, length: numberText(layer.lengths[name][at]) });
  }
  for (const name of ["z1", "activated"]) {
    notes[name] = t("positive", { length: numberText(layer.lengths[name][at]), share: (100 * layer.positive[at]).toFixed(0) });
  }
  for (const [name, packed] of Object.entries(layer.heads)) {
    const start = (head * count + at) * packed.width, values = valuesOf(name, packed).slice(start, start + packed.width);
    paint(name, values, packed.step * 127);
    notes[name] = t("length", { length: numberText(Math.hypot(...values)) });
  }
  const lengths = layer.head_lengths.map((row) => numberText(row[at]));
  notes.heads = t("of-heads", { length: lengths[head], lengths: lengths.join(", ") });
  const start = (head * count + at) * layer.tokens;
  const scores = [...valuesOf("scores", layer.scores).slice(start, start + layer.tokens)];
  const most = Math.max(...scores), powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b, 0), weights = powers.map((power) => power / sum);
  const best = scores.indexOf(most), first = weights.slice(0, data.prefix).reduce((a, b) => a + b, 0);
  const isAllowed = (score) => layer.least === null || score > layer.least;
  const patches = scores.slice(data.prefix).map((score) => (isAllowed(score) ? score : 0));
  paint("scores", patches, Math.max(...patches.map(Math.abs), 1e-12), grid[1]);
  paintHeat(document.querySelector("[data-step=weights]"), weights.slice(data.prefix), grid, data.ramp);
  notes.scores = t("largest-score", { low: numberText(Math.min(...scores.filter(isAllowed))), high: numberText(most), who: tokenName(best) });
  notes.weights = t("largest-weight", { weight: numberText(weights[best]), who: tokenName(best), times: (weights[best] * layer.tokens).toFixed(1) })
    + (data.prefix ? t(data.class ? "prefix-weight" : "registers-weight", { weight: numberText(first) }) : "");
  for (const code of document.querySelectorAll("[data-note]")) code.textContent = notes[code.dataset.note];
}

function paint(name, values, scale, wide = values.length) {
  const canvas = document.querySelector(`[data-step=${name}]`);
  if (canvas) paintSigned(canvas, values, scale, data.signed, wide);
}

layerBox.onchange = headBox.onchange = draw;
for (const radio of document.querySelectorAll("input[name=inside-token]")) radio.onchange = () => { selected.token = radio.value; draw(); };
languageListeners.push(draw);
imageListeners.push((number) => { selected.image = number; draw(); });
patchListeners.push((patch) => { selected.patch = patch; draw(); });
