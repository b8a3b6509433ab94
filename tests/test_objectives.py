"""Self-supervision: the paper's masked patches and iGPT's next pixel."""

import numpy as np
import pytest
import torch

import vitrail
from vitrail.configs.recipe import Recipe
from vitrail.data.sources import open_data
from vitrail.errors import UsageError
from vitrail.images.preprocess import Preprocess
from vitrail.models.igpt import cluster
from vitrail.models.layers import patchify
from vitrail.training.loop import Options
from vitrail.training.objectives.base import Task
from vitrail.training.objectives.masked import MaskedPatches
from vitrail.training.objectives.next_pixel import NextPixel
from vitrail.training.run import train

HALF = Preprocess(resolution=32, mean=(0.5,) * 3, std=(0.5,) * 3)
TASK = Task(Recipe(), HALF, ())


def masked(**settings):
    model = vitrail.create("ViT-Micro/4", resolution=32, channels=3, **settings)
    return MaskedPatches(model, TASK).eval()


def test_colours_are_three_bits_of_each_channels_mean():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    pixels[:, :4, :4] = [0, 255, 128]
    images = HALF.scale(torch.from_numpy(pixels))
    found = masked().colours(images)
    for number in range(2):
        for index in range(64):
            row, column = divmod(index, 8)
            mean = pixels[number, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].astype(float).mean((0, 1))
            red, green, blue = np.minimum(mean / 255 * 8, 7.999).astype(int)
            assert found[number, index] == 64 * red + 8 * green + blue
    assert found[0, 0] == 0 * 64 + 7 * 8 + 4


def test_half_of_the_patches_are_corrupted_in_the_papers_shares():
    objective = masked()
    seen = {}

    def keep(x_BND, *_):
        seen["corrupted"] = x_BND
        return torch.zeros(len(x_BND), objective.model.config.tokens, 64)

    images = torch.rand(64, 3, 32, 32) * 2 - 1
    clean = objective.model.patch_embed(images)
    objective.model.assemble = keep
    objective.mask_token.data.fill_(7.0)
    _, _, corrupted = objective.predict(images, torch.rand(3, 64, 64))
    assert (corrupted.sum(1) == 32).all()
    now = seen["corrupted"]
    is_mask = (now == 7.0).all(-1)
    is_same = (now == clean).all(-1)
    is_other = ~is_mask & ~is_same
    assert is_same[corrupted == 0].all()
    chosen = corrupted.bool()
    for kind, share in ((is_mask, 0.8), (is_same, 0.1), (is_other, 0.1)):
        assert abs(kind[chosen].float().mean().item() - share) < 0.03
    # What stands in another's place is a patch of the same picture.
    for number, index in is_other.nonzero()[:20].tolist():
        assert (now[number, index] == clean[number]).all(-1).any()


def test_hidden_patches_cannot_be_read_through():
    """With every corrupted patch masked, their content changes nothing of what is predicted."""
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


def test_masked_training_learns_and_leaves_a_bundle_to_fine_tune(tmp_path):
    recipe = Recipe(epochs=12, batch=64, objective="masked", optimiser="muon", learning_rate=0.02, momentum=0.95)
    train("digits", "ViT-Pico/2", tmp_path / "run", recipe, Options(workers=0))
    import json

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if line["event"] == "evaluate"]
    assert seen[-1]["loss"] < seen[0]["loss"] - 0.2
    assert seen[-1]["accuracy"] > 0.35  # of 8 levels of grey
    page = (tmp_path / "run" / "report.html").read_text()
    assert "What it fills in" in page
    assert page.count("data:image/png") == 21
    bundle = vitrail.load(tmp_path / "run" / "bundle")
    assert (bundle.labels, bundle.provenance["objective"]) == (None, "masked")
    with pytest.raises(UsageError, match="trained to classify"):
        vitrail.Classifier(bundle).predict([np.zeros((8, 8), np.uint8)])


def test_filling_in_changes_hidden_patches_alone():
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
def test_masked_refuses_what_it_cannot_do(settings):
    with pytest.raises(UsageError, match="masked"):
        masked(**settings)
    with pytest.raises(UsageError, match="masked"):
        MaskedPatches(vitrail.create("Mixer-Nano/7"), TASK)


def test_the_palette_is_as_good_as_scikit_learns():
    from sklearn.cluster import KMeans

    split = open_data("digits").splits["train"]
    eye = Preprocess(resolution=8, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    pixels = eye(split.pictures[:400]).reshape(-1, 1)
    palette = cluster(pixels, 6, seed=0)

    def loss(centres):
        return ((pixels[:, None] - centres[None]) ** 2).sum(-1).min(1).values.mean().item()

    reference = KMeans(6, n_init=3, random_state=0).fit(pixels.numpy())
    theirs = loss(torch.from_numpy(reference.cluster_centers_))
    assert loss(palette) < 1.15 * theirs
    assert torch.equal(palette, cluster(pixels, 6, seed=0))


def test_next_pixel_training_learns_and_completes(tmp_path):
    recipe = Recipe(epochs=6, batch=64, objective="next-pixel", learning_rate=3e-3, model={"resolution": 8})
    train("digits", "iGPT-Micro", tmp_path / "run", recipe, Options(workers=0))
    import json

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if line["event"] == "evaluate"]
    assert seen[-1]["loss"] < seen[0]["loss"] - 0.2
    assert "How it goes on" in (tmp_path / "run" / "report.html").read_text()
    bundle = vitrail.load(tmp_path / "run" / "bundle")
    assert bundle.model.config.output == "pixels"
    images = bundle.preprocess(open_data("digits").splits["test"].pictures[:3])
    with torch.no_grad():
        same, hidden, gone_on = NextPixel(bundle.model, TASK).complete(images)
    assert torch.equal(same[:, :, :4], gone_on[:, :, :4])
    assert torch.equal(hidden[:, :, :4], gone_on[:, :, :4])
    assert not torch.equal(hidden[:, :, 4:], gone_on[:, :, 4:])
    known = bundle.model.palette.flatten().tolist()
    assert set(gone_on.flatten().tolist()) <= set(known)


def test_next_pixel_refuses_others():
    with pytest.raises(UsageError, match="next-pixel"):
        NextPixel(vitrail.create("ViT-Nano/7"), TASK)
