// Forward pass of the Vision Transformer (arXiv 2010.11929), equation by equation, in plain JavaScript. Order and names
// follow models/families/vit/model.py.
//
// Shapes: C channels, N = h*w patches of F = C*P*P numbers, T tokens with [CLS] and registers, D width, H heads of width
// K = D/H, M hidden features of the MLP. A tensor is a row-major Float32Array; sums have double precision.
//
//     z_0  = [x_class; x_1 E; ...; x_N E] + E_pos        eq. 1    embed
//     z'_l = MSA(LN(z_(l-1))) + z_(l-1)                  eq. 2    encode
//     z_l  = MLP(LN(z'_l)) + z'_l                        eq. 3    encode
//     y    = LN(z_L^0)                                   eq. 4    read
//
// `model` is { config, tensors }: the model's config with `grid`, `prefix` and `tokens`, and its tensors by name.
// `positions` (T, D) are the position embeddings. `change` has optional changes:
//     positions: false          no position embeddings
//     order: [n, ...]           position i shows patch order[i]
//     masked: Set of positions  no token attends to these patches
//     heads: Set of "l.h"       the output of head h of layer l is zero
//     attention, mlp: Sets of l layer l skips eq. 2, or eq. 3
//     temperature: t            softmax(q k^T / sqrt(K) / t)
"use strict";

// Return the values of all steps, the logits after each layer (`lens`), and the logits of the model.
function forward(model, image_CHW, change = {}) {
  const steps = {};
  let z_TD = embed(model, image_CHW, change, steps);
  const lens = [read(model, z_TD, change).logits];
  for (let layer = 0; layer < model.config.depth; layer++) {
    z_TD = steps[`blocks.${layer}`] = encode(model, layer, z_TD, change, steps);
    lens.push(read(model, z_TD, change).logits);  // logits as if this layer were the last (logit lens)
  }
  const { pooled, logits } = read(model, z_TD, change);
  steps.pooled = pooled;
  return { steps, lens, logits };
}

// Eq. 1: cut the image into patches, project them, prepend [CLS] and registers, add positions.
function embed({ config, tensors }, image_CHW, change, steps) {
  const { width, prefix, tokens } = config;
  steps.patches = patchify(config, image_CHW, change.order);
  const flat = steps.patches.length / (tokens - prefix);
  steps.projected = linear(steps.patches, flat, tensors["patch_embed.proj.weight"], tensors["patch_embed.proj.bias"]);
  const z_TD = new Float32Array(tokens * width);
  let offset = 0;
  for (const name of ["cls_token", "reg_token"]) {
    if (!tensors[name]) continue;
    z_TD.set(tensors[name], offset);
    offset += tensors[name].length;
  }
  z_TD.set(steps.projected, prefix * width);
  if (tensors.positions && change.positions !== false) z_TD.forEach((value, i) => { z_TD[i] = value + tensors.positions[i]; });
  return (steps.tokens = z_TD);
}

// Return non-overlapping patches, flattened: (N, C*P*P) in raster order.
function patchify({ channels, resolution, patch, grid }, image_CHW, order) {
  const [high, wide] = resolution, [tall, broad] = patch, size = channels * tall * broad;
  const patches = new Float32Array(grid[0] * grid[1] * size);
  let at = 0;
  for (let position = 0; position < grid[0] * grid[1]; position++) {
    const from = order ? order[position] : position, top = Math.floor(from / grid[1]) * tall, left = (from % grid[1]) * broad;
    for (let c = 0; c < channels; c++) {
      for (let row = top; row < top + tall; row++) {
        for (let column = left; column < left + broad; column++) patches[at++] = image_CHW[(c * high + row) * wide + column];
      }
    }
  }
  return patches;
}

