// The stations: each builds its figure and its control once, and draws them from `state` and `now` (walk.js), whose names
// are those of `look` in Python.
"use strict";

const show = (name) => $(`${name}-show`), control = (name) => $(`${name}-control`);
// The equation with the numbers of the token in hand; lines may break at ~.
// An exponent, as in 1e−5, is written as a power of ten.
const powers = (text) => text.replace(/(\d)e([+−]?)(\d+)/g, (_, digit, sign, power) => `${digit} \\cdot 10^{${sign === "−" ? sign : ""}${power}}`);
const live = (name, text) => $(`${name}-live`).replaceChildren(...lined(powers(text)));
const caption = (host, name, fields) => { const made = el("p", { class: "caption" }, ...(name ? [both(name, fields)] : [])); host.append(made); return made; };

const STATIONS = {
  image: (() => {
    const canvas = el("canvas", { class: "paper", tabindex: 0, role: "application" }), cursor = el("i", { class: "mark", hidden: true });
    const box = el("div", { class: "map draw", style: `aspect-ratio: ${WIDE} / ${HIGH}` }, canvas, cursor), list = el("div", { class: "thumbs" });
    const at = { row: Math.floor(HIGH / 2), column: Math.floor(WIDE / 2) };
    let ink = 255, buttons = [];
    const dab = (row, column) => {
      const pixels = (state.drawn ?? images[state.image].pixels).slice(), reach = Math.max(1, Math.round(HIGH / 28));
      for (let y = row - reach; y <= row + reach; y++) {
        for (let x = column - reach; x <= column + reach; x++) {
          const share = 1 - Math.hypot(y - row, x - column) / (reach + 0.7);
          if (share <= 0 || y < 0 || x < 0 || y >= HIGH || x >= WIDE) continue;
          const to = (wrap(y - state.down, HIGH) * WIDE + wrap(x - state.right, WIDE)) * CHANNELS;
          for (let c = 0; c < CHANNELS; c++) pixels[to + c] = Math.round(pixels[to + c] + (ink - pixels[to + c]) * Math.min(1.4 * share, 1));
        }
      }
      change({ drawn: pixels });
    };
    const under = (event) => {
      const frame = canvas.getBoundingClientRect();
      return [Math.floor(((event.clientY - frame.top) / frame.height) * HIGH), Math.floor(((event.clientX - frame.left) / frame.width) * WIDE)];
    };
    const place = () => {
      cursor.style.left = `${(100 * at.column) / WIDE}%`; cursor.style.top = `${(100 * at.row) / HIGH}%`;
      cursor.style.width = `${100 / WIDE}%`; cursor.style.height = `${100 / HIGH}%`;
    };
    let showInk = null;
    return {
      thumbs() {
        buttons = images.map((image, number) => {
          const small = el("canvas", { "aria-hidden": true });
          paintPixels(small, image.pixels, [HIGH, WIDE]);
          return el("button", { type: "button", class: "thumb", onclick: () => { tell(null); change({ image: number, drawn: null }); } }, small);
        });
        list.replaceChildren(...buttons);
      },
      build() {
        const drawing = el("div", { class: "drawing" }, el("p", { class: "caption" }, both("draw")), box, el("p", { class: "hint" }, both("draw-help")));
        canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); dab(...under(event)); });
        canvas.addEventListener("pointermove", (event) => { if (event.buttons) dab(...under(event)); });
        canvas.addEventListener("focus", () => { cursor.hidden = false; place(); });
        canvas.addEventListener("blur", () => { cursor.hidden = true; });
        canvas.addEventListener("keydown", (event) => {
          const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
          if (step) { at.row = wrap(at.row + step[0], HIGH); at.column = wrap(at.column + step[1], WIDE); place(); } else if (event.key === " " || event.key === "Enter") dab(at.row, at.column);
          else return;
          event.preventDefault(); event.stopPropagation();
        });
        const inks = el("div", { class: "controls" }), arrows = el("div", { class: "controls" }), arrow = (words, sign, down, right) => {
          const button = press(arrows, words, () => change({ down: (state.down + down) % HIGH, right: (state.right + right) % WIDE }));
          button.prepend(`${sign} `);
        };
        showInk = choose(inks, "ink", "ink", [{ value: 255, words: both("ink-light") }, { value: 0, words: both("ink-dark") }], (value) => { ink = Number(value); showInk(ink); });
        showInk(ink);
        arrows.append(el("span", {}, both("shift")));
        arrow("shift-left", "←", 0, -1); arrow("shift-right", "→", 0, 1); arrow("shift-up", "↑", -1, 0); arrow("shift-down", "↓", 1, 0);
        drawing.append(inks);
        const file = el("input", { type: "file", accept: "image/*", onchange: () => { openFile(file.files[0]); file.value = ""; } });
        const choosing = el("div", { class: "choosing" }, el("p", { class: "caption" }, both("choose-image")), list, el("label", { class: "file" }, both("drop"), file));
        show("image").append(el("div", { class: "two" }, drawing, choosing));
        control("image").append(arrows);
        this.thumbs();
      },
      draw() {
        paintPixels(canvas, now.pixels, [HIGH, WIDE]);
        canvas.setAttribute("aria-label", `${say("draw")}. ${say("draw-help")}`);
        buttons.forEach((button, number) => {
          const text = say("image-number", { number, name: images[number].truth ?? images[number].name });
          button.setAttribute("aria-pressed", number === state.image); button.setAttribute("aria-label", text); button.title = text;
        });
        const c = Math.floor(state.pixel / (TALL * BROAD)), inside = state.pixel % (TALL * BROAD);
        const from = patchAt(state.patch), row = Math.floor(from / COLUMNS) * TALL + Math.floor(inside / BROAD), column = (from % COLUMNS) * BROAD + (inside % BROAD);
        const level = now.pixels[(row * WIDE + column) * CHANNELS + c];
        live("image", `x_{${row},${column}} = \\frac{${level} / 255 - ${rules.mean[c]}}{${rules.std[c]}} = ${spoken((level / 255 - rules.mean[c]) / rules.std[c])}`);
      },
    };
  })(),

  patches: {
    build() {
      this.map = makeMap(show("patches"), "patch-in-hand", (patch) => update({ patch, token: "patch" }));
      this.map.box.classList.add("large");
      this.hide = check(control("patches"), both("hide"), () => hide(patchAt(state.patch)));
      this.back = shuffleControl(control("patches"));
    },
    draw() {
      const zoom = Math.max(1, Math.round(280 / Math.max(HIGH, WIDE))), gap = Math.max(2, Math.round(zoom / 2)), canvas = this.map.canvas;
      const flat = el("canvas");
      paintPixels(flat, shownPixels(), [HIGH, WIDE]);
      canvas.width = WIDE * zoom; canvas.height = HIGH * zoom;
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      for (let place = 0; place < PATCHES; place++) {
        const x = (place % COLUMNS) * BROAD, y = Math.floor(place / COLUMNS) * TALL;
        context.drawImage(flat, x, y, BROAD, TALL, x * zoom + gap / 2, y * zoom + gap / 2, BROAD * zoom - gap, TALL * zoom - gap);
      }
      this.map.mark(state.patch);
      this.hide.input.checked = state.hidden.has(patchAt(state.patch));
      this.back.disabled = !state.shuffle;
      live("patches", `N = \\frac{${HIGH} \\cdot ${WIDE}}{${TALL} \\cdot ${BROAD}} = ${PATCHES}`);
    },
  },

  flatten: {
    build() {
      const grids = el("div", { class: "cells-of" });
      this.square = []; this.row = [];
      const few = FLAT <= 64, make = (list, i) => { const cell = el("span", { class: few ? "cell" : "cell bare" }); list[i] = cell; return cell; };
      for (let c = 0; c < CHANNELS; c++) {
        const grid = el("div", { class: "cells", style: `grid-template-columns: repeat(${BROAD}, 1fr)` });
        for (let i = 0; i < TALL * BROAD; i++) grid.append(make(this.square, c * TALL * BROAD + i));
        grids.append(grid);
      }
      const row = el("div", { class: "cells flat" });
      for (let i = 0; i < FLAT; i++) row.append(make(this.row, i));
      this.about = caption(show("flatten"));
      show("flatten").append(el("div", { class: "unrolled", "aria-hidden": true }, grids, row));
      this.pixel = slide(control("flatten"), "pixel", 0, FLAT - 1, (pixel) => update({ pixel }));
    },
    draw() {
      const values = rowOf("patches", state.patch, FLAT), low = -Math.max(...rules.mean.map((m, c) => m / rules.std[c])), high = Math.max(...rules.mean.map((m, c) => (1 - m) / rules.std[c]));
      for (let i = 0; i < FLAT; i++) {
        const grey = Math.round((255 * (values[i] - low)) / (high - low));
        for (const cell of [this.square[i], this.row[i]]) {
          cell.style.background = `rgb(${grey} ${grey} ${grey})`; cell.style.color = grey > 120 ? "#000" : "#fff";
          cell.classList.toggle("chosen", i === state.pixel);
          if (FLAT <= 64) cell.textContent = values[i].toFixed(1).replace("-", "−");
        }
      }
      this.about.textContent = state.token === "cls" ? say("no-pixels") : "";
      this.pixel(state.pixel);
      live("flatten", `x_p^{${patchNumber()}} = ${some3(values)}, ~x_{p,${state.pixel}}^{${patchNumber()}} = ${spoken(values[state.pixel])}`);
    },
  },

  project: {
    build() {
      const row = el("div", { class: "sum" }), sign = (text) => row.append(el("span", { class: "sign", "aria-hidden": true }, text));
      this.parts = ["x", "E", "xE"].map((name, i) => {
        if (i) sign(i === 1 ? "×" : "=");
        const canvas = el("canvas", { class: "tile", role: "img", style: `aspect-ratio: ${BROAD * CHANNELS} / ${TALL}` });
        row.append(canvas);
        return canvas;
      });
      this.about = caption(show("project"));
      show("project").append(row);
      this.strip = makeStrip(show("project"), "x_p E + b", true);
      this.feature = slide(control("project"), "feature", 0, WIDTH - 1, (feature) => update({ feature }));
    },
    draw() {
      const values = rowOf("patches", state.patch, FLAT), weights = model.tensors["patch_embed.proj.weight"].subarray(state.feature * FLAT, (state.feature + 1) * FLAT);
      const products = values.map((value, i) => value * weights[i]), bias = model.tensors["patch_embed.proj.bias"][state.feature];
      // Channels side by side: a row of the tile is the same row of each.
      const tiled = (list) => Float32Array.from({ length: FLAT }, (_, i) => {
        const row = Math.floor(i / (BROAD * CHANNELS)), c = Math.floor((i % (BROAD * CHANNELS)) / BROAD), column = i % BROAD;
        return list[(c * TALL + row) * BROAD + column];
      });
      [values, weights, products].forEach((list, i) => {
        paint(this.parts[i], tiled(list), BROAD * CHANNELS);
        this.parts[i].setAttribute("aria-label", say("strip", { name: ["x", "E", "x E"][i], count: FLAT, low: spoken(Math.min(...list)), high: spoken(Math.max(...list)) }));
      });
      this.about.textContent = say("pattern", { feature: state.feature });
      this.strip.draw(rowOf("projected", state.patch), { chosen: state.feature });
      this.feature(state.feature);
      live("project", `x_p^{${patchNumber()}} E_{${state.feature}} + b_{${state.feature}} = ${spoken(products.reduce((a, b) => a + b, 0))} + (${spoken(bias)}) ~= ${spoken(rowOf("projected", state.patch)[state.feature])}`);
    },
  },

  cls: {
    build() {
      this.canvas = el("canvas", { class: "matrix", role: "img" });
      this.at = el("i", { class: "at across" });
      show("cls").append(el("div", { class: "bed tall" }, this.canvas, this.at));
      this.follow = choose(control("cls"), "follow", "token", [{ value: "patch", words: both("follow-patch") }, ...(HAS_CLASS ? [{ value: "cls", words: "[CLS]" }] : [])], (token) => update({ token }));
    },
    draw() {
      const all = new Float32Array(TOKENS * WIDTH);
      let at = 0;
      for (const name of ["cls_token", "reg_token"]) if (model.tensors[name]) { all.set(model.tensors[name], at); at += model.tensors[name].length; }
      all.set(now.steps.projected, PREFIX * WIDTH);
      paint(this.canvas, all, WIDTH);
      this.canvas.setAttribute("aria-label", say("strip", { name: `${TOKENS} × ${WIDTH}`, count: all.length, low: spoken(Math.min(...all)), high: spoken(Math.max(...all)) }));
      this.at.style.top = `${(100 * inHand()) / TOKENS}%`; this.at.style.height = `${100 / TOKENS}%`;
      this.follow(state.token);
      const first = HAS_CLASS ? `x_{class} = ${some3(model.tensors.cls_token)}, ~` : "";
      live("cls", `${first}x_p^{${patchNumber()}} E + b = ${some3(rowOf("projected", state.patch))}`);
    },
  },

  positions: {
    build() {
      const rows = el("div"), side = el("div", { class: "side-map" });
      this.strips = [state.token === "cls" ? "x_{class}" : "x_p E", "+ E_{pos}", "= z_0"].map((name) => makeStrip(rows, name));
      this.caption = caption(side, "similar-places");
      this.map = makeMap(side, "similar-places");
      caption(side, "similarity-scale");
      show("positions").append(el("div", { class: "two" }, rows, side));
      const { input } = check(control("positions"), both("positions"), (on) => change({ positions: on ? "on" : "off" }));
      this.input = input;
      input.disabled = !model.tensors.positions;
      this.back = shuffleControl(control("positions"));
    },
    draw() {
      const t = inHand(), table = model.tensors.positions ?? new Float32Array(TOKENS * WIDTH), isOn = state.positions === "on";
      const place = isOn ? table.subarray(t * WIDTH, (t + 1) * WIDTH) : new Float32Array(WIDTH), sum = rowOf("tokens", t);
      const own = sum.map((value, i) => value - place[i]), peak = Math.max(...sum.map(Math.abs), ...own.map(Math.abs));
      this.strips[0].name.replaceChildren(typeset(state.token === "cls" ? "x_{class}" : "x_p E"));
      [own, place, sum].forEach((row, i) => this.strips[i].draw(row, { peak, text: lengthOf(row) }));
      const similar = Float32Array.from({ length: PATCHES }, (_, n) => cosine(table.subarray(t * WIDTH, (t + 1) * WIDTH), table.subarray((PREFIX + n) * WIDTH, (PREFIX + n + 1) * WIDTH)));
      this.map.draw(similar, "signed", t - PREFIX, 1);
      this.input.checked = isOn && !this.input.disabled;
      this.back.disabled = !state.shuffle;
      live("positions", `z_0^{${t}} = ~${some3(own)} ~+ ${some3(place)} ~= ${some3(sum)}`);
    },
  },

  norm: {
    build() {
      this.strips = ["z_l", "LN(z_l)"].map((name) => makeStrip(show("norm"), name, true));
      this.layer = choose(control("norm"), "layer", "layer-norm", layerChoices(), (layer) => update({ layer: Number(layer) }));
    },
    draw() {
      const t = inHand(), z = rowOf(entering(state.layer), t), d = state.feature, { mean, deviation } = moments(z, 0, WIDTH, config.norm_epsilon), out = rowOf(inLayer("norm1"), t);
      this.strips[0].draw(z, { chosen: d, text: `μ ${spoken(mean)} · σ ${spoken(deviation)}` });
      const after = moments(out, 0, WIDTH, 0);
      this.strips[1].draw(out, { chosen: d, text: `μ ${spoken(after.mean)} · σ ${spoken(after.deviation)}` });
      this.layer(state.layer);
      const [scale, offset] = ["weight", "bias"].map((part) => model.tensors[`blocks.${state.layer}.norm1.${part}`][d]);
      live("norm", `\\frac{${spoken(z[d])} - (${spoken(mean)})}{${spoken(deviation)}} \\cdot ${spoken(scale)} ~+ (${spoken(offset)}) = ${spoken(out[d])}`);
    },
  },

  qkv: {
    build() {
      this.strips = ["q", "k", "v"].map((name) => makeStrip(show("qkv"), name));
      this.head = choose(control("qkv"), "head", "head-qkv", headChoices(), (head) => update({ head: Number(head) }));
    },
    draw() {
      const rows = ["q", "k", "v"].map((name) => headRow(name, inHand()));
      rows.forEach((row, i) => this.strips[i].draw(row, { text: lengthOf(row) }));
      this.head(state.head);
      live("qkv", rows.map((row, i) => `${"qkv"[i]} = ${some3(row)}`).join(", ~"));
    },
  },

  scores: {
    build() {
      const rows = el("div"), side = el("div", { class: "side-map" });
      this.strips = ["q_i", "k_j", "q_i k_j"].map((name) => makeStrip(rows, name));
      caption(side, "scores-map");
      this.map = makeMap(side, "scores-map", (patch) => update({ key: PREFIX + patch }), "compared-with");
      this.map.box.classList.add("key");
      show("scores").append(el("div", { class: "two" }, rows, side));
      this.note = caption(show("scores"));
      this.key = slide(control("scores"), "compared-with", 0, TOKENS - 1, (key) => update({ key }), tokenName);
    },
    draw() {
      const q = headRow("q", inHand()), k = headRow("k", state.key), products = q.map((value, i) => value * k[i]), row = headRow("scores", inHand(), TOKENS);
      [q, k, products].forEach((values, i) => this.strips[i].draw(values));
      this.map.draw(onPatches(row), "signed", state.key - PREFIX);
      this.key(state.key);
      const isHidden = row[state.key] === -Infinity;
      this.note.textContent = isHidden ? say("key-hidden") : "";
      live("scores", isHidden ? `s_{${inHand()},${state.key}} = −∞` : `s_{${inHand()},${state.key}} = \\frac{${spoken(products.reduce((a, b) => a + b, 0))}}{\\sqrt{${NARROW}}} = ${spoken(row[state.key])}`);
    },
  },

  softmax: {
    // Attention laid over the image, as `inspect` shows it.
    lay(shares) {
      const pixels = shownPixels(), peak = Math.max(...shares), laid = new Uint8Array(HIGH * WIDE * 3);
      for (let i = 0; i < HIGH * WIDE; i++) {
        const place = Math.floor(Math.floor(i / WIDE) / TALL) * COLUMNS + Math.floor((i % WIDE) / BROAD);
        const colour = colourOf("shares", shares[place] / peak);
        for (let c = 0; c < 3; c++) laid[3 * i + c] = 0.45 * pixels[i * CHANNELS + (CHANNELS === 3 ? c : 0)] + 0.55 * colour[c];
      }
      paintPixels(this.laid.canvas, laid, [HIGH, WIDE]);
      this.laid.canvas.setAttribute("aria-label", say("laid"));
      this.laid.mark(inHand() - PREFIX);
    },
    build() {
      const side = el("div", { class: "side-map" }), other = el("div", { class: "side-map" });
      caption(side, "weights-map");
      this.map = makeMap(side, "weights-map", (patch) => update({ key: PREFIX + patch }), "compared-with");
      this.map.box.classList.add("key");
      caption(other, "laid");
      this.laid = makeMap(other, "laid");
      show("softmax").append(el("div", { class: "two halves" }, side, other));
      this.note = caption(show("softmax"));
      this.temperature = slide(control("softmax"), "temperature", -16, 16, (value) => change({ temperature: value }), (value) => spoken(2 ** (value / 4)));
    },
    draw() {
      const row = headRow("weights", inHand(), TOKENS), scores = headRow("scores", inHand(), TOKENS), t = temperature();
      this.map.draw(onPatches(row), "shares", state.key - PREFIX);
      this.lay(onPatches(row));
      const spread = Math.exp(-row.reduce((sum, share) => sum + (share > 0 ? share * Math.log(share) : 0), 0));
      this.note.textContent = say("spread", { first: FIRST ? ` · ${FIRST} ${percent(row.slice(0, PREFIX).reduce((a, b) => a + b, 0))}` : "", largest: percent(Math.max(...row)), count: spread.toFixed(1) });
      this.temperature(state.temperature);
      const by = t === 1 ? "" : ` / ${spoken(t)}`, sum = scores.reduce((all, score) => all + Math.exp(score / t), 0);
      live("softmax", `A_{${inHand()},${state.key}} = \\frac{exp(${spoken(scores[state.key])}${by})}{${sum < 1e6 ? spoken(sum) : `\\sum_m exp(s_m${t === 1 ? "" : " / t"})`}} = ${spoken(row[state.key])}`);
    },
  },

  mix: {
    build() {
      caption(show("mix"), "most-watched");
      this.strips = Array.from({ length: Math.min(4, TOKENS) }, () => makeStrip(show("mix"), "v_j"));
      this.rest = TOKENS > 4 ? makeStrip(show("mix"), "…") : null;
      this.sum = makeStrip(show("mix"), "SA_i");
      this.note = caption(show("mix"));
      press(control("mix"), "hide-most", () => {
        const row = onPatches(headRow("weights", inHand(), TOKENS));
        hide(patchAt(largest(row.map((share, place) => (state.hidden.has(patchAt(place)) ? -1 : share)))));
      });
    },
    draw() {
      const row = headRow("weights", inHand(), TOKENS), order = [...row.keys()].sort((a, b) => row[b] - row[a]), top = order.slice(0, this.strips.length);
      const sum = headRow("heads", inHand()), brought = (j) => headRow("v", j).map((value) => row[j] * value);
      const peak = Math.max(...sum.map(Math.abs), ...top.flatMap((j) => [...brought(j).map(Math.abs)]));
      top.forEach((j, i) => {
        this.strips[i].name.replaceChildren(`${percent(row[j])} · `, typeset(`v_{${j}}`));
        this.strips[i].draw(brought(j), { peak });
      });
      if (this.rest) {
        const others = order.slice(top.length), values = new Float32Array(NARROW);
        for (const j of others) brought(j).forEach((value, i) => { values[i] += value; });
        this.rest.name.textContent = say("others", { count: others.length });
        this.rest.draw(values, { peak });
      }
      this.sum.draw(sum, { peak, text: say("sum") });
      const isOff = state.heads.has(`${state.layer}.${state.head}`);
      this.note.textContent = isOff ? say("head-is-off") : "";
      live("mix", isOff ? `SA_{${inHand()}} = 0` : `SA_{${inHand()}} = ${top.slice(0, 2).map((j) => `${spoken(row[j])} \\cdot v_{${j}}`).join(" + ")} + \\dots ~= ${some3(sum)}`);
    },
  },

  heads: {
    build() {
      const row = el("div", { class: "heads" });
      this.cells = Array.from({ length: HEADS }, (_, head) => {
        const cell = el("div", { class: "head" }), { input, text } = check(cell, both("head-on", { head }), () => toggle(state.heads, `${state.layer}.${head}`));
        const map = makeMap(cell, "weights-map");
        row.append(cell);
        return { input, text, map };
      });
      control("heads").append(row);
      this.strip = makeStrip(show("heads"), "MSA_i");
    },
    draw() {
      this.cells.forEach(({ input, map }, head) => {
        input.checked = !state.heads.has(`${state.layer}.${head}`);
        map.draw(onPatches(headRow("weights", inHand(), TOKENS, head)), "shares", inHand() - PREFIX);
        map.box.classList.toggle("off", !input.checked);
      });
      const row = rowOf(inLayer("msa"), inHand());
      this.strip.draw(row, { text: lengthOf(row) });
      live("heads", `MSA_{${inHand()}} = ${some3(row)}`);
    },
  },

  attended: sumStation("attended", "z_l", "+ MSA", "= z'", "attention-on", "attention", () => entering(state.layer), "msa", () => inLayer("middle")),

  mlp: {
    build() {
      this.about = caption(show("mlp"), "gelu-curve");
      this.canvas = el("canvas", { class: "curve", role: "img" });
      show("mlp").append(this.canvas);
      this.note = caption(show("mlp"));
      this.strips = ["z1", "GELU(z1)", "z2"].map((name, i) => makeStrip(show("mlp"), name, i < 2));
      this.unit = slide(control("mlp"), "unit", 0, HIDDEN - 1, (unit) => update({ unit }));
    },
    draw() {
      const t = inHand(), z1 = rowOf(inLayer("z1"), t, HIDDEN), activated = rowOf(inLayer("activated"), t, HIDDEN), z2 = rowOf(inLayer("z2"), t);
      [z1, activated, z2].forEach((row, i) => this.strips[i].draw(row, { chosen: i < 2 ? state.unit : -1 }));
      drawCurve(this.canvas, z1, state.unit);
      this.canvas.setAttribute("aria-label", `${say("gelu-curve")}: ${spoken(z1[state.unit])} → ${spoken(activated[state.unit])}`);
      this.note.textContent = say("quiet-units", { quiet: z1.filter((value) => value < 0).length, count: HIDDEN });
      this.unit(state.unit);
      live("mlp", `z1_{${state.unit}} = ${spoken(z1[state.unit])}, ~GELU(${spoken(z1[state.unit])}) = ${spoken(activated[state.unit])}, ~z2 = ${some3(z2)}`);
    },
  },

  added: sumStation("added", "z'", "+ MLP", "= z_{l+1}", "mlp-on", "mlp", () => inLayer("middle"), "z2", () => `blocks.${state.layer}`),

  layers: {
    build() {
      const row = el("div", { class: "heads" });
      const first = el("div", { class: "head" }, el("span", { class: "check" }, both("embedded")));
      row.append(first);
      this.maps = [makeMap(first, "similarity-scale")];
      this.inputs = Array.from({ length: DEPTH }, (_, layer) => {
        const cell = el("div", { class: "head" }), { input } = check(cell, both("layer-on", { layer }), (on) => {
          for (const set of [state.attention, state.mlp]) { if (on) set.delete(layer); else set.add(layer); }
          change();
        });
        this.maps.push(makeMap(cell, "similarity-scale"));
        row.append(cell);
        return input;
      });
      control("layers").append(row);
      caption(control("layers"), "similarity-scale");
    },
    draw() {
      const t = inHand(), parts = [];
      for (let n = 0; n <= DEPTH; n++) {
        const own = rowOf(entering(n), t), similar = Float32Array.from({ length: PATCHES }, (_, p) => cosine(own, rowOf(entering(n), PREFIX + p)));
        this.maps[n].draw(similar, "signed", t - PREFIX, 1);
        parts.push(`|z_{${n}}| = ${spoken(norm(own))}`);
      }
      this.inputs.forEach((input, layer) => { input.checked = !(state.attention.has(layer) && state.mlp.has(layer)); this.maps[layer + 1].box.classList.toggle("off", !input.checked); });
      live("layers", parts.join(", ~"));
    },
  },

  lens: {
    build() {
      this.head = el("th", { class: "number" });
      const body = el("tbody");
      this.rows = Array.from({ length: DEPTH + 1 }, (_, n) => {
        const name = el("th", { scope: "row" }, n ? both("after-layer", { layer: n - 1 }) : both("embedded")), answer = el("td"), fillTo = el("i", { class: "now" }), share = el("td", { class: "number" });
        body.append(el("tr", {}, name, answer, el("td", { class: "wide" }, el("span", { class: "track" }, fillTo)), share));
        return { answer, fillTo, share };
      });
      const columns = el("tr", {}, el("th", { scope: "col" }, both("layer")), el("th", { scope: "col" }, both("lens-would")), (this.of = el("th", { scope: "col", colspan: 2 })));
      show("lens").append(el("table", { class: "lens" }, el("thead", {}, columns), body));
      this.class = pickClass(control("lens"));
    },
    draw() {
      const k = chosenClass();
      this.of.textContent = say("lens-of", { label: label(k) });
      this.rows.forEach(({ answer, fillTo, share }, n) => {
        const shares = softmax(now.lens[n], CLASSES), best = largest(shares);
        answer.textContent = `${label(best)} ${percent(shares[best])}`;
        answer.className = best === now.best ? "same" : "";
        fillTo.style.width = percent(shares[k]).replace(" ", "");
        share.textContent = percent(shares[k]);
      });
      this.class();
      live("lens", `p_{${k}} = ${now.lens.map((logits) => `${spoken(softmax(logits, CLASSES)[k])} `).join("~\\to ")}`);
    },
  },

  read: {
    build() {
      this.strips = [HAS_CLASS ? "z_L^0" : "z_L", "y"].map((name) => makeStrip(show("read"), name, true));
      this.feature = slide(control("read"), "feature", 0, WIDTH - 1, (feature) => update({ feature }));
    },
    draw() {
      const d = state.feature, last = entering(DEPTH), y = now.steps.pooled, z = HAS_CLASS ? rowOf(last, 0) : rowOf(last, inHand());
      this.strips[0].draw(z, { chosen: d, text: lengthOf(z) });
      this.strips[1].draw(y, { chosen: d, text: lengthOf(y) });
      this.feature(d);
      const { mean, deviation } = moments(z, 0, WIDTH, config.norm_epsilon), [scale, offset] = ["weight", "bias"].map((part) => model.tensors[`norm.${part}`][d]);
      live("read", HAS_CLASS ? `y_{${d}} = \\frac{${spoken(z[d])} - (${spoken(mean)})}{${spoken(deviation)}} \\cdot ${spoken(scale)} ~+ (${spoken(offset)}) = ${spoken(y[d])}` : `y = ${some3(y)}`);
    },
  },

  logits: {
    build() {
      this.about = caption(show("logits"));
      this.strip = makeStrip(show("logits"), config.representation === "none" ? "y_d W_d" : "h_d W_d");
      this.class = pickClass(control("logits"));
    },
    draw() {
      const k = chosenClass(), y = represent(model, now.steps.pooled), weights = model.tensors["head.weight"].subarray(k * WIDTH, (k + 1) * WIDTH);
      const parts = y.map((value, d) => value * weights[d]), bias = model.tensors["head.bias"][k];
      this.about.textContent = say("contributions", { label: label(k) });
      this.strip.draw(parts.slice().sort().reverse());
      this.class();
      live("logits", `logit_{${k}} = ${spoken(parts.reduce((a, b) => a + b, 0))} + (${spoken(bias)}) = ${spoken(now.logits[k])}`);
    },
  },

  answer: {
    build() {
      this.list = el("ol", { class: "bars" });
      show("answer").append(this.list, el("p", { class: "hint" }, both("now-and-before")));
      press(control("answer"), "undo-all", undoAll);
      press(control("answer"), "copy-link", async () => {
        history.replaceState(null, "", address());
        try { await navigator.clipboard.writeText(location.href); tell(linkHoldsAll() ? "copied" : "link-cannot", { name: state.drawn ? say("your-drawing") : images[state.image].name }); } catch { tell("not-copied"); }
      });
    },
    draw() {
      drawBars(this.list, ranked(Math.min(CLASSES, 12)));
      const k = now.best, peak = now.logits[k], sum = now.logits.reduce((all, logit) => all + Math.exp(logit - peak), 0) * Math.exp(peak);
      live("answer", `p_{${k}} = \\frac{exp(${spoken(now.logits[k])})}{${sum < 1e6 ? spoken(sum) : "\\sum_m exp(logit_m)"}} = ${spoken(now.shares[k])}`);
    },
  },
};

