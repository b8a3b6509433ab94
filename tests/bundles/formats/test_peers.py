"""Other libraries load files that vitrail wrote, and the reverse; both models give the same logits."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vitrail
from tests.bundles.test_convert import CLOTHES, SMALL, convert_bundle, has_equal_weights, small
from tests.peers import import_peer
from vitrail.bundles.convert import UserHints, convert, import_weights
from vitrail.bundles.formats.base import split_tensors
from vitrail.bundles.formats.registry import FORMATS
from vitrail.bundles.parity import prove
from vitrail.core.errors import UsageError, VitrailError
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.protocols import evaluate
from vitrail.evaluation.split_predictions import predict_split
from vitrail.lab.exact import redraw

# Other libraries read files that vitrail wrote


def random_images(count=64):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (80, 90, 3), dtype=np.uint8) for _ in range(count)]


def assert_equal_predictions(bundle, forward):
    """Assert that logits differ by at most 1e-4 and predictions are equal on 64 images."""
    images = bundle.preprocess(random_images())
    with torch.inference_mode():
        ours, theirs = bundle.model.eval()(images), forward(images)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_transformers_reads_written_folders_with_labels_and_preprocessing(tmp_path):
    transformers = import_peer("transformers")
    bundle = small()
    report = convert_bundle(tmp_path, bundle, "huggingface")
    assert report["proofs"][-1]["largest_difference"] < 1e-4
    folder = tmp_path / "huggingface"
    peer = transformers.ViTForImageClassification.from_pretrained(folder, local_files_only=True).eval()
    assert_equal_predictions(bundle, lambda images: peer(images).logits)
    pipeline = transformers.pipeline("image-classification", str(folder), image_processor=str(folder), device="cpu")

    for image in random_images(8):
        theirs = pipeline(Image.fromarray(image), top_k=5)
        ours = vitrail.Classifier(bundle).predict([image])[0]
        assert [row["label"] for row in theirs] == [row["label"] for row in ours]
        assert [row["score"] for row in theirs] == pytest.approx([row["score"] for row in ours], abs=2e-3)


def test_timm_reads_written_folders(tmp_path):
    timm = import_peer("timm")
    bundle = small()
    convert_bundle(tmp_path, bundle, "timm")
    peer = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert_equal_predictions(bundle, peer)
    by_hand = timm.create_model(
        "vit_base_patch16_224", img_size=64, embed_dim=128, depth=2, num_heads=2, mlp_ratio=2, num_classes=5
    ).eval()
    by_hand.load_state_dict(load_file(tmp_path / "timm" / "model.safetensors"), strict=True)
    assert_equal_predictions(bundle, by_hand)


def test_timm_reads_written_npz_files(tmp_path):
    timm = import_peer("timm")
    for number, changes in enumerate(({}, {"pool": "map"}, {"activation": "gelu-tanh"})):
        bundle = small(**changes)
        folder = tmp_path / str(number)
        folder.mkdir()
        convert_bundle(folder, bundle, "google")
        peer = timm.models.VisionTransformer(
            img_size=64,
            embed_dim=128,
            depth=2,
            num_heads=2,
            mlp_ratio=2,
            num_classes=5,
            class_token="pool" not in changes,
            global_pool=changes.get("pool", "token"),
            act_layer="gelu_tanh" if "activation" in changes else None,
        ).eval()
        peer.load_pretrained(str(folder / "google" / "model.npz"))
        assert_equal_predictions(bundle, peer)


def test_torchvision_reads_written_state_dicts(tmp_path):
    torchvision = import_peer("torchvision")
    model = redraw(vitrail.create("ViT-B/16", name="", **{**SMALL, "heads": 2}), std=0.05)
    bundle = vitrail.Bundle(model=model, preprocess=Preprocess(resolution=64))
    convert_bundle(tmp_path, bundle, "torchvision")
    peer = torchvision.models.VisionTransformer(64, 16, 2, 2, 128, 256, num_classes=5).eval()
    peer.load_state_dict(load_file(tmp_path / "torchvision" / "model.safetensors"), strict=True)
    assert_equal_predictions(bundle, peer)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_vit_b16_is_proved_by_each_library(tmp_path, to):
    """ViT-B/16 on 64 images, with the library's own function for this size (vit_b_16, ...)."""
    import_peer("torchvision" if to == "torchvision" else "transformers" if to == "huggingface" else "timm")
    model = redraw(vitrail.create("ViT-B/16", classes=10), std=0.03)
    bundle = vitrail.Bundle(model=model, preprocess=Preprocess(resolution=224))
    convert_bundle(tmp_path, bundle, to, verifies=False)
    forward = FORMATS[to](to).open_written(model.config, tmp_path / to)
    proof = prove(model, bundle.preprocess, forward, to, random_images(64))
    assert proof["equal_answers"] == proof["pictures"] == 64
    assert proof["largest_difference"] < 1e-4


