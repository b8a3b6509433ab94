// From a file to the pixels that the model is given, as images/preprocess.py does it: upright, on the background where
// it is transparent, grey or colour, resized by Pillow's arithmetic, cropped at the centre; and the levels as the model
// reads them. `rules` is the bundle's preprocess.json.
"use strict";

const MOST_PIXELS = 120e6, WHOLE_RESIZE = 32e6;

// The file's pixels (RGBA) as they are stored, upright, and laid onto the background where they are transparent.
async function decode(file, { background }) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
  const { width, height } = bitmap;
  if (width * height > MOST_PIXELS) throw new Error("too many pixels");
  const canvas = document.createElement("canvas");
  canvas.width = width; canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = `rgb(${background})`;
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  return { width, height, rgba: context.getImageData(0, 0, width, height).data };
}

// Uint8 pixels (H, W, C) of the model's size.
function cropped({ width, height, rgba }, rules) {
  const channels = rules.mean.length, [high, wide] = rules.resolution;
  const planes = planesOf(rgba, width * height, channels);
  const [broad, tall] = resizedSize(rules, width, height);
  const left = roundHalfEven((broad - wide) / 2), top = roundHalfEven((tall - high) / 2);
  const whole = broad * tall <= WHOLE_RESIZE, [across, down] = [width / broad, height / tall];
  const fill = planesOf(rules.background, 1, channels).map(([level]) => level);
  const pixels = new Uint8Array(high * wide * channels);
  planes.forEach((plane, c) => {
    const fitted = whole
      ? resizePlane(plane, width, height, broad, tall, [0, 0, width, height], rules.interpolation)
      : resizePlane(plane, width, height, wide, high, [left * across, top * down, Math.min((left + wide) * across, width), Math.min((top + high) * down, height)], rules.interpolation);
    for (let row = 0; row < high; row++) {
      for (let column = 0; column < wide; column++) {
        const y = whole ? row + top : row, x = whole ? column + left : column;
        const isInside = !whole || (y >= 0 && y < tall && x >= 0 && x < broad);
        pixels[(row * wide + column) * channels + c] = isInside ? fitted[y * (whole ? broad : wide) + x] : fill[c];
      }
    }
  });
  return pixels;
}

// Every channel by itself; grey is Pillow's (ITU-R 601-2).
function planesOf(rgba, count, channels) {
  return Array.from({ length: channels }, (_, c) => {
    const plane = new Uint8Array(count);
    for (let i = 0; i < count; i++) {
      plane[i] = channels === 3 ? rgba[4 * i + c] : (rgba[4 * i] * 19595 + rgba[4 * i + 1] * 38470 + rgba[4 * i + 2] * 7471 + 0x8000) >> 16;
    }
    return plane;
  });
}

// Width and height after the resize, before the crop.
function resizedSize(rules, width, height) {
  const [high, wide] = rules.resolution.map((side) => Math.floor(side / rules.crop_fraction));
  if (rules.resize === "squash") return [wide, high];
  const widthLimits = width * high <= height * wide;
  if (widthLimits === (rules.resize === "shorter")) return [wide, Math.max(Math.floor((wide * height) / width), 1)];
  return [Math.max(Math.floor((high * width) / height), 1), high];
}

function roundHalfEven(x) {
  const below = Math.floor(x);
  return x - below === 0.5 ? below + (((below % 2) + 2) % 2) : Math.round(x);
}

// Pillow's filters, and how far they reach.
const FILTERS = {
  bilinear: { reach: 1, at: (x) => Math.max(1 - Math.abs(x), 0) },
  bicubic: {
    reach: 2,
    at: (x) => {
      const d = Math.abs(x);
      return d < 1 ? (1.5 * d - 2.5) * d * d + 1 : d < 2 ? ((-0.5 * d + 2.5) * d - 4) * d + 2 : 0;
    },
  },
};
const BITS = 22;  // of the fraction of a coefficient

// For every output pixel, where its input begins and the coefficients of it, as integers.
function coefficients(inside, from, to, outside, interpolation) {
  const { reach, at } = FILTERS[interpolation], scale = (to - from) / outside, stretch = Math.max(scale, 1);
  return Array.from({ length: outside }, (_, i) => {
    const centre = from + (i + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - reach * stretch + 0.5), 0);
    const last = Math.min(Math.trunc(centre + reach * stretch + 0.5), inside);
    const shares = Array.from({ length: last - first }, (_, j) => at((first + j - centre + 0.5) / stretch));
    const sum = shares.reduce((a, b) => a + b, 0);
    return { first, shares: Int32Array.from(shares, (share) => Math.trunc((share / sum) * 2 ** BITS + (share < 0 ? -0.5 : 0.5))) };
  });
}

// First along rows, then along columns, rounded to 8 bits after each, as Pillow does it.
function resizePlane(plane, width, height, wide, high, [left, top, right, bottom], interpolation) {
  let found = plane;
  if (wide !== width || left || right !== width) {
    const ways = coefficients(width, left, right, wide, interpolation), next = new Uint8Array(wide * height);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < wide; x++) next[y * wide + x] = weighed(found, y * width + ways[x].first, 1, ways[x].shares);
    }
    found = next;
  }
  if (high !== height || top || bottom !== height) {
    const ways = coefficients(height, top, bottom, high, interpolation), next = new Uint8Array(wide * high);
    for (let y = 0; y < high; y++) {
      for (let x = 0; x < wide; x++) next[y * wide + x] = weighed(found, ways[y].first * wide + x, wide, ways[y].shares);
    }
    found = next;
  }
  return found;
}

function weighed(plane, from, step, shares) {
  let sum = 1 << (BITS - 1);
  for (let j = 0; j < shares.length; j++) sum += plane[from + j * step] * shares[j];
  return Math.max(0, Math.min(255, sum >> BITS));
}

// Pixels (H, W, C) as the model reads them: float32 (C, H, W), (level / 255 - mean) / std.
function scaled(pixels, rules) {
  const channels = rules.mean.length, count = pixels.length / channels, found = new Float32Array(pixels.length);
  for (let c = 0; c < channels; c++) {
    const mean = Math.fround(rules.mean[c]), deviation = Math.fround(rules.std[c]);
    for (let i = 0; i < count; i++) found[c * count + i] = Math.fround(Math.fround(pixels[i * channels + c] / 255) - mean) / deviation;
  }
  return found;
}
