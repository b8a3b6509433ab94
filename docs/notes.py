"""Draw the figures of the notes (docs/notes/*.svg), and update the tables of claims in docs/notes-*.md.

.venv/bin/python docs/notes.py          (part of `make format`; tests/docs/test_notes.py checks pages and figures)

Every figure is drawn from the embedded model and data, or from a model with fixed random weights. Tables are between
`<!-- lab: C1 C2 -->` and `<!-- end -->` in the pages, and contain results of the bias lab.
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
LAB_SOURCE = DOCS.parent / "src" / "vitrail" / "lab"
BOOT_INDEX = 15  # of an ankle boot among the forty embedded images

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


# Parts of figures


def draw(width: int, height: int, title: str, *parts: str) -> str:
    """Return an SVG file with light and dark colours."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def label(x: float, y: float, content: object, css_class: str = "") -> str:
    """Return a text element, centred unless a class `start` or `end` aligns it."""
    attribute = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x:g}" y="{y:g}"{attribute}>{content}</text>'


def tile(x: float, y: float, side: float, colours: np.ndarray, above: str = "", below: str = "") -> str:
    """Return pixels (h, w) or (h, w, 3) as a framed image of width `side`, with a line of text above and one below."""
    buffer = io.BytesIO()
    Image.fromarray(colours).save(buffer, "PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    height = side * colours.shape[0] / colours.shape[1]
    box = f'x="{x:g}" y="{y:g}" width="{side:g}" height="{height:g}"'
    parts = [f'<image {box} href="data:image/png;base64,{data}"/>', f'<rect class="frame" {box}/>']
    parts += [label(x + side / 2, y - 8, above)] if above else []
    parts += [label(x + side / 2, y + height + 17, below, "soft")] if below else []
    return "\n".join(parts)


def tiles(title: str, rows: Sequence[Sequence[tuple[np.ndarray, str, str]]], side: int = 120) -> str:
    """Return a figure of square images in rows. Each cell has pixels, the text above and the text below."""
    parts, y = [], 0
    for cells in rows:
        y += 26 if any(above for _, above, _ in cells) else 6
        parts += [tile(8 + column * (side + 16), y, side, *cell) for column, cell in enumerate(cells)]
        y += side + (24 if any(below for _, _, below in cells) else 4)
    return draw((side + 16) * max(map(len, rows)), y + 4, title, *parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]], maximum: float, *, colour: str = "c0") -> str:
    """Return a chart of horizontal bars. Each row has a name, a value up to `maximum`, and the text after the bar."""
    parts = []
    for row, (name, value, value_text) in enumerate(rows):
        y, width = 8 + row * 26, max(300 * value / maximum, 0)
        parts += [
            label(150, y + 14, name, "end"),
            f'<rect class="{colour}" x="158" y="{y}" width="{width:.1f}" height="18"/>',
            label(164 + width, y + 14, value_text, "start soft"),
        ]
    return draw(620, 12 + 26 * len(rows), title, *parts)