# Files of other libraries


def test_vit_and_deit_of_hugging_face_are_read_with_both_naming_schemes(tmp_path):
    transformers = import_peer("transformers")
    settings = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "image_size": 64,
        "patch_size": 16,
        "num_labels": 5,
        "layer_norm_eps": 1e-12,
    }
    for model_class, config_class in (
        (transformers.ViTForImageClassification, transformers.ViTConfig),
        (transformers.DeiTForImageClassification, transformers.DeiTConfig),
    ):
        torch.manual_seed(0)
        peer = model_class(config_class(**settings)).eval()
        redraw(peer, std=0.05)
        folder = tmp_path / model_class.__name__
        peer.save_pretrained(folder)
        imported = import_weights(str(folder), UserHints())
        assert imported.bundle.model.config.heads == 4
        assert imported.bundle.model.config.norm_epsilon == 1e-12
        assert_equal_predictions(imported.bundle, lambda images, peer=peer: peer(images).logits)
    # The names of transformers 5, in a state dict without a config.json.
    peer = transformers.ViTForImageClassification(transformers.ViTConfig(**settings)).eval()
    save_file(peer.state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(UsageError, match="got ViT-Ti/16 of width 192 for 128"):
        import_weights(str(tmp_path / "bare.safetensors"), UserHints(model="ViT-Ti/16"))
    imported = import_weights(str(tmp_path / "bare.safetensors"), UserHints())
    assert imported.bundle.model.config.heads == 2
    assert any("number of heads; 2 are used" in note for note in imported.notes)


def test_dinov2_is_read_and_proved_in_both_naming_schemes(tmp_path):
    transformers = import_peer("transformers")
    settings = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    }
    peer = transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**settings)).eval()
    redraw(peer, std=0.05)
    peer.save_pretrained(tmp_path / "hf")
    report = convert(str(tmp_path / "hf"), tmp_path / "ours", "vitrail", images=CLOTHES)
    assert report["left_out"] == ["embeddings.mask_token"]
    assert report["proofs"][0]["compared"] == "features"
    assert report["proofs"][0]["largest_difference"] < 1e-4
    bundle = vitrail.load(tmp_path / "ours")
    assert (bundle.model.config.registers, bundle.provenance["objective"]) == (4, "features")
    with pytest.raises(UsageError, match="Fine-tune it first"):
        vitrail.Classifier(bundle).predict(CLOTHES[:1])
    # The names of facebookresearch are ours, with two more tensors.
    tensors = {name: tensor for name, tensor in bundle.model.state_dict().items() if not name.startswith("head.")}
    tensors["register_tokens"] = tensors.pop("reg_token")
    tensors["mask_token"] = torch.zeros(1, 128)
    torch.save({"teacher": {f"backbone.{name}": tensor for name, tensor in tensors.items()}}, tmp_path / "fb.pth")
    again = import_weights(str(tmp_path / "fb.pth"), UserHints())
    assert has_equal_weights(again.bundle.model, bundle.model)
    # Without a config.json the peer is built from the shapes of the tensors; a wrong tensor fails the proof.
    proof = convert(str(tmp_path / "fb.pth"), tmp_path / "fb", "vitrail", images=CLOTHES)["proofs"][0]
    assert proof["library"] == "transformers (reading DINO's tensors)"
    assert proof["largest_difference"] < 1e-4
    (tmp_path / "hf" / "config.json").unlink()
    imported = import_weights(str(tmp_path / "hf"), UserHints())
    assert (
        prove(imported.bundle.model, imported.bundle.preprocess, imported.open_peer(), "", CLOTHES)[
            "largest_difference"
        ]
        < 1e-4
    )
    with torch.no_grad():
        imported.bundle.model.blocks[1].ls1.gamma[0] += 1
    with pytest.raises(VitrailError, match="gives other outputs"):
        prove(imported.bundle.model, imported.bundle.preprocess, imported.open_peer(), "", CLOTHES)


