"""`vitrail demo`: the main job on embedded data, in about a minute on two cores."""

import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail import __version__
from vitrail.classifier import Classifier
from vitrail.data.arrays import built_in
from vitrail.data.dataset import Split
from vitrail.errors import VitrailError
from vitrail.images.preprocess import Preprocess
from vitrail.inspection.attention import class_attention_figure
from vitrail.models.base import AnyModel
from vitrail.models.create import create
from vitrail.models.look import look
from vitrail.settings import check_whole
from vitrail.storage import check_output, refuse_foreign
from vitrail.weights.bundle import Bundle, load, save

MODEL = "ViT-Pico/2"
BATCH = 64
LEARNING_RATE = 3e-3


def run(output: Path, *, epochs: int, seed: int, force: bool) -> None:
    """Train, save, reload, test on held-out digits, show some answers, and draw where the model looks."""
    check_whole("epochs", epochs, low=1, high=10_000)
    check_whole("seed", seed, low=0, high=2**63 - 1)
    check_output(output, force=force)
    refuse_foreign(output / "bundle")
    digits = built_in("digits")
    training, held_out = digits.splits["train"], digits.splits["test"]
    preprocess = Preprocess(resolution=(8, 8), crop_fraction=1.0, mean=(0.5,), std=(0.5,))

    torch.manual_seed(seed)
    model = create(MODEL, dropout=0.1)
    _say(f"{MODEL}: {model.config.parameters:,} parameters, {len(training.labels):,} training digits, {epochs} epochs")
    _train(model, preprocess(training.pictures), torch.from_numpy(training.labels), epochs)

    provenance = {
        "data": "digits: 1,797 handwritten digits (UCI), 360 held out",
        "licence": "cc-by-4.0",
        "vitrail": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seed": seed,
        "epochs": epochs,
    }
    save(
        Bundle(model=model, preprocess=preprocess, labels=digits.labels, provenance=provenance),
        output / "bundle",
        force=force,
    )
    bundle = load(output / "bundle")
    answers = [answer[0] for answer in Classifier(bundle).predict(held_out.pictures, top_k=1)]
    third = len(answers) // 3
    is_right = [answer["label"] == digits.labels[label] for answer, label in zip(answers, held_out.labels, strict=True)]
    shown = next((index for index in range(third, len(answers)) if is_right[index]), third)
    digit, answer = held_out.pictures[shown], answers[shown]
    figure = class_attention_figure(
        Image.fromarray(preprocess.crop(digit)[..., 0]), look(bundle.model, preprocess([digit])), bundle.model.config,
        f"A {digits.labels[held_out.labels[shown]]}, answered {answer['label']} ({answer['score']:.2f})",
    )  # fmt: skip
    try:
        figure.save(output / "attention.png")
    except OSError as error:
        raise VitrailError(f"Writing {str(output / 'attention.png')!r} failed ({error.strerror}).") from None
    _report(held_out, digits.labels, answers)
    _print(f"\nmodel      {output / 'bundle'}\nattention  {output / 'attention.png'}")


def _train(model: AnyModel, images: Tensor, labels: Tensor, epochs: int) -> None:
    """A plain loop: AdamW, one cosine with a short warm-up, every other digit shifted by up to one pixel."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05, fused=True)
    steps = epochs * math.ceil(len(labels) / BATCH)
    warm_up = max(steps // 20, 1)
    step = 0
    model.train()
    for epoch in range(epochs):
        losses = []
        for chosen in torch.randperm(len(labels)).split(BATCH):
            for group in optimiser.param_groups:
                group["lr"] = LEARNING_RATE * min(step / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))
            loss = F.cross_entropy(model(_shift(images[chosen])), labels[chosen], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
            step += 1
        if (epoch + 1) % max(epochs // 6, 1) == 0 or epoch + 1 == epochs:
            _say(f"epoch {epoch + 1:3d}/{epochs}  loss {sum(losses) / len(losses):.3f}")
    model.eval()


def _shift(images_BCHW: Tensor) -> Tensor:
    """About half of the pictures moved by up to one pixel in each direction, the rim filled with background."""
    moved = torch.rand(len(images_BCHW), 1, 1) < 0.5
    down, right = torch.where(moved, torch.randint(0, 3, (2, len(images_BCHW), 1, 1)), 1)
    height, width = images_BCHW.shape[2:]
    padded = F.pad(images_BCHW, (1, 1, 1, 1), value=-1.0)
    rows = down + torch.arange(height)[None, :, None]
    columns = right + torch.arange(width)[None, None, :]
    return padded[torch.arange(len(images_BCHW))[:, None, None], :, rows, columns].permute(0, 3, 1, 2)


def _report(held_out: Split, labels: tuple[str, ...], answers: list[dict[str, str | float]]) -> None:
    truth = [labels[label] for label in held_out.labels]
    right = np.array([answer["label"] == label for answer, label in zip(answers, truth, strict=True)])
    low, high = _wilson(int(right.sum()), len(right))
    _print(
        f"held-out accuracy {right.mean():.1%} ({right.sum()} of {len(right)}; 95 % interval {low:.1%} to {high:.1%})"
    )
    _print("\ndigit  answer  score")
    # A few right ones, and every mistake up to ten.
    shown = [*np.flatnonzero(right)[:: max(int(right.sum()) // 6, 1)][:6], *np.flatnonzero(~right)[:10]]
    for index in shown:
        mark = "" if right[index] else "   <- wrong"
        _print(f"{truth[index]:>5}  {answers[index]['label']:>6}  {answers[index]['score']:.3f}{mark}")


def _wilson(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion."""
    share = right / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return centre - half, centre + half


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
