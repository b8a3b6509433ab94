"""Heads of several layers: description, construction, costs, and bundles that keep them."""

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from vitrail.core.errors import UsageError
from vitrail.models.head_layers import parse_head_layers
from vitrail.models.head_modules import build_head, describe_head

WIDTH, CLASSES = 48, 5


def make_heads() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, CLASSES),
        nn.Linear(WIDTH, CLASSES, bias=False),
        nn.Sequential(nn.Linear(WIDTH, CLASSES)),
        nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, CLASSES)),
        nn.Sequential(
            nn.LayerNorm(WIDTH, eps=1e-6, bias=False),
            nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16, momentum=None), nn.LeakyReLU(0.2)),
            nn.RMSNorm(16),
            nn.GELU(approximate="tanh"),
            nn.Linear(16, CLASSES),
            nn.Identity(),
        ),
    ]


@pytest.mark.parametrize("number", range(len(make_heads())))
def test_a_described_head_is_built_again_with_the_same_logits(number):
    head = make_heads()[number].eval()
    description = describe_head(head, WIDTH)
    assert description is not None
    text, classes = description
    assert classes == CLASSES
    built = build_head(text or "Linear(classes)", WIDTH, classes).eval()
    assert repr(built) == repr(head)
    built.load_state_dict(head.state_dict())
    features = torch.randn(3, WIDTH)
    assert torch.equal(built(features), head(features))
    layers = parse_head_layers(text or "Linear(classes)", WIDTH, classes)
    assert sum(layer.parameters for layer in layers) == sum(parameter.numel() for parameter in head.parameters())
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    assert sum(layer.macs for layer in layers) == sum(layer.weight.numel() for layer in linears)


def test_a_head_that_cannot_be_built_again_is_not_described():
    class Doubled(nn.Linear):
        pass

    hooked = nn.Linear(WIDTH, CLASSES)
    hooked.register_forward_hook(lambda *_: None)
    for head in (
        nn.Linear(WIDTH + 1, CLASSES),
        nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Flatten()),
        nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(9, CLASSES)),
        nn.Sequential(nn.LayerNorm((2, WIDTH)), nn.Linear(WIDTH, CLASSES)),
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES)),
        Doubled(WIDTH, CLASSES),
        hooked,
        nn.GELU(),
        nn.Sequential(nn.LeakyReLU(-0.1), nn.Linear(WIDTH, CLASSES)),
        nn.Sequential(*(nn.GELU() for _ in range(300)), nn.Linear(WIDTH, CLASSES)),
    ):
        assert describe_head(head, WIDTH) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Linaer(3), Linear(classes)", "Did you mean 'Linear'"),
        ("Linear(3)", "must end with Linear(classes)"),
        ("Linear(classes), Linear(3)", "one output per class"),
        ("GELU", "must be calls"),
        ("__import__('os')", "must be one of"),
        ("Linear(classes).weight", "must be calls"),
        ("GELU(a=1), Linear(classes)", "must be one of approximate"),
        ("Dropout(2), Linear(classes)", "impossible value"),
        ("Linear(0), Linear(classes)", "1 to 10,000,000 outputs"),
        ("Sequential(), Linear(classes)", "must hold the layers"),
        ("(" * 300, "must be layers such as"),
        ("Linear(classes)," * 1000, "must be layers such as"),
        ("Linear(" + "-" * 1900 + "1), Linear(classes)", "must be calls"),
    ],
)
def test_a_wrong_text_is_one_clear_error(text, message):
    with pytest.raises(UsageError) as raised:
        parse_head_layers(text, WIDTH, CLASSES)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_an_assigned_head_sets_the_configuration_and_counts():
    model = vitrail.create("ViT-Pico/2")
    model.head = make_heads()[3]
    assert model.config.classes == CLASSES
    assert model.config.head_layers == "Linear(32), GELU(), Dropout(0.1), Linear(classes)"
    assert model.config.parameters == sum(parameter.numel() for parameter in model.parameters())
    model.reset_classifier(3)
    assert (model.config.classes, model.config.head_layers) == (3, "")
    model.head = nn.Linear(WIDTH, 3, bias=False)
    assert model.config.head_layers == "Linear(classes, bias=False)"
    again = vitrail.create("ViT-Pico/2", head_layers="Linear(32), GELU(), Linear(classes)", classes=7)
    assert again(torch.zeros(1, 1, 8, 8)).tolist() == [[0.0] * 7]  # only the last layer starts at zero
    assert again.head[0].weight.any()
    with pytest.raises(UsageError, match="Head layers must be empty for a model without classes"):
        vitrail.create("ViT-Pico/2", head_layers="Linear(classes)", classes=0)


