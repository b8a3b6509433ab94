"""README.md of an exported model, with a program that runs it without vitrail."""

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
    """Write README.md for the model at a path in the folder. The model takes `batch` images per call."""
    name = info.config.name or info.config.family
    licence = info.provenance.get("licence", "unknown")
    (height, width), channels = info.config.resolution, info.config.channels
    batches = "any number of images" if proof["batch"] == "any" else f"{batch} images"
    text = f"""# {name}, exported to {target.name}

`{model}` takes `pixel_values` ({batches}, {channels} channels, {height} x {width} pixels; float32, normalised as
described in `preprocess.json`) and returns `logits` and `features`, the input of the head. Run this program in this
folder with the path of an image as its argument:

```python
{_program_text(info, target, model, proof["precision"], batch)}
```

{target.notes}

The model computes in {proof["precision"]}. {proof["same_answers"]} of {proof["pictures"]} predictions are the same as
with torch, and logits differ by at most {proof["max_logit_difference"]:.1e}; `proof.json` has these numbers and the
hashes of the files.{_describe_changes(proof)} Licence of the weights: {licence}.
"""
    write_text(folder / "README.md", text.replace("\n\n\n\n", "\n\n"))


def _describe_changes(proof: dict[str, Any]) -> str:
    """Return sentences about merged tokens, and about the predictions that `vitrail bench` compared with float32."""
    text = ""
    if "merging" in proof:
        text += f" The model merges tokens: {describe_merging(proof['merging'])}."
    if (measured := proof.get("measured")) is not None and proof["precision"] != "float32":
        text += (
            f" On {measured['data']}, {measured['same']:,} of {measured['images']:,} predictions are the same as in"
            " float32."
        )
    return text


def describe_merging(merging: dict[str, Any]) -> str:
    """Return how many tokens are merged before each layer, and how many predictions this changes."""
    counts = ", ".join(map(str, merging["merge"]))
    if not merging.get("curve"):
        return f"{counts} before its layers; changed predictions were not counted (no --data)"
    cost = merging["curve"][-1]
    low, high = cost["interval"]
    return (
        f"{counts} before its layers; {cost['changed']} of {cost['count']} predictions differ from the model without"
        f" merging on {merging['data']} ({low:.1%} to {high:.1%})"
    )


def _program_text(info: BundleInfo, target: "type[Target]", model: str, precision: str, batch: int) -> str:
    lines = ["import sys", "", "import numpy as np", target.imports, "from PIL import Image, ImageOps", ""]
    lines += _preprocessing_lines(info.preprocess)
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


def _preprocessing_lines(preprocess: Preprocess) -> list[str]:
    """Return the lines of the program that read an image file into `pixels` as `Preprocess.crop` and `scale` do."""
    (height, width), channels = preprocess.resolution, preprocess.channels
    if channels not in (1, 3):
        return [f"pixels = np.load(sys.argv[1])  # float32 (1, {channels}, {height}, {width}), normalised"]
    resized_width, resized_height = (int(side / preprocess.crop_fraction) for side in (width, height))
    mode = "L" if channels == 1 else "RGB"
    resize_lines = {
        "squash": [f"size = {resized_width}, {resized_height}"],
        "shorter": [f"scale = max({resized_width} / image.width, {resized_height} / image.height)"],
        "pad": [f"scale = min({resized_width} / image.width, {resized_height} / image.height)"],
    }[preprocess.resize]
    if preprocess.resize != "squash":
        resize_lines.append("size = [max(int(side * scale + 1e-9), 1) for side in image.size]")
    mean, std = ([float(value) for value in values] for values in (preprocess.mean, preprocess.std))
    return [
        "image = ImageOps.exif_transpose(Image.open(sys.argv[1]))",
        'if image.mode[0] in "IF": sys.exit("Image must have 8 bits per channel. Convert it first.")',
        f'ground = Image.new("RGBA", image.size, {(*preprocess.background, 255)})',
        f'image = Image.alpha_composite(ground, image.convert("RGBA")).convert("{mode}")',
        *resize_lines,
        f'canvas = Image.new("{mode}", ({width}, {height}), {preprocess.background_pixel})',
        f"canvas.paste(image.resize(size, Image.{preprocess.interpolation.upper()}),"
        f" (-round((size[0] - {width}) / 2), -round((size[1] - {height}) / 2)))",
        f"pixels = np.asarray(canvas, np.float32).reshape(1, {height}, {width}, {channels}) / 255",
        f"pixels = ((pixels - {mean}) / {std}).transpose(0, 3, 1, 2).astype(np.float32)",
    ]
