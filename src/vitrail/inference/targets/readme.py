"""README.md of an export: a program that runs the model without vitrail."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.bundles.metadata import BundleInfo
from vitrail.core.files import write_text
from vitrail.data.preprocess import Preprocess

if TYPE_CHECKING:
    from vitrail.inference.targets.base import Target


def write_readme(
    folder: Path, info: BundleInfo, target: "type[Target]", model: str, batch: int, proof: dict[str, Any]
) -> None:
    """Write README.md for the model at a path in the folder; `batch` is the number of images it must be given."""
    name = info.config.name or info.config.family
    licence = info.provenance.get("licence", "unknown")
    (height, width), channels = info.config.resolution, info.config.channels
    batches = "any number of images" if proof["batch"] == "any" else f"{batch} images"
    text = f"""# {name}, exported to {target.name}

`{model}` takes `pixel_values` ({batches}, {channels} channels, {height} x {width} pixels; float32, normalised as
`preprocess.json` says) and gives `logits` and `features`, the input of the head. In this folder, for an image that is
named on the command line:

```python
{_program(info, target, model, proof["precision"], batch)}
```

{target.notes}

The model computes in {proof["precision"]}. Compared with torch, {proof["same_answers"]} of {proof["pictures"]} answers
are the same, and logits are at most {proof["max_logit_difference"]:.1e} apart; `proof.json` has this with the hashes of
the files.{_more(proof)} Licence of the weights: {licence}.
"""
    write_text(folder / "README.md", text.replace("\n\n\n\n", "\n\n"))


def _more(proof: dict[str, Any]) -> str:
    """What else changes answers: merged tokens, and what `vitrail bench` found of the precision."""
    found = ""
    if "merging" in proof:
        found += f" That is the model that merges tokens: {merging_words(proof['merging'])}."
    if (known := proof.get("measured")) is not None and proof["precision"] != "float32":
        found += f" On {known['data']}, {known['same']:,} of {known['images']:,} answers are those of float32."
    return found


def merging_words(about: dict[str, Any]) -> str:
    """How many tokens join others in front of each layer, and what that changes."""
    counts = ", ".join(map(str, about["merge"]))
    if not about.get("curve"):
        return f"{counts} in front of its layers; changed answers were not counted (no --data)"
    last = about["curve"][-1]
    low, high = last["interval"]
    return (
        f"{counts} in front of its layers; {last['changed']} of {last['count']} answers differ from the model without"
        f" merging on {about['data']} ({low:.1%} to {high:.1%})"
    )


def _program(info: BundleInfo, target: "type[Target]", model: str, precision: str, batch: int) -> str:
    lines = ["import sys", "", "import numpy as np", target.imports, "from PIL import Image, ImageOps", ""]
    lines += _pixels(info.preprocess)
    if batch > 1:
        lines.append(f"pixels = np.repeat(pixels, {batch}, axis=0)  # the model takes {batch} images at a time")
    lines.append(target.program_for(model, precision))
    if info.config.classes:
        lines += [
            info.answer.python_code,
            'labels = open("labels.txt", encoding="utf-8").read().split("\\n")',
            "for index in scores.argsort()[::-1][:5]:",
            '    print(f"{scores[index]:.4f} {labels[index]}")',
        ]
    else:
        lines.append("print(*logits)")
    return "\n".join(lines)


def _pixels(preprocess: Preprocess) -> list[str]:
    """Lines from an image file to `pixels`; what they compute is `Preprocess.crop` and `scale`."""
    (height, width), channels = preprocess.resolution, preprocess.channels
    if channels not in (1, 3):
        return [f"pixels = np.load(sys.argv[1])  # float32 (1, {channels}, {height}, {width}), normalised"]
    wide, high = (int(side / preprocess.crop_fraction) for side in (width, height))
    mode = "L" if channels == 1 else "RGB"
    fitting = {
        "squash": [f"size = {wide}, {high}"],
        "shorter": [f"scale = max({wide} / image.width, {high} / image.height)"],
        "pad": [f"scale = min({wide} / image.width, {high} / image.height)"],
    }[preprocess.resize]
    if preprocess.resize != "squash":
        fitting.append("size = [max(int(side * scale + 1e-9), 1) for side in image.size]")
    mean, std = ([float(value) for value in values] for values in (preprocess.mean, preprocess.std))
    return [
        "image = ImageOps.exif_transpose(Image.open(sys.argv[1]))",
        'if image.mode[0] in "IF": sys.exit("Image must have 8 bits per channel. Convert it first.")',
        f'ground = Image.new("RGBA", image.size, {(*preprocess.background, 255)})',
        f'image = Image.alpha_composite(ground, image.convert("RGBA")).convert("{mode}")',
        *fitting,
        f'canvas = Image.new("{mode}", ({width}, {height}), {preprocess.background_pixel})',
        f"canvas.paste(image.resize(size, Image.{preprocess.interpolation.upper()}),"
        f" (-round((size[0] - {width}) / 2), -round((size[1] - {height}) / 2)))",
        f"pixels = np.asarray(canvas, np.float32).reshape(1, {height}, {width}, {channels}) / 255",
        f"pixels = ((pixels - {mean}) / {std}).transpose(0, 3, 1, 2).astype(np.float32)",
    ]
