// Every step inside a layer, for the token in hand. Scores are 16-bit integers; their softmax is computed here.
const { grid } = pageData.page;
const chosen = { image: 0, patch: pageData.page.followed, token: "patch" };
const opened = new Map();
const layerBox = $("inside-layer"), headBox = $("inside-head");
const say = (name, fields = {}) => data.messages[root.lang][name].replace(/{(\w+)}/g, (_, field) => fields[field]);
const spoken = (value) => Number(value.toPrecision(3)).toString();

// Numbers of one layer of one image, unpacked once.
function numbersOf(name, packed) {
  const key = `${chosen.image} ${layerBox.value} ${name}`;
  if (!opened.has(key)) opened.set(key, unpack(packed));
  return opened.get(key);
}

function tokenName(token) {
  if (data.class && token === 0) return say("of-class");
  if (token < data.prefix) return `R${token - data.class}`;
  const patch = token - data.prefix;
  return say("one-patch-only", { row: Math.floor(patch / grid[1]), column: patch % grid[1] });
}

function draw() {
  const layer = data.images[chosen.image][layerBox.value], head = Number(headBox.value), count = layer.rows.length;
  const asked = chosen.token === "class" ? 0 : data.prefix + chosen.patch;
  const found = layer.rows.indexOf(asked), at = found < 0 ? count - 1 : found;
  $("inside-of").textContent = `${tokenName(layer.rows[at])} · ${say("layer")} ${layerBox.value} · ${say("head")} ${head}`;
  const notes = {};
  for (const [name, packed] of Object.entries(layer.vectors)) {
    const values = numbersOf(name, packed).slice(at * packed.width, (at + 1) * packed.width);
    paint(name, values, packed.step * 127);
    notes[name] = say("length", { length: spoken(layer.lengths[name][at]) });
  }
  for (const [name, used] of Object.entries(layer.norms)) {
    const fields = Object.fromEntries(Object.entries(used).map(([one, values]) => [one, spoken(values[at])]));
    notes[name] = say(Object.keys(used).join("-"), { ...fields, length: spoken(layer.lengths[name][at]) });
  }
  for (const name of ["z1", "activated"]) {
    notes[name] = say("positive", { length: spoken(layer.lengths[name][at]), share: (100 * layer.positive[at]).toFixed(0) });
  }
  for (const [name, packed] of Object.entries(layer.heads)) {
    const start = (head * count + at) * packed.width, values = numbersOf(name, packed).slice(start, start + packed.width);
    paint(name, values, packed.step * 127);
    notes[name] = say("length", { length: spoken(Math.hypot(...values)) });
  }
  const lengths = layer.head_lengths.map((row) => spoken(row[at]));
  notes.heads = say("of-heads", { length: lengths[head], lengths: lengths.join(", ") });
  const start = (head * count + at) * layer.tokens;
  const scores = [...numbersOf("scores", layer.scores).slice(start, start + layer.tokens)];
  const most = Math.max(...scores), powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b, 0), weights = powers.map((power) => power / sum);
  const best = scores.indexOf(most), first = weights.slice(0, data.prefix).reduce((a, b) => a + b, 0);
  const isSeen = (score) => layer.least === null || score > layer.least;  // others are masked
  const patches = scores.slice(data.prefix).map((score) => (isSeen(score) ? score : 0));
  paint("scores", patches, Math.max(...patches.map(Math.abs), 1e-12), grid[1]);
  paintHeat(document.querySelector("[data-step=weights]"), weights.slice(data.prefix), grid, data.ramp);
  notes.scores = say("largest-score", { low: spoken(Math.min(...scores.filter(isSeen))), high: spoken(most), who: tokenName(best) });
  notes.weights = say("largest-weight", { weight: spoken(weights[best]), who: tokenName(best), times: (weights[best] * layer.tokens).toFixed(1) })
    + (data.prefix ? say(data.class ? "prefix-weight" : "registers-weight", { weight: spoken(first) }) : "");
  for (const code of document.querySelectorAll("[data-note]")) code.textContent = notes[code.dataset.note];
}

function paint(name, values, scale, wide = values.length) {
  const canvas = document.querySelector(`[data-step=${name}]`);
  if (canvas) paintSigned(canvas, values, scale, data.signed, wide);
}

layerBox.onchange = headBox.onchange = draw;
for (const radio of document.querySelectorAll("input[name=inside-token]")) radio.onchange = () => { chosen.token = radio.value; draw(); };
whenLanguage.push(draw);
whenChosen.push((number) => { chosen.image = number; draw(); });
whenFollowed.push((patch) => { chosen.patch = patch; draw(); });
