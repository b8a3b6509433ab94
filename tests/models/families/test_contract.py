"""Contract tests of every named model of every family: large models on the meta device, small models on real data."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from vitrail.bundles.pretrained import create
from vitrail.core.errors import UsageError
from vitrail.data.preprocess import Preprocess
from vitrail.lab.exact import redraw
from vitrail.models.activations import look
from vitrail.models.config import INFO_KEYS
from vitrail.models.create import build
from vitrail.models.zoo import FAMILIES, MODELS, find

SMALL = [name for name, config in MODELS.items() if config.resolution[0] <= 32 and config.macs < 20e6]
ONE_PER_FAMILY = ["ViT-Nano/7", "Hybrid-Nano", "ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "iGPT-Micro", "MLP-Nano"]


def random_images(config, count=2):
    return torch.randn(count, config.channels, *config.resolution)


@pytest.mark.parametrize("name", MODELS)
def test_arithmetic_equals_the_built_model(name):
    config = find(name)
    with torch.device("meta"):
        model = build(config)
        images = random_images(config, 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters
    with FlopCounterMode(display=False) as counter:
        # The literature counts the complete last block of a ViT; `forward` computes only [CLS] there.
        logits = (
            model.read(model.encode(model.embed(images), all_tokens=True))
            if hasattr(model, "encode")
            else model(images)
        )
    assert counter.get_total_flops() == 2 * config.macs
    assert logits.shape[0] == 1
    assert logits.shape[-1] == (config.classes or config.embedding)
    assert tuple(config.info()) == INFO_KEYS
    assert FAMILIES[config.family] is type(config)
    assert type(config).from_json(config.to_json()) == config


@pytest.mark.parametrize("name", SMALL)
def test_gradients_determinism_batches_and_bundles(name, tmp_path):
    # These standard deviations give logits of order 1 in every family.
    model = redraw(create(name), std={"MLP": 0.02, "ResNet": 0.2}.get(name.partition("-")[0], 0.1))
    config = model.config
    images = random_images(config, 8)
    logits = model(images)
    assert logits.shape == (8, config.classes)
    assert logits.std(0).max() > 1e-2
    assert torch.equal(model(images), logits)
    alone = torch.cat([model(image[None]) for image in images])
    largest = logits.abs().max().item()
    torch.testing.assert_close(alone / largest, logits / largest, rtol=0, atol=1e-5)

    (logits * torch.randn_like(logits)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, key

    half = (0.5,) * config.channels
    preprocess = Preprocess(resolution=config.resolution, mean=half, std=half)
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "bundle")
    loaded = vitrail.load(tmp_path / "bundle").model
    assert loaded.config == config
    assert torch.equal(loaded(images), logits)
    assert torch.equal(copy.deepcopy(model)(images), logits)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_every_family_supports_any_channels_and_classes(name):
    for channels in (1, 3, 13):
        model = create(name, channels=channels, classes=7)
        assert model(random_images(model.config)).shape == (2, 7)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_model_without_a_head_returns_the_pooled_features(name):
    model = redraw(create(name))
    images = random_images(model.config)
    headless = model.clone_with(drop=("head.",), classes=0).eval()
    activations = look(model, images)
    with torch.no_grad():
        assert torch.equal(headless(images), activations.steps["pooled"])
    assert torch.equal(look(headless, images).logits, activations.steps["pooled"])
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(headless.config).parameters())
    assert parameters == headless.config.parameters < model.config.parameters
    assert (headless.config.predicts, headless.config.classifies) == ("features", False)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_look_does_not_change_the_logits(name):
    model = redraw(create(name))
    images = random_images(model.config)
    with torch.no_grad():
        logits = model(images)
    activations = look(model, images)
    assert torch.equal(activations.logits, logits)
    assert [key for key in activations.steps if key.startswith("blocks")] == [
        f"blocks.{i}" for i in range(model.config.depth)
    ]
    with torch.no_grad():
        torch.testing.assert_close(model.head(activations.steps["pooled"]), logits, rtol=0, atol=1e-5)
    assert list(look(model, images, [0]).attention) == ([0] if name[:2] in ("Vi", "Hy", "iG") else [])
    with pytest.raises(UsageError, match="Layer must be from 0"):
        look(model, images, [model.config.depth])


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_new_model_starts_with_zero_logits_and_trains(name):
    """With the zero head of the paper the first loss is log K, and some steps on one batch lower it."""
    torch.manual_seed(0)
    model = create(name)
    images, labels = random_images(model.config, 16), torch.arange(16) % 10
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.302585, abs=1e-5)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.filterwarnings("ignore:The tensor attributes self.layers:UserWarning")  # torch of its own LSTM
@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_export_keeps_the_logits(name):
    model = redraw(create(name))
    images = random_images(model.config)
    exported = torch.export.export(model, (images,))
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(images), model(images), rtol=0, atol=1e-4)


# Without the LSTM, at which torch breaks the graph. Few blocks, because tracing takes a second per block.
COMPILABLE = {
    "ViT-Pico/2": {"depth": 2},
    "Hybrid-Pico": {"depth": 2},
    "ResNet-Pico": {},
    "Mixer-Pico/2": {"depth": 2},
    "iGPT-Micro": {"depth": 2},
    "MLP-Pico": {},
}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", COMPILABLE)
def test_compile_makes_one_graph_for_all_batches(name, training):
    model = redraw(create(name, **COMPILABLE[name])).train(training)
    images = [random_images(model.config) for _ in range(3)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
        for batch in images:
            logits = compiled(batch)
            logits.sum().backward()
            torch.testing.assert_close(logits, model(batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", COMPILABLE)
def test_strict_export_keeps_the_logits(name, training):
    model = redraw(create(name, **COMPILABLE[name])).train(training)
    images = random_images(model.config)
    exported = torch.export.export(copy.deepcopy(model), (images,), strict=True)
    torch.testing.assert_close(exported.module()(images), model(images), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), [("Hybrid-Nano", 36), ("ResNet-Nano", 41), ("LSTM-Nano/7", 35), ("iGPT-Micro", 16)]
)
def test_resize_of_families_without_positional_weights(name, size):
    model = redraw(create(name))
    resized = model.resize((size, size))
    assert resized.config.resolution == (size, size)
    assert resized(random_images(resized.config)).shape == (2, 10)
    images = random_images(model.config)
    assert torch.equal(resized.resize(model.config.resolution).head.weight, model.head.weight)
    assert torch.equal(model.resize(model.config.resolution)(images), model(images))


@pytest.mark.parametrize("name", ["Mixer-Nano/7", "MLP-Nano"])
def test_resize_is_rejected_for_families_with_positional_weights(name):
    for size in (35, (14, 56)):  # the second size has as many positions as 28 x 28
        with pytest.raises(UsageError, match="whose weights depend on positions"):
            create(name).resize(size)
    assert create(name).resize(28).config.resolution == (28, 28)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_images_of_another_shape_are_rejected(name):
    with pytest.raises(UsageError, match="Images must have shape"):
        create(name)(torch.zeros(1, 2, 30, 30))


def test_small_presets_cost_the_same_in_every_family():
    for size, reference in (("Pico", "ViT-Pico/2"), ("Nano", "ViT-Nano/7"), ("Micro", "ViT-Micro/4")):
        macs = {name: config.macs for name, config in MODELS.items() if f"-{size}" in name and config.channels == 1}
        assert len(macs) == (7 if size == "Micro" else 6)
        for name, count in macs.items():
            assert abs(count / MODELS[reference].macs - 1) < 0.10, name


INVALID = [
    ("BiT-R50x1", {"base": 60}, "Base must be a multiple of the 32 groups"),
    ("BiT-R50x1", {"edges": "circular"}, "must not be set for kind bit"),
    ("BiT-R50x1", {"layers": ()}, "Layers must be 1 to 8 integers"),
    ("BiT-R50x1", {"pool": "gap"}, "Setting must be one of"),
    ("ResNet-Nano", {"strides": (1, 2)}, "Strides must be one for each of the 3 stages"),
    ("ResNet-Nano", {"layers": (0, 1, 1)}, "Layers must be an integer from 1"),
    ("R50+ViT-B/16", {"stem": "vgg"}, "Stem must be one of resnet, light"),
    ("R50+ViT-B/16", {"stem_base": 48}, "Stem base must be a multiple of the 32 groups"),
    ("R+ViT-Ti/16", {"resolution": 225}, "got height 225 (a feature map of 57) with patch 8. Use 224 or 256."),
    ("R+ViT-Ti/16", {"stem_strides": (5, 5)}, "Stem strides must not be set for stem resnet"),
    ("Hybrid-Nano", {"position": "relative", "wrap": True}, "Wrap must be false in a hybrid"),
    ("Hybrid-Nano", {"stem_strides": (2, 2)}, "Stem strides must be one for each"),
    ("Mixer-B/16", {"resolution": 225}, "Use 224 or 240."),
    ("Mixer-B/16", {"token_mlp": 0}, "Token mlp must be an integer"),
    ("LSTM-Nano/7", {"order": "spiral"}, "Order must be one of raster"),
    ("LSTM-Nano/7", {"bidirectional": 1}, "Bidirectional must be true or false"),
    ("iGPT-S", {"heads": 7}, "Width must be a multiple of heads"),
    ("iGPT-S", {"classes": 10}, "Classes must be the palette's 512 colours"),
    ("iGPT-S", {"causal": False}, "Causal must be true for output pixels"),
    ("MLP-Nano", {"width": -1}, "Width must be an integer"),
]


@pytest.mark.parametrize(("name", "changes", "message"), INVALID, ids=lambda value: str(value)[:30])
def test_invalid_settings_raise_a_one_line_error(name, changes, message):
    with pytest.raises(UsageError) as error:
        create(name, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
