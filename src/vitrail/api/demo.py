"""`vitrail demo`: training and prediction on embedded data, in about a minute on two cores.

A small ViT is trained on digits; then the embedded model classifies test images of Fashion-MNIST.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.api.output import print_run
from vitrail.bundles.bundle import Bundle, load
from vitrail.core.errors import MissingError, VitrailError
from vitrail.core.settings import check_integer
from vitrail.core.terminal import say
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
# Digits are small and few: shifts of one pixel, smaller batches, longer steps, nothing held out but the test digits.
CHANGES = ("batch=64", "learning_rate=0.02", "holdout=0", "augment.padding=1", "augment.flip=none")


QUESTIONS, FAMILIES = ("data", "position", "neighbourhood"), ("vit", "resnet", "mlp")


def run(output: Path, *, epochs: int, seed: int, resumes: bool, force: bool, lab: bool) -> Result:
    """Train on digits, show predictions and attention; then the same with the embedded model on clothes; then a short
    bias lab on digits."""
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
    _print("\n1. The model that was just trained, on held-out digits")
    _show(result.bundle, open_data("digits").splits["test"], output / "attention.png")
    _print("\n2. The embedded model, on 40 images of clothes that it has never seen")
    clothes = open_data("fashion-40")
    _show(load("fashion"), clothes.splits["test"], output / "fashion-attention.png")
    _write_images(clothes, output / "images")
    if lab:
        _compare(output / "lab")
    _print(
        f"\nNext:\n  open {output / 'report.html'}\n  vitrail predict fashion {output / 'images'}\n"
        f"  vitrail evaluate {output / 'bundle'} digits\n  vitrail train YOUR_FOLDER --model ViT-Nano/7 --output run"
    )
    return result


def _compare(output: Path) -> None:
    """A minute of the bias lab, where its extra is installed."""
    _print(
        "\n3. The bias lab: how much data do ViT, a CNN and an MLP need, and what do positions and neighbours matter?"
    )
    try:
        found = compare(
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
    for claim in found["claims"]:
        _print(f"{claim['id']:>5}  {claim['verdict']:12}  {claim['claim']}")
    _print(f"report: {output / 'index.html'}")
    _print(f"more:   vitrail compare digits --output {output} --budget 5m")


def _show(bundle: Bundle, split: Split, figure: Path) -> None:
    """Show some predictions, up to ten mistakes, and a figure of the class token's attention."""
    answers = [answer[0] for answer in Classifier(bundle).predict(split.images, top_k=1)]
    labels = bundle.labels or ()
    truth = [labels[label] for label in split.labels]
    right = np.array([answer["label"] == label for answer, label in zip(answers, truth, strict=True)])
    _render_attention(bundle, split, right, figure)
    wide = max(map(len, ("image", *labels)))
    _print(f"{right.sum()} of {len(right)} right\n{'image':>{wide}}  {'answer':>{wide}}  score")
    for index in [*np.flatnonzero(right)[:: max(int(right.sum()) // 6, 1)][:6], *np.flatnonzero(~right)[:10]]:
        mark = "" if right[index] else "   <- wrong"
        _print(f"{truth[index]:>{wide}}  {answers[index]['label']:>{wide}}  {answers[index]['score']:.3f}{mark}")
    _print(f"where it looks: {figure}")


def _write_images(dataset: Dataset, folder: Path) -> None:
    """Write images as files, named by their class, to try other commands on."""
    split = dataset.splits["test"]
    try:
        folder.mkdir(exist_ok=True)
        for index, (pixels, label) in enumerate(zip(split.images, split.labels, strict=True)):
            name = dataset.labels[label].lower().replace("/", "-").replace(" ", "-")
            Image.fromarray(np.asarray(pixels)[..., 0]).save(folder / f"{name}-{index:02}.png")
    except OSError as error:
        raise VitrailError(f"Writing {str(folder)!r} failed ({error.strerror}).") from None


def _render_attention(bundle: Bundle, held_out: Split, right: np.ndarray, path: Path) -> None:
    """Attention of the class token, for a correctly classified image if there is one."""
    shown = int(np.flatnonzero(right)[len(np.flatnonzero(right)) // 3]) if right.any() else 0
    pixels = held_out.images[shown]
    preprocess: Preprocess = bundle.preprocess
    seen = look(bundle.model, preprocess([pixels]))
    label = (bundle.labels or ())[held_out.labels[shown]]
    score = float(seen.logits.softmax(-1).max())
    c = bundle.model.config
    maps = {
        layer: weights[0, :, 0, c.prefix :].numpy().reshape(-1, *c.grid) for layer, weights in seen.attention.items()
    }
    title = f"Where does [CLS] look? {label}, score {score:.2f}"
    figure = attention_figure(preprocess.crop(pixels), maps, c.tokens, title)
    try:
        figure.save(path)
    except OSError as error:
        raise VitrailError(f"Writing {str(path)!r} failed ({error.strerror}).") from None


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
