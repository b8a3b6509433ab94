"""Draw docs/notes/*.svg, the figures of the route from the notes, and fill in what the lab found of each claim.

.venv/bin/python docs/notes.py          (`make format` does it; tests/test_notes.py holds pages and figures to it)

Every figure is drawn from the embedded model and data, or from a model with fixed random weights. Tables stand between
`<!-- lab: C1 C2 -->` and `<!-- end -->` in the pages, and come from the report of the lab.
"""

import base64
import io
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.analysis.position_structure import filters, position_table, similarity, structure
from vitrail.analysis.receptive_field import reach
from vitrail.data.sources.registry import open_data
from vitrail.lab.permute import move, patch_order, permute_input_weights
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.layers import patchify
from vitrail.models.zoo import find
from vitrail.reports.colours import heat, reach_colours, sequential, signed
from vitrail.reports.families import COLOURS
from vitrail.reports.inspect.walkthrough_steps import apply_logit_lens, colour_by_components

DOCS = Path(__file__).resolve().parent
FIGURES = DOCS / "notes"
LAB = DOCS / "lab" / "fashion-mnist"
WORDS = DOCS.parent / "src" / "vitrail" / "lab"
BOOT = 15  # an ankle boot among the forty embedded images

STYLE = """
text { fill: #1c2127; font: 13px system-ui, sans-serif; text-anchor: middle; } .end { text-anchor: end; }
.start { text-anchor: start; } .soft { fill: #5b6470; } image { image-rendering: pixelated; }
path { fill: none; stroke-width: 2; } .axis, .frame { stroke: #98a2b0; stroke-width: .7; fill: none; }
.c0 { fill: #0072b2; } .c1 { fill: #d55e00; } .c2 { fill: #009e73; } .c4 { fill: #b87f00; }
.l0 { stroke: #0072b2; } .l1 { stroke: #d55e00; } .l2 { stroke: #009e73; } .l4 { stroke: #b87f00; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; } .soft { fill: #98a2b0; }
  .c0 { fill: #4aa8e0; } .c1 { fill: #ff8a3c; } .c2 { fill: #2ec79c; } .c4 { fill: #e69f00; }
  .l0 { stroke: #4aa8e0; } .l1 { stroke: #ff8a3c; } .l2 { stroke: #2ec79c; } .l4 { stroke: #e69f00; }
}
"""


# What figures are drawn with


