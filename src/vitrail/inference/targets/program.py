"""run.py of an exported model: a program that runs it on one image, without vitrail."""

from typing import TYPE_CHECKING

from vitrail.bundles.metadata import BundleInfo
from vitrail.data.preprocess import Preprocess

if TYPE_CHECKING:
    from vitrail.inference.targets.base import Target

PROGRAM = "run.py"
"""Name of the program in the folder of the export."""


def format_program(info: BundleInfo, target: "type[Target]", model: str, precision: str, batch: int) -> str:
    """Return the text of run.py. `model` is the model's path in the folder; the model takes `batch` images per call."""
    reads_image, argument = _reads_image(info.preprocess), argument_name(info.preprocess)
    purpose = "Print the five best classes of an image" if info.config.classes else "Print the features of an image"
    lines = [
        f'"""{purpose}: python {PROGRAM} {argument}',
        "",
        f"Needs only the packages {format_names(required_packages(info.preprocess, target))}.",
        '"""',
        "",
        "import os",
        "import sys",
        "",
        "import numpy as np",
        *(["from PIL import Image, ImageOps"] if reads_image else []),
        "",
        target.imports,
        "",
        f'if len(sys.argv) != 2: sys.exit("usage: python {PROGRAM} {argument}")',
        *preprocessing_lines(info.preprocess),
    ]
    if batch > 1:
        lines.append(f"pixels = np.repeat(pixels, {batch}, axis=0)  # the model takes {batch} images at a time")
    lines += [
        "os.chdir(os.path.dirname(os.path.abspath(__file__)))  # the folder of the model",
        target.program_for(model, precision),
    ]
    if info.config.classes:
        lines += [
            info.answer.python_code,
            'labels = open("labels.txt", encoding="utf-8").read().split("\\n")',
            "for index in scores.argsort()[::-1][:5]:",
            '    print(f"{scores[index]:.4f} {labels[index]}")',
        ]
    else:
        lines.append("print(*logits)")
    return "\n".join(lines) + "\n"


def required_packages(preprocess: Preprocess, target: "type[Target]") -> list[str]:
    """Return the names of the packages that run.py needs, as pip knows them."""
    names = ["numpy", *(["pillow"] if _reads_image(preprocess) else [])]
    return [*names, *(target.program_packages or target.packages)]


def argument_name(preprocess: Preprocess) -> str:
    """Return the placeholder for the argument of run.py."""
    return "IMAGE" if _reads_image(preprocess) else "PIXELS.npy"


def format_names(names: list[str]) -> str:
    """Return names as a list in a sentence: `numpy, pillow and torch`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _reads_image(preprocess: Preprocess) -> bool:
    """Whether the input is an image file. Other numbers of channels are read as an array."""
    return preprocess.channels in (1, 3)


def preprocessing_lines(preprocess: Preprocess) -> list[str]:
    """Return the lines of the program that read an image file into `pixels` as `Preprocess.crop` and `scale` do."""
    (height, width), channels = preprocess.resolution, preprocess.channels
    if not _reads_image(preprocess):
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
        'if image.mode[0] in "IF": sys.exit("Image must have 8 bits per channel. Save it as 8-bit PNG first.")',
        f'ground = Image.new("RGBA", image.size, {(*preprocess.background, 255)})',
        f'image = Image.alpha_composite(ground, image.convert("RGBA")).convert("{mode}")',
        *resize_lines,
        f'canvas = Image.new("{mode}", ({width}, {height}), {preprocess.background_pixel})',
        f"canvas.paste(image.resize(size, Image.{preprocess.interpolation.upper()}),"
        f" (-round((size[0] - {width}) / 2), -round((size[1] - {height}) / 2)))",
        f"pixels = np.asarray(canvas, np.float32).reshape(1, {height}, {width}, {channels}) / 255",
        f"pixels = ((pixels - {mean}) / {std}).transpose(0, 3, 1, 2).astype(np.float32)",
    ]
