// The walk follows the patch in hand: its vectors at every station, its place on every map.
const { grid } = pageData.page;
const vectors = new Map();  // of each image and station: unpacked rows
let patch = pageData.page.followed, image = 0;

function stationOf(name) {
  const [number, index] = name.split(" ");
  return data.images[number][index];
}

// The place of the patch in hand at a station, and its numbers.
function rowOf(name) {
  const station = stationOf(name);
  if (!vectors.has(name)) vectors.set(name, unpack(station.rows));
  const place = station.many ? patch : 0;
  return { station, place, values: vectors.get(name).slice(place * station.width, (place + 1) * station.width) };
}

const spoken = (value) => Number(value.toPrecision(3)).toString();
const shown = (selector) => document.querySelectorAll(`[data-image="${image}"] ${selector}`);

function draw() {
  for (const canvas of shown("[data-strip]")) {
    const { station, values } = rowOf(canvas.dataset.strip);
    paintSigned(canvas, values, station.rows.step * 127, data.signed);
  }
  for (const code of shown("[data-values]")) {
    const { station, place } = rowOf(code.dataset.values);
    code.textContent = station.first[place].map(spoken).join(", ") + (station.of > station.first[place].length ? ", ..." : "");
  }
  for (const code of shown("[data-length]")) {
    const { station, place } = rowOf(code.dataset.length);
    code.textContent = spoken(station.lengths[place]);
  }
  for (const canvas of shown("[data-reads]")) {
    const { station, place } = rowOf(canvas.dataset.reads), count = grid[0] * grid[1];
    paintHeat(canvas, unpack(station.reads).slice(place * count, (place + 1) * count), grid, data.ramp);
  }
  if (patch === null) return;
  for (const map of shown(".place")) {
    const [high, wide] = map.dataset.grid.split(" ").map(Number), at = placeIn(patch, grid, [high, wide]);
    const mark = map.querySelector(".mark");
    mark.style.cssText = `width:${100 / wide}%;height:${100 / high}%;left:${(100 * (at % wide)) / wide}%;top:${(100 * Math.floor(at / wide)) / high}%`;
  }
  for (const zoom of shown("[data-zoom]")) {
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
    map.onclick = (event) => follow(placeIn(placeUnder(event, map, own), own, grid));
    map.onkeydown = (event) => {
      const next = placeBeside(patch, event.key, grid);
      if (next === undefined) return;
      event.preventDefault();
      follow(next);
    };
  }
}
whenLanguage.push(draw);
whenChosen.push((number) => { image = number; draw(); });
whenFollowed.push((chosen) => { if (data.all || chosen === pageData.page.followed) { patch = chosen; draw(); } });
