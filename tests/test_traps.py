"""Mistakes in other ViT code bases: each test checks that vitrail does not make one of them.

What one of them does is said where the trap is; their files are public. Traps that are only about a library's own
installation (versions asserted, files to be copied into another package) have no counterpart here.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import train
from vitrail.bundles.convert import UserHints, convert, import_weights
from vitrail.cli import main
from vitrail.core.errors import UsageError
from vitrail.data.augment.config import Augment
from vitrail.data.cache import ImageCache
from vitrail.data.loader import Loader
from vitrail.data.preprocess import IMAGENET_MEAN, Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.protocols import evaluate
from vitrail.lab.exact import redraw
from vitrail.models.zoo import find
from vitrail.training.finetune import adapt_bundle
from vitrail.training.options import Options
from vitrail.training.recipe import Recipe, find_recipe

SOURCE = Path(vitrail.__file__).parent
SHAPE = {"width": 128, "depth": 2, "heads": 2, "mlp": 256, "classes": 3}


def plain(**changes):
    return redraw(vitrail.create("ViT-B/16", name="", **{"resolution": 64, **SHAPE, **changes}), std=0.05)


def test_1_the_resize_rule_comes_with_the_weights(tmp_path):
    """Four libraries interpolate position embeddings differently, so the same file would give four models."""
    rng = np.random.default_rng(0)
    bundle = vitrail.Bundle(model=plain(), preprocess=Preprocess(resolution=64))
    vitrail.save(bundle, tmp_path / "ours")
    tables = {}
    for to in ("google", "huggingface", "timm", "torchvision"):
        convert(
            str(tmp_path / "ours"), tmp_path / to, to, verifies=False, images=[rng.random((4, 4, 3)).astype(np.uint8)]
        )
        (tmp_path / to / "vitrail.json").unlink()
        model = import_weights(str(tmp_path / to), UserHints()).bundle.model
        assert model.config.resize_rule == to
        tables[to] = model.resize(96).pos_embed
    for name in tables:
        assert all(name == other_name or not torch.equal(tables[name], tables[other_name]) for other_name in tables)


def test_2_a_grid_of_another_shape_with_as_many_patches_is_interpolated():
    """timm compares the number of tokens, so it does not interpolate from 8 x 32 to 16 x 16."""
    model = plain(resolution=(128, 512))
    square = model.resize(256)
    assert square.pos_embed.shape == model.pos_embed.shape
    assert not torch.equal(square.pos_embed, model.pos_embed)
    assert torch.equal(square.pos_embed[:, 0], model.pos_embed[:, 0])  # without the position of [CLS]


def test_3_a_model_that_was_trained_on_wide_images_can_be_resized(tmp_path):
    """Several code bases assume a square grid."""
    model = plain(resolution=(32, 128))
    vitrail.save(vitrail.Bundle(model=model, preprocess=Preprocess(resolution=(32, 128))), tmp_path / "wide")
    again = vitrail.load(tmp_path / "wide").model.resize((64, 128))
    assert again(torch.zeros(1, 3, 64, 128)).shape == (1, 3)


def test_4_a_head_for_other_classes_is_new_at_any_resolution():
    """torchvision replaces the head only if the sequence length changes, too."""
    bundle = vitrail.Bundle(model=plain(), preprocess=Preprocess(resolution=64), labels=("a", "b", "c"))
    for resolution in ((64, 64), (96, 96)):
        model, _, notes = adapt_bundle(bundle, ("d", "e", "f"), 3, Recipe(steps=1), resolution)
        assert not model.head.weight.any()
        assert any("a new head" in note for note in notes)


def test_5_the_last_images_of_a_test_set_count(tmp_path):
    """vision_transformer drops an incomplete batch: it evaluates 512 of 600 images."""
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz", images=rng.integers(0, 256, (70, 28, 28), dtype=np.uint8), labels=np.arange(70) % 10
    )
    assert evaluate("fashion", str(tmp_path / "data.npz"))["count"] == 70


def test_6_a_class_that_test_lacks_does_not_shift_the_others(tmp_path):
    """vision_transformer numbers the classes of train and test separately, and reads only *.jpg files."""
    for split, classes in (("train", "abc"), ("test", "ac")):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / split / name / "1.PNG")
    data = open_data(str(tmp_path))
    assert data.splits["test"].labels.tolist() == [0, 2]


def test_7_checkpoints_are_written_at_the_requested_interval(tmp_path):
    """vision_transformer ignores checkpoint_every."""
    recipe = Recipe(steps=3, batch=32)
    train("digits", "ViT-Pico/2", tmp_path / "run", recipe, Options(checkpoint_seconds=0, keep=9))
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 3


def test_8_and_17_resumed_run_sees_the_rest_of_its_epoch(tmp_path):
    """timm skips the rest of the epoch; DINOv2 restarts the data."""
    training, _ = open_data("digits").for_training(holdout=0, seed=0)
    eye = Preprocess(resolution=8, mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    loader = Loader(training, eye, batch=100, seed=3)
    batches = [batch.indices.tolist() for batch in loader.epoch(2)]
    assert [batch.indices.tolist() for batch in loader.epoch(2, start=5)] == batches[5:]


def test_9_and_10_epsilon_gelu_and_pixels_come_along(tmp_path):
    """A file of weights does not state epsilon (1e-6 or 1e-12), GELU (exact or tanh) or pixel statistics."""
    model = plain(norm_epsilon=1e-12, activation="gelu-tanh")
    eye = Preprocess(resolution=64, mean=IMAGENET_MEAN, resize="squash", crop_fraction=1.0, interpolation="bilinear")
    vitrail.save(vitrail.Bundle(model=model, preprocess=eye), tmp_path / "ours")
    convert(str(tmp_path / "ours"), tmp_path / "hf", "huggingface", verifies=False, images=[])
    (tmp_path / "hf" / "vitrail.json").unlink()
    back = import_weights(str(tmp_path / "hf"), UserHints()).bundle
    assert (back.model.config.norm_epsilon, back.model.config.activation) == (1e-12, "gelu-tanh")
    assert back.preprocess == eye


def test_11_the_held_out_share_depends_on_the_seed_only():
    """transformers' example draws another held-out share in every run."""
    data = open_data("digits")
    held_out = [data.for_training(holdout=0.1, seed=seed)[1].images.sum() for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_13_model_shapes_equal_the_paper():
    """A popular ViT has no qkv bias and two more norms, so no published checkpoint can be loaded."""
    assert find("ViT-B/16").parameters == 86_567_656


def test_14_attention_is_scaled_by_the_width_of_a_head_on_any_device():
    """A face model divides by the square root of the model's width, and calls .cuda()."""
    model = plain().eval()
    images = torch.randn(1, 3, 64, 64)
    seen = vitrail.look(model, images, [0])
    tokens = model.blocks[0].norm1(seen.steps["tokens"])
    q, k, _ = model.blocks[0].attn.qkv(tokens).reshape(1, -1, 3, 2, 64).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(seen.attention[0], (q @ k.transpose(-1, -2) / 64**0.5).softmax(-1), rtol=1e-4, atol=1e-6)
    assert not [path for path in SOURCE.rglob("*.py") if ".cuda()" in path.read_text()]


def test_15_resolution_not_divisible_by_the_patch_is_rejected():
    """A face model of 112 px with patches of 9 px loses 4 of them."""
    with pytest.raises(UsageError, match="must divide into whole patches"):
        vitrail.create("ViT-B/16", resolution=112, patch=9)


def test_16_the_grid_of_the_small_hybrid():
    """Its name states 16 px; its stem and patches together reduce by 32."""
    assert find("R+ViT-Ti/16").grid == (7, 7)


def test_18_position_embeddings_are_interpolated_at_a_higher_resolution():
    """transformers with ignore_mismatched_sizes replaces the position embeddings by random ones."""
    model = plain()
    larger = model.resize(128)
    table = larger.pos_embed[0, 1:].unflatten(0, (8, 8))
    corners = model.pos_embed[0, 1:].unflatten(0, (4, 4))
    torch.testing.assert_close(table[::7, ::7], corners[::3, ::3])  # Google's rule keeps corners


def test_19_cached_images_are_not_augmented(tmp_path):
    """torchvision's reference stores the transforms with the data."""
    (tmp_path / "data" / "a").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "data" / "a" / "1.png")
    split = next(iter(open_data(str(tmp_path / "data")).splits.values()))

    def one(settings, cache):
        loader = Loader(split, Preprocess(resolution=32), batch=1, settings=settings, cache=cache, shuffle=False)
        return next(iter(loader.epoch())).pixels

    with ImageCache(str(tmp_path / "cache"), 10**9) as cache:
        for settings in (Augment(), Augment(crop="resized", scale=(0.1, 0.2))):
            assert torch.equal(one(settings, cache), one(settings, None))
        assert cache.hits == 1


