// The stations of the page, one for each step of the model. `build` adds figure and controls once, `draw` shows the values
// of `state` and `now` (walk.js). Steps have the same names as in `vitrail.look`.
"use strict";

const show = (name) => $(`${name}-show`), control = (name) => $(`${name}-control`);
// Write exponents, as in 1e−5, as powers of ten.
const powers = (text) => text.replace(/(\d)e([+−]?)(\d+)/g, (_, digit, sign, power) => `${digit} \\cdot 10^{${sign === "−" ? sign : ""}${power}}`);
// Show the equation of a station with the numbers of the followed token.
const showEquation = (name, text) => $(`${name}-live`).replaceChildren(...typesetLines(powers(text)));
const addCaption = (host, name, fields) => { const element = el("p", { class: "caption" }, ...(name ? [bilingual(name, fields)] : [])); host.append(element); return element; };

const STATIONS = {
  image: (() => {
    const canvas = el("canvas", { class: "paper", tabindex: 0, role: "application" }), cursor = el("i", { class: "mark", hidden: true });
    const box = el("div", { class: "map draw", style: `aspect-ratio: ${IMAGE_WIDTH} / ${IMAGE_HEIGHT}` }, canvas, cursor), list = el("div", { class: "thumbs" });
    const at = { row: Math.floor(IMAGE_HEIGHT / 2), column: Math.floor(IMAGE_WIDTH / 2) };
    let ink = 255, buttons = [];
    const paintBrush = (row, column) => {
      const pixels = (state.drawn ?? images[state.image].pixels).slice(), reach = Math.max(1, Math.round(IMAGE_HEIGHT / 28));
      for (let y = row - reach; y <= row + reach; y++) {
        for (let x = column - reach; x <= column + reach; x++) {
          const share = 1 - Math.hypot(y - row, x - column) / (reach + 0.7);
          if (share <= 0 || y < 0 || x < 0 || y >= IMAGE_HEIGHT || x >= IMAGE_WIDTH) continue;
          const to = (wrap(y - state.down, IMAGE_HEIGHT) * IMAGE_WIDTH + wrap(x - state.right, IMAGE_WIDTH)) * CHANNELS;
          for (let c = 0; c < CHANNELS; c++) pixels[to + c] = Math.round(pixels[to + c] + (ink - pixels[to + c]) * Math.min(1.4 * share, 1));
        }
      }
      change({ drawn: pixels });
    };
    const pixelUnder = (event) => {
      const frame = canvas.getBoundingClientRect();
      return [Math.floor(((event.clientY - frame.top) / frame.height) * IMAGE_HEIGHT), Math.floor(((event.clientX - frame.left) / frame.width) * IMAGE_WIDTH)];
    };
    const moveCursor = () => {
      cursor.style.left = `${(100 * at.column) / IMAGE_WIDTH}%`; cursor.style.top = `${(100 * at.row) / IMAGE_HEIGHT}%`;
      cursor.style.width = `${100 / IMAGE_WIDTH}%`; cursor.style.height = `${100 / IMAGE_HEIGHT}%`;
    };
    let showInk = null;
    return {
      thumbs() {
        buttons = images.map((image, number) => {
          const small = el("canvas", { "aria-hidden": true });
          paintPixels(small, image.pixels, [IMAGE_HEIGHT, IMAGE_WIDTH]);
          return el("button", { type: "button", class: "thumb", onclick: () => { showNotice(null); change({ image: number, drawn: null }); } }, small);
        });
        list.replaceChildren(...buttons);
      },
      build() {
        const drawing = el("div", { class: "drawing" }, el("p", { class: "caption" }, bilingual("draw")), box, el("p", { class: "hint" }, bilingual("draw-help")));
        canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); paintBrush(...pixelUnder(event)); });
        canvas.addEventListener("pointermove", (event) => { if (event.buttons) paintBrush(...pixelUnder(event)); });
        canvas.addEventListener("focus", () => { cursor.hidden = false; moveCursor(); });
        canvas.addEventListener("blur", () => { cursor.hidden = true; });
        canvas.addEventListener("keydown", (event) => {
          const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
          if (step) { at.row = wrap(at.row + step[0], IMAGE_HEIGHT); at.column = wrap(at.column + step[1], IMAGE_WIDTH); moveCursor(); } else if (event.key === " " || event.key === "Enter") paintBrush(at.row, at.column);
          else return;
          event.preventDefault(); event.stopPropagation();
        });
        const inks = el("div", { class: "controls" }), arrows = el("div", { class: "controls" }), addArrow = (title, sign, down, right) => {
          const button = addButton(arrows, title, () => change({ down: (state.down + down) % IMAGE_HEIGHT, right: (state.right + right) % IMAGE_WIDTH }));
          button.prepend(`${sign} `);
        };
        showInk = addChoice(inks, "ink", "ink", [{ value: 255, text: bilingual("ink-light") }, { value: 0, text: bilingual("ink-dark") }], (value) => { ink = Number(value); showInk(ink); });
        showInk(ink);
        arrows.append(el("span", {}, bilingual("shift")));
        addArrow("shift-left", "←", 0, -1); addArrow("shift-right", "→", 0, 1); addArrow("shift-up", "↑", -1, 0); addArrow("shift-down", "↓", 1, 0);
        drawing.append(inks);
        const file = el("input", { type: "file", accept: "image/*", onchange: () => { openFile(file.files[0]); file.value = ""; } });
        const choosing = el("div", { class: "choosing" }, el("p", { class: "caption" }, bilingual("choose-image")), list, el("label", { class: "file" }, bilingual("drop"), file));
        show("image").append(el("div", { class: "two" }, drawing, choosing));
        control("image").append(arrows);
        this.thumbs();
      },
      draw() {
        paintPixels(canvas, now.pixels, [IMAGE_HEIGHT, IMAGE_WIDTH]);
        canvas.setAttribute("aria-label", `${message("draw")}. ${message("draw-help")}`);
        buttons.forEach((button, number) => {
          const text = message("image-number", { number, name: images[number].truth ?? images[number].name });
          button.setAttribute("aria-pressed", number === state.image); button.setAttribute("aria-label", text); button.title = text;
        });
        const c = Math.floor(state.pixel / (PATCH_HEIGHT * PATCH_WIDTH)), inside = state.pixel % (PATCH_HEIGHT * PATCH_WIDTH);
        const from = patchAt(state.patch), row = Math.floor(from / COLUMNS) * PATCH_HEIGHT + Math.floor(inside / PATCH_WIDTH), column = (from % COLUMNS) * PATCH_WIDTH + (inside % PATCH_WIDTH);
        const level = now.pixels[(row * IMAGE_WIDTH + column) * CHANNELS + c];
        showEquation("image", `x_{${row},${column}} = \\frac{${level} / 255 - ${preprocess.mean[c]}}{${preprocess.std[c]}} = ${numberText((level / 255 - preprocess.mean[c]) / preprocess.std[c])}`);
      },
    };
  })(),

  patches: {
    build() {
      this.map = makeMap(show("patches"), "followed-patch", (patch) => update({ patch, token: "patch" }));
      this.map.box.classList.add("large");
      this.hide = addCheckbox(control("patches"), bilingual("hide"), () => toggleHidden(patchAt(state.patch)));
      this.back = addShuffleButtons(control("patches"));
    },
    draw() {
      const zoom = Math.max(1, Math.round(280 / Math.max(IMAGE_HEIGHT, IMAGE_WIDTH))), gap = Math.max(2, Math.round(zoom / 2)), canvas = this.map.canvas;
      const flat = el("canvas");
      paintPixels(flat, displayedPixels(), [IMAGE_HEIGHT, IMAGE_WIDTH]);
      canvas.width = IMAGE_WIDTH * zoom; canvas.height = IMAGE_HEIGHT * zoom;
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      for (let place = 0; place < PATCH_COUNT; place++) {
        const x = (place % COLUMNS) * PATCH_WIDTH, y = Math.floor(place / COLUMNS) * PATCH_HEIGHT;
        context.drawImage(flat, x, y, PATCH_WIDTH, PATCH_HEIGHT, x * zoom + gap / 2, y * zoom + gap / 2, PATCH_WIDTH * zoom - gap, PATCH_HEIGHT * zoom - gap);
      }
      this.map.mark(state.patch);
      this.hide.input.checked = state.hidden.has(patchAt(state.patch));
      this.back.disabled = !state.shuffle;
      showEquation("patches", `N = \\frac{${IMAGE_HEIGHT} \\cdot ${IMAGE_WIDTH}}{${PATCH_HEIGHT} \\cdot ${PATCH_WIDTH}} = ${PATCH_COUNT}`);
    },
  },

  flatten: {
    build() {
      const grids = el("div", { class: "cells-of" });
      this.square = []; this.row = [];
      const showsNumbers = PATCH_SIZE <= 64, makeCell = (list, i) => { const cell = el("span", { class: showsNumbers ? "cell" : "cell bare" }); list[i] = cell; return cell; };
      for (let c = 0; c < CHANNELS; c++) {
        const grid = el("div", { class: "cells", style: `grid-template-columns: repeat(${PATCH_WIDTH}, 1fr)` });
        for (let i = 0; i < PATCH_HEIGHT * PATCH_WIDTH; i++) grid.append(makeCell(this.square, c * PATCH_HEIGHT * PATCH_WIDTH + i));
        grids.append(grid);
      }
      const row = el("div", { class: "cells flat" });
      for (let i = 0; i < PATCH_SIZE; i++) row.append(makeCell(this.row, i));
      this.about = addCaption(show("flatten"));
      show("flatten").append(el("div", { class: "unrolled", "aria-hidden": true }, grids, row));
      this.pixel = addSlider(control("flatten"), "pixel", 0, PATCH_SIZE - 1, (pixel) => update({ pixel }));
    },
    draw() {
      const values = rowOf("patches", state.patch, PATCH_SIZE), low = -Math.max(...preprocess.mean.map((m, c) => m / preprocess.std[c])), high = Math.max(...preprocess.mean.map((m, c) => (1 - m) / preprocess.std[c]));
      for (let i = 0; i < PATCH_SIZE; i++) {
        const grey = Math.round((255 * (values[i] - low)) / (high - low));
        for (const cell of [this.square[i], this.row[i]]) {
          cell.style.background = `rgb(${grey} ${grey} ${grey})`; cell.style.color = grey > 120 ? "#000" : "#fff";
          cell.classList.toggle("chosen", i === state.pixel);
          if (PATCH_SIZE <= 64) cell.textContent = values[i].toFixed(1).replace("-", "−");
        }
      }
      this.about.textContent = state.token === "cls" ? message("no-pixels") : "";
      this.pixel(state.pixel);
      showEquation("flatten", `x_p^{${patchNumber()}} = ${firstThree(values)}, ~x_{p,${state.pixel}}^{${patchNumber()}} = ${numberText(values[state.pixel])}`);
    },
  },

  project: {
    build() {
      const row = el("div", { class: "sum" }), sign = (text) => row.append(el("span", { class: "sign", "aria-hidden": true }, text));
      this.parts = ["x", "E", "xE"].map((name, i) => {
        if (i) sign(i === 1 ? "×" : "=");
        const canvas = el("canvas", { class: "tile", role: "img", style: `aspect-ratio: ${PATCH_WIDTH * CHANNELS} / ${PATCH_HEIGHT}` });
        row.append(canvas);
        return canvas;
      });
      this.about = addCaption(show("project"));
      show("project").append(row);
      this.strip = makeStrip(show("project"), "x_p E + b", true);
      this.feature = addSlider(control("project"), "feature", 0, WIDTH - 1, (feature) => update({ feature }));
    },
    draw() {
      const values = rowOf("patches", state.patch, PATCH_SIZE), weights = model.tensors["patch_embed.proj.weight"].subarray(state.feature * PATCH_SIZE, (state.feature + 1) * PATCH_SIZE);
      const products = values.map((value, i) => value * weights[i]), bias = model.tensors["patch_embed.proj.bias"][state.feature];
      // Arrange channels side by side: a row of the tile is the same row of each channel.
      const tiled = (list) => Float32Array.from({ length: PATCH_SIZE }, (_, i) => {
        const row = Math.floor(i / (PATCH_WIDTH * CHANNELS)), c = Math.floor((i % (PATCH_WIDTH * CHANNELS)) / PATCH_WIDTH), column = i % PATCH_WIDTH;
        return list[(c * PATCH_HEIGHT + row) * PATCH_WIDTH + column];
      });
      [values, weights, products].forEach((list, i) => {
        paint(this.parts[i], tiled(list), PATCH_WIDTH * CHANNELS);
        this.parts[i].setAttribute("aria-label", message("strip", { name: ["x", "E", "x E"][i], count: PATCH_SIZE, low: numberText(Math.min(...list)), high: numberText(Math.max(...list)) }));
      });
      this.about.textContent = message("pattern", { feature: state.feature });
      this.strip.draw(rowOf("projected", state.patch), { chosen: state.feature });
      this.feature(state.feature);
      showEquation("project", `x_p^{${patchNumber()}} E_{${state.feature}} + b_{${state.feature}} = ${numberText(products.reduce((a, b) => a + b, 0))} + (${numberText(bias)}) ~= ${numberText(rowOf("projected", state.patch)[state.feature])}`);
    },
  },

  cls: {
    build() {
      this.canvas = el("canvas", { class: "matrix", role: "img" });
      this.at = el("i", { class: "at across" });
      show("cls").append(el("div", { class: "bed tall" }, this.canvas, this.at));
      this.follow = addChoice(control("cls"), "follow", "token", [{ value: "patch", text: bilingual("follow-patch") }, ...(HAS_CLASS ? [{ value: "cls", text: "[CLS]" }] : [])], (token) => update({ token }));
    },
    draw() {
      const all = new Float32Array(TOKENS * WIDTH);
      let at = 0;
      for (const name of ["cls_token", "reg_token"]) if (model.tensors[name]) { all.set(model.tensors[name], at); at += model.tensors[name].length; }
      all.set(now.steps.projected, PREFIX * WIDTH);
      paint(this.canvas, all, WIDTH);
      this.canvas.setAttribute("aria-label", message("strip", { name: `${TOKENS} × ${WIDTH}`, count: all.length, low: numberText(Math.min(...all)), high: numberText(Math.max(...all)) }));
      this.at.style.top = `${(100 * followedToken()) / TOKENS}%`; this.at.style.height = `${100 / TOKENS}%`;
      this.follow(state.token);
      const first = HAS_CLASS ? `x_{class} = ${firstThree(model.tensors.cls_token)}, ~` : "";
      showEquation("cls", `${first}x_p^{${patchNumber()}} E + b = ${firstThree(rowOf("projected", state.patch))}`);
    },
  },

  positions: {
    build() {
      const rows = el("div"), side = el("div", { class: "side-map" });
      this.strips = [state.token === "cls" ? "x_{class}" : "x_p E", "+ E_{pos}", "= z_0"].map((name) => makeStrip(rows, name));
      this.addCaption = addCaption(side, "similar-positions");
      this.map = makeMap(side, "similar-positions");
      addCaption(side, "similarity-scale");
      show("positions").append(el("div", { class: "two" }, rows, side));
      const { input } = addCheckbox(control("positions"), bilingual("positions"), (on) => change({ positions: on ? "on" : "off" }));
      this.input = input;
      input.disabled = !model.tensors.positions;
      this.back = addShuffleButtons(control("positions"));
    },
    draw() {
      const t = followedToken(), table = model.tensors.positions ?? new Float32Array(TOKENS * WIDTH), isOn = state.positions === "on";
      const place = isOn ? table.subarray(t * WIDTH, (t + 1) * WIDTH) : new Float32Array(WIDTH), sum = rowOf("tokens", t);
      const own = sum.map((value, i) => value - place[i]), peak = Math.max(...sum.map(Math.abs), ...own.map(Math.abs));
      this.strips[0].name.replaceChildren(typeset(state.token === "cls" ? "x_{class}" : "x_p E"));
      [own, place, sum].forEach((row, i) => this.strips[i].draw(row, { peak, text: lengthOf(row) }));
      const similar = Float32Array.from({ length: PATCH_COUNT }, (_, n) => cosine(table.subarray(t * WIDTH, (t + 1) * WIDTH), table.subarray((PREFIX + n) * WIDTH, (PREFIX + n + 1) * WIDTH)));
      this.map.draw(similar, "signed", t - PREFIX, 1);
      this.input.checked = isOn && !this.input.disabled;
      this.back.disabled = !state.shuffle;
      showEquation("positions", `z_0^{${t}} = ~${firstThree(own)} ~+ ${firstThree(place)} ~= ${firstThree(sum)}`);
    },
  },

  norm: {
    build() {
      this.strips = ["z_l", "LN(z_l)"].map((name) => makeStrip(show("norm"), name, true));
      this.layer = addChoice(control("norm"), "layer", "layer-norm", layerChoices(), (layer) => update({ layer: Number(layer) }));
    },
    draw() {
      const t = followedToken(), z = rowOf(layerInput(state.layer), t), d = state.feature, { mean, deviation } = moments(z, 0, WIDTH, config.norm_epsilon), out = rowOf(inLayer("norm1"), t);
      this.strips[0].draw(z, { chosen: d, text: `μ ${numberText(mean)} · σ ${numberText(deviation)}` });
      const after = moments(out, 0, WIDTH, 0);
      this.strips[1].draw(out, { chosen: d, text: `μ ${numberText(after.mean)} · σ ${numberText(after.deviation)}` });
      this.layer(state.layer);
      const [scale, offset] = ["weight", "bias"].map((part) => model.tensors[`blocks.${state.layer}.norm1.${part}`][d]);
      showEquation("norm", `\\frac{${numberText(z[d])} - (${numberText(mean)})}{${numberText(deviation)}} \\cdot ${numberText(scale)} ~+ (${numberText(offset)}) = ${numberText(out[d])}`);
    },
  },

  qkv: {
    build() {
      this.strips = ["q", "k", "v"].map((name) => makeStrip(show("qkv"), name));
      this.head = addChoice(control("qkv"), "head", "head-qkv", headChoices(), (head) => update({ head: Number(head) }));
    },
    draw() {
      const rows = ["q", "k", "v"].map((name) => headRow(name, followedToken()));
      rows.forEach((row, i) => this.strips[i].draw(row, { text: lengthOf(row) }));
      this.head(state.head);
      showEquation("qkv", rows.map((row, i) => `${"qkv"[i]} = ${firstThree(row)}`).join(", ~"));
    },
  },

  scores: {
    build() {
      const rows = el("div"), side = el("div", { class: "side-map" });
      this.strips = ["q_i", "k_j", "q_i k_j"].map((name) => makeStrip(rows, name));
      addCaption(side, "scores-map");
      this.map = makeMap(side, "scores-map", (patch) => update({ key: PREFIX + patch }), "compared-with");
      this.map.box.classList.add("key");
      show("scores").append(el("div", { class: "two" }, rows, side));
      this.note = addCaption(show("scores"));
      this.key = addSlider(control("scores"), "compared-with", 0, TOKENS - 1, (key) => update({ key }), tokenName);
    },
    draw() {
      const q = headRow("q", followedToken()), k = headRow("k", state.key), products = q.map((value, i) => value * k[i]), row = headRow("scores", followedToken(), TOKENS);
      [q, k, products].forEach((values, i) => this.strips[i].draw(values));
      this.map.draw(patchPart(row), "signed", state.key - PREFIX);
      this.key(state.key);
      const isHidden = row[state.key] === -Infinity;
      this.note.textContent = isHidden ? message("key-hidden") : "";
      showEquation("scores", isHidden ? `s_{${followedToken()},${state.key}} = −∞` : `s_{${followedToken()},${state.key}} = \\frac{${numberText(products.reduce((a, b) => a + b, 0))}}{\\sqrt{${HEAD_WIDTH}}} = ${numberText(row[state.key])}`);
    },
  },

  softmax: {
    // Draw attention over the image, as `inspect` does.
    drawOverlay(shares) {
      const pixels = displayedPixels(), peak = Math.max(...shares), overlay = new Uint8Array(IMAGE_HEIGHT * IMAGE_WIDTH * 3);
      for (let i = 0; i < IMAGE_HEIGHT * IMAGE_WIDTH; i++) {
        const place = Math.floor(Math.floor(i / IMAGE_WIDTH) / PATCH_HEIGHT) * COLUMNS + Math.floor((i % IMAGE_WIDTH) / PATCH_WIDTH);
        const colour = colourOf("shares", shares[place] / peak);
        for (let c = 0; c < 3; c++) overlay[3 * i + c] = 0.45 * pixels[i * CHANNELS + (CHANNELS === 3 ? c : 0)] + 0.55 * colour[c];
      }
      paintPixels(this.overlay.canvas, overlay, [IMAGE_HEIGHT, IMAGE_WIDTH]);
      this.overlay.canvas.setAttribute("aria-label", message("overlay"));
      this.overlay.mark(followedToken() - PREFIX);
    },
    build() {
      const side = el("div", { class: "side-map" }), other = el("div", { class: "side-map" });
      addCaption(side, "weights-map");
      this.map = makeMap(side, "weights-map", (patch) => update({ key: PREFIX + patch }), "compared-with");
      this.map.box.classList.add("key");
      addCaption(other, "overlay");
      this.overlay = makeMap(other, "overlay");
      show("softmax").append(el("div", { class: "two halves" }, side, other));
      this.note = addCaption(show("softmax"));
      this.temperature = addSlider(control("softmax"), "temperature", -16, 16, (value) => change({ temperature: value }), (value) => numberText(2 ** (value / 4)));
    },
    draw() {
      const row = headRow("weights", followedToken(), TOKENS), scores = headRow("scores", followedToken(), TOKENS), t = temperature();
      this.map.draw(patchPart(row), "shares", state.key - PREFIX);
      this.drawOverlay(patchPart(row));
      const spread = Math.exp(-row.reduce((sum, share) => sum + (share > 0 ? share * Math.log(share) : 0), 0));
      this.note.textContent = message("spread", { first: PREFIX_NAMES ? ` · ${PREFIX_NAMES} ${percent(row.slice(0, PREFIX).reduce((a, b) => a + b, 0))}` : "", largest: percent(Math.max(...row)), count: spread.toFixed(1) });
      this.temperature(state.temperature);
      const by = t === 1 ? "" : ` / ${numberText(t)}`, sum = scores.reduce((all, score) => all + Math.exp(score / t), 0);
      showEquation("softmax", `A_{${followedToken()},${state.key}} = \\frac{exp(${numberText(scores[state.key])}${by})}{${sum < 1e6 ? numberText(sum) : `\\sum_m exp(s_m${t === 1 ? "" : " / t"})`}} = ${numberText(row[state.key])}`);
    },
  },

  mix: {
    build() {
      addCaption(show("mix"), "largest-weights");
      this.strips = Array.from({ length: Math.min(4, TOKENS) }, () => makeStrip(show("mix"), "v_j"));
      this.rest = TOKENS > 4 ? makeStrip(show("mix"), "…") : null;
      this.sum = makeStrip(show("mix"), "SA_i");
      this.note = addCaption(show("mix"));
      addButton(control("mix"), "hide-most", () => {
        const row = patchPart(headRow("weights", followedToken(), TOKENS));
        toggleHidden(patchAt(largest(row.map((share, place) => (state.hidden.has(patchAt(place)) ? -1 : share)))));
      });
    },
    draw() {
      const row = headRow("weights", followedToken(), TOKENS), order = [...row.keys()].sort((a, b) => row[b] - row[a]), top = order.slice(0, this.strips.length);
      const sum = headRow("heads", followedToken()), weightedValue = (j) => headRow("v", j).map((value) => row[j] * value);
      const peak = Math.max(...sum.map(Math.abs), ...top.flatMap((j) => [...weightedValue(j).map(Math.abs)]));
      top.forEach((j, i) => {
        this.strips[i].name.replaceChildren(`${percent(row[j])} · `, typeset(`v_{${j}}`));
        this.strips[i].draw(weightedValue(j), { peak });
      });
      if (this.rest) {
        const remaining = order.slice(top.length), values = new Float32Array(HEAD_WIDTH);
        for (const j of remaining) weightedValue(j).forEach((value, i) => { values[i] += value; });
        this.rest.name.textContent = message("remaining", { count: remaining.length });
        this.rest.draw(values, { peak });
      }
      this.sum.draw(sum, { peak, text: message("sum") });
      const isOff = state.heads.has(`${state.layer}.${state.head}`);
      this.note.textContent = isOff ? message("head-is-off") : "";
      showEquation("mix", isOff ? `SA_{${followedToken()}} = 0` : `SA_{${followedToken()}} = ${top.slice(0, 2).map((j) => `${numberText(row[j])} \\cdot v_{${j}}`).join(" + ")} + \\dots ~= ${firstThree(sum)}`);
    },
  },

  heads: {
    build() {
      const row = el("div", { class: "heads" });
      this.cells = Array.from({ length: HEADS }, (_, head) => {
        const cell = el("div", { class: "head" }), { input, text } = addCheckbox(cell, bilingual("head-on", { head }), () => toggle(state.heads, `${state.layer}.${head}`));
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
        map.draw(patchPart(headRow("weights", followedToken(), TOKENS, head)), "shares", followedToken() - PREFIX);
        map.box.classList.toggle("off", !input.checked);
      });
      const row = rowOf(inLayer("msa"), followedToken());
      this.strip.draw(row, { text: lengthOf(row) });
      showEquation("heads", `MSA_{${followedToken()}} = ${firstThree(row)}`);
    },
  },

  attended: sumStation("attended", "z_l", "+ MSA", "= z'", "attention-on", "attention", () => layerInput(state.layer), "msa", () => inLayer("middle")),

  mlp: {
    build() {
      this.about = addCaption(show("mlp"), "gelu-curve");
      this.canvas = el("canvas", { class: "curve", role: "img" });
      show("mlp").append(this.canvas);
      this.note = addCaption(show("mlp"));
      this.strips = ["z1", "GELU(z1)", "z2"].map((name, i) => makeStrip(show("mlp"), name, i < 2));
      this.unit = addSlider(control("mlp"), "unit", 0, HIDDEN - 1, (unit) => update({ unit }));
    },
    draw() {
      const t = followedToken(), z1 = rowOf(inLayer("z1"), t, HIDDEN), activated = rowOf(inLayer("activated"), t, HIDDEN), z2 = rowOf(inLayer("z2"), t);
      [z1, activated, z2].forEach((row, i) => this.strips[i].draw(row, { chosen: i < 2 ? state.unit : -1 }));
      drawCurve(this.canvas, z1, state.unit);
      this.canvas.setAttribute("aria-label", `${message("gelu-curve")}: ${numberText(z1[state.unit])} → ${numberText(activated[state.unit])}`);
      this.note.textContent = message("quiet-units", { quiet: z1.filter((value) => value < 0).length, count: HIDDEN });
      this.unit(state.unit);
      showEquation("mlp", `z1_{${state.unit}} = ${numberText(z1[state.unit])}, ~GELU(${numberText(z1[state.unit])}) = ${numberText(activated[state.unit])}, ~z2 = ${firstThree(z2)}`);
    },
  },

  added: sumStation("added", "z'", "+ MLP", "= z_{l+1}", "mlp-on", "mlp", () => inLayer("middle"), "z2", () => `blocks.${state.layer}`),

  layers: {
    build() {
      const row = el("div", { class: "heads" });
      const first = el("div", { class: "head" }, el("span", { class: "check" }, bilingual("embedded")));
      row.append(first);
      this.maps = [makeMap(first, "similarity-scale")];
      this.inputs = Array.from({ length: DEPTH }, (_, layer) => {
        const cell = el("div", { class: "head" }), { input } = addCheckbox(cell, bilingual("layer-on", { layer }), (on) => {
          for (const set of [state.attention, state.mlp]) { if (on) set.delete(layer); else set.add(layer); }
          change();
        });
        this.maps.push(makeMap(cell, "similarity-scale"));
        row.append(cell);
        return input;
      });
      control("layers").append(row);
      addCaption(control("layers"), "similarity-scale");
    },
    draw() {
      const t = followedToken(), parts = [];
      for (let n = 0; n <= DEPTH; n++) {
        const own = rowOf(layerInput(n), t), similar = Float32Array.from({ length: PATCH_COUNT }, (_, p) => cosine(own, rowOf(layerInput(n), PREFIX + p)));
        this.maps[n].draw(similar, "signed", t - PREFIX, 1);
        parts.push(`|z_{${n}}| = ${numberText(norm(own))}`);
      }
      this.inputs.forEach((input, layer) => { input.checked = !(state.attention.has(layer) && state.mlp.has(layer)); this.maps[layer + 1].box.classList.toggle("off", !input.checked); });
      showEquation("layers", parts.join(", ~"));
    },
  },

  lens: {
    build() {
      this.head = el("th", { class: "number" });
      const body = el("tbody");
      this.rows = Array.from({ length: DEPTH + 1 }, (_, n) => {
        const name = el("th", { scope: "row" }, n ? bilingual("after-layer", { layer: n - 1 }) : bilingual("embedded")), answer = el("td"), fillTo = el("i", { class: "now" }), share = el("td", { class: "number" });
        body.append(el("tr", {}, name, answer, el("td", { class: "wide" }, el("span", { class: "track" }, fillTo)), share));
        return { answer, fillTo, share };
      });
      const columns = el("tr", {}, el("th", { scope: "col" }, bilingual("layer")), el("th", { scope: "col" }, bilingual("lens-prediction")), (this.of = el("th", { scope: "col", colspan: 2 })));
      show("lens").append(el("table", { class: "lens" }, el("thead", {}, columns), body));
      this.class = addClassSelect(control("lens"));
    },
    draw() {
      const k = chosenClass();
      this.of.textContent = message("lens-probability", { label: label(k) });
      this.rows.forEach(({ answer, fillTo, share }, n) => {
        const shares = softmax(now.lens[n], CLASSES), best = largest(shares);
        answer.textContent = `${label(best)} ${percent(shares[best])}`;
        answer.className = best === now.best ? "same" : "";
        fillTo.style.width = percent(shares[k]).replace(" ", "");
        share.textContent = percent(shares[k]);
      });
      this.class();
      showEquation("lens", `p_{${k}} = ${now.lens.map((logits) => `${numberText(softmax(logits, CLASSES)[k])} `).join("~\\to ")}`);
    },
  },

  read: {
    build() {
      this.strips = [HAS_CLASS ? "z_L^0" : "z_L", "y"].map((name) => makeStrip(show("read"), name, true));
      this.feature = addSlider(control("read"), "feature", 0, WIDTH - 1, (feature) => update({ feature }));
    },
    draw() {
      const d = state.feature, last = layerInput(DEPTH), y = now.steps.pooled, z = HAS_CLASS ? rowOf(last, 0) : rowOf(last, followedToken());
      this.strips[0].draw(z, { chosen: d, text: lengthOf(z) });
      this.strips[1].draw(y, { chosen: d, text: lengthOf(y) });
      this.feature(d);
      const { mean, deviation } = moments(z, 0, WIDTH, config.norm_epsilon), [scale, offset] = ["weight", "bias"].map((part) => model.tensors[`norm.${part}`][d]);
      showEquation("read", HAS_CLASS ? `y_{${d}} = \\frac{${numberText(z[d])} - (${numberText(mean)})}{${numberText(deviation)}} \\cdot ${numberText(scale)} ~+ (${numberText(offset)}) = ${numberText(y[d])}` : `y = ${firstThree(y)}`);
    },
  },

  logits: {
    build() {
      this.about = addCaption(show("logits"));
      this.strip = makeStrip(show("logits"), config.representation === "none" ? "y_d W_d" : "h_d W_d");
      this.class = addClassSelect(control("logits"));
    },
    draw() {
      const k = chosenClass(), y = represent(model, now.steps.pooled), weights = model.tensors["head.weight"].subarray(k * WIDTH, (k + 1) * WIDTH);
      const parts = y.map((value, d) => value * weights[d]), bias = model.tensors["head.bias"][k];
      this.about.textContent = message("contributions", { label: label(k) });
      this.strip.draw(parts.slice().sort().reverse());
      this.class();
      showEquation("logits", `logit_{${k}} = ${numberText(parts.reduce((a, b) => a + b, 0))} + (${numberText(bias)}) = ${numberText(now.logits[k])}`);
    },
  },

  answer: {
    build() {
      this.list = el("ol", { class: "bars" });
      show("answer").append(this.list, el("p", { class: "hint" }, bilingual("now-and-before")));
      addButton(control("answer"), "undo-all", undoChanges);
      addButton(control("answer"), "copy-link", async () => {
        history.replaceState(null, "", address());
        try { await navigator.clipboard.writeText(location.href); showNotice(linkHoldsAll() ? "copied" : "link-too-long", { name: state.drawn ? message("your-drawing") : images[state.image].name }); } catch { showNotice("not-copied"); }
      });
    },
    draw() {
      drawBars(this.list, ranked(Math.min(CLASSES, 12)));
      const k = now.best, peak = now.logits[k], sum = now.logits.reduce((all, logit) => all + Math.exp(logit - peak), 0) * Math.exp(peak);
      showEquation("answer", `p_{${k}} = \\frac{exp(${numberText(now.logits[k])})}{${sum < 1e6 ? numberText(sum) : "\\sum_m exp(logit_m)"}} = ${numberText(now.shares[k])}`);
    },
  },
};