def draw(width: int, height: int, title: str, *parts: str) -> str:
    """An SVG file that fits a page in light and in dark."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: object, kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{shown}>{words}</text>'


def tile(x: float, y: float, side: float, colours: np.ndarray, above: str = "", below: str = "") -> str:
    """Pixels (h, w) or (h, w, 3) as a framed picture of this width, with a line of text above and one below."""
    buffer = io.BytesIO()
    Image.fromarray(colours).save(buffer, "PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    tall = side * colours.shape[0] / colours.shape[1]
    place = f'x="{x:g}" y="{y:g}" width="{side:g}" height="{tall:g}"'
    parts = [f'<image {place} href="data:image/png;base64,{data}"/>', f'<rect class="frame" {place}/>']
    parts += [text(x + side / 2, y - 8, above)] if above else []
    parts += [text(x + side / 2, y + tall + 17, below, "soft")] if below else []
    return "\n".join(parts)


def tiles(title: str, rows: Sequence[Sequence[tuple[np.ndarray, str, str]]], side: int = 120) -> str:
    """Rows of square pictures: pixels, the text above and the text below of each."""
    parts, y = [], 0
    for cells in rows:
        y += 26 if any(above for _, above, _ in cells) else 6
        parts += [tile(8 + at * (side + 16), y, side, *cell) for at, cell in enumerate(cells)]
        y += side + (24 if any(below for _, _, below in cells) else 4)
    return draw((side + 16) * max(map(len, rows)), y + 4, title, *parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]], most: float, *, colour: str = "c0") -> str:
    """Horizontal bars: a name, a value up to `most`, and what is written behind it."""
    parts = []
    for row, (name, value, words) in enumerate(rows):
        y, wide = 8 + row * 26, max(300 * value / most, 0)
        parts += [
            text(150, y + 14, name, "end"),
            f'<rect class="{colour}" x="158" y="{y}" width="{wide:.1f}" height="18"/>',
            text(164 + wide, y + 14, words, "start soft"),
        ]
    return draw(620, 12 + 26 * len(rows), title, *parts)


def lines(
    title: str,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    across: str,
    up: str,
    ticks: Sequence[tuple[float, str]],
    levels: Sequence[tuple[float, str]],
    colours: Sequence[int] = (0, 1, 2),
) -> str:
    """Curves with dots: a name, places across and values up; `ticks` and `levels` are the marks of the two axes."""
    (left, right), (low, high) = ((marks[0][0], marks[-1][0]) for marks in (ticks, levels))

    def at(x: float, y: float) -> tuple[float, float]:
        return 60 + 340 * (x - left) / (right - left), 200 - 170 * (y - low) / (high - low)

    parts = [text(8, 16, up, "start soft"), text(230, 242, across, "soft")]
    for value, words in levels:
        y = at(left, value)[1]
        parts += [f'<path class="axis" d="M 60 {y:.1f} H 400"/>', text(54, y + 4, words, "end soft")]
    parts += [text(at(value, low)[0], 220, words, "soft") for value, words in ticks]
    ends = []
    for number, (name, xs, ys) in zip(colours, curves, strict=False):
        places = [at(x, y) for x, y in zip(xs, ys, strict=True)]
        parts.append(f'<path class="l{number}" d="M {" L ".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>')
        parts += [f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        ends.append((places[-1][1], name, number))
    below = -100.0
    for y, name, number in sorted(ends):
        below = max(y, below + 16)
        parts.append(text(408, below + 4, name, f"start c{number}"))
    return draw(560, 250, title, *parts)


# What they are drawn from


@cache
def clothes() -> tuple[vitrail.Bundle, np.ndarray, torch.Tensor, torch.Tensor]:
    """The embedded bundle, and the embedded images: pixels, preprocessed, and their labels."""
    bundle, data = vitrail.load("fashion"), open_data("fashion-40").splits["test"]
    pixels = np.stack([np.asarray(image).squeeze() for image in data.images])
    return bundle, pixels, bundle.preprocess(list(data.images)), torch.tensor(data.labels)


@cache
def boot() -> Activations:
    """All steps of the model for the ankle boot."""
    bundle, _, images, _ = clothes()
    return vitrail.look(bundle.model, images[BOOT : BOOT + 1], inside=None)


def step(name: str) -> np.ndarray:
    return boot().steps[name][0].numpy()


def untrained(name: str, **changes: Any) -> AnyModel:
    torch.manual_seed(0)
    return vitrail.create(name, **changes).eval()


@cache
def shuffled() -> tuple[torch.Tensor, torch.Tensor]:
    """An order of the 49 patches, and the images with their patches in it."""
    order = torch.randperm(49, generator=torch.Generator().manual_seed(0))
    return order, move(clothes()[2], patch_order(order, (28, 28), (4, 4)))


# Chapter 1


def fields() -> str:
    names = {"CNN": "ResNet-Nano", "LSTM": "LSTM-Nano/7", "MLP": "MLP-Nano", "ViT": "ViT-Nano/7"}
    cells = []
    for short, name in names.items():
        field = reach(untrained(name), torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), layer=0)
        cells.append((reach_colours(field), short, f"{np.count_nonzero(field)} / 784"))
    return tiles("Which pixels reach the centre after the first layer, before training", [cells])


@torch.no_grad()
def shifts() -> str:
    _, _, images, _ = clothes()
    image, rows = images[BOOT : BOOT + 1].double(), []
    for strides, by in (((1, 1, 1), (3, 5)), (None, (1, 1))):
        cnn = untrained("ResNet-Nano", strides=strides, edges="circular").double()
        moved = image.roll(by, (2, 3))
        (first,), (second,) = cnn.feature_maps(image), cnn.feature_maps(moved)
        here, there = (maps[0, 0].numpy() for maps in (first, second))
        scale = image.shape[-1] // first.shape[-1]
        follows = scale == 1 and f"{np.abs(np.roll(here, by, (0, 1)) - there).max():.0e}"
        cells = [
            (_grey(image[0, 0]), "x", ""),
            (heat(here - here.min()), "f(x)", f"{len(here)} x {len(here)}"),
            (_grey(moved[0, 0]), f"T x, {by[0]} + {by[1]} px", ""),
            (heat(there - there.min()), "f(T x)", f"|T f(x) - f(T x)| {follows}" if follows else ""),
        ]
        rows.append(cells)
    return tiles("A convolution's features move with the image; strides break it", rows)


def _grey(image: torch.Tensor) -> np.ndarray:
    values = image.numpy()
    return (255 * (values - values.min()) / np.ptp(values)).round().astype(np.uint8)


def patches() -> str:
    _, pixels, _, _ = clothes()
    cut = pixels[BOOT].reshape(7, 4, 7, 4).transpose(0, 2, 1, 3)
    parts = [tile(8, 26, 140, pixels[BOOT], "x", "28 x 28")]
    parts += [tile(176 + 22 * column, 26 + 22 * row, 18, cut[row, column]) for row in range(7) for column in range(7)]
    parts += [text(250, 18, "P = 4"), text(250, 195, "N = 49", "soft")]
    flat = cut.reshape(49, 16)
    parts.append(tile(360, 26, 46, flat, "x_p", "49 x 16"))
    embedded = step("projected")
    parts.append(tile(450, 26, 276, signed(embedded), "x_p E", "49 x 96"))
    return draw(740, 200, "An image, its 49 patches, the patches flattened, and projected", *parts)


@torch.no_grad()
def order() -> str:
    bundle, pixels, images, labels = clothes()
    numbers, changed = shuffled()
    follows = vitrail.load("fashion").model
    permute_input_weights(follows, patch_order(numbers, (28, 28), (4, 4)))
    right = [
        int((model(some).argmax(1) == labels).sum())
        for model, some in ((bundle.model, images), (bundle.model, changed), (follows, changed))
    ]
    moved = _grey(changed[BOOT, 0])
    return tiles(
        "Shuffled patches, and positions that follow them",
        [
            [
                (pixels[BOOT], "x, E_pos", f"{right[0]} / 40"),
                (moved, "shuffled x, E_pos", f"{right[1]} / 40"),
                (moved, "shuffled x and E_pos", f"{right[2]} / 40"),
            ]
        ],
        side=140,
    )


def kernels() -> str:
    components, shares = filters(clothes()[0].model)
    cells = [((255 * components[at, ..., 0]).round().astype(np.uint8), "", f"{shares[at]:.0%}") for at in range(8)]
    return tiles("The principal components of the columns of E", [cells], side=64)


def cls() -> str:
    attention = [boot().attention[layer][0].numpy() for layer in range(5)]
    rows = [
        [(clothes()[1][BOOT], "", "")]
        + [
            (heat(some[head, 0, 1:].reshape(7, 7)), f"layer {at}" if not head else "", "")
            for at, some in enumerate(attention)
        ]
        for head in range(3)
    ]
    return tiles("Where [CLS] looks, in five layers (columns) and three heads (rows)", rows, side=84)


def positions() -> str:
    near = similarity(position_table(clothes()[0].model)).reshape(7, 7, 7, 7)
    parts = [
        tile(8 + 52 * column, 8 + 52 * row, 48, signed(near[row, column])) for row in range(7) for column in range(7)
    ]
    return draw(376, 376, "Similarity of each position embedding to all others", *parts)


# Chapter 2


def transfer() -> str:
    bundle = clothes()[0]
    bare = vitrail.Bundle(model=type(bundle.model)(bundle.model.config), preprocess=bundle.preprocess)
    torch.manual_seed(0)
    bare.model.init_weights()
    curves = []
    for name, one in (("pre-trained", bundle), ("untrained", bare)):
        found = vitrail.evaluate(one, "digits", protocol="fewshot", shots=[1, 5, 10, 25]).scores["shots"]
        curves.append((name, np.log([row["shots"] for row in found]), [100 * row["accuracy"] for row in found]))
    ticks = [(float(np.log(count)), str(count)) for count in (1, 5, 10, 25)]
    levels = [(value, str(value)) for value in (20, 40, 60, 80, 100)]
    return lines("Few-shot accuracy on digits", curves, "n / class", "accuracy, %", ticks, levels)


def heads() -> str:
    parts = [tile(8, 26, 192, signed(step("blocks.0.norm1")), "LN(z)", "50 x 96")]
    for column, name in enumerate("qkv"):
        parts += [
            tile(
                232 + 84 * column, 26 + 116 * head, 64, signed(step(f"blocks.0.{name}")[head]), name if not head else ""
            )
            for head in range(3)
        ]
    parts.append(text(348, 376, "3 x (50 x 32)", "soft"))
    return draw(500, 384, "One layer's queries, keys and values in three heads", *parts)


def mlp() -> str:
    strips = {name: step(f"blocks.0.{name}")[25:26] for name in ("norm2", "z1", "activated", "z2")}
    labels = ("LN(z')", "W1 x + b1", "GELU", "W2 a + b2")
    parts = []
    for row, ((_name, values), label) in enumerate(zip(strips.items(), labels, strict=True)):
        y, wide = 8 + 46 * row, values.shape[1] * 2.4
        parts.append(tile(110, y, wide, np.repeat(signed(values), 16, axis=0)))
        parts += [
            text(102, y + 24, label, "end"),
            text(118 + wide, y + 24, f"{values.shape[1]}: {values.min():.2f} ... {values.max():.2f}", "start soft"),
        ]
    return draw(740, 196, "One token through the MLP: one activation, between two linear layers", *parts)


@torch.no_grad()
def commuting() -> str:
    model = vitrail.load("fashion").model.double()
    z = model.patch_embed(clothes()[2].double())
    block, numbers, table = model.blocks[0], shuffled()[0], model.pos_embed[0, 1:]
    pairs = {
        name: (layer(z)[:, numbers], layer(z[:, numbers]))
        for name, layer in (("LN", block.norm1), ("MLP", block.mlp), ("MSA", block.attn))
    }
    pairs["MSA, z + E_pos"] = (block.attn(z + table)[:, numbers], block.attn(z[:, numbers] + table))
    rows = []
    for name, (one, other) in pairs.items():
        moved = float((one - other).abs().max() / one.abs().max())
        shown = "0" if not moved else f"{moved:.2f}" if moved > 0.01 else "&lt; 1e-14"
        rows.append((name, moved, shown))
    return bars("Which layers commute with a new order of tokens", rows, most=1.0)


@torch.no_grad()
def hybrid() -> str:
    model = untrained("Hybrid-Nano")
    seen = vitrail.look(model, clothes()[2][BOOT : BOOT + 1])
    tokens = seen.steps["patches"][0]
    cells = [(clothes()[1][BOOT], "x", "28 x 28")]
    shown = sorted(tokens.std(dim=0).topk(4).indices.tolist())
    cells += [(heat((tokens[:, at] - tokens[:, at].min()).view(4, 4).numpy()), f"c{at}", "") for at in shown]
    cells.append((colour_by_components(tokens, (4, 4)), "64", "16 tokens, 1 x 1"))
    return tiles("Feature maps of an untrained stem of convolutions: each place is a token", [cells], side=100)


def gradients() -> str:
    curves = []
    for kind in ("pre", "post"):
        model = untrained("ViT-Nano/7", depth=12, norm_order=kind, classes=10)
        torch.nn.init.normal_(model.head.weight, std=0.02)
        torch.nn.functional.cross_entropy(model(clothes()[2]), clothes()[3]).backward()
        norms = [float(block.mlp.fc2.weight.grad.norm()) for block in model.blocks]
        curves.append((f"{kind}-LN", range(12), np.log10(norms)))
    ticks = [(at, str(at)) for at in (0, 3, 6, 9, 11)]
    return lines("Gradients of twelve layers at the start", curves, "layer", "|gradient|", ticks, _decades(-2, 0))


def answer() -> str:
    bundle, head = clothes()[0], clothes()[0].model.head
    parts = [tile(8, 26, 288, np.repeat(signed(step("pooled")[None]), 8, axis=0), "y", "96")]
    parts.append(tile(8, 106, 288, signed(head.weight.detach().numpy()), "W", "10 x 96"))
    for row, (label, logit) in enumerate(zip(bundle.labels, boot().logits[0].tolist(), strict=True)):
        y, left, right = 12 + 18 * row, 490 + 16 * min(logit, 0), 490 + 16 * max(logit, 0)
        parts += [
            text(430, y + 11, label, "end"),
            f'<rect class="c{int(logit > 0)}" x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="13"/>',
            text(580, y + 11, f"{logit:.1f}", "start soft"),
        ]
    return draw(620, 200, "From the normalised class token to ten logits: one linear layer", *parts)


def sizes() -> str:
    names = ("ViT-B/32", "ViT-B/16", "ViT-L/32", "ViT-L/16", "ViT-H/14")
    rows = [
        (name, config.parameters / 1e6, f"{config.parameters / 1e6:.1f} M") for name in names if (config := find(name))
    ]
    return bars("Parameters of published ViTs, with 1,000 classes", rows, most=700)


# Chapter 3


def sinusoids() -> str:
    table = position_table(untrained("ViT-Micro/4", position="sincos-1d"))
    far = np.linalg.norm(table[:, None] - table[None], axis=-1)
    parts = [
        tile(8, 26, 192, signed(table), "sin, cos", "49 x 64"),
        tile(232, 26, 147, heat(far), "|e_i - e_j|", "49 x 49"),
    ]
    return draw(400, 200, "A table of sines and cosines, and how far its rows are from each other", *parts)


@torch.no_grad()
def orderless() -> str:
    bundle, pixels, images, _ = clothes()
    changed = shuffled()[1]
    kept = {name: tensor for name, tensor in bundle.model.state_dict().items() if name != "pos_embed"}
    bare = bundle.model.clone_with(kept, position="none").eval()
    parts = [tile(8, 26, 112, pixels[BOOT], "x"), tile(136, 26, 112, _grey(changed[BOOT, 0]), "shuffled x")]
    for column, (name, model) in enumerate((("E_pos", bundle.model), ("none", bare))):
        left = 290 + 200 * column
        parts.append(text(left + 80, 18, f"logits, position {name}"))
        for row, (one, other) in enumerate(zip(model(images)[BOOT], model(changed)[BOOT], strict=True)):
            for offset, value, kind in ((0, one, "c0"), (5, other, "c1")):
                start, wide = left + 80 + min(float(value), 0) * 14, abs(float(value)) * 14
                parts.append(
                    f'<rect class="{kind}" x="{start:.1f}" y="{26 + 14 * row + offset}" width="{wide:.1f}" height="4"/>'
                )
    return draw(680, 172, "Ten logits for an image and the same with shuffled patches", *parts)


def stream() -> str:
    depth, curves = range(5), []
    for name, key in (("z", "blocks.{}"), ("MSA", "blocks.{}.msa"), ("MLP", "blocks.{}.z2")):
        curves.append((name, depth, [float(np.linalg.norm(step(key.format(at)), axis=-1).mean()) for at in depth]))
    high = 10 * int(np.ceil(max(max(ys) for _, _, ys in curves) / 10))
    ticks, levels = [(at, str(at)) for at in depth], [(value, str(value)) for value in range(0, high + 1, 10)]
    return lines("The residual stream, and what each part adds to it", curves, "layer", "mean length", ticks, levels)


def functions() -> str:
    x = torch.linspace(-3, 3, 25)
    kinds = (("GELU", torch.nn.functional.gelu), ("tanh", torch.tanh), ("ReLU", torch.relu))
    curves = [(name, x.tolist(), function(x).tolist()) for name, function in kinds]
    ticks = [(at, str(at)) for at in range(-3, 4)]
    return lines("Three activation functions", curves, "x", "", ticks, [(at, str(at)) for at in range(-1, 4)])


def path() -> str:
    bundle = clothes()[0]
    rows = [
        (f"layer {one['layer']}", one["probability"], f"{one['probability']:.0%} (1. {bundle.labels[one['winner']]})")
        for one in apply_logit_lens(bundle.model, boot())
    ]
    return bars("The probability of ankle boot if each layer were the last", rows, most=1.0)


def resized() -> str:
    model = clothes()[0].model
    cells = []
    for one, grid in ((model, 7), (model.resize(56), 14)):
        near = similarity(position_table(one)).reshape(grid, grid, grid, grid)
        cells.append((signed(near[2 * grid // 7, 3 * grid // 7]), f"{grid} x {grid}", f"E_pos {grid**2 + 1} x 96"))
    return tiles("The similarity of one position to all others, before and after interpolation", [cells], side=140)


# Chapter 4


def count() -> str:
    parts = []
    for left, patch, grid in ((8, 16, 14), (300, 14, 16)):
        size = 224 / grid
        marks = [f"M {left + at * size:.1f} 26 v 224 M {left} {26 + at * size:.1f} h 224" for at in range(grid + 1)]
        parts += [
            f'<path class="axis" d="{" ".join(marks)}"/>',
            text(left + 112, 18, f"P = {patch}"),
            text(left + 112, 268, f"{grid} x {grid} = {grid**2}", "soft"),
        ]
    return draw(532, 276, "224 pixels in patches of 16 and of 14", *parts)


def costs() -> str:
    sizes = [64, 128, 256, 512, 1024, 2048, 4096]
    config = vitrail.create("ViT-Nano/7").config.replace(width=768, heads=12, mlp=3072)
    per_token = 4 * config.width**2 + 2 * config.width * config.mlp
    curves = [
        ("N x (4 D^2 + 2 D M)", np.log10(sizes), np.log10([n * per_token / 1e6 for n in sizes])),
        ("2 N^2 D", np.log10(sizes), np.log10([2 * n * n * config.width / 1e6 for n in sizes])),
    ]
    ticks = [(float(np.log10(n)), f"{n:,}") for n in (64, 256, 1024, 4096)]
    levels = [(value, f"{10**value:,}") for value in range(0, 6)]
    return lines("Multiply-accumulates of one layer, D = 768", curves, "N", "M MAC", ticks, levels)


def attending() -> str:
    query, rows = 1 + 3 * 7 + 3, []
    for head in range(3):
        scores = step("blocks.0.scores")[head, query, 1:].reshape(7, 7)
        weights = step("blocks.0.weights")[head, query, 1:].reshape(7, 7)
        shown = clothes()[1][BOOT].copy()
        shown[12:16, [12, 15]] = shown[[12, 15], 12:16] = 255
        rows.append(
            [
                (shown, "x" if not head else "", ""),
                (signed(scores), "q k^T / sqrt(d)" if not head else "", f"{scores.min():.1f} ... {scores.max():.1f}"),
                (heat(weights), "softmax" if not head else "", f"{weights.min():.4f} ... {weights.max():.2f}"),
            ]
        )
    return tiles("Scores and attention weights of the patch in the middle, in three heads", rows, side=112)


def scaling() -> str:
    query, keys = step("blocks.0.q"), step("blocks.0.k")
    cells = []
    for name, scale in (("1 / sqrt(d)", 32**-0.5), ("1", 1.0)):
        weights = torch.tensor(query @ keys.transpose(0, 2, 1) * scale).softmax(-1)[0].numpy()
        spread = -(weights * np.log(np.maximum(weights, 1e-30))).sum(-1).mean() / np.log(50)
        cells.append((sequential(np.sqrt(weights)), name, f"entropy {spread:.2f}"))
    return tiles("Attention of one head with and without the scale", [cells], side=150)


def activation() -> str:
    parts, edges = [], np.linspace(-8, 8, 65)
    for column, (name, label) in enumerate((("z1", "z1"), ("activated", "GELU(z1)"), ("z2", "z2"))):
        counts = np.histogram(step(f"blocks.0.{name}"), edges)[0]
        left = 8 + 230 * column
        for at, (number, (low, _high)) in enumerate(zip(counts, pairwise(edges), strict=True)):
            tall = 110 * number / counts.max()
            parts.append(
                f'<rect class="c{int(low >= -0.25)}" x="{left + at * 3.3:.1f}" y="{140 - tall:.1f}" width="2.9"'
                f' height="{tall:.1f}"/>'
            )
        parts += [text(left + 105, 18, label), text(left + 105, 158, "0", "soft")]
        parts.append(f'<path class="axis" d="M {left} 140.5 h 211"/>')
    return draw(700, 164, "Values in the MLP of the first layer", *parts)


def norms() -> str:
    before, after = step("tokens"), step("blocks.0.norm1")
    norm = clothes()[0].model.blocks[0].norm1
    plain = (after - norm.bias.detach().numpy()) / norm.weight.detach().numpy()
    curves = [
        ("std of z_0", range(50), before.std(-1)),
        ("std of LN", range(50), plain.std(-1)),
        ("mean of LN", range(50), plain.mean(-1)),
    ]
    ticks = [(0, "[CLS]"), (10, "10"), (20, "20"), (30, "30"), (40, "40"), (49, "49")]
    levels = [(value / 2, f"{value / 2:g}") for value in range(0, 4)]
    return lines("Mean and deviation of each token over its D values", curves, "token", "", ticks, levels)


def states() -> str:
    names = ["tokens", *(f"blocks.{layer}" for layer in range(5))]
    together = colour_by_components(np.concatenate([step(name)[1:] for name in names]), (7 * len(names), 7))
    cells = [(colours, f"z_{at}", "") for at, colours in enumerate(np.split(together, len(names)))]
    return tiles("The 49 patches after each layer: three principal components as colours", [cells], side=96)


def learners() -> str:
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.tree import DecisionTreeClassifier

    splits, rows = open_data("digits").splits, []
    (x, labels), (unseen, truth) = (
        (np.stack(splits[name].images).reshape(-1, 64) / 255, np.array(splits[name].labels))
        for name in ("train", "test")
    )
    for name, learner in (
        ("k-NN", KNeighborsClassifier(3)),
        ("linear", LogisticRegression(max_iter=2000)),
        ("tree", DecisionTreeClassifier(random_state=0)),
        ("tree, depth 2", DecisionTreeClassifier(max_depth=2, random_state=0)),
        ("Bayes", GaussianNB(var_smoothing=0.01)),
    ):
        learner.fit(x[:200], labels[:200])
        known, score = learner.score(x[:200], labels[:200]), learner.score(unseen, truth)
        rows.append((name, score, f"test {score:.0%}, train {known:.0%}"))
    return bars("Classical learners from 200 digits, on 360 others", rows, most=1.0)


# Chapter 5


def knowing() -> str:
    bundle = clothes()[0]
    bare = type(bundle.model)(bundle.model.config)
    torch.manual_seed(0)
    bare.init_weights()
    cells = []
    for model in (bare, bundle.model):
        table = position_table(model)
        known, near = structure(table, (7, 7)), similarity(table).reshape(7, 7, 7, 7)
        mosaic = signed(np.pad(near, ((0, 0), (0, 0), (0, 1), (0, 1))).transpose(0, 2, 1, 3).reshape(56, 56))
        cells.append((mosaic, "", f"R2: row {max(known.row, 0):.2f}, column {max(known.column, 0):.2f}"))
    return tiles("Similarity of position embeddings before and after training", [cells], side=200)


def horizon() -> str:
    noise = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    cells = []
    for name, short in (("ResNet-Nano", "CNN"), ("ViT-Nano/7", "ViT")):
        model = untrained(name)
        for layer in range(0, model.config.depth, max(model.config.depth - 1, 1)):
            field = reach(model, noise, layer=layer)
            cells.append((reach_colours(field), f"{short}, layer {layer}", f"{(field > 0).mean():.0%}"))
    return tiles("Which pixels reach the centre, before training", [cells])


def memory() -> str:
    noise, curves = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), []
    for name in ("ViT-Nano/7", "LSTM-Nano/7"):
        model, x = untrained(name, patch=2), noise.clone().requires_grad_()
        output = vitrail.look(model, x, attention=False, gradients=True).steps[f"blocks.{model.config.depth - 1}"]
        (gradient,) = torch.autograd.grad(output[:, -1].norm(dim=-1).sum(), x)
        found = patchify(gradient, (2, 2)).norm(dim=-1).mean(0).numpy()
        places = [*range(0, 195, 5), 195]
        curves.append((name.split("-")[0], places, np.log10(found[places] / found.max())))
    ticks = [(at, str(at)) for at in (0, 50, 100, 150, 195)]
    title, levels = "The last state's dependence on each patch", _decades(-5, 0)
    return lines(title, curves, "i", "|gradient|", ticks, levels, [COLOURS["vit"], COLOURS["lstm"]])


def _decades(low: int, high: int) -> list[tuple[float, str]]:
    return [(power, f"{10.0**power:g}") for power in range(low, high + 1)]


@torch.no_grad()
def steps() -> str:
    bundle, _, images, _ = clothes()
    kept = {name: tensor for name, tensor in bundle.model.state_dict().items() if name != "pos_embed"}
    models = {"none": bundle.model.clone_with(kept, position="none").eval(), "E_pos": bundle.model}
    cells = []
    for by in (0, 4, 1):
        moved = images.roll(by, dims=3)
        changes = [f"{name} {float((one(moved) - one(images)).abs().max()):.1f}" for name, one in models.items()]
        cells.append((_grey(moved[BOOT, 0]), f"{by} px", ", ".join(changes)))
    return tiles("The largest change of a logit under shifts, without and with positions", [cells], side=140)


def mixing() -> str:
    model = untrained("Mixer-Nano/7")
    seen = vitrail.look(untrained("ViT-Nano/7"), clothes()[2][BOOT : BOOT + 1])
    weights = dict(model.named_parameters())
    first, second = (weights[f"blocks.0.mlp_tokens.fc{number}.weight"].detach().numpy() for number in (1, 2))
    return tiles(
        "Token mixing has a weight for each pair of places; attention computes them from the image",
        [
            [
                (signed(second @ first), "Mixer", "16 x 16"),
                (heat(seen.attention[0][0, 0, 1:, 1:].numpy()), "ViT", "16 x 16"),
            ]
        ],
        side=140,
    )


def prices() -> str:
    rows = [
        (name, config.macs / 1e9, f"{config.macs / 1e9:.1f} GMAC, {config.parameters / 1e6:.1f} M")
        for name in ("ViT-B/16", "Mixer-B/16")
        if (config := find(name))
    ]
    return bars("Multiply-accumulates and parameters of ViT-B/16 and Mixer-B/16", rows, most=20)


DRAWN: tuple[Callable[[], str], ...] = (
    *(fields, shifts, patches, order, kernels, cls, positions),
    *(transfer, heads, mlp, answer, commuting, hybrid, sizes, gradients),
    *(sinusoids, orderless, stream, functions, path, resized),
    *(count, costs, attending, scaling, activation, norms, states, learners),
    *(knowing, horizon, memory, steps, mixing, prices),
)

KOREAN = {
    r"16 tokens": "토큰 16개",
    r"Bayes": "베이즈",
    r"R2: row (\S+), column": r"R2: 행 \1, 열",
    r"\|gradient\|": "|기울기|",
    r"accuracy, %": "정확도, %",
    r"entropy": "엔트로피",
    r"layer": "층",
    r"linear": "선형",
    r"logits, position none": "로짓, 위치 없음",
    r"logits, position": "로짓, 위치",
    r"mean length": "평균 노름",
    r"mean of (\w+)": r"\1의 평균",
    r"n / class": "클래스마다 이미지 수",
    r"pre-trained": "사전 학습",
    r"shuffled x and": "섞은 x와",
    r"shuffled x": "섞은 x",
    r"std of (\w+)": r"\1의 표준편차",
    r"test (\S+), train": r"테스트 \1, 학습",
    r"token": "토큰",
    r"tree, depth": "트리, 깊이",
    r"tree": "트리",
    r"untrained": "학습 전",
}
"""The words of the figures, as patterns, in Korean."""


def in_korean(svg: str) -> str:
    """The same figure with Korean words."""

    def translate(text: re.Match[str]) -> str:
        words = text[1]
        for english, korean in KOREAN.items():
            words = re.sub(english, korean, words)
        return f">{words}</text>"

    return re.sub(r">([^<>]+)</text>", translate, svg)


def drawings() -> Iterator[tuple[str, str]]:
    """Every figure by the name of its file; those that have words in Korean, too, as NAME.ko."""
    for figure in DRAWN:
        svg = figure()
        yield figure.__name__, svg
        if (korean := in_korean(svg)) != svg:
            yield f"{figure.__name__}.ko", korean


# What the lab found

UNITS = {
    "C3": ("log error", "로그 오차"),
    "C17": ("R²", "R²"),
    "C30": ("exponent - 1.5", "지수 - 1.5"),
    "C32a": ("difference of exponents", "지수의 차이"),
    "C32b": ("recency index - 0.5", "최근성 지수 - 0.5"),
}
"""Of claims whose number is not a difference of accuracies, in English and Korean."""


@cache
def claims() -> dict[str, dict]:
    """What the lab says of each claim, by its id."""
    return {one["id"]: one for one in json.loads((LAB / "claims.json").read_text(encoding="utf-8"))["claims"]}


@cache
def sentences() -> dict[str, dict[str, str]]:
    """The sentences of the lab's report in both languages, by the name of their file and their own."""
    return {
        f"{file.stem} {name}": words
        for file in [WORDS / "lab_report.toml", *sorted((WORDS / "questions").glob("*.toml"))]
        for name, words in tomllib.loads(file.read_text(encoding="utf-8")).items()
    }


