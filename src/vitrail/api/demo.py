"""The command `demo`: train and predict on embedded data, in about a minute on two cores.

A small ViT is trained on digits. Then the embedded bundle classifies test images of Fashion-MNIST.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.api.output import CLAIMS, print_run
from vitrail.bundles.bundle import Bundle, load
from vitrail.core.errors import MissingError, VitrailError
from vitrail.core.language import localise
from vitrail.core.settings import check_integer
from vitrail.core.terminal import display_width, say
from vitrail.data.dataset import Dataset, Split
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.inference.classifier import Classifier
from vitrail.lab.compare import compare
from vitrail.models.activations import look
from vitrail.reports.attention_figure import attention_figure
from vitrail.reports.run_report import RunReport
from vitrail.training.options import Options
from vitrail.training.recipe import change_recipe, find_recipe
from vitrail.training.run import Result, train

MODEL = "ViT-Pico/2"
# Digits are small and few: smaller batches, a higher learning rate, shifts of one pixel, no held-out images.
CHANGES = ("batch=64", "learning_rate=0.02", "holdout=0", "augment.padding=1", "augment.flip=none")
QUESTIONS, FAMILIES = ("data", "position", "neighbourhood"), ("vit", "resnet", "mlp")


def run(output: Path, *, epochs: int, seed: int, resumes: bool, force: bool, lab: bool) -> Result:
    """Train on digits; show predictions and attention on digits and clothes; run a short bias lab on digits."""
    check_integer("epochs", epochs, low=1, high=10_000)
    recipe = change_recipe(find_recipe("small"), CHANGES).with_length(epochs=epochs, steps=None, minutes=None)
    options = Options(seed=seed)
    result = train(
        "digits",
        MODEL,
        output,
        recipe,
        options,
        resumes=resumes,
        force=force,
        command="vitrail demo",
        observers=(RunReport,),
    )
    print_run(result.sentence, output)
    _print("\n1. The new model on held-out digits")
    _print_predictions(result.bundle, open_data("digits").splits["test"], output / "attention.png")
    _print("\n2. The embedded bundle on 40 images of clothes that it was not trained on")
    clothes = open_data("fashion-40")
    _print_predictions(load("fashion"), clothes.splits["test"], output / "fashion-attention.png")
    _write_images(clothes, output / "images")
    if lab:
        _run_lab(output / "lab")
    _print(
        f"\nNext:\n  open {output / 'report.html'}\n  vitrail predict fashion {output / 'images'}\n"
        f"  vitrail evaluate {output / 'bundle'} digits\n  vitrail train YOUR_FOLDER --model ViT-Nano/7 --output run"
    )
    return result


def _run_lab(output: Path) -> None:
    """Run the bias lab for a minute and print its verdicts; print a note if its extra is not installed."""
    _print("\n3. The bias lab: how much data do ViT, CNN and MLP need, and do positions and neighbours matter?")
    try:
        report = compare(
            "digits",
            output,
            questions=QUESTIONS,
            families=FAMILIES,
            seeds=2,
            budget="60s",
            command="vitrail demo",
            tell=say,
        )
    except MissingError as error:
        _print(f"left out: {error}")
        return
    for claim in report["claims"]:
        verdict, sentence = localise(claim["verdict"], "cells"), localise(claim["claim"], CLAIMS)
        _print(f"{claim['id']:>5}  {verdict}{' ' * (12 - display_width(verdict))}  {sentence}")
    _print(f"report: {output / 'index.html'}")
    _print(f"more:   vitrail compare digits --output {output} --budget 5m")


def _print_predictions(bundle: Bundle, split: Split, figure: Path) -> None:
    """Print correct predictions and up to ten mistakes, and write a figure of the [CLS] token's attention."""
    predictions = Classifier(bundle).predict(split.images, top_k=1)
    labels = bundle.labels or ()
    truth = [labels[label] for label in split.labels]
    is_correct = np.array([best.label == label for best, label in zip(predictions, truth, strict=True)])
    _write_attention_figure(bundle, split, is_correct, figure)
    width = max(map(len, ("prediction", *labels)))
    correct, mistakes = np.flatnonzero(is_correct), np.flatnonzero(~is_correct)
    _print(f"{len(correct)} of {len(is_correct)} correct")
    image, prediction, score = (localise(name, "headings") for name in ("image", "prediction", "score"))
    _print(f"{_align_right(image, width)}  {_align_right(prediction, width)}  {score}")
    for index in [*correct[:: max(len(correct) // 6, 1)][:6], *mistakes[:10]]:
        mark = "" if is_correct[index] else f"   <- {localise('wrong', 'cells')}"
        best = predictions[index]
        _print(f"{truth[index]:>{width}}  {best.label:>{width}}  {best.score:.3f}{mark}")
    _print(f"attention of [CLS]: {figure}")


def _write_images(dataset: Dataset, folder: Path) -> None:
    """Write the test images as files named by their class, as input for other commands."""
    split = dataset.splits["test"]
    try:
        folder.mkdir(exist_ok=True)
        for index, (pixels, label) in enumerate(zip(split.images, split.labels, strict=True)):
            name = dataset.labels[label].lower().replace("/", "-").replace(" ", "-")
            Image.fromarray(np.asarray(pixels)[..., 0]).save(folder / f"{name}-{index:02}.png")
    except OSError as error:
        raise VitrailError(f"Writing {str(folder)!r} failed ({error.strerror}).") from None


def _write_attention_figure(bundle: Bundle, held_out: Split, is_correct: np.ndarray, path: Path) -> None:
    """Write a figure of the [CLS] token's attention for an image, a correctly classified one if possible."""
    correct = np.flatnonzero(is_correct)
    index = int(correct[len(correct) // 3]) if len(correct) else 0
    pixels = held_out.images[index]
    preprocess: Preprocess = bundle.preprocess
    activations = look(bundle.model, preprocess([pixels]))
    label = (bundle.labels or ())[held_out.labels[index]]
    score = float(activations.logits.softmax(-1).max())
    c = bundle.model.config
    maps = {
        layer: weights[0, :, 0, c.prefix :].numpy().reshape(-1, *c.grid)
        for layer, weights in activations.attention.items()
    }
    title = f"Where does [CLS] look? {label}, score {score:.2f}"
    figure = attention_figure(preprocess.crop(pixels), maps, c.tokens, title)
    try:
        figure.save(path)
    except OSError as error:
        raise VitrailError(f"Writing {str(path)!r} failed ({error.strerror}).") from None


def _align_right(text: str, width: int) -> str:
    return " " * (width - display_width(text)) + text


def _print(text: str) -> None:
    """Print lines in the language of the command line."""
    sys.stdout.write("".join(f"{localise(line)}\n" for line in text.split("\n")))
