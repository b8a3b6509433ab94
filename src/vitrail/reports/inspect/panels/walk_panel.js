// Show the followed patch: its vector in every step, and its position on every map.
const { grid } = pageData.page;
const vectors = new Map();  // decoded rows, by image and step
let patch = pageData.page.followed, image = 0;

function stepOf(name) {
  const [number, index] = name.split(" ");
  return data.images[number][index];
}

// The values of a step at the followed patch.
function rowOf(name) {
  const step = stepOf(name);
  if (!vectors.has(name)) vectors.set(name, unpack(step.rows));
  const place = step.many ? patch : 0;
  return { step, place, values: vectors.get(name).slice(place * step.width, (place + 1) * step.width) };
}

const numberText = (value) => Number(value.toPrecision(3)).toString();
const inImage = (selector) => document.querySelectorAll(`[data-image="${image}"] ${selector}`);

function draw() {
  for (const canvas of inImage("[data-strip]")) {
    const { step, values } = rowOf(canvas.dataset.strip);
    paintSigned(canvas, values, step.rows.step * 127, data.signed);
  }
  for (const code of inImage("[data-values]")) {
    const { step, place } = rowOf(code.dataset.values);
    code.textContent = step.first[place].map(numberText).join(", ") + (step.of > step.first[place].length ? ", ..." : "");
  }
  for (const code of inImage("[data-length]")) {
    const { step, place } = rowOf(code.dataset.length);
    code.textContent = numberText(step.lengths[place]);
  }
  for (const canvas of inImage("[data-reads]")) {
    const { step, place } = rowOf(canvas.dataset.reads), count = grid[0] * grid[1];
    paintHeat(canvas, unpack(step.reads).slice(place * count, (place + 1) * count), grid, data.ramp);
  }
  if (patch === null) return;
  for (const map of inImage(".place")) {
    const [high, wide] = map.dataset.grid.split(" ").map(Number), at = positionInGrid(patch, grid, [high, wide]);
    const mark = map.querySelector(".mark");
    mark.style.cssText = `width:${100 / wide}%;height:${100 / high}%;left:${(100 * (at % wide)) / wide}%;top:${(100 * Math.floor(at / wide)) / high}%`;
  }
  for (const zoom of inImage("[data-zoom]")) {
    const [high, wide] = grid, part = (at, count) => (100 * at) / Math.max(count - 1, 1);
    zoom.style.backgroundSize = `${100 * wide}% ${100 * high}%`;
    zoom.style.backgroundPosition = `${part(patch % wide, wide)}% ${part(Math.floor(patch / wide), high)}%`;
  }
  const names = { row: Math.floor(patch / grid[1]), column: patch % grid[1], number: patch, count: grid[0] * grid[1] };
  $("followed").textContent = data.messages[root.lang].replace(/{(\w+)}/g, (_, name) => names[name]);
}

if (data.all && patch !== null) {
  for (const map of document.querySelectorAll(".place")) {
    const own = map.dataset.grid.split(" ").map(Number);
    map.onclick = (event) => followPatch(positionInGrid(positionUnder(event, map, own), own, grid));
    map.onkeydown = (event) => {
      const next = neighbour(patch, event.key, grid);
      if (next === undefined) return;
      event.preventDefault();
      followPatch(next);
    };
  }
}
languageListeners.push(draw);
imageListeners.push((number) => { image = number; draw(); });
patchListeners.push((followed) => { if (data.all || followed === pageData.page.followed) { patch = followed; draw(); } });
