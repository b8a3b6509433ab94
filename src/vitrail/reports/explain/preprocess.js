// Decode, resize, crop and normalise an image file, as data/preprocess.py does in Python, with Pillow's arithmetic.
// `preprocess` is the bundle's preprocess.json.
"use strict";

const MAX_PIXELS = 120e6;
const MAX_RESIZED_PIXELS = 32e6;  // above, only the cropped part is resized

// Return the file's pixels (RGBA), upright and without a colour profile. Transparent pixels get the background colour.
async function decode(file, { background }) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
  const { width, height } = bitmap;
  if (width * height > MAX_PIXELS) throw new Error("too many pixels");
  const canvas = document.createElement("canvas");
  canvas.width = width; canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = `rgb(${background})`;
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  return { width, height, rgba: context.getImageData(0, 0, width, height).data };
}

// Return uint8 pixels (H, W, C), resized and cropped to the model's size.
function cropped({ width, height, rgba }, preprocess) {
  const channels = preprocess.mean.length, [high, wide] = preprocess.resolution;
  const planes = planesOf(rgba, width * height, channels);
  const [broad, tall] = resizedSize(preprocess, width, height);
  const left = roundHalfEven((broad - wide) / 2), top = roundHalfEven((tall - high) / 2);
  const whole = broad * tall <= MAX_RESIZED_PIXELS, [across, down] = [width / broad, height / tall];
  const fill = planesOf(preprocess.background, 1, channels).map(([level]) => level);
  const pixels = new Uint8Array(high * wide * channels);
  planes.forEach((plane, c) => {
    const fitted = whole
      ? resizePlane(plane, width, height, broad, tall, [0, 0, width, height], preprocess.interpolation)
      : resizePlane(plane, width, height, wide, high, [left * across, top * down, Math.min((left + wide) * across, width), Math.min((top + high) * down, height)], preprocess.interpolation);
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

// Return each channel as its own array. Grey is computed like Pillow does (ITU-R 601-2).
function planesOf(rgba, count, channels) {
  return Array.from({ length: channels }, (_, c) => {
    const plane = new Uint8Array(count);
    for (let i = 0; i < count; i++) {
      plane[i] = channels === 3 ? rgba[4 * i + c] : (rgba[4 * i] * 19595 + rgba[4 * i + 1] * 38470 + rgba[4 * i + 2] * 7471 + 0x8000) >> 16;
    }
    return plane;
  });
}

// Return width and height after the resize, before the crop.
function resizedSize(preprocess, width, height) {
  const [high, wide] = preprocess.resolution.map((side) => Math.floor(side / preprocess.crop_fraction));
  if (preprocess.resize === "squash") return [wide, high];
  const widthLimits = width * high <= height * wide;
  if (widthLimits === (preprocess.resize === "shorter")) return [wide, Math.max(Math.floor((wide * height) / width), 1)];
  return [Math.max(Math.floor((high * width) / height), 1), high];
}

function roundHalfEven(x) {
  const below = Math.floor(x);
  return x - below === 0.5 ? below + (((below % 2) + 2) % 2) : Math.round(x);
}

// Pillow's interpolation filters and their radii.
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
const BITS = 22;  // fraction bits of a fixed-point coefficient

// Return the first input pixel and the fixed-point coefficients of each output pixel.
function coefficients(inputSize, from, to, outputSize, interpolation) {
  const { reach, at } = FILTERS[interpolation], scale = (to - from) / outputSize, stretch = Math.max(scale, 1);
  return Array.from({ length: outputSize }, (_, i) => {
    const centre = from + (i + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - reach * stretch + 0.5), 0);
    const last = Math.min(Math.trunc(centre + reach * stretch + 0.5), inputSize);
    const shares = Array.from({ length: last - first }, (_, j) => at((first + j - centre + 0.5) / stretch));
    const sum = shares.reduce((a, b) => a + b, 0);
    return { first, shares: Int32Array.from(shares, (share) => Math.trunc((share / sum) * 2 ** BITS + (share < 0 ? -0.5 : 0.5))) };
  });
}

// Resize a channel along rows, then along columns, rounded to 8 bits after each pass, as Pillow does.
function resizePlane(plane, width, height, wide, high, [left, top, right, bottom], interpolation) {
  let resized = plane;
  if (wide !== width || left || right !== width) {
    const inputs = coefficients(width, left, right, wide, interpolation), next = new Uint8Array(wide * height);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < wide; x++) next[y * wide + x] = weightedSum(resized, y * width + inputs[x].first, 1, inputs[x].shares);
    }
    resized = next;
  }
  if (high !== height || top || bottom !== height) {
    const inputs = coefficients(height, top, bottom, high, interpolation), next = new Uint8Array(wide * high);
    for (let y = 0; y < high; y++) {
      for (let x = 0; x < wide; x++) next[y * wide + x] = weightedSum(resized, inputs[y].first * wide + x, wide, inputs[y].shares);
    }
    resized = next;
  }
  return resized;
}

// Return the sum of pixels times fixed-point coefficients as an 8-bit level.
function weightedSum(plane, from, step, shares) {
  let sum = 1 << (BITS - 1);
  for (let j = 0; j < shares.length; j++) sum += plane[from + j * step] * shares[j];
  return Math.max(0, Math.min(255, sum >> BITS));
}

// Return pixels (H, W, C) as the input of the model: float32 (C, H, W), (level / 255 - mean) / std.
function scaled(pixels, preprocess) {
  const channels = preprocess.mean.length, count = pixels.length / channels, input = new Float32Array(pixels.length);
  for (let c = 0; c < channels; c++) {
    const mean = Math.fround(preprocess.mean[c]), deviation = Math.fround(preprocess.std[c]);
    for (let i = 0; i < count; i++) input[c * count + i] = Math.fround(Math.fround(pixels[i * channels + c] / 255) - mean) / deviation;
  }
  return input;
}