def test_vits_of_hugging_face_are_proved_without_config_json(tmp_path):
    transformers = import_peer("transformers")
    settings = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    settings |= {"image_size": 64, "patch_size": 16, "num_labels": 5, "layer_norm_eps": 1e-12}
    for kind in ("ViT", "DeiT"):
        config = getattr(transformers, f"{kind}Config")(**settings)
        peer = redraw(getattr(transformers, f"{kind}ForImageClassification")(config).eval(), std=0.05)
        peer.save_pretrained(tmp_path / kind)
        (tmp_path / kind / "config.json").unlink()
        report = convert(str(tmp_path / kind), tmp_path / f"our-{kind}", "vitrail", images=CLOTHES)
        assert report["proofs"][0]["equal_answers"] == 40
        assert report["proofs"][0]["largest_difference"] < 1e-4


def test_big_vision_is_read_with_stacked_layers_and_prefixes(tmp_path):
    bundle = small(class_position=False)
    tensors = split_tensors(FORMATS["google"]("google").entries(bundle.model.config), bundle.model.state_dict())
    plain = {name: tensor.numpy() for name, tensor in tensors.items()}
    stacked = {name: array for name, array in plain.items() if "encoderblock_" not in name}
    for name in plain:
        if "encoderblock_0/" in name:
            layers = [plain[name.replace("encoderblock_0", f"encoderblock_{layer}")] for layer in range(2)]
            stacked[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    np.savez(tmp_path / "stacked.npz", **stacked)
    np.savez(
        tmp_path / "old.npz", **{f"opt/target/{name.removeprefix('params/')}": array for name, array in plain.items()}
    )
    for name in ("stacked.npz", "old.npz"):
        assert has_equal_weights(import_weights(str(tmp_path / name), UserHints()).bundle.model, bundle.model)


# Real weights


@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_deit_is_unchanged_by_a_round_trip_through_each_format(tmp_path, shared, to):
    import_peer("timm")
    report = convert(str(shared / "deit-ti16"), tmp_path / "ours", "vitrail", images=CLOTHES[:8])
    import_peer("torchvision" if to == "torchvision" else "transformers" if to == "huggingface" else "timm")
    assert report["proofs"][0]["equal_answers"] == 8
    report = convert(str(tmp_path / "ours"), tmp_path / to, to, images=CLOTHES[:8])
    assert report["proofs"][0]["equal_answers"] == 8
    convert(str(tmp_path / to), tmp_path / "again", "vitrail", verifies=False, images=CLOTHES[:8])
    ours, again = vitrail.load(tmp_path / "ours"), vitrail.load(tmp_path / "again")
    assert has_equal_weights(ours.model, again.model)
    assert (ours.model.config, ours.preprocess) == (again.model.config, again.preprocess)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_deit_predicts_500_photos_equally_after_a_round_trip_without_sidecar(tmp_path, shared, to):
    """Without vitrail.json: preprocessing that a format does not store is passed as a hint, as a user would."""
    data = str(shared / "imagenet-val-500")
    convert(str(shared / "deit-ti16"), tmp_path / "ours", "vitrail", verifies=False, images=CLOTHES)
    convert(str(tmp_path / "ours"), tmp_path / to, to, verifies=False, images=CLOTHES)
    (tmp_path / to / "vitrail.json").unlink()
    preprocess = vitrail.load(tmp_path / "ours").preprocess
    settings = (
        f"mean={list(preprocess.mean)}",
        f"std={list(preprocess.std)}",
        "resize=shorter",
        "crop_fraction=0.9",
        "interpolation=bicubic",
    )
    hints = UserHints(preprocess=settings if to in ("google", "torchvision") else ())
    convert(str(tmp_path / to), tmp_path / "again", "vitrail", hints=hints, verifies=False, images=CLOTHES)
    split = open_data(data).first_split
    ours, again = (
        predict_split(bundle.model, Loader(split, bundle.preprocess, batch=50, shuffle=False)).probabilities.argmax(1)
        for bundle in (vitrail.load(tmp_path / "ours"), vitrail.load(tmp_path / "again"))
    )
    # Models of Google's format compute GELU in the tanh form, which changes the prediction of one photo.
    assert (ours == again).sum() == (499 if to == "google" else 500)
    assert abs(evaluate(tmp_path / "again", data)["accuracy"] - 356 / 500) <= (0.0021 if to == "google" else 0)