def say(english: str, language: str) -> str:
    """A sentence of the report, which `claims.json` has in English, in this language."""
    if language == "en":
        return english
    for words in sentences().values():
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(words["en"]))
        if (found := re.fullmatch(pattern, english)) is not None and "ko" in words:
            fields = found.groupdict()
            if "remedy" in fields:  # a sentence of its own
                fields["remedy"] = say(fields["remedy"], language)
            return words["ko"].format(**fields)
    raise SystemExit(f"The words of the lab have no Korean for: {english}")


def number(claim: dict, language: str) -> str:
    """The deciding number of a trained claim with its interval; empty where there is none."""
    if not isinstance(claim["value"], float | int) or isinstance(claim["value"], bool):
        return ""
    value, *ends = (
        f"{one:+.2f}" if claim["id"] in UNITS else f"{100 * one:+.1f}"
        for one in (claim["value"], *(claim["interval"] or ()))
    )
    interval = f" ({' … '.join(ends)})" if ends else ""
    if claim["id"] in UNITS:
        return f"{UNITS[claim['id']][language == 'ko']}: {value}{interval}"
    return f"{value} {('points', '%p')[language == 'ko']}{interval}"


def lab_table(ids: Sequence[str], language: str) -> str:
    """What the lab says of these claims, as a table."""
    heads = ("| claim | verdict | what the lab found |", "| 주장 | 판정 | 실험실의 결과 |")[language == "ko"]
    rows = [heads, "|---|---|---|"]
    for name in ids:
        claim = claims()[name]
        verdict = sentences()[f"lab_report {claim['verdict']}"][language]
        said = [number(claim, language), *(say(claim[key], language) for key in ("result", "why") if key in claim)]
        found = "; ".join(filter(None, said)) or say(claim["rule"], language)
        rows.append(f"| **{name}** {say(claim['claim'], language)} | {verdict} | {found} |")
    return "\n".join(rows)


TABLE = re.compile(r"(<!-- lab: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: Path) -> str:
    """The text of a page with its tables as the report has them."""
    language = "ko" if page.stem.endswith(".ko") else "en"
    return TABLE.sub(
        lambda found: f"{found[1]}{lab_table(found[2].split(), language)}\n{found[3]}", page.read_text(encoding="utf-8")
    )


def pages() -> list[Path]:
    return sorted(DOCS.glob("notes*.md"))


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for name, svg in drawings():
        (FIGURES / f"{name}.svg").write_text(svg, encoding="utf-8")
    for page in pages():
        page.write_text(filled(page), encoding="utf-8")