def lines(
    title: str,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    colours: Sequence[int] = (0, 1, 2),
) -> str:
    """Return a line chart with dots. Each curve has a name, x and y values; each tick has a value and its text."""
    (left, right), (low, high) = ((ticks[0][0], ticks[-1][0]) for ticks in (x_ticks, y_ticks))

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return 60 + 340 * (x - left) / (right - left), 200 - 170 * (y - low) / (high - low)

    parts = [label(8, 16, y_label, "start soft"), label(230, 242, x_label, "soft")]
    for value, tick_text in y_ticks:
        y = to_pixels(left, value)[1]
        parts += [f'<path class="axis" d="M 60 {y:.1f} H 400"/>', label(54, y + 4, tick_text, "end soft")]
    parts += [label(to_pixels(value, low)[0], 220, tick_text, "soft") for value, tick_text in x_ticks]
    line_ends = []
    for number, (name, xs, ys) in zip(colours, curves, strict=False):
        points = [to_pixels(x, y) for x, y in zip(xs, ys, strict=True)]
        parts.append(f'<path class="l{number}" d="M {" L ".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
        parts += [f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        line_ends.append((points[-1][1], name, number))
    label_y = -100.0
    for y, name, number in sorted(line_ends):
        label_y = max(y, label_y + 16)  # labels must not overlap
        parts.append(label(408, label_y + 4, name, f"start c{number}"))
    return draw(560, 250, title, *parts)


# Models and data of figures


@cache
def clothes() -> tuple[vitrail.Bundle, np.ndarray, torch.Tensor, torch.Tensor]:
    """Return the embedded bundle, and pixels, model inputs and labels of the embedded images."""
    bundle, data = vitrail.load("fashion"), open_data("fashion-40").splits["test"]
    pixels = np.stack([np.asarray(image).squeeze() for image in data.images])
    return bundle, pixels, bundle.preprocess(list(data.images)), torch.tensor(data.labels)


@cache
def boot() -> Activations:
    """Return the activations of the embedded model for the ankle boot, with all steps inside layers."""
    bundle, _, images, _ = clothes()
    return vitrail.look(bundle.model, images[BOOT_INDEX : BOOT_INDEX + 1], inside=None)


def boot_step(name: str) -> np.ndarray:
    """Return a step of the embedded model for the ankle boot."""
    return boot().steps[name][0].numpy()


def untrained(name: str, **changes: Any) -> AnyModel:
    """Return a model with fixed random weights."""
    torch.manual_seed(0)
    return vitrail.create(name, **changes).eval()


@cache
def shuffled() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random order of the 49 patches, and the embedded images with their patches in this order."""
    order = torch.randperm(49, generator=torch.Generator().manual_seed(0))
    return order, move(clothes()[2], patch_order(order, (28, 28), (4, 4)))


# Figures. The name of each function is the name of its file, and its title says what the figure shows.

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
    image, rows = images[BOOT_INDEX : BOOT_INDEX + 1].double(), []
    for strides, shift in (((1, 1, 1), (3, 5)), (None, (1, 1))):
        cnn = untrained("ResNet-Nano", strides=strides, edges="circular").double()
        shifted_image = image.roll(shift, (2, 3))
        (maps,), (shifted_maps,) = cnn.feature_maps(image), cnn.feature_maps(shifted_image)
        features, shifted_features = (values[0, 0].numpy() for values in (maps, shifted_maps))
        scale = image.shape[-1] // maps.shape[-1]
        error = np.abs(np.roll(features, shift, (0, 1)) - shifted_features).max() if scale == 1 else None
        cells = [
            (_grey(image[0, 0]), "x", ""),
            (heat(features - features.min()), "f(x)", f"{len(features)} x {len(features)}"),
            (_grey(shifted_image[0, 0]), f"T x, {shift[0]} + {shift[1]} px", ""),
            (
                heat(shifted_features - shifted_features.min()),
                "f(T x)",
                "" if error is None else f"|T f(x) - f(T x)| {error:.0e}",
            ),
        ]
        rows.append(cells)
    return tiles("A convolution's features move with the image; strides break it", rows)


def _grey(image: torch.Tensor) -> np.ndarray:
    values = image.numpy()
    return (255 * (values - values.min()) / np.ptp(values)).round().astype(np.uint8)


def patches() -> str:
    _, pixels, _, _ = clothes()
    cut = pixels[BOOT_INDEX].reshape(7, 4, 7, 4).transpose(0, 2, 1, 3)
    parts = [tile(8, 26, 140, pixels[BOOT_INDEX], "x", "28 x 28")]
    parts += [tile(176 + 22 * column, 26 + 22 * row, 18, cut[row, column]) for row in range(7) for column in range(7)]
    parts += [label(250, 18, "P = 4"), label(250, 195, "N = 49", "soft")]
    flat = cut.reshape(49, 16)
    parts.append(tile(360, 26, 46, flat, "x_p", "49 x 16"))
    embedded = boot_step("projected")
    parts.append(tile(450, 26, 276, signed(embedded), "x_p E", "49 x 96"))
    return draw(740, 200, "An image, its 49 patches, the patches flattened, and projected", *parts)


@torch.no_grad()
def order() -> str:
    bundle, pixels, images, labels = clothes()
    order, shuffled_images = shuffled()
    permuted_model = vitrail.load("fashion").model
    permute_input_weights(permuted_model, patch_order(order, (28, 28), (4, 4)))
    correct = [
        int((model(inputs).argmax(1) == labels).sum())
        for model, inputs in (
            (bundle.model, images),
            (bundle.model, shuffled_images),
            (permuted_model, shuffled_images),
        )
    ]
    shuffled_boot = _grey(shuffled_images[BOOT_INDEX, 0])
    return tiles(
        "Shuffled patches, and positions that follow them",
        [
            [
                (pixels[BOOT_INDEX], "x, E_pos", f"{correct[0]} / 40"),
                (shuffled_boot, "shuffled x, E_pos", f"{correct[1]} / 40"),
                (shuffled_boot, "shuffled x and E_pos", f"{correct[2]} / 40"),
            ]
        ],
        side=140,
    )


def kernels() -> str:
    components, shares = filters(clothes()[0].model)
    cells = [
        ((255 * components[index, ..., 0]).round().astype(np.uint8), "", f"{shares[index]:.0%}") for index in range(8)
    ]
    return tiles("The principal components of the columns of E", [cells], side=64)


def cls() -> str:
    attention = [boot().attention[layer][0].numpy() for layer in range(5)]
    rows = [
        [(clothes()[1][BOOT_INDEX], "", "")]
        + [
            (heat(weights[head, 0, 1:].reshape(7, 7)), f"layer {layer}" if not head else "", "")
            for layer, weights in enumerate(attention)
        ]
        for head in range(3)
    ]
    return tiles("Where [CLS] looks, in five layers (columns) and three heads (rows)", rows, side=84)


def positions() -> str:
    similarities = similarity(position_table(clothes()[0].model)).reshape(7, 7, 7, 7)
    parts = [
        tile(8 + 52 * column, 8 + 52 * row, 48, signed(similarities[row, column]))
        for row in range(7)
        for column in range(7)
    ]
    return draw(376, 376, "Similarity of each position embedding to all others", *parts)


# Chapter 2


def transfer() -> str:
    bundle = clothes()[0]
    untrained_bundle = vitrail.Bundle(model=type(bundle.model)(bundle.model.config), preprocess=bundle.preprocess)
    torch.manual_seed(0)
    untrained_bundle.model.init_weights()
    curves = []
    for name, evaluated in (("pre-trained", bundle), ("untrained", untrained_bundle)):
        rows = vitrail.evaluate(evaluated, "digits", protocol="fewshot", shots=[1, 5, 10, 25]).scores["shots"]
        curves.append((name, np.log([row["shots"] for row in rows]), [100 * row["accuracy"] for row in rows]))
    ticks = [(float(np.log(count)), str(count)) for count in (1, 5, 10, 25)]
    levels = [(value, str(value)) for value in (20, 40, 60, 80, 100)]
    return lines("Few-shot accuracy on digits", curves, "n / class", "accuracy, %", ticks, levels)


def heads() -> str:
    parts = [tile(8, 26, 192, signed(boot_step("blocks.0.norm1")), "LN(z)", "50 x 96")]
    for column, name in enumerate("qkv"):
        parts += [
            tile(
                232 + 84 * column,
                26 + 116 * head,
                64,
                signed(boot_step(f"blocks.0.{name}")[head]),
                name if not head else "",
            )
            for head in range(3)
        ]
    parts.append(label(348, 376, "3 x (50 x 32)", "soft"))
    return draw(500, 384, "One layer's queries, keys and values in three heads", *parts)


def mlp() -> str:
    strips = {name: boot_step(f"blocks.0.{name}")[25:26] for name in ("norm2", "z1", "activated", "z2")}
    labels = ("LN(z')", "W1 x + b1", "GELU", "W2 a + b2")
    parts = []
    for row, (values, name) in enumerate(zip(strips.values(), labels, strict=True)):
        y, width = 8 + 46 * row, values.shape[1] * 2.4
        parts.append(tile(110, y, width, np.repeat(signed(values), 16, axis=0)))
        parts += [
            label(102, y + 24, name, "end"),
            label(118 + width, y + 24, f"{values.shape[1]}: {values.min():.2f} ... {values.max():.2f}", "start soft"),
        ]
    return draw(740, 196, "One token through the MLP: one activation, between two linear layers", *parts)


@torch.no_grad()
def commuting() -> str:
    model = vitrail.load("fashion").model.double()
    z = model.patch_embed(clothes()[2].double())
    block, order, table = model.blocks[0], shuffled()[0], model.pos_embed[0, 1:]
    pairs = {
        name: (layer(z)[:, order], layer(z[:, order]))
        for name, layer in (("LN", block.norm1), ("MLP", block.mlp), ("MSA", block.attn))
    }
    pairs["MSA, z + E_pos"] = (block.attn(z + table)[:, order], block.attn(z[:, order] + table))
    rows = []
    for name, (shuffled_after, shuffled_before) in pairs.items():
        difference = float((shuffled_after - shuffled_before).abs().max() / shuffled_after.abs().max())
        value_text = "0" if not difference else f"{difference:.2f}" if difference > 0.01 else "&lt; 1e-14"
        rows.append((name, difference, value_text))
    return bars("Which layers commute with a new order of tokens", rows, maximum=1.0)


@torch.no_grad()
def hybrid() -> str:
    model = untrained("Hybrid-Nano")
    activations = vitrail.look(model, clothes()[2][BOOT_INDEX : BOOT_INDEX + 1])
    tokens = activations.steps["patches"][0]
    cells = [(clothes()[1][BOOT_INDEX], "x", "28 x 28")]
    for channel in sorted(tokens.std(dim=0).topk(4).indices.tolist()):
        values = tokens[:, channel] - tokens[:, channel].min()
        cells.append((heat(values.view(4, 4).numpy()), f"c{channel}", ""))
    cells.append((colour_by_components(tokens, (4, 4)), "64", "16 tokens, 1 x 1"))
    return tiles("Feature maps of an untrained stem of convolutions: each position is a token", [cells], side=100)


def gradients() -> str:
    curves = []
    for norm_order in ("pre", "post"):
        model = untrained("ViT-Nano/7", depth=12, norm_order=norm_order, classes=10)
        torch.nn.init.normal_(model.head.weight, std=0.02)
        torch.nn.functional.cross_entropy(model(clothes()[2]), clothes()[3]).backward()
        norms = [float(block.mlp.fc2.weight.grad.norm()) for block in model.blocks]
        curves.append((f"{norm_order}-LN", range(12), np.log10(norms)))
    ticks = [(at, str(at)) for at in (0, 3, 6, 9, 11)]
    return lines("Gradients of twelve layers at the start", curves, "layer", "|gradient|", ticks, _decades(-2, 0))


def answer() -> str:
    bundle, head = clothes()[0], clothes()[0].model.head
    parts = [tile(8, 26, 288, np.repeat(signed(boot_step("pooled")[None]), 8, axis=0), "y", "96")]
    parts.append(tile(8, 106, 288, signed(head.weight.detach().numpy()), "W", "10 x 96"))
    for row, (class_name, logit) in enumerate(zip(bundle.labels, boot().logits[0].tolist(), strict=True)):
        y, left, right = 12 + 18 * row, 490 + 16 * min(logit, 0), 490 + 16 * max(logit, 0)
        parts += [
            label(430, y + 11, class_name, "end"),
            f'<rect class="c{int(logit > 0)}" x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="13"/>',
            label(580, y + 11, f"{logit:.1f}", "start soft"),
        ]
    return draw(620, 200, "From the normalised class token to ten logits: one linear layer", *parts)


def sizes() -> str:
    names = ("ViT-B/32", "ViT-B/16", "ViT-L/32", "ViT-L/16", "ViT-H/14")
    rows = [
        (name, config.parameters / 1e6, f"{config.parameters / 1e6:.1f} M") for name in names if (config := find(name))
    ]
    return bars("Parameters of published ViTs, with 1,000 classes", rows, maximum=700)


# Chapter 3


def sinusoids() -> str:
    table = position_table(untrained("ViT-Micro/4", position="sincos-1d"))
    distances = np.linalg.norm(table[:, None] - table[None], axis=-1)
    parts = [
        tile(8, 26, 192, signed(table), "sin, cos", "49 x 64"),
        tile(232, 26, 147, heat(distances), "|e_i - e_j|", "49 x 49"),
    ]
    return draw(400, 200, "A table of sines and cosines, and how far its rows are from each other", *parts)


def _without_positions(model: AnyModel) -> AnyModel:
    """Return a copy of the embedded model without position embeddings."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "pos_embed"}
    return model.clone_with(weights, position="none").eval()


@torch.no_grad()
def orderless() -> str:
    bundle, pixels, images, _ = clothes()
    shuffled_images = shuffled()[1]
    without_positions = _without_positions(bundle.model)
    parts = [
        tile(8, 26, 112, pixels[BOOT_INDEX], "x"),
        tile(136, 26, 112, _grey(shuffled_images[BOOT_INDEX, 0]), "shuffled x"),
    ]
    for column, (name, model) in enumerate((("E_pos", bundle.model), ("none", without_positions))):
        left = 290 + 200 * column
        parts.append(label(left + 80, 18, f"logits, position {name}"))
        logits, shuffled_logits = (model(inputs)[BOOT_INDEX].tolist() for inputs in (images, shuffled_images))
        for row, pair in enumerate(zip(logits, shuffled_logits, strict=True)):
            for colour, logit in enumerate(pair):
                x, width = left + 80 + min(logit, 0) * 14, abs(logit) * 14
                y = 26 + 14 * row + 5 * colour
                parts.append(f'<rect class="c{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="4"/>')
    return draw(680, 172, "Ten logits for an image, and for the same image with shuffled patches", *parts)


def stream() -> str:
    depth, curves = range(5), []
    for name, key in (("z", "blocks.{}"), ("MSA", "blocks.{}.msa"), ("MLP", "blocks.{}.z2")):
        curves.append(
            (name, depth, [float(np.linalg.norm(boot_step(key.format(layer)), axis=-1).mean()) for layer in depth])
        )
    high = 10 * int(np.ceil(max(max(ys) for _, _, ys in curves) / 10))
    ticks, levels = [(at, str(at)) for at in depth], [(value, str(value)) for value in range(0, high + 1, 10)]
    return lines("The residual stream, and what each part adds to it", curves, "layer", "mean norm", ticks, levels)


def functions() -> str:
    x = torch.linspace(-3, 3, 25)
    functions = (("GELU", torch.nn.functional.gelu), ("tanh", torch.tanh), ("ReLU", torch.relu))
    curves = [(name, x.tolist(), function(x).tolist()) for name, function in functions]
    ticks = [(at, str(at)) for at in range(-3, 4)]
    return lines("Three activation functions", curves, "x", "", ticks, [(at, str(at)) for at in range(-1, 4)])


def path() -> str:
    bundle = clothes()[0]
    rows = [
        (
            f"layer {entry['layer']}",
            entry["probability"],
            f"{entry['probability']:.0%} (1. {bundle.labels[entry['winner']]})",
        )
        for entry in apply_logit_lens(bundle.model, boot())
    ]
    return bars("The probability of ankle boot if each layer were the last", rows, maximum=1.0)


def resized() -> str:
    original = clothes()[0].model
    cells = []
    for model, grid in ((original, 7), (original.resize(56), 14)):
        similarities = similarity(position_table(model)).reshape(grid, grid, grid, grid)
        cells.append(
            (signed(similarities[2 * grid // 7, 3 * grid // 7]), f"{grid} x {grid}", f"E_pos {grid**2 + 1} x 96")
        )
    return tiles("The similarity of one position to all others, before and after interpolation", [cells], side=140)


# Chapter 4


def count() -> str:
    parts = []
    for left, patch, grid in ((8, 16, 14), (300, 14, 16)):
        size = 224 / grid
        grid_lines = [f"M {left + n * size:.1f} 26 v 224 M {left} {26 + n * size:.1f} h 224" for n in range(grid + 1)]
        parts += [
            f'<path class="axis" d="{" ".join(grid_lines)}"/>',
            label(left + 112, 18, f"P = {patch}"),
            label(left + 112, 268, f"{grid} x {grid} = {grid**2}", "soft"),
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
        scores = boot_step("blocks.0.scores")[head, query, 1:].reshape(7, 7)
        weights = boot_step("blocks.0.weights")[head, query, 1:].reshape(7, 7)
        pixels = clothes()[1][BOOT_INDEX].copy()
        pixels[12:16, [12, 15]] = pixels[[12, 15], 12:16] = 255  # frame of the query patch
        rows.append(
            [
                (pixels, "x" if not head else "", ""),
                (signed(scores), "q k^T / sqrt(d)" if not head else "", f"{scores.min():.1f} ... {scores.max():.1f}"),
                (heat(weights), "softmax" if not head else "", f"{weights.min():.4f} ... {weights.max():.2f}"),
            ]
        )
    return tiles("Scores and attention weights of the patch in the middle, in three heads", rows, side=112)


def scaling() -> str:
    query, keys = boot_step("blocks.0.q"), boot_step("blocks.0.k")
    cells = []
    for name, scale in (("1 / sqrt(d)", 32**-0.5), ("1", 1.0)):
        weights = torch.tensor(query @ keys.transpose(0, 2, 1) * scale).softmax(-1)[0].numpy()
        entropy = -(weights * np.log(np.maximum(weights, 1e-30))).sum(-1).mean() / np.log(50)
        cells.append((sequential(np.sqrt(weights)), name, f"entropy {entropy:.2f}"))
    return tiles("Attention of one head with and without the scale", [cells], side=150)


def activation() -> str:
    parts, edges = [], np.linspace(-8, 8, 65)
    for column, (name, title) in enumerate((("z1", "z1"), ("activated", "GELU(z1)"), ("z2", "z2"))):
        counts = np.histogram(boot_step(f"blocks.0.{name}"), edges)[0]
        left = 8 + 230 * column
        for index, (count, (low, _high)) in enumerate(zip(counts, pairwise(edges), strict=True)):
            height = 110 * count / counts.max()
            parts.append(
                f'<rect class="c{int(low >= -0.25)}" x="{left + index * 3.3:.1f}" y="{140 - height:.1f}" width="2.9"'
                f' height="{height:.1f}"/>'
            )
        parts += [label(left + 105, 18, title), label(left + 105, 158, "0", "soft")]
        parts.append(f'<path class="axis" d="M {left} 140.5 h 211"/>')
    return draw(700, 164, "Values in the MLP of the first layer", *parts)


def norms() -> str:
    before, after = boot_step("tokens"), boot_step("blocks.0.norm1")
    norm = clothes()[0].model.blocks[0].norm1
    normalised = (after - norm.bias.detach().numpy()) / norm.weight.detach().numpy()
    curves = [
        ("std of z_0", range(50), before.std(-1)),
        ("std of LN", range(50), normalised.std(-1)),
        ("mean of LN", range(50), normalised.mean(-1)),
    ]
    ticks = [(0, "[CLS]"), (10, "10"), (20, "20"), (30, "30"), (40, "40"), (49, "49")]
    levels = [(value / 2, f"{value / 2:g}") for value in range(0, 4)]
    return lines("Mean and deviation of each token over its D values", curves, "token", "", ticks, levels)


def states() -> str:
    names = ["tokens", *(f"blocks.{layer}" for layer in range(5))]
    colours = colour_by_components(np.concatenate([boot_step(name)[1:] for name in names]), (7 * len(names), 7))
    cells = [(tokens, f"z_{layer}", "") for layer, tokens in enumerate(np.split(colours, len(names)))]
    return tiles("The 49 patches after each layer: three principal components as colours", [cells], side=96)


def learners() -> str:
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.tree import DecisionTreeClassifier

    splits, rows = open_data("digits").splits, []
    (x_train, y_train), (x_test, y_test) = (
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
        learner.fit(x_train[:200], y_train[:200])
        train_score, test_score = learner.score(x_train[:200], y_train[:200]), learner.score(x_test, y_test)
        rows.append((name, test_score, f"test {test_score:.0%}, train {train_score:.0%}"))
    return bars("Classical learners from 200 digits, on 360 others", rows, maximum=1.0)


# Chapter 5


def knowing() -> str:
    bundle = clothes()[0]
    untrained_model = type(bundle.model)(bundle.model.config)
    torch.manual_seed(0)
    untrained_model.init_weights()
    cells = []
    for model in (untrained_model, bundle.model):
        table = position_table(model)
        encoding, similarities = structure(table, (7, 7)), similarity(table).reshape(7, 7, 7, 7)
        mosaic = signed(np.pad(similarities, ((0, 0), (0, 0), (0, 1), (0, 1))).transpose(0, 2, 1, 3).reshape(56, 56))
        cells.append((mosaic, "", f"R2: row {max(encoding.row, 0):.2f}, column {max(encoding.column, 0):.2f}"))
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
        norms = patchify(gradient, (2, 2)).norm(dim=-1).mean(0).numpy()
        indices = [*range(0, 195, 5), 195]
        curves.append((name.split("-")[0], indices, np.log10(norms[indices] / norms.max())))
    ticks = [(at, str(at)) for at in (0, 50, 100, 150, 195)]
    title, levels = "The last state's dependence on each patch", _decades(-5, 0)
    return lines(title, curves, "i", "|gradient|", ticks, levels, [COLOURS["vit"], COLOURS["lstm"]])


def _decades(low: int, high: int) -> list[tuple[float, str]]:
    """Return ticks of a logarithmic axis, one per power of ten."""
    return [(power, f"{10.0**power:g}") for power in range(low, high + 1)]


@torch.no_grad()
def steps() -> str:
    bundle, _, images, _ = clothes()
    models = {"none": _without_positions(bundle.model), "E_pos": bundle.model}
    cells = []
    for shift in (0, 4, 1):
        shifted = images.roll(shift, dims=3)
        changes = [
            f"{name} {float((model(shifted) - model(images)).abs().max()):.1f}" for name, model in models.items()
        ]
        cells.append((_grey(shifted[BOOT_INDEX, 0]), f"{shift} px", ", ".join(changes)))
    return tiles("The largest change of a logit under shifts, without and with positions", [cells], side=140)


def mixing() -> str:
    model = untrained("Mixer-Nano/7")
    activations = vitrail.look(untrained("ViT-Nano/7"), clothes()[2][BOOT_INDEX : BOOT_INDEX + 1])
    weights = dict(model.named_parameters())
    first, second = (weights[f"blocks.0.mlp_tokens.fc{number}.weight"].detach().numpy() for number in (1, 2))
    return tiles(
        "Token mixing has a fixed weight for each pair of tokens; attention computes weights from the image",
        [
            [
                (signed(second @ first), "Mixer", "16 x 16"),
                (heat(activations.attention[0][0, 0, 1:, 1:].numpy()), "ViT", "16 x 16"),
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
    return bars("Multiply-accumulates and parameters of ViT-B/16 and Mixer-B/16", rows, maximum=20)


FIGURE_FUNCTIONS: tuple[Callable[[], str], ...] = (
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
    r"mean norm": "평균 노름",
    r"mean of (\w+)": r"\1의 평균",
    r"n / class": "클래스마다 이미지 수",
    r"none (\S+), E_pos": r"위치 없음 \1, E_pos",
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
"""Korean translations of the texts in figures, by regular expression."""


def to_korean(svg: str) -> str:
    """Return a figure with its texts in Korean."""

    def translate(match: re.Match[str]) -> str:
        content = match[1]
        for english, korean in KOREAN.items():
            content = re.sub(english, korean, content)
        return f">{content}</text>"

    return re.sub(r">([^<>]+)</text>", translate, svg)


def draw_figures() -> Iterator[tuple[str, str]]:
    """Yield each figure as (file name without suffix, SVG), and a second one NAME.ko if it has translated texts."""
    for figure in FIGURE_FUNCTIONS:
        svg = figure()
        yield figure.__name__, svg
        if (korean := to_korean(svg)) != svg:
            yield f"{figure.__name__}.ko", korean


# Tables of claims

UNITS = {
    "C3": ("log error", "로그 오차"),
    "C17": ("R²", "R²"),
    "C30": ("exponent - 1.5", "지수 - 1.5"),
    "C32a": ("difference of exponents", "지수의 차이"),
    "C32b": ("recency index - 0.5", "최근성 지수 - 0.5"),
}
"""Units in English and Korean of claims whose number is not a difference of accuracies."""


@cache
def claims() -> dict[str, dict]:
    """Return the claims of the lab with their verdicts, by id."""
    document = json.loads((LAB / "claims.json").read_text(encoding="utf-8"))
    return {claim["id"]: claim for claim in document["claims"]}


@cache
def lab_messages() -> dict[str, dict[str, str]]:
    """Return the messages of the lab in both languages, by file name and message name."""
    return {
        f"{file.stem} {name}": message
        for file in [LAB_SOURCE / "lab_report.toml", *sorted((LAB_SOURCE / "questions").glob("*.toml"))]
        for name, message in tomllib.loads(file.read_text(encoding="utf-8")).items()
    }


# Messages of stored results that the lab words differently since, until the lab is run again.
EARLIER_MESSAGES = (
    {
        "en": "fine-tuned accuracy with the hidden layer at pre-training - without: {hidden}",
        "ko": "은닉층을 두고 사전 학습한 뒤의 미세 조정 정확도 - 두지 않은 경우: {hidden}",
    },
    {"en": "Mixer-B/16 {mixer}, ViT-B/16 {vit} GMAC", "ko": "Mixer-B/16 {mixer}, ViT-B/16 {vit} GMAC"},
    {"en": "a probe on raw pixels: {pixels}", "ko": "원본 픽셀의 선형 평가: {pixels}"},
)


def translate_sentence(english: str, language: str) -> str:
    """Return an English sentence of `claims.json` in a language. Exit with an error if it has no translation."""
    if language == "en":
        return english
    for message in (*lab_messages().values(), *EARLIER_MESSAGES):
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(message["en"]))
        if (match := re.fullmatch(pattern, english)) is not None and "ko" in message:
            fields = match.groupdict()
            if "remedy" in fields:  # a message itself
                fields["remedy"] = translate_sentence(fields["remedy"], language)
            return message["ko"].format(**fields)
    raise SystemExit(f"Messages of the lab must be in Korean, too, got none for: {english}")


def claim_number(claim: dict, language: str) -> str:
    """Return the number that decides a claim, with its interval. Empty for claims without a number."""
    if not isinstance(claim["value"], float | int) or isinstance(claim["value"], bool):
        return ""
    value, *ends = (
        f"{part:+.2f}" if claim["id"] in UNITS else f"{100 * part:+.1f}"
        for part in (claim["value"], *(claim["interval"] or ()))
    )
    interval = f" ({' … '.join(ends)})" if ends else ""
    if claim["id"] in UNITS:
        return f"{UNITS[claim['id']][language == 'ko']}: {value}{interval}"
    return f"{value} {('points', '%p')[language == 'ko']}{interval}"


def lab_table(ids: Sequence[str], language: str) -> str:
    """Return a Markdown table of claims with their verdicts and results."""
    header = ("| claim | verdict | result of the lab |", "| 주장 | 판정 | 실험실의 결과 |")[language == "ko"]
    rows = [header, "|---|---|---|"]
    for name in ids:
        claim = claims()[name]
        verdict = lab_messages()[f"lab_report {claim['verdict']}"][language]
        parts = [
            claim_number(claim, language),
            *(translate_sentence(claim[key], language) for key in ("result", "why") if key in claim),
        ]
        result = "; ".join(filter(None, parts)) or translate_sentence(claim["rule"], language)
        rows.append(f"| **{name}** {translate_sentence(claim['claim'], language)} | {verdict} | {result} |")
    return "\n".join(rows)


TABLE = re.compile(r"(<!-- lab: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_tables(page: Path) -> str:
    """Return the text of a page with its tables updated."""
    language = "ko" if page.stem.endswith(".ko") else "en"
    return TABLE.sub(
        lambda match: f"{match[1]}{lab_table(match[2].split(), language)}\n{match[3]}", page.read_text(encoding="utf-8")
    )


def pages() -> list[Path]:
    return sorted(DOCS.glob("notes*.md"))


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for name, svg in draw_figures():
        (FIGURES / f"{name}.svg").write_text(svg, encoding="utf-8")
    for page in pages():
        page.write_text(fill_tables(page), encoding="utf-8")
