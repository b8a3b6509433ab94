// State of the page of `vitrail inspect`: the selected image, the followed patch, folded sections and the language.
// The scripts of the panels follow this one. They add listeners to these lists.
"use strict";
const pageData = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const imageListeners = [], patchListeners = [], languageListeners = [];

function selectImage(number) {
  for (const part of document.querySelectorAll("[data-image]")) part.hidden = Number(part.dataset.image) !== number;
  for (const thumb of document.querySelectorAll("[data-choose]")) thumb.setAttribute("aria-pressed", String(Number(thumb.dataset.choose) === number));
  for (const listener of imageListeners) listener(number);
}

// `patch` is the raster index of the followed patch in the model's grid.
function followPatch(patch) {
  for (const listener of patchListeners) listener(patch);
}

// Raster index, in another grid, of the cell at the centre of a patch.
function positionInGrid(patch, [rows, columns], [high, wide]) {
  const row = Math.floor(patch / columns), column = patch % columns;
  return Math.floor(((2 * row + 1) * high) / (2 * rows)) * wide + Math.floor(((2 * column + 1) * wide) / (2 * columns));
}

// Raster index of the cell under the pointer.
function positionUnder(event, element, [high, wide]) {
  const box = element.getBoundingClientRect();
  const inside = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  return inside((event.clientY - box.top) / box.height, high) * wide + inside((event.clientX - box.left) / box.width, wide);
}

// Raster index of the cell that an arrow key moves to. Undefined for other keys.
function neighbour(patch, key, [high, wide]) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[key];
  return step === undefined ? undefined : (patch + step + high * wide) % (high * wide);
}

// Decode numbers that `packing.pack` encoded.
function unpack({ bits, step, bytes }) {
  const raw = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
  const integers = bits === 8 ? new Int8Array(raw.buffer) : new Int16Array(raw.buffer);
  return Float64Array.from(integers, (value) => value * step);
}

// Paint values, one pixel each: -scale is blue, 0 white, scale orange.
function paintSigned(canvas, values, scale, colours, wide = values.length) {
  canvas.width = wide; canvas.height = Math.max(1, Math.ceil(values.length / wide));
  const image = new ImageData(canvas.width, canvas.height), middle = (colours.length - 1) / 2;
  values.forEach((value, n) => image.data.set([...colours[Math.round(middle * (1 + Math.max(-1, Math.min(1, value / scale))))], 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Paint values from 0 (dark) to their maximum (bright), and return the maximum.
function paintHeat(canvas, values, [high, wide], colours) {
  canvas.width = wide; canvas.height = high;
  const peak = values.reduce((a, b) => Math.max(a, b), 1e-12), image = new ImageData(wide, high);
  values.forEach((value, n) => image.data.set([...colours[Math.round(255 * Math.min(value / peak, 1))], 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return peak;
}

function setLanguage(language) {
  root.lang = language;
  try { history.replaceState(null, "", `#${language}`); } catch { /* a frame in a notebook has no address */ }
  for (const listener of languageListeners) listener();
}

// Unfold the section of a link and scroll to it. A frame in a notebook has no address to navigate to.
function openSection(event) {
  const section = $(event.currentTarget.getAttribute("href").slice(1));
  event.preventDefault();
  for (const fold of section.querySelectorAll(":scope > details")) fold.open = true;
  section.scrollIntoView();
}

// Print all sections unfolded.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const fold of folded) fold.open = true;
});
addEventListener("afterprint", () => { for (const fold of folded) fold.open = false; });

function start() {
  for (const thumb of document.querySelectorAll("[data-choose]")) thumb.onclick = () => selectImage(Number(thumb.dataset.choose));
  for (const link of document.querySelectorAll("nav a")) link.onclick = openSection;
  $("language").onclick = () => setLanguage(root.lang === "ko" ? "en" : "ko");
  if (matchMedia("(max-width: 44rem)").matches) {
    for (const fold of document.querySelectorAll("details.second")) fold.open = false;
  }
  for (const fold of document.querySelectorAll("section:target > details")) fold.open = true;
  selectImage(0);
  if (pageData.page.followed !== null) followPatch(pageData.page.followed);
  if (location.hash === "#ko" || (location.hash !== "#en" && navigator.language.startsWith("ko"))) setLanguage("ko");
}

