"""Other libraries load what we wrote and we load what they wrote, and both give the same answers."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vitrail
from tests.bundles.test_convert import CLOTHES, SMALL, equal, small, there
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

# The libraries themselves read what we wrote


def clothes(count=64):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (80, 90, 3), dtype=np.uint8) for _ in range(count)]


def assert_same_answers(bundle, forward):
    """Logits within 1e-4 and equal answers on 64 images."""
    images = bundle.preprocess(clothes())
    with torch.inference_mode():
        ours, theirs = bundle.model.eval()(images), forward(images)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_transformers_reads_what_we_wrote_with_labels_and_pixels(tmp_path):
    transformers = import_peer("transformers")
    bundle = small()
    report = there(tmp_path, bundle, "huggingface")
    assert report["proofs"][-1]["largest_difference"] < 1e-4
    folder = tmp_path / "huggingface"
    peer = transformers.ViTForImageClassification.from_pretrained(folder, local_files_only=True).eval()
    assert_same_answers(bundle, lambda images: peer(images).logits)
    guess = transformers.pipeline("image-classification", str(folder), image_processor=str(folder), device="cpu")

    for image in clothes(8):
        theirs = guess(Image.fromarray(image), top_k=5)
        ours = vitrail.Classifier(bundle).predict([image])[0]
        assert [one["label"] for one in theirs] == [one["label"] for one in ours]
        assert [one["score"] for one in theirs] == pytest.approx([one["score"] for one in ours], abs=2e-3)


def test_timm_reads_what_we_wrote(tmp_path):
    timm = import_peer("timm")
    bundle = small()
    there(tmp_path, bundle, "timm")
    peer = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert_same_answers(bundle, peer)
    by_hand = timm.create_model(
        "vit_base_patch16_224", img_size=64, embed_dim=128, depth=2, num_heads=2, mlp_ratio=2, num_classes=5
    ).eval()
    by_hand.load_state_dict(load_file(tmp_path / "timm" / "model.safetensors"), strict=True)
    assert_same_answers(bundle, by_hand)


def test_timms_own_reader_of_npz_reads_what_we_wrote(tmp_path):
    timm = import_peer("timm")
    for number, changes in enumerate(({}, {"pool": "map"}, {"activation": "gelu-tanh"})):
        bundle = small(**changes)
        folder = tmp_path / str(number)
        folder.mkdir()
        there(folder, bundle, "google")
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
        assert_same_answers(bundle, peer)


def test_torchvision_reads_what_we_wrote(tmp_path):
    torchvision = import_peer("torchvision")
    model = redraw(vitrail.create("ViT-B/16", name="", **{**SMALL, "heads": 2}), std=0.05)
    bundle = vitrail.Bundle(model=model, preprocess=Preprocess(resolution=64))
    there(tmp_path, bundle, "torchvision")
    peer = torchvision.models.VisionTransformer(64, 16, 2, 2, 128, 256, num_classes=5).eval()
    peer.load_state_dict(load_file(tmp_path / "torchvision" / "model.safetensors"), strict=True)
    assert_same_answers(bundle, peer)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_the_papers_own_size_is_proved_by_each_library(tmp_path, to):
    """ViT-B/16 on 64 images, by the library's own function for it (vit_b_16, ...)."""
    import_peer("torchvision" if to == "torchvision" else "transformers" if to == "huggingface" else "timm")
    model = redraw(vitrail.create("ViT-B/16", classes=10), std=0.03)
    bundle = vitrail.Bundle(model=model, preprocess=Preprocess(resolution=224))
    there(tmp_path, bundle, to, verifies=False)
    forward = FORMATS[to](to).open_written(model.config, tmp_path / to)
    proof = prove(model, bundle.preprocess, forward, to, clothes(64))
    assert proof["equal_answers"] == proof["pictures"] == 64
    assert proof["largest_difference"] < 1e-4


# Their own files


