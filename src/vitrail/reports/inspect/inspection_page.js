// The page of `vitrail inspect`: which image is chosen, which patch is followed, what is unfolded, and the language.
// Panels add their own scripts after this one; what they must do when one of these changes, they add to these lists.
"use strict";
const pageData = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const whenChosen = [], whenFollowed = [], whenLanguage = [];

function choose(number) {
  for (const part of document.querySelectorAll("[data-image]")) part.hidden = Number(part.dataset.image) !== number;
  for (const thumb of document.querySelectorAll("[data-choose]")) thumb.setAttribute("aria-pressed", String(Number(thumb.dataset.choose) === number));
  for (const listener of whenChosen) listener(number);
}

// The patch in hand, counted row by row in the model's grid.
function follow(patch) {
  for (const listener of whenFollowed) listener(patch);
}

// The place of another grid at the centre of a patch.
function placeIn(patch, [rows, columns], [high, wide]) {
  const row = Math.floor(patch / columns), column = patch % columns;
  return Math.floor(((2 * row + 1) * high) / (2 * rows)) * wide + Math.floor(((2 * column + 1) * wide) / (2 * columns));
}

// The place of a grid under the pointer.
function placeUnder(event, element, [high, wide]) {
  const box = element.getBoundingClientRect();
  const inside = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  return inside((event.clientY - box.top) / box.height, high) * wide + inside((event.clientX - box.left) / box.width, wide);
}

// The place that an arrow key leads to; undefined for other keys.
function placeBeside(patch, key, [high, wide]) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[key];
  return step === undefined ? undefined : (patch + step + high * wide) % (high * wide);
}

// Integers that the page carries, as numbers.
function unpack({ bits, step, bytes }) {
  const raw = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
  const whole = bits === 8 ? new Int8Array(raw.buffer) : new Int16Array(raw.buffer);
  return Float64Array.from(whole, (value) => value * step);
}

// Values from the most negative (blue) over 0 (white) to the most positive (orange) of a scale, one pixel each.
function paintSigned(canvas, values, scale, colours, wide = values.length) {
  canvas.width = wide; canvas.height = Math.max(1, Math.ceil(values.length / wide));
  const image = new ImageData(canvas.width, canvas.height), middle = (colours.length - 1) / 2;
  values.forEach((value, n) => image.data.set([...colours[Math.round(middle * (1 + Math.max(-1, Math.min(1, value / scale))))], 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Values from 0 (dark) to their largest (bright).
function paintHeat(canvas, values, [high, wide], colours) {
  canvas.width = wide; canvas.height = high;
  const peak = values.reduce((a, b) => Math.max(a, b), 1e-12), image = new ImageData(wide, high);
  values.forEach((value, n) => image.data.set([...colours[Math.round(255 * Math.min(value / peak, 1))], 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return peak;
}

function speak(language) {
  root.lang = language;
  try { history.replaceState(null, "", `#${language}`); } catch { /* inside of a notebook there is no address */ }
  for (const listener of whenLanguage) listener();
}

// A link unfolds its section; inside of a notebook there is no address that it could go to.
function go(event) {
  const section = $(event.currentTarget.getAttribute("href").slice(1));
  event.preventDefault();
  for (const fold of section.querySelectorAll(":scope > details")) fold.open = true;
  section.scrollIntoView();
}

// On paper nothing can be unfolded.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const fold of folded) fold.open = true;
});
addEventListener("afterprint", () => { for (const fold of folded) fold.open = false; });

function start() {
  for (const thumb of document.querySelectorAll("[data-choose]")) thumb.onclick = () => choose(Number(thumb.dataset.choose));
  for (const link of document.querySelectorAll("nav a")) link.onclick = go;
  $("language").onclick = () => speak(root.lang === "ko" ? "en" : "ko");
  if (matchMedia("(max-width: 44rem)").matches) {
    for (const fold of document.querySelectorAll("details.second")) fold.open = false;
  }
  for (const fold of document.querySelectorAll("section:target > details")) fold.open = true;
  choose(0);
  if (pageData.page.followed !== null) follow(pageData.page.followed);
  if (location.hash === "#ko" || (location.hash !== "#en" && navigator.language.startsWith("ko"))) speak("ko");
}