// Return the station of a residual connection: input, added values and sum, each with its formula. `set` is the set of
// switched-off layers in `state`; `inputStep` and `sumStep` return names of steps, `addedStep` is a name inside the layer.
function sumStation(name, inputFormula, addedFormula, sumFormula, switchTitle, set, inputStep, addedStep, sumStep) {
  let strips = null, on = null, note = null;
  return {
    build() {
      strips = [inputFormula, addedFormula, sumFormula].map((formula) => makeStrip(show(name), formula));
      note = addCaption(show(name));
      on = addCheckbox(control(name), "", () => toggle(state[set], state.layer));
    },
    draw() {
      const t = followedToken(), isOff = state[set].has(state.layer), a = rowOf(inputStep(), t), c = rowOf(sumStep(), t);
      const b = isOff ? new Float32Array(WIDTH) : rowOf(inLayer(addedStep), t), peak = Math.max(...a.map(Math.abs), ...b.map(Math.abs), ...c.map(Math.abs));
      [a, b, c].forEach((row, i) => strips[i].draw(row, { peak, text: lengthOf(row) }));
      const angle = (180 / Math.PI) * Math.acos(Math.min(cosine(a, c), 1));
      note.textContent = message("lengths", { before: numberText(norm(a)), new: numberText(norm(b)), after: numberText(norm(c)), angle: angle.toFixed(0) });
      on.input.checked = !isOff;
      on.text.textContent = message(switchTitle, { layer: state.layer });
      showEquation(name, `${firstThree(a)} ~+ ${firstThree(b)} ~= ${firstThree(c)}`);
    },
  };
}

// Draw the GELU curve with a dot for each hidden unit. The chosen unit `unit` is larger.
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

