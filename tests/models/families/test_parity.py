"""Parity with published implementations at equal weights: logits, gradients, pixels and predictions."""

import functools

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.peers import huggingface_vit, import_peer, timm_vit, torchvision_vit
from vitrail.bundles.pretrained import create
from vitrail.data.preprocess import Preprocess
from vitrail.lab.exact import redraw

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "changes", "make_peer"),
    [
        ("ViT-Ti/16", {}, timm_vit),
        ("ViT-Ti/16", {}, huggingface_vit),
        ("ViT-Ti/16", {}, torchvision_vit),
        pytest.param("ViT-B/32", {}, timm_vit, marks=slow),
        pytest.param("ViT-B/32", {}, huggingface_vit, marks=slow),
        pytest.param("ViT-B/32", {}, torchvision_vit, marks=slow),
        pytest.param("ViT-B/16", {"resolution": 384}, timm_vit, marks=slow),
        pytest.param("ViT-B/16", {"resolution": 384}, huggingface_vit, marks=slow),
        pytest.param("ViT-B/16", {"resolution": 384}, torchvision_vit, marks=slow),
    ],
)
def test_logits_and_gradients_equal_the_peer(name, changes, make_peer):
    model = redraw(create(name, **changes), std=0.02)
    try:
        peer, rename, run = make_peer(model.config)
    except ImportError as error:
        pytest.skip(str(error))
    peer.load_state_dict(rename(model.state_dict()), strict=True)
    peer.eval()
    images = torch.randn(1 if changes else 2, 3, *model.config.resolution)
    ours, theirs = model(images), run(images)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)

    labels = torch.arange(len(images))
    torch.nn.functional.cross_entropy(ours, labels).backward()
    torch.nn.functional.cross_entropy(theirs, labels).backward()
    assert model.pos_embed.grad.abs().max() > 1e-3
    gradients = rename({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, parameter in peer.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=0, atol=1e-4, msg=key)


def test_map_pooling_registers_and_layer_scale_equal_timm():
    timm = import_peer("timm")
    model = redraw(
        create("ViT-Ti/16", pool="map", registers=0, layer_scale=0.1, classes=11, depth=2, qkv_bias=False), std=0.1
    )
    peer = timm.models.VisionTransformer(
        embed_dim=192,
        depth=2,
        num_heads=3,
        num_classes=11,
        global_pool="map",
        class_token=False,
        init_values=0.1,
        qkv_bias=False,
    ).eval()
    peer.load_state_dict(model.state_dict(), strict=True)
    images = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(model(images), peer(images), rtol=0, atol=1e-4)
    model = redraw(create("ViT-Ti/16", registers=3, class_position=False, classes=11, depth=2), std=0.1)
    peer = timm.models.VisionTransformer(
        embed_dim=192, depth=2, num_heads=3, num_classes=11, reg_tokens=3, no_embed_class=True
    ).eval()
    peer.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(model(images), peer(images), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (224, 224), (300, 1000), (249, 247), (64, 64)])
def test_preprocessing_is_bit_identical_to_timm(size):
    data = import_peer("timm.data")
    from PIL import Image

    transform = data.create_transform((3, 224, 224), is_training=False, interpolation="bicubic", crop_pct=0.9)
    noise = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8).numpy()
    assert torch.equal(Preprocess()([noise])[0], transform(Image.fromarray(noise)))


@pytest.fixture(scope="module")
def deit(shared):
    """Return the bundle of DeiT-Ti/16 with its published weights, 500 ImageNet photos, and a cached prediction."""
    model = create("ViT-Ti/16")
    model.load_state_dict(load_file(shared / "deit-ti16" / "model.safetensors"), strict=True)
    bundle = vitrail.Bundle(model=model, preprocess=Preprocess())
    photos = sorted((shared / "imagenet-val-500").glob("*/*.JPEG"))
    assert len(photos) == 500

    @functools.cache
    def predict(step):
        """Return every `step`-th photo and the class that we predict for it."""
        sample = photos[::step]
        labels = vitrail.Classifier(bundle).predict(sample, top_k=1)
        return sample, [int(prediction[0]["label"]) for prediction in labels]

    return bundle, predict


@pytest.mark.parametrize(("step", "correct"), [(5, 70), pytest.param(1, 356, marks=slow)])
def test_published_weights_reach_timms_accuracy_on_photos(deit, step, correct):
    _, predict = deit
    photos, predictions = predict(step)
    labels = [int(photo.parent.name) for photo in photos]
    assert sum(prediction == label for prediction, label in zip(predictions, labels, strict=True)) == correct


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=slow)])
def test_predictions_equal_timm_on_every_photo(deit, step):
    timm = import_peer("timm")
    bundle, predict = deit
    photos, predictions = predict(step)
    peer = timm.create_model("deit_tiny_patch16_224").eval()
    peer.load_state_dict(bundle.model.state_dict(), strict=True)
    with torch.inference_mode():
        batches = [photos[start : start + 10] for start in range(0, len(photos), 10)]
        theirs = torch.cat([peer(bundle.preprocess(batch)).argmax(-1) for batch in batches])
    assert predictions == theirs.tolist()