@pytest.mark.parametrize("name", ["ViT-Pico/2", "ResNet-Pico", "MLP-Pico"])
def test_a_bundle_keeps_an_mlp_head(tmp_path, name):
    model = vitrail.create(name, classes=10, channels=1).eval()
    model.head = nn.Sequential(nn.Linear(model.head_width, 24), nn.ReLU(), nn.Linear(24, 10))
    preprocess = vitrail.Preprocess(resolution=(8, 8), mean=(0.5,), std=(0.5,))
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "bundle")
    loaded = vitrail.load(tmp_path / "bundle").model
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(images), model(images))
    assert loaded.config.head_layers == "Linear(24), ReLU(), Linear(classes)"


def test_a_head_that_is_not_described_is_refused_by_name(tmp_path):
    model = vitrail.create("ViT-Pico/2", classes=5)
    model.head = nn.Sequential(nn.Linear(48, 5), nn.Flatten())
    bundle = vitrail.Bundle(model=model, preprocess=vitrail.Preprocess(resolution=(8, 8), mean=(0.5,), std=(0.5,)))
    with pytest.raises(UsageError, match=r"Head must be layers of torch.nn .* got Sequential"):
        vitrail.save(bundle, tmp_path / "bundle")


class OwnHead(nn.Module):
    """A head that a configuration cannot describe: it adds two branches."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, classes), nn.Sequential(nn.Dropout(), nn.Linear(WIDTH, classes))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.left(features) + self.right(features)


def test_a_head_of_ones_own_is_used_and_sets_the_number_of_classes(tmp_path):
    model = vitrail.create("ViT-Pico/2", classes=10)
    head = OwnHead(3).train()
    head.left.eval()
    model.head = head
    assert (model.config.classes, model.config.head_layers) == (3, "")
    assert [module.training for module in head.modules()] == [True, False, True, True, True]
    model.eval()
    images = np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)
    preprocess = vitrail.Preprocess(resolution=(8, 8), mean=(0.5,), std=(0.5,))
    bundle = vitrail.Bundle(model=model, preprocess=preprocess, labels=("a", "b", "c"))
    predictions = vitrail.Classifier(bundle).predict(images)
    expected = head(model.features(preprocess(list(images)))).softmax(dim=1)
    for prediction, row in zip(predictions, expected, strict=True):
        assert prediction.score == pytest.approx(row.max().item(), abs=1e-5)
    with pytest.raises(UsageError, match=r"Head must be layers of torch.nn .* got OwnHead"):
        vitrail.save(bundle, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    before = model.config
    model.head = nn.Linear(WIDTH + 1, 7)  # of another width
    assert model.config is before
    model.head = nn.Flatten(0)  # not one row per image
    assert model.config is before


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"model.head_layers": "Linear(16), BatchNorm1d(), GELU(), Dropout(0.1), Linear(classes)"}, 1),
        ({"model.distilled": True, "model.registers": 1}, 2),
    ],
    ids=["mlp", "distilled"],
)
def test_a_model_with_a_custom_head_is_trained_saved_evaluated_and_exported(tmp_path, settings, layers):
    shades = np.random.default_rng(0).integers(0, 80, (60, 8, 8, 1), dtype=np.uint8)
    labels = np.arange(60) % 3
    images = shades + (80 * labels).astype(np.uint8)[:, None, None, None]
    result = vitrail.train(
        (images, labels), "ViT-Pico/2", epochs=30, batch=16, lr=0.003, settings={**settings, "holdout": 0}, quiet=True
    )
    assert len(result.bundle.model.output_layers()) == layers
    for layer in result.bundle.model.output_layers():
        assert layer.weight.any()
    vitrail.save(result.bundle, tmp_path / "bundle")
    loaded = vitrail.load(tmp_path / "bundle")
    assert loaded.model.config == result.bundle.model.config
    pixels = loaded.preprocess(list(images))
    for name, tensor in result.bundle.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    torch.testing.assert_close(loaded.model(pixels), result.bundle.model.eval()(pixels), rtol=0, atol=1e-5)
    assert vitrail.evaluate(loaded, (images, labels)).accuracy > 0.9
    proof = vitrail.export(tmp_path / "bundle", tmp_path / "onnx", to="onnx")
    assert proof["same_answers"] == proof["pictures"]
    torch_predictions, onnx_predictions = (
        vitrail.predict(tmp_path / "bundle", images, engine=engine) for engine in ("torch", "onnx")
    )
    for ours, theirs in zip(torch_predictions, onnx_predictions, strict=True):
        assert ours.label == theirs.label
        assert ours.score == pytest.approx(theirs.score, abs=1e-4)
    assert np.mean([int(ours.label) for ours in torch_predictions] == labels) > 0.9


def test_norms_after_the_last_linear_layer_are_refused():
    head = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.BatchNorm1d(CLASSES))
    assert describe_head(head, WIDTH) is None
    with pytest.raises(UsageError, match="must not have a norm after"):
        parse_head_layers("Linear(classes), BatchNorm1d()", WIDTH, CLASSES)


@pytest.mark.parametrize("kind", ["mlp", "distilled"])
def test_finetuning_keeps_a_trained_head_of_several_layers_in_the_order_of_the_classes(tmp_path, kind):
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 1), dtype=np.uint8)
    model = vitrail.create("ViT-Pico/2", classes=3, registers=1, distilled=kind == "distilled")
    if kind == "mlp":
        model.head = nn.Sequential(nn.Linear(48, 16), nn.GELU(), nn.Linear(16, 3))
    for layer in model.output_layers():
        nn.init.normal_(layer.weight)
    preprocess = vitrail.Preprocess(resolution=(8, 8), mean=(0.5,), std=(0.5,))
    bundle = vitrail.Bundle(model=model, preprocess=preprocess, labels=("c", "a", "b"))
    vitrail.save(bundle, tmp_path / "bundle")
    names = np.array(["a", "b", "c"])[np.arange(60) % 3]
    result = vitrail.finetune(tmp_path / "bundle", (images, names), steps=1, lr=1e-9, quiet=True)
    assert result.bundle.labels == ("a", "b", "c")
    expected, outputs = (net.eval()(torch.zeros(1, 1, 8, 8)) for net in (model, result.bundle.model))
    torch.testing.assert_close(outputs, expected[:, [1, 2, 0]], rtol=0, atol=1e-3)
    others = np.array(["x", "y"])[np.arange(60) % 2]
    tuned = vitrail.finetune(tmp_path / "bundle", (images, others), steps=2, quiet=True).bundle
    assert tuned.model.config.distilled == (kind == "distilled")
    assert tuned.model.config.head_layers == ""
    vitrail.save(tuned, tmp_path / "tuned")
    predictions = [vitrail.predict(tmp_path / "tuned", images[:8], engine=engine) for engine in ("torch", "onnx")]
    for ours, theirs in zip(*predictions, strict=True):
        assert ours.label == theirs.label
        assert ours.score == pytest.approx(theirs.score, abs=1e-4)
    assert vitrail.evaluate(tmp_path / "tuned", (images, others)).count > 0