def test_no_module_unpickles_outside_the_sandbox():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if (
            path.relative_to(SOURCE).as_posix() == "core/sandbox/read_arrays.py"
        ):  # runs behind the wall, and knows a list of names
            assert re.findall(r"pickle\.\w+", text) == ["pickle.Unpickler"]
            continue
        assert not re.search(r"^\s*(import|from) (pickle|dill|cloudpickle)\b", text, re.MULTILINE), path
        assert "joblib.load" not in text, path  # the lab's engine uses joblib for its own processes alone
        assert "allow_pickle=True" not in text, path
        assert all("weights_only=True" in call for call in re.findall(r"torch\.load\([^)]*\)", text)), path


def test_recipes_do_not_override_the_preprocessing_of_a_bundle(tmp_path):
    """Google's recipes scale pixels to [-1, 1]; a bundle of DeiT's weights uses other statistics."""
    assert find_recipe("paper-finetune").preprocess["mean"] == [0.5, 0.5, 0.5]
    main(
        [
            "finetune",
            "fashion",
            "digits",
            "--output",
            str(tmp_path / "run"),
            "--recipe",
            "paper-finetune",
            "--steps",
            "1",
            "--resolution",
            "28",
            "--set",
            "batch=8",
            "holdout=0",
        ]
    )
    stored = json.loads((tmp_path / "run" / "bundle" / "preprocess.json").read_text())
    assert stored == vitrail.load("fashion").preprocess.to_json()