def test_both_spellings_of_hugging_face_and_its_deit(tmp_path):
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
    for kind, config in (
        (transformers.ViTForImageClassification, transformers.ViTConfig),
        (transformers.DeiTForImageClassification, transformers.DeiTConfig),
    ):
        torch.manual_seed(0)
        peer = kind(config(**settings)).eval()
        redraw(peer, std=0.05)
        folder = tmp_path / kind.__name__
        peer.save_pretrained(folder)
        found = import_weights(str(folder), UserHints())
        assert found.bundle.model.config.heads == 4
        assert found.bundle.model.config.norm_epsilon == 1e-12
        assert_same_answers(found.bundle, lambda images, peer=peer: peer(images).logits)
    # As modules of version 5 call it, in a bare state dict.
    peer = transformers.ViTForImageClassification(transformers.ViTConfig(**settings)).eval()
    save_file(peer.state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(UsageError, match="got ViT-Ti/16 of width 192 for 128"):
        import_weights(str(tmp_path / "bare.safetensors"), UserHints(model="ViT-Ti/16"))
    found = import_weights(str(tmp_path / "bare.safetensors"), UserHints())
    assert found.bundle.model.config.heads == 2
    assert any("number of heads; 2 are used" in note for note in found.notes)


def test_dinov2_of_hugging_face_and_of_facebook(tmp_path):
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
    # Facebook's names are ours, with two more.
    tensors = {name: tensor for name, tensor in bundle.model.state_dict().items() if not name.startswith("head.")}
    tensors["register_tokens"] = tensors.pop("reg_token")
    tensors["mask_token"] = torch.zeros(1, 128)
    torch.save({"teacher": {f"backbone.{name}": tensor for name, tensor in tensors.items()}}, tmp_path / "fb.pth")
    again = import_weights(str(tmp_path / "fb.pth"), UserHints())
    assert equal(again.bundle.model, bundle.model)
    # Without a config.json the peer is built from the shapes; a wrong tensor would show.
    proof = convert(str(tmp_path / "fb.pth"), tmp_path / "fb", "vitrail", images=CLOTHES)["proofs"][0]
    assert proof["library"] == "transformers (reading DINO's tensors)"
    assert proof["largest_difference"] < 1e-4
    (tmp_path / "hf" / "config.json").unlink()
    found = import_weights(str(tmp_path / "hf"), UserHints())
    assert (
        prove(found.bundle.model, found.bundle.preprocess, found.open_peer(), "", CLOTHES)["largest_difference"] < 1e-4
    )
    with torch.no_grad():
        found.bundle.model.blocks[1].ls1.gamma[0] += 1
    with pytest.raises(VitrailError, match="gives other outputs"):
        prove(found.bundle.model, found.bundle.preprocess, found.open_peer(), "", CLOTHES)


def test_vits_of_hugging_face_without_a_config_are_proved_by_their_shapes(tmp_path):
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


def test_big_vision_with_stacked_layers_and_prefixes(tmp_path):
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
        assert equal(import_weights(str(tmp_path / name), UserHints()).bundle.model, bundle.model)


# Real weights


@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_deit_through_every_format_and_back_is_the_same_bundle(tmp_path, shared, to):
    import_peer("timm")
    report = convert(str(shared / "deit-ti16"), tmp_path / "ours", "vitrail", images=CLOTHES[:8])
    import_peer("torchvision" if to == "torchvision" else "transformers" if to == "huggingface" else "timm")
    assert report["proofs"][0]["equal_answers"] == 8
    report = convert(str(tmp_path / "ours"), tmp_path / to, to, images=CLOTHES[:8])
    assert report["proofs"][0]["equal_answers"] == 8
    convert(str(tmp_path / to), tmp_path / "again", "vitrail", verifies=False, images=CLOTHES[:8])
    one, other = vitrail.load(tmp_path / "ours"), vitrail.load(tmp_path / "again")
    assert equal(one.model, other.model)
    assert (one.model.config, one.preprocess) == (other.model.config, other.preprocess)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_deit_answers_500_photos_the_same_even_if_only_the_format_speaks(tmp_path, shared, to):
    """Without vitrail.json: what a format does not say is told, as a user would."""
    data = str(shared / "imagenet-val-500")
    convert(str(shared / "deit-ti16"), tmp_path / "ours", "vitrail", verifies=False, images=CLOTHES)
    convert(str(tmp_path / "ours"), tmp_path / to, to, verifies=False, images=CLOTHES)
    (tmp_path / to / "vitrail.json").unlink()
    eye = vitrail.load(tmp_path / "ours").preprocess
    words = (
        f"mean={list(eye.mean)}",
        f"std={list(eye.std)}",
        "resize=shorter",
        "crop_fraction=0.9",
        "interpolation=bicubic",
    )
    hints = UserHints(preprocess=words if to in ("google", "torchvision") else ())
    convert(str(tmp_path / to), tmp_path / "again", "vitrail", hints=hints, verifies=False, images=CLOTHES)
    split = open_data(data).first_split
    ours, again = (
        predict_split(bundle.model, Loader(split, bundle.preprocess, batch=50, shuffle=False)).probabilities.argmax(1)
        for bundle in (vitrail.load(tmp_path / "ours"), vitrail.load(tmp_path / "again"))
    )
    # By its definition, Google's format computes GELU in the tanh form: one photo is on the edge.
    assert (ours == again).sum() == (499 if to == "google" else 500)
    assert abs(evaluate(tmp_path / "again", data)["accuracy"] - 356 / 500) <= (0.0021 if to == "google" else 0)