// Eqs. 2 and 3: one layer.
function encode({ config, tensors }, layer, z_TD, change, steps) {
  const name = `blocks.${layer}`, keep = (step, values) => (steps[`${name}.${step}`] = values);
  const of = (part) => [tensors[`${name}.${part}.weight`], tensors[`${name}.${part}.bias`]];

  const norm1 = keep("norm1", layerNorm(z_TD, ...of("norm1"), config.norm_epsilon));
  const [q, k, v] = heads(linear(norm1, config.width, ...of("attn.qkv")), config).map((part, i) => keep("qkv"[i], part));
  const scores = keep("scores", scoresOf(q, k, config, change));
  const weights = keep("weights", softmax(scores, config.tokens, change.temperature));
  const mixed = keep("heads", mix(weights, v, config, change.heads, layer));
  const msa = keep("msa", linear(concatenateHeads(mixed, config), config.width, ...of("attn.proj")));
  const middle = keep("middle", change.attention?.has(layer) ? z_TD.slice() : add(msa, z_TD));

  const norm2 = keep("norm2", layerNorm(middle, ...of("norm2"), config.norm_epsilon));
  const z1 = keep("z1", linear(norm2, config.width, ...of("mlp.fc1")));
  const activated = keep("activated", z1.map(GELU[config.activation]));
  const z2 = keep("z2", linear(activated, config.mlp, ...of("mlp.fc2")));
  return change.mlp?.has(layer) ? middle.slice() : add(z2, middle);
}

// Eq. 4 and the head: normalise, pool, classify.
function read({ config, tensors }, z_TD, change) {
  const { pool, prefix, width, tokens, norm_epsilon } = config;
  const norm = (values) => layerNorm(values, tensors["norm.weight"], tensors["norm.bias"], norm_epsilon);
  let pooled = null;
  if (pool === "cls") {
    pooled = norm(z_TD.slice(0, width));
  } else {
    const y_TD = norm(z_TD), sums = new Float64Array(width);
    let count = 0;
    for (let t = prefix; t < tokens; t++) {
      if (change.masked?.has(t - prefix)) continue;
      count++;
      for (let d = 0; d < width; d++) sums[d] += y_TD[t * width + d];
    }
    pooled = Float32Array.from(sums, (sum) => sum / count);
  }
  const y = represent({ config, tensors }, pooled);
  return { pooled, logits: linear(y, width, tensors["head.weight"], tensors["head.bias"]) };
}

// Apply the hidden layer of the pre-training head, if the model has one.
function represent({ config, tensors }, pooled) {
  if (config.representation === "none") return pooled;
  const hidden = linear(pooled, config.width, tensors["pre_logits.fc.weight"], tensors["pre_logits.fc.bias"]);
  return hidden.map(config.representation === "tanh" ? Math.tanh : GELU.gelu);
}

// Return x W^T + b for the rows of x, which have `width` numbers each. The default bias is 0. Two rows and two outputs are
// computed together, so that each number is loaded half as often; an odd last row or output is computed twice.
function linear(x, width, weight, bias = new Float32Array(weight.length / width)) {
  const out = weight.length / width, rows = x.length / width, y = new Float32Array(rows * out);
  for (let t = 0; t < rows; t += 2) {
    const u = Math.min(t + 1, rows - 1), x_t = t * width, x_u = u * width;
    for (let o = 0; o < out; o += 2) {
      const p = Math.min(o + 1, out - 1), w_o = o * width, w_p = p * width;
      let to = 0, tp = 0, uo = 0, up = 0;
      for (let i = 0; i < width; i++) {
        const a = x[x_t + i], b = x[x_u + i], v = weight[w_o + i], w = weight[w_p + i];
        to += a * v; tp += a * w; uo += b * v; up += b * w;
      }
      y[t * out + o] = to + bias[o]; y[t * out + p] = tp + bias[p];
      y[u * out + o] = uo + bias[o]; y[u * out + p] = up + bias[p];
    }
  }
  return y;
}

// Return the dot product of `count` numbers of a and b. Four partial sums let the processor work in parallel.
function dot(a, from, b, start, count) {
  let sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0, i = 0;
  for (; i + 3 < count; i += 4) {
    sum0 += a[from + i] * b[start + i];
    sum1 += a[from + i + 1] * b[start + i + 1];
    sum2 += a[from + i + 2] * b[start + i + 2];
    sum3 += a[from + i + 3] * b[start + i + 3];
  }
  for (; i < count; i++) sum0 += a[from + i] * b[start + i];
  return sum0 + sum1 + sum2 + sum3;
}