// A residual connection: what was, what is added, what becomes of it.
function sumStation(name, was, plus, is, words, part, from, added, to) {
  let strips = null, on = null, note = null;
  return {
    build() {
      strips = [was, plus, is].map((formula) => makeStrip(show(name), formula));
      note = caption(show(name));
      on = check(control(name), "", () => toggle(state[part], state.layer));
    },
    draw() {
      const t = inHand(), isOff = state[part].has(state.layer), a = rowOf(from(), t), c = rowOf(to(), t);
      const b = isOff ? new Float32Array(WIDTH) : rowOf(inLayer(added), t), peak = Math.max(...a.map(Math.abs), ...b.map(Math.abs), ...c.map(Math.abs));
      [a, b, c].forEach((row, i) => strips[i].draw(row, { peak, text: lengthOf(row) }));
      const angle = (180 / Math.PI) * Math.acos(Math.min(cosine(a, c), 1));
      note.textContent = say("lengths", { before: spoken(norm(a)), new: spoken(norm(b)), after: spoken(norm(c)), angle: angle.toFixed(0) });
      on.input.checked = !isOff;
      on.text.textContent = say(words, { layer: state.layer });
      live(name, `${some3(a)} ~+ ${some3(b)} ~= ${some3(c)}`);
    },
  };
}

