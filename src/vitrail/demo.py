"""`vitrail demo`: the main job on embedded data, in about a minute on two cores."""

import sys
import webbrowser
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.classifier import Classifier
from vitrail.configs.recipe import change_recipe, find_recipe
from vitrail.data.arrays import built_in
from vitrail.data.dataset import Split
from vitrail.errors import VitrailError
from vitrail.images.preprocess import Preprocess
from vitrail.inspection.attention import class_attention_figure
from vitrail.models.look import look
from vitrail.settings import check_whole
from vitrail.training.loop import Options
from vitrail.training.run import train
from vitrail.weights.bundle import Bundle, load

MODEL = "ViT-Pico/2"
# Digits are small and few: shifts of one pixel, smaller batches, nothing held out but the test digits.
CHANGES = ("batch=64", "holdout=0", "augment.padding=1", "augment.flip=none")


def run(output: Path, *, epochs: int, seed: int, force: bool, opens: bool) -> None:
    """Train, evaluate on held-out digits, show some answers, and draw where the model looks."""
    check_whole("epochs", epochs, low=1, high=10_000)
    recipe = change_recipe(find_recipe("small"), CHANGES).with_length(epochs=epochs, steps=None, minutes=None)
    train("digits", MODEL, output, recipe, Options(seed=seed), force=force, command="vitrail demo")
    bundle = load(output / "bundle")
    held_out = built_in("digits").splits["test"]
    answers = [answer[0] for answer in Classifier(bundle).predict(held_out.pictures, top_k=1)]
    labels = bundle.labels or ()
    truth = [labels[label] for label in held_out.labels]
    right = np.array([answer["label"] == label for answer, label in zip(answers, truth, strict=True)])
    _draw(bundle, held_out, right, output / "attention.png")
    _print("\ndigit  answer  score")
    # A few right ones, and every mistake up to ten.
    for index in [*np.flatnonzero(right)[:: max(int(right.sum()) // 6, 1)][:6], *np.flatnonzero(~right)[:10]]:
        mark = "" if right[index] else "   <- wrong"
        _print(f"{truth[index]:>5}  {answers[index]['label']:>6}  {answers[index]['score']:.3f}{mark}")
    _print(f"\nattention  {output / 'attention.png'}\nNext: open {output / 'report.html'}")
    if opens:
        webbrowser.open((output / "report.html").absolute().as_uri())


def _draw(bundle: Bundle, held_out: Split, right: np.ndarray, path: Path) -> None:
    """Where the class token looks, on a digit that was recognised if there is one."""
    shown = int(np.flatnonzero(right)[len(np.flatnonzero(right)) // 3]) if right.any() else 0
    digit = held_out.pictures[shown]
    preprocess: Preprocess = bundle.preprocess
    seen = look(bundle.model, preprocess([digit]))
    label = (bundle.labels or ())[held_out.labels[shown]]
    score = float(seen.logits.softmax(-1).max())
    image = Image.fromarray(preprocess.crop(digit)[..., 0])
    figure = class_attention_figure(image, seen, bundle.model.config, f"A {label}, recognised ({score:.2f})")
    try:
        figure.save(path)
    except OSError as error:
        raise VitrailError(f"Writing {str(path)!r} failed ({error.strerror}).") from None


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