// Return mean and standard deviation of `count` numbers from index `from`.
function moments(x, from, count, epsilon) {
  let sum = 0, squares = 0;
  for (let i = from; i < from + count; i++) sum += x[i];
  const mean = sum / count;
  for (let i = from; i < from + count; i++) squares += (x[i] - mean) ** 2;
  return { mean, deviation: Math.sqrt(squares / count + epsilon) };
}

// Normalise each token over its D features.
function layerNorm(x, scale, shift, epsilon) {
  const width = scale.length, y = new Float32Array(x.length);
  for (let t = 0; t < x.length; t += width) {
    const { mean, deviation } = moments(x, t, width, epsilon);
    for (let d = 0; d < width; d++) y[t + d] = ((x[t + d] - mean) / deviation) * scale[d] + shift[d];
  }
  return y;
}

// Eq. 5: split queries, keys and values (T, 3*D) into three tensors (H, T, K).
function heads(x, { heads: count, width, tokens }) {
  const narrow = width / count;
  return [0, 1, 2].map((part) => {
    const y = new Float32Array(tokens * width);
    for (let h = 0; h < count; h++) {
      for (let t = 0; t < tokens; t++) {
        const from = t * 3 * width + part * width + h * narrow;
        y.set(x.subarray(from, from + narrow), (h * tokens + t) * narrow);
      }
    }
    return y;
  });
}

// Eq. 6, before the softmax: scores q k^T / sqrt(K), (H, T, T).
function scoresOf(q, k, { heads: count, width, tokens, prefix }, change) {
  const narrow = width / count, scale = narrow ** -0.5, y = new Float32Array(count * tokens * tokens);
  for (let h = 0; h < count; h++) {
    for (let t = 0; t < tokens; t++) {
      for (let s = 0; s < tokens; s++) {
        const value = scale * dot(q, (h * tokens + t) * narrow, k, (h * tokens + s) * narrow, narrow);
        y[(h * tokens + t) * tokens + s] = change.masked?.has(s - prefix) ? -Infinity : value;
      }
    }
  }
  return y;
}

// Eq. 6: softmax of each row of `width` scores.
function softmax(scores, width, temperature = 1) {
  const y = new Float32Array(scores.length);
  for (let row = 0; row < scores.length; row += width) {
    let largest = -Infinity, sum = 0;
    for (let i = row; i < row + width; i++) largest = Math.max(largest, scores[i]);
    for (let i = row; i < row + width; i++) sum += y[i] = Math.exp((scores[i] - largest) / temperature);
    for (let i = row; i < row + width; i++) y[i] /= sum;
  }
  return y;
}

// Eq. 7: A v, the sums of values weighted by attention (H, T, K). Switched-off heads (`off`) give zeros.
function mix(weights, v, { heads: count, width, tokens }, off, layer) {
  const narrow = width / count, y = new Float32Array(v.length), sums = new Float64Array(narrow);
  for (let h = 0; h < count; h++) {
    if (off?.has(`${layer}.${h}`)) continue;
    for (let t = 0; t < tokens; t++) {
      sums.fill(0);
      for (let s = 0; s < tokens; s++) {
        const weight = weights[(h * tokens + t) * tokens + s], from = (h * tokens + s) * narrow;
        for (let i = 0; i < narrow; i++) sums[i] += weight * v[from + i];
      }
      y.set(sums, (h * tokens + t) * narrow);
    }
  }
  return y;
}

// Concatenate the heads, (T, D).
function concatenateHeads(mixed, { heads: count, width, tokens }) {
  const narrow = width / count, y = new Float32Array(mixed.length);
  for (let h = 0; h < count; h++) {
    for (let t = 0; t < tokens; t++) {
      const from = (h * tokens + t) * narrow;
      y.set(mixed.subarray(from, from + narrow), t * width + h * narrow);
    }
  }
  return y;
}

function add(a, b) { return a.map((value, i) => value + b[i]); }

// Error function by Abramowitz and Stegun, 7.1.26. The error of 1.5e-7 is about the rounding error of float32.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - tail * Math.exp(-x * x));
}

const GELU = {
  "gelu": (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  "gelu-tanh": (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
};