// GELU, and every hidden unit on it.
function drawCurve(canvas, z1, unit) {
  const scale = window.devicePixelRatio || 1, wide = 480, high = 190, reach = Math.max(3, ...z1.map(Math.abs)), style = getComputedStyle(root);
  canvas.width = wide * scale; canvas.height = high * scale;
  const context = canvas.getContext("2d"), gelu = GELU[config.activation];
  context.scale(scale, scale);
  const x = (value) => wide / 2 + (value / reach) * (wide / 2 - 8), y = (value) => high - 26 - (value / reach) * (high - 40);
  context.strokeStyle = style.getPropertyValue("--line");
  context.beginPath(); context.moveTo(0, y(0)); context.lineTo(wide, y(0)); context.moveTo(x(0), 4); context.lineTo(x(0), high - 4); context.stroke();
  context.strokeStyle = style.getPropertyValue("--lead"); context.lineWidth = 1.5;
  context.beginPath();
  for (let i = 0; i <= 120; i++) { const value = reach * (i / 60 - 1); context[i ? "lineTo" : "moveTo"](x(value), y(gelu(value))); }
  context.stroke();
  const dot = (value, size, share) => { context.fillStyle = `rgb(${colourOf("signed", share)})`; context.beginPath(); context.arc(x(value), y(gelu(value)), size, 0, 7); context.fill(); };
  context.globalAlpha = 0.75;
  z1.forEach((value) => dot(value, 3, value < 0 ? 0.08 : 0.92));
  context.globalAlpha = 1;
  dot(z1[unit], 6, z1[unit] < 0 ? 0 : 1);
  context.strokeStyle = style.getPropertyValue("--ink"); context.stroke();
}

