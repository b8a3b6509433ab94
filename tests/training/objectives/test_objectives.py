"""Objectives: masked patches, next-pixel prediction, and custom objectives of other packages."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrail
from tests.training.runs import train
from tests.training.test_loop import STATE, curve, make_trainer
from vitrail.core.errors import UsageError
from vitrail.data.augment.config import Augment
from vitrail.data.dataset import Split
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.models.layers import patchify
from vitrail.models.palette import cluster
from vitrail.training.checkpoint import load_newest
from vitrail.training.objectives.base import Judgement, Objective, Task
from vitrail.training.objectives.classify import Classify
from vitrail.training.objectives.masked import MaskedPatches
from vitrail.training.objectives.next_pixel import NextPixel
from vitrail.training.options import Options
from vitrail.training.recipe import OBJECTIVES, Recipe
from vitrail.training.run_log import RunLog
from vitrail.training.trainer_checkpoint import collect_arrays, restore_trainer, save_trainer

HALF = Preprocess(resolution=32, mean=(0.5,) * 3, std=(0.5,) * 3)
TASK = Task(Recipe(), HALF, ())


def masked(**settings):
    model = vitrail.create("ViT-Micro/4", resolution=32, channels=3, **settings)
    return MaskedPatches(model, TASK).eval()


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_mixed_images_have_cross_entropy_of_soft_labels(loss):
    """With Mixup and CutMix, the loss is that of the smoothed mixture of both labels."""
    model = redraw(vitrail.create("MLP-Pico", classes=5), std=0.5).eval()
    objective = Classify(model, Task(Recipe(loss=loss, label_smoothing=0.1), HALF, tuple("abcde")))
    images, labels, others = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]), torch.tensor([4, 2, 0, 3])
    share = torch.tensor([0.25, 0.5, 0.9, 0.7])
    own, other = torch.eye(5)[labels], torch.eye(5)[others]
    targets = 0.9 * (share[:, None] * own + (1 - share[:, None]) * other) + 0.1 / 5
    logits = model(images)
    if loss == "softmax":
        expected = -(targets * logits.log_softmax(1)).sum(1)
    else:
        expected = -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)).sum(1)
    torch.testing.assert_close(objective(images, labels, others, share), expected)


def test_masked_colours_are_three_bits_of_channel_means():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    pixels[:, :4, :4] = [0, 255, 128]
    images = HALF.scale(torch.from_numpy(pixels))
    colours = masked().colours(images)
    for number in range(2):
        for index in range(64):
            row, column = divmod(index, 8)
            mean = pixels[number, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].astype(float).mean((0, 1))
            red, green, blue = np.minimum(mean / 255 * 8, 7.999).astype(int)
            assert colours[number, index] == 64 * red + 8 * green + blue
    assert colours[0, 0] == 0 * 64 + 7 * 8 + 4


def test_half_of_patches_are_corrupted_in_shares_of_paper():
    objective = masked()
    tokens = {}

    images = torch.rand(64, 3, 32, 32) * 2 - 1
    clean = objective.model.patch_embed(images)

    def encode_patches(_images, change):
        tokens["corrupted"] = change(clean)
        return torch.zeros(64, 64, 64)

    objective.model.encode_patches = encode_patches
    objective.mask_token.data.fill_(7.0)
    _, _, corrupted = objective.predict(images, torch.rand(3, 64, 64))
    assert (corrupted.sum(1) == 32).all()
    changed = tokens["corrupted"]
    is_mask = (changed == 7.0).all(-1)
    is_same = (changed == clean).all(-1)
    is_other = ~is_mask & ~is_same
    assert is_same[corrupted == 0].all()
    chosen = corrupted.bool()
    for is_type, share in ((is_mask, 0.8), (is_same, 0.1), (is_other, 0.1)):
        assert abs(is_type[chosen].float().mean().item() - share) < 0.03
    # Patches that replace others are from the same image.
    for number, index in is_other.nonzero()[:20].tolist():
        assert (changed[number, index] == clean[number]).all(-1).any()


def test_masked_patches_do_not_influence_predictions():
    """If every corrupted patch is masked, the content of these patches does not change predictions."""
    objective = masked()
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    noise = torch.rand(3, 1, 64)
    noise[1] = 0.0
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        _, before, corrupted = objective.predict(images, noise)
        other = torch.rand(1, 3, 32, 32) * 2 - 1
        hidden = corrupted.bool()[..., None]
        from vitrail.models.layers import unpatchify

        mixed = unpatchify(torch.where(hidden, patchify(other, (4, 4)), patchify(images, (4, 4))), (8, 8), (4, 4))
        _, after, _ = objective.predict(mixed, noise)
    torch.testing.assert_close(after, before)


def test_masked_training_reduces_loss_and_saves_bundle(tmp_path):
    recipe = Recipe(epochs=10, batch=64, objective="masked", optimiser="muon", learning_rate=0.02, momentum=0.95)
    train("digits", "ViT-Pico/2", tmp_path / "run", recipe, Options(workers=0))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluate"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] - 0.2
    assert evaluations[-1]["accuracy"] > 0.35  # of 8 levels of grey
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Reconstruction of masked patches" in page
    assert "가린 패치를 채운 결과" in page
    assert "맞힌 색의 비율" in page
    assert "--protocol knn" in page
    assert page.count("data:image/png") == 21
    bundle = vitrail.load(tmp_path / "run" / "bundle")
    assert (bundle.labels, bundle.provenance["objective"]) == (None, "masked")
    with pytest.raises(UsageError, match="trained to classify"):
        vitrail.Classifier(bundle).predict([np.zeros((8, 8), np.uint8)])


def test_fill_in_changes_only_masked_patches():
    objective = masked()
    images = torch.rand(3, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        hidden, filled = objective.fill_in(images)
    differs = (patchify(hidden, (4, 4)) != patchify(images, (4, 4))).any(-1)
    assert differs.sum(1).tolist() == [32, 32, 32]
    assert torch.equal(patchify(filled, (4, 4))[~differs], patchify(images, (4, 4))[~differs])
    first = patchify(filled, (4, 4))[differs][0].reshape(3, 16)
    assert torch.equal(first, first[:, :1].expand(3, 16))  # one colour


@pytest.mark.parametrize("settings", [{"norm": "batch"}, {"stride": 2}, {"token_drop": 0.5}])
def test_masked_objective_rejects_unsupported_models(settings):
    with pytest.raises(UsageError, match="masked"):
        masked(**settings)
    with pytest.raises(UsageError, match="masked"):
        MaskedPatches(vitrail.create("Mixer-Nano/7"), TASK)


def test_palette_loss_is_close_to_scikit_learn_kmeans():
    from sklearn.cluster import KMeans

    split = open_data("digits").splits["train"]
    eye = Preprocess(resolution=8, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    pixels = eye(split.images[:400]).reshape(-1, 1)
    palette = cluster(pixels, 6, seed=0)

    def loss(centres):
        return ((pixels[:, None] - centres[None]) ** 2).sum(-1).min(1).values.mean().item()

    reference = KMeans(6, n_init=3, random_state=0).fit(pixels.numpy())
    theirs = loss(torch.from_numpy(reference.cluster_centers_))
    assert loss(palette) < 1.15 * theirs
    assert torch.equal(palette, cluster(pixels, 6, seed=0))


def test_next_pixel_training_reduces_loss_and_completes_images(tmp_path):
    recipe = Recipe(epochs=4, batch=64, objective="next-pixel", learning_rate=3e-3, model={"resolution": 8})
    train("digits", "iGPT-Micro", tmp_path / "run", recipe, Options(workers=0))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluate"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] - 0.2
    assert "Completion of the lower half" in (tmp_path / "run" / "report.html").read_text()
    bundle = vitrail.load(tmp_path / "run" / "bundle")
    assert bundle.model.config.output == "pixels"
    images = bundle.preprocess(open_data("digits").splits["test"].images[:3])
    with torch.no_grad():
        quantised, hidden, completed = NextPixel(bundle.model, TASK).complete(images)
    assert torch.equal(quantised[:, :, :4], completed[:, :, :4])
    assert torch.equal(hidden[:, :, :4], completed[:, :, :4])
    assert not torch.equal(hidden[:, :, 4:], completed[:, :, 4:])
    palette = bundle.model.palette.flatten().tolist()
    assert set(completed.flatten().tolist()) <= set(palette)


def test_next_pixel_objective_rejects_other_models():
    with pytest.raises(UsageError, match="next-pixel"):
        NextPixel(vitrail.create("ViT-Nano/7"), TASK)


# Custom objectives: parameters of their own for features without a head, metrics that are not means, several labels per
# image


class CosineMargin(Objective):
    """Objective with an additive cosine margin (arXiv 1801.09414) and a weight vector for each label."""

    output = "features"
    watched, watched_name = "verified", "pairs verified"
    head = ("weight",)

    def __init__(self, model, task):
        super().__init__(model, task)
        self.weight = nn.Parameter(torch.randn(len(task.labels), model.config.width))

    def _cosines(self, images):
        return F.normalize(self.model(images)) @ F.normalize(self.weight).T

    def forward(self, images, labels, others, share):
        cosines = self._cosines(images)
        return F.cross_entropy(16 * (cosines - 0.2 * F.one_hot(labels, cosines.shape[1])), labels, reduction="none")

    def score(self, images, labels):
        return {"loss": self.forward(images, labels, None, None)}

    def evaluate(self, batches, ranks):
        batches = list(batches)
        features = torch.cat([self.model(images) for images, *_ in batches])
        labels = torch.cat([labels for _, labels, _ in batches])
        return {**super().evaluate(batches, ranks), "verified": share_verified(features, labels)}

    def goodness(self, metrics):
        return metrics["verified"]

    def judge(self, loader, ranks):
        batches = [(loader.preprocess.scale(batch.pixels), batch.labels, batch.weights) for batch in loader.epoch()]
        with torch.inference_mode():
            scores = self.evaluate(batches, ranks)
        share = f"{scores['verified']:.1%}"
        return Judgement(scores=scores, sentence=f"verified {share}", summary=(("verified pairs", share),))


def share_verified(features, labels):
    """Return the share of (same, different) couples of pairs in which the pair of one label is more similar."""
    similar = F.normalize(features) @ F.normalize(features).T
    first, second = torch.triu_indices(len(labels), len(labels), 1)
    same, pairs = labels[first] == labels[second], similar[first, second]
    order = pairs.argsort().argsort().double()
    count = same.sum()
    return float((order[same].sum() - count * (count - 1) / 2) / (count * (~same).sum()))


def test_custom_objective_has_own_parameters_and_metric(tmp_path, monkeypatch):
    monkeypatch.setitem(OBJECTIVES._built_ins, "margin", "tests.training.objectives.test_objectives:CosineMargin")
    recipe = Recipe(epochs=3, batch=64, objective="margin", learning_rate=3e-3, layer_decay=0.9)
    result = train("digits", "ViT-Pico/2", tmp_path / "run", recipe, Options(workers=0))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluate"]
    assert evaluations[-1]["verified"] > evaluations[0]["verified"] > 0.5
    (final,) = (line for line in lines if line["event"] == "final")
    bundle = vitrail.load(tmp_path / "run" / "bundle")
    assert (bundle.model.config.classes, bundle.labels, bundle.provenance["objective"]) == (0, None, "margin")
    assert bundle.provenance["scores"]["verified"] == final["verified"]
    images = open_data("digits").splits["test"]
    with torch.no_grad():
        features = bundle.model(bundle.preprocess(images.images))
    assert share_verified(features, torch.from_numpy(images.labels)) == pytest.approx(final["verified"], abs=1e-6)
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"Held-out images: pairs verified {evaluations[-1]['verified']:.1%} at the end" in page
    assert "verified pairs" in page
    assert result.sentence == f"verified {final['verified']:.1%}"


class SeveralLabels(Objective):
    """Objective for several labels per image."""

    classifies = True
    watched, watched_name = "precision", "mean average precision"

    def forward(self, images, labels, others, share):
        targets = labels if others is None else share[:, None] * labels + (1 - share[:, None]) * others
        return F.binary_cross_entropy_with_logits(self.model(images), targets, reduction="none").mean(1)

    def score(self, images, labels):
        return {"loss": self.forward(images, labels, None, None)}

    def evaluate(self, batches, ranks):
        batches = list(batches)
        logits = torch.cat([self.model(images) for images, *_ in batches])
        labels = torch.cat([labels for _, labels, _ in batches])
        hits = labels.gather(0, logits.argsort(0, descending=True))
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)[:, None]
        return {
            **super().evaluate(batches, ranks),
            "precision": float(((precision * hits).sum(0) / hits.sum(0)).mean()),
        }

    def goodness(self, metrics):
        return metrics["precision"]


def test_custom_multilabel_objective_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setitem(OBJECTIVES._built_ins, "several", "tests.training.objectives.test_objectives:SeveralLabels")
    digits = open_data("digits").splits
    labels = np.stack([np.isin(np.arange(10), group) for group in ((0, 2, 4, 6, 8), (5, 6, 7, 8, 9), (2, 3, 5, 7))], 1)
    training, held_out = (
        Split(name, digits[name].images, labels[digits[name].labels].astype(np.float32)) for name in ("train", "test")
    )
    recipe = Recipe(steps=40, batch=64, objective="several", learning_rate=3e-3, augment=Augment(mixup=0.2))

    def make():
        return make_trainer(recipe=recipe, data=training, held_out=held_out, total=40, classes=3)

    trainer = make()
    with RunLog(tmp_path, 40, writes=False) as log:
        trainer.evaluate(0, log)
        before = trainer.latest["precision"]
        curve(trainer, 40)
        trainer.evaluate(0, log)
        save_trainer(trainer, tmp_path / "checkpoints", STATE, log)
    assert trainer.latest["precision"] > before + 0.1
    assert trainer.best["score"] == trainer.latest["precision"]
    checkpoint, _ = load_newest(tmp_path / "checkpoints")
    resumed = make()
    restore_trainer(resumed, checkpoint)
    for name, tensor in collect_arrays(resumed).items():
        np.testing.assert_array_equal(tensor, collect_arrays(trainer)[name])


def test_parameters_of_objective_have_roles():
    objective = masked()
    roles = objective.roles()
    assert roles.keys() == {name for name, _ in objective.named_parameters()}
    top = objective.model.config.depth + 1
    assert (roles["mask_token"].layer, roles["mask_token"].decays) == (0, False)
    assert (roles["decoder.weight"].layer, roles["decoder.weight"].decays) == (top, True)
    assert not roles["decoder.weight"].is_matrix
    assert roles["model.blocks.0.attn.qkv.weight"] == objective.model.roles()["blocks.0.attn.qkv.weight"]
    objective.freeze()
    trained = {name for name, parameter in objective.named_parameters() if parameter.requires_grad}
    assert trained == {"decoder.weight", "decoder.bias"}
