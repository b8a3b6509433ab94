"""`convert`: round trips through every format are exact, incomplete checkpoints are refused, settings are inferred."""

import json
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import vitrail
from tests.peers import import_peer
from tests.test_cli import run
from vitrail.api.output import print_conversion
from vitrail.bundles.convert import UserHints, convert, import_weights
from vitrail.bundles.formats.base import WeightFormat
from vitrail.bundles.formats.registry import FORMATS, written_formats
from vitrail.bundles.infer_config import infer_heads
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw

CLOTHES = list(open_data("fashion-40").splits["test"].images)
LABELS = ("ant", "bee", "crane", "crane (machine)", "dog")
# A small ViT that every format can represent. Its heads are 64 wide, as in published models.
SMALL = {"resolution": 64, "width": 128, "depth": 2, "heads": 2, "mlp": 256, "classes": 5}


def small(**changes):
    settings = {**SMALL, **changes}
    model = redraw(vitrail.create("ViT-B/16", name="", **settings), std=0.05)
    half = (0.5,) * model.config.channels
    preprocess = Preprocess(resolution=model.config.resolution, mean=half, std=half, resize="squash", crop_fraction=1.0)
    labels = LABELS if model.config.classes == 5 else None
    return vitrail.Bundle(model=model, preprocess=preprocess, labels=labels, provenance={"licence": "mit"})


def convert_bundle(tmp_path, bundle, to, **options):
    """Save a bundle as `ours`, and convert it to a folder with the name of the format. Return the report."""
    vitrail.save(bundle, tmp_path / "ours")
    return convert(str(tmp_path / "ours"), tmp_path / to, to, images=CLOTHES, **options)


def has_equal_weights(model, other_model):
    """Whether two models have the same tensors, bit for bit."""
    tensors, other_tensors = model.state_dict(), other_model.state_dict()
    assert tensors.keys() == other_tensors.keys()
    return all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
@pytest.mark.parametrize("has_sidecar", [True, False])
def test_a_round_trip_through_each_format_gives_identical_weights(tmp_path, to, has_sidecar):
    bundle = small()
    convert_bundle(tmp_path, bundle, to, verifies=False)
    if not has_sidecar:  # only settings that the format itself can store
        (tmp_path / to / "vitrail.json").unlink()
    imported = import_weights(str(tmp_path / to), UserHints())
    assert has_equal_weights(imported.bundle.model, bundle.model)
    config, back = bundle.model.config, imported.bundle.model.config
    if has_sidecar:
        assert (back, imported.bundle.preprocess, imported.bundle.labels) == (config, bundle.preprocess, bundle.labels)
        assert imported.bundle.provenance == bundle.provenance
        assert imported.notes == ()
        return
    assert back.resize_rule == to
    assert back.activation == ("gelu-tanh" if to == "google" else "gelu")
    assert back.replace(resize_rule=config.resize_rule, activation="gelu", name="") == config
    assert imported.bundle.labels == (bundle.labels if to in ("timm", "huggingface") else None)
    if to in ("timm", "huggingface"):
        assert imported.bundle.preprocess.replace(interpolation="bicubic") == bundle.preprocess


def test_a_round_trip_keeps_provenance_and_proofs(tmp_path):
    bundle = small()
    proofs = [{"library": "timm", "not_verified": "not asked for"}]
    bundle.provenance.update(converted_from="timm", proofs=proofs)
    convert_bundle(tmp_path, bundle, "huggingface", verifies=False)
    convert(str(tmp_path / "huggingface"), tmp_path / "back", "vitrail", verifies=False, images=CLOTHES)
    for name in ("config.json", "provenance.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


def test_the_proof_of_googles_format_names_timm_which_reads_the_file(tmp_path, monkeypatch, capsys):
    bundle = small()
    monkeypatch.setattr("vitrail.bundles.formats.google.Google._open_by_timm", lambda *_: bundle.model.eval())
    report = convert_bundle(tmp_path, bundle, "google")
    report["proofs"] += convert(str(tmp_path / "google"), tmp_path / "back", "vitrail", images=CLOTHES)["proofs"]
    assert [proof["library"] for proof in report["proofs"]] == ["timm (reading Google's file)"] * 2
    print_conversion(report)
    assert "timm (reading Google's file) on 40 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("to", "changes"),
    [
        ("timm", {"pool": "map", "layer_scale": 0.1}),
        ("timm", {"registers": 2, "class_position": False, "qkv_bias": False}),
        ("timm", {"pool": "gap", "activation": "gelu-tanh", "channels": 1}),
        ("google", {"representation": "tanh"}),
        ("google", {"pool": "map"}),
        ("google", {"class_position": False}),
        ("google", {"pool": "gap", "channels": 4}),
        ("huggingface", {"norm_epsilon": 1e-12, "activation": "gelu-tanh", "qkv_bias": False, "channels": 1}),
        ("torchvision", {"representation": "tanh"}),
    ],
)
def test_unusual_settings_survive_a_round_trip(tmp_path, to, changes):
    bundle = small(**changes)
    convert_bundle(tmp_path, bundle, to, verifies=False)
    (tmp_path / to / "vitrail.json").unlink()
    back = import_weights(str(tmp_path / to), UserHints()).bundle.model
    assert has_equal_weights(back, bundle.model)
    for name, value in changes.items():
        if name == "layer_scale":
            assert back.config.layer_scale is not None
        elif (to, name) != ("google", "activation"):
            assert getattr(back.config, name) == value, name


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("R+ViT-Ti/16", "google"),
        ("R+ViT-Ti/16", "timm"),
        ("Mixer-S/32", "google"),
        ("Mixer-S/32", "timm"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("BiT-R50x1", "google"),
                ("BiT-R50x1", "timm"),
                ("R26+ViT-S/32", "google"),
                ("R26+ViT-S/32", "timm"),
            )
        ),
    ],
)
def test_hybrid_mixer_and_bit_survive_a_round_trip(tmp_path, name, to):
    model = redraw(vitrail.create(name, classes=3), std=0.02)
    bundle = vitrail.Bundle(model=model, preprocess=Preprocess())
    convert_bundle(tmp_path, bundle, to, verifies=False)
    (tmp_path / to / "vitrail.json").unlink()
    back = import_weights(str(tmp_path / to), UserHints()).bundle.model
    assert has_equal_weights(back, bundle.model)
    assert back.config.name == name


# Incomplete checkpoints


@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_missing_unknown_and_misshapen_tensors_are_refused(tmp_path, to):
    bundle = small()
    convert_bundle(tmp_path, bundle, to, verifies=False)
    folder = tmp_path / to
    file = next(path for path in folder.iterdir() if path.name.startswith("model."))
    tensors = dict(np.load(file)) if file.suffix == ".npz" else load_file(file)

    def write(tensors):
        np.savez(file, **tensors) if file.suffix == ".npz" else save_file(tensors, file, metadata={"format": "pt"})

    for name in list(tensors)[:: max(len(tensors) // 6, 1)]:
        write({key: tensor for key, tensor in tensors.items() if key != name})
        with pytest.raises(VitrailError) as caught:
            import_weights(str(folder), UserHints())
        assert "\n" not in str(caught.value)
    write({**tensors, "adapter.down": next(iter(tensors.values())) + 0})
    with pytest.raises(UsageError, match=r"1 of unknown names \(adapter.down\)"):
        import_weights(str(folder), UserHints())
    name = next(key for key in tensors if tensors[key].ndim == 2 and "head" not in key)
    write({**tensors, name: tensors[name][:-1]})
    with pytest.raises(VitrailError):
        import_weights(str(folder), UserHints())


FORMATS_OF_VIT = ("google", "huggingface", "timm", "torchvision")


def test_settings_that_another_library_cannot_represent_are_refused(tmp_path):
    pool_error, activation_error = (
        "Model must have pool 'cls' for transformers, got 'gap'",
        "Model must have activation 'gelu' for torchvision, got 'gelu-",
    )
    for to, changes, message in (
        ("huggingface", {"registers": 1}, "Model must have registers 0 for transformers, got 1"),
        ("huggingface", {"pool": "gap"}, pool_error),
        (
            "huggingface",
            {"classes": 0, "representation": "gelu"},
            "Model must be one that transformers has, got a layer",
        ),
        ("timm", {"representation": "tanh"}, "timm has no representation layer"),
        ("torchvision", {"activation": "gelu-tanh"}, activation_error),
        ("torchvision", {"representation": "gelu"}, "Model must be one that torchvision has, got a layer with gelu"),
        ("google", {"layer_scale": 0.1}, "Model must have layer scale None for Google's code, got 0.1"),
        ("google", {"representation": "gelu"}, "Model must be one that Google's code has, got an MLP without GELU"),
        ("timm", {"position": "rope-2d"}, "Model must be one that timm has, got position 'rope-2d'"),
        ("google", {"attention": "local"}, "Model must be one that Google's code has, got attention 'local'"),
        ("huggingface", {"norm": "none"}, "Model must be one that transformers has, got norm 'none'"),
        ("timm", {"activation": "none"}, "Model must be one that timm has, got an MLP without activation"),
        ("huggingface", {"resolution": (64, 128)}, r"Resolution must be square for transformers, got \(64, 128\)"),
        *(
            (to, changes, "Model must")
            for to in FORMATS_OF_VIT
            for changes in ({"residual": False}, {"attention_scale": 1.0})
        ),
    ):
        folder = tmp_path / f"{to}-{next(iter(changes))}"
        folder.mkdir()
        with pytest.raises(UsageError, match=f"^{message}"):
            convert_bundle(folder, small(**changes), to)
        assert not (folder / to).exists()


def test_a_misread_setting_fails_the_proof(tmp_path, monkeypatch):
    """If vitrail misreads a file, the proof fails and nothing is written."""
    import_peer("transformers")
    convert_bundle(tmp_path, small(), "huggingface", verifies=False)
    (tmp_path / "huggingface" / "vitrail.json").unlink()
    config = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    from vitrail.bundles.formats import huggingface

    monkeypatch.setitem(huggingface.ACTIVATIONS, config["hidden_act"], "relu")
    with pytest.raises(VitrailError, match="gives other outputs"):
        convert(str(tmp_path / "huggingface"), tmp_path / "back", "vitrail", images=CLOTHES)
    assert not (tmp_path / "back").exists()


# Missing and wrong settings in files


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (1024, 16), (1280, 16), (1408, 16), (1152, 16), (128, 2)])
def test_inferred_heads_are_those_of_published_models(width, heads):
    inferred_heads, note = infer_heads(width, None)
    assert inferred_heads == heads
    assert "does not state the number of heads" in note


def test_heads_that_config_json_states_are_used(tmp_path):
    bundle = small(heads=4)
    convert_bundle(tmp_path, bundle, "timm", verifies=False)
    (tmp_path / "timm" / "vitrail.json").unlink()
    assert import_weights(str(tmp_path / "timm"), UserHints()).bundle.model.config.heads == 4
    # The file of weights in a bundle is read as the bundle, not as timm's format.
    assert import_weights(str(tmp_path / "ours" / "model.safetensors"), UserHints()).bundle.model.config.heads == 4


def test_a_wrong_number_of_heads_fails_the_proof(tmp_path):
    """The other library builds the model with its own function, not with the inferred settings."""
    timm = import_peer("timm")
    peer = redraw(timm.create_model("vit_base_patch16_gap_224", depth=1, num_classes=3, img_size=64), std=0.05)
    save_file(peer.state_dict(), tmp_path / "model.safetensors")
    document = {"architecture": "vit_base_patch16_gap_224", "model_args": {"depth": 1, "img_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(VitrailError, match="timm gives other outputs"):  # it has 16 heads, not 12
        convert(str(tmp_path), tmp_path / "ours", "vitrail", images=CLOTHES[:4])


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"architecture": "hf-hub:owner/model"}, "timm has no model 'hf-hub:owner/model'"),
        ({"architecture": "local-dir:/tmp"}, "timm has no model 'local-dir:/tmp'"),
        ({"model_args": {"checkpoint_path": "weights.pth"}}, "config.json sets checkpoint_path to weights.pth"),
        ({"model_args": {"depth": 10**9}}, "config.json sets depth to 1000000000"),
        ({"model_args": {"mlp_ratio": 1e6}}, "config.json sets mlp_ratio"),
    ],
)
def test_config_json_cannot_make_timm_open_or_build_something_else(tmp_path, monkeypatch, document, reason):
    timm = import_peer("timm")
    convert_bundle(tmp_path, small(), "timm", verifies=False)
    (tmp_path / "timm" / "vitrail.json").unlink()
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    arguments = {**config["model_args"], **document.pop("model_args", {})}
    (tmp_path / "timm" / "config.json").write_text(json.dumps({**config, "model_args": arguments, **document}))
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm must not be called"))
    report = convert(str(tmp_path / "timm"), tmp_path / "read", "vitrail", images=CLOTHES[:4])
    assert reason in report["proofs"][0]["not_verified"]


def test_a_sidecar_is_ignored_if_files_have_changed(tmp_path):
    """The folder that `convert` wrote was trained further by another program."""
    bundle = small()
    convert_bundle(tmp_path, bundle, "huggingface", verifies=False)
    file = tmp_path / "huggingface" / "model.safetensors"
    tensors = {name: tensor + 0.1 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    config["id2label"]["0"] = "aardvark"
    (tmp_path / "huggingface" / "config.json").write_text(json.dumps(config))
    imported = import_weights(str(tmp_path / "huggingface"), UserHints())
    assert imported.bundle.labels[0] == "aardvark"
    assert any("vitrail.json is ignored" in note for note in imported.notes)


@pytest.mark.parametrize(
    ("file", "change", "is_read"),
    [
        ("preprocessor_config.json", {"size": None}, True),
        ("preprocessor_config.json", {"do_center_crop": True, "crop_size": None}, True),
        ("preprocessor_config.json", {"image_mean": None}, True),
        ("preprocessor_config.json", {"size": "large"}, False),
        ("preprocessor_config.json", {"image_std": 3}, False),
        ("preprocessor_config.json", {"resample": [1]}, False),
        ("config.json", {"id2label": ["a"]}, False),
        ("config.json", {"hidden_act": ["gelu"]}, False),
        ("config.json", {"image_size": "big"}, False),
        ("config.json", {"hidden_size": 3}, False),
    ],
)
def test_unusual_documents_are_read_or_refused_in_one_line(tmp_path, file, change, is_read):
    bundle = small()
    convert_bundle(tmp_path, bundle, "huggingface", verifies=False)
    folder = tmp_path / "huggingface"
    (folder / "vitrail.json").unlink()
    document = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(document | change))
    if is_read:
        assert (
            import_weights(str(folder), UserHints()).bundle.preprocess.replace(interpolation="bicubic")
            == bundle.preprocess
        )
        return
    with pytest.raises(VitrailError) as caught:
        import_weights(str(folder), UserHints())
    assert "\n" not in str(caught.value)


def test_an_index_that_lists_itself_is_refused(tmp_path):
    name = "model.safetensors.index.json"
    (tmp_path / name).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptFileError, match="must name files in its own folder"):
        import_weights(str(tmp_path), UserHints())


def test_npz_files_are_read_without_a_head_and_in_bfloat16(tmp_path):
    import_peer("timm")
    bundle = small(activation="gelu-tanh")
    convert_bundle(tmp_path, bundle, "google", verifies=False)
    arrays = dict(np.load(tmp_path / "google" / "model.npz"))
    headless = {name: array for name, array in arrays.items() if not name.startswith("head/")}
    np.savez(tmp_path / "headless.npz", **headless)
    report = convert(str(tmp_path / "headless.npz"), tmp_path / "features", "vitrail", images=CLOTHES[:4])
    assert report["proofs"][0]["compared"] == "features"
    halves = {name: (array.view(np.uint32) >> 16).astype(np.uint16).view("V2") for name, array in arrays.items()}
    np.savez(tmp_path / "bfloat16.npz", **halves, step=np.array(3))
    imported = import_weights(str(tmp_path / "bfloat16.npz"), UserHints())
    kernel = bundle.model.head.weight.detach()
    torch.testing.assert_close(imported.bundle.model.head.weight.detach(), kernel, rtol=0.01, atol=0)
    assert "arrays that are not floating point are left out: step" in imported.notes


@pytest.mark.parametrize(
    ("to", "changes"),
    [("timm", {"pool": "gap"}), ("google", {"activation": "gelu-tanh"}), ("huggingface", {"representation": "tanh"})],
)
def test_a_model_without_a_head_survives_a_round_trip(tmp_path, to, changes):
    import_peer("transformers" if to == "huggingface" else "timm")
    bundle = small(classes=0, **changes)
    proofs = convert_bundle(tmp_path, bundle, to)["proofs"]
    (tmp_path / to / "vitrail.json").unlink()
    proofs += convert(str(tmp_path / to), tmp_path / "back", "vitrail", images=CLOTHES)["proofs"]
    assert [proof["compared"] for proof in proofs] == ["features", "features"]
    assert max(proof["largest_difference"] for proof in proofs) < 1e-5
    back = vitrail.load(tmp_path / "back")
    assert back.model.config.classes == 0
    assert back.provenance["objective"] == "features"
    assert has_equal_weights(back.model, bundle.model)


def test_a_model_without_a_head_is_refused_for_torchvision(tmp_path):
    with pytest.raises(UsageError, match="Model must have a head for torchvision, got a model without a head"):
        convert_bundle(tmp_path, small(classes=0), "torchvision")
    assert not (tmp_path / "torchvision").exists()


def test_a_vit_of_transformers_with_a_pooler_is_proved_by_the_pooler_output(tmp_path):
    transformers = import_peer("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    config = transformers.ViTConfig(**sizes, image_size=64, patch_size=16)
    redraw(transformers.ViTModel(config), std=0.05).save_pretrained(tmp_path / "hf")
    (proof,) = convert(str(tmp_path / "hf"), tmp_path / "ours", "vitrail", images=CLOTHES)["proofs"]
    assert (proof["compared"], proof["largest_difference"] < 1e-5) == ("features", True)
    assert vitrail.load(tmp_path / "ours").model.config.representation == "tanh"


def test_models_that_timm_does_not_publish_are_refused(tmp_path):
    model = redraw(vitrail.create("Mixer-Nano/7"), std=0.05)
    preprocess = Preprocess(resolution=28, mean=(0.5,), std=(0.5,))
    bundle = vitrail.Bundle(model=model, preprocess=preprocess)
    with pytest.raises(UsageError, match=r"^Model must be one that timm has by name, got Mixer-Nano/7"):
        convert_bundle(tmp_path, bundle, "timm")
    with pytest.raises(UsageError, match=r"^Model must be one that transformers has, got family mixer"):
        convert(str(tmp_path / "ours"), tmp_path / "huggingface", "huggingface", images=CLOTHES)


def test_notes_name_what_another_library_computes_differently(tmp_path):
    report = convert_bundle(tmp_path, small(norm_epsilon=1e-12), "google", verifies=False)
    assert report["notes"] == [
        "Google's code computes with epsilon 1e-06, this model with 1e-12",
        "Google's code computes GELU in its tanh form, this model the exact one",
    ]


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- vision\n---\n# ViT\nlicense: mit\n", "apache-2.0"),
        ("---\ntags: [a, b]\nlicense: 'cc-by-nc-4.0' # not for sale\n---\n", "cc-by-nc-4.0"),
        ("---\nlicense:\n- mit\n- apache-2.0\ntags:\n- x\n---\n", "mit, apache-2.0"),
        ("---\nlicense: other\nlicense_name: our own\n---\n", "our own"),
        ('---\nlicense: mit"\x1b\u202e X\n---\n', 'mit" X'),
        ("---\nlicense: mit\n", None),
        ("# ViT\n\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_the_licence_of_a_model_card_is_kept(tmp_path, card, licence):
    convert_bundle(tmp_path, small(), "huggingface", verifies=False)
    (tmp_path / "huggingface" / "vitrail.json").unlink()
    (tmp_path / "huggingface" / "README.md").write_text(card)
    convert(str(tmp_path / "huggingface"), tmp_path / "again", "vitrail", verifies=False, images=[])
    again = vitrail.load(tmp_path / "again")
    assert again.provenance.get("licence") == licence
    written = (tmp_path / "again" / "README.md").read_text()
    is_id = licence in (None, "apache-2.0", "cc-by-nc-4.0")  # the Hub takes others as "other", with a name
    key = "license" if is_id else "license: other\nlicense_name"
    assert f"{key}: {json.dumps(licence or 'unknown')}\n" in written


def test_the_licence_in_timms_config_is_kept_in_a_round_trip(tmp_path):
    convert_bundle(tmp_path, small(), "timm", verifies=False)
    (tmp_path / "timm" / "vitrail.json").unlink()
    assert import_weights(str(tmp_path / "timm"), UserHints()).bundle.provenance["licence"] == "mit"
    (tmp_path / "timm" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    imported = import_weights(str(tmp_path / "timm" / "model.safetensors"), UserHints())
    assert imported.bundle.provenance["licence"] == "apache-2.0"
    assert "the settings are taken from config.json, README.md beside the file" in imported.notes


# The command


def test_the_convert_command_reports_as_json_and_refuses_errors_in_one_line(call, tmp_path):
    bundle = small()
    vitrail.save(bundle, tmp_path / "ours")
    done = call("convert", tmp_path / "ours", tmp_path / "hf", "--to", "huggingface", "--no-verify", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["from"], report["to"]) == ("vitrail", "huggingface")
    assert report["proofs"] == [{"library": "huggingface", "not_verified": "not asked for"}]
    for arguments, code in (
        ((tmp_path / "ours", tmp_path / "hf", "--to", "timm"), 2),
        ((tmp_path / "hf", tmp_path / "z", "--to", "vitrail", "--preprocess", "men=3"), 2),
    ):
        done = call("convert", *arguments)
        assert done.returncode == code, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_the_former_flag_pictures_still_works(call, tmp_path):
    (tmp_path / "photos").mkdir()
    Image.new("L", (28, 28), 99).save(tmp_path / "photos" / "a.png")
    vitrail.save(small(), tmp_path / "ours")
    for flag, folder in (("--images", "one"), ("--pictures", "other")):
        command = ("convert", tmp_path / "ours", tmp_path / folder, "--to", "timm", "--json")
        done = call(*command, flag, tmp_path / "photos")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["proofs"][0]["pictures"] == 1
    done = call(*command, "--images", tmp_path / "photos", f"--pictures={tmp_path / 'photos'}")
    assert (done.returncode, "--images must be given once" in done.stderr) == (2, True)
    done = call("convert", "--help")
    assert "--images DIR" in done.stdout
    assert "--pictures" not in done.stdout


def test_written_formats_are_those_that_implement_check():
    writable = [name for name in FORMATS if FORMATS[name].check is not WeightFormat.check]
    assert written_formats() == ["vitrail", *writable]


def test_a_format_that_cannot_be_written_is_refused_with_a_suggestion(call, tmp_path):
    done = call("convert", "fashion", tmp_path / "out", "--to", "hugginface")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Format must be one of vitrail, huggingface, torchvision, google, timm" in done.stderr
    assert "got 'hugginface'. Did you mean 'huggingface'?" in done.stderr
    assert call("convert", "fashion", tmp_path / "out", "--to", "dino").returncode == 2
    assert not (tmp_path / "out").exists()


def test_a_library_that_cannot_import_its_model_is_not_an_error(tmp_path):
    """transformers imports a model's class on first access, which fails if torchvision does not match torch. Runs in a
    process of its own, without the patches of other tests."""
    vitrail.save(small(), tmp_path / "ours")
    done = run("convert", tmp_path / "ours", tmp_path / "hf", "--to", "huggingface", "--json")
    assert done.returncode == 0, done.stderr
    (proof,) = json.loads(done.stdout)["proofs"]
    assert "largest_difference" in proof or "cannot be imported" in proof["not_verified"]


def test_the_first_error_of_a_failed_import_is_reported(tmp_path, monkeypatch):
    def fail_to_import(name):
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as cause:
            raise ModuleNotFoundError(f"Could not import module '{name}'") from cause

    library = types.ModuleType("transformers")
    library.__getattr__ = lambda name: fail_to_import(name) if name.startswith("ViT") else mock.Mock()
    monkeypatch.setitem(sys.modules, "transformers", library)
    proof = convert_bundle(tmp_path, small(), "huggingface")["proofs"][0]
    reason = "ViTForImageClassification cannot be imported (operator torchvision::nms does not exist)"
    assert proof == {"library": "huggingface", "not_verified": reason}


@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_a_full_disk_gives_an_error_of_one_line_and_leaves_no_file(call, monkeypatch, tmp_path, to):
    def raise_disk_full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("vitrail.bundles.bundle.save_file", raise_disk_full)
    done = call("convert", "fashion", tmp_path / "out", "--to", to, "--no-verify")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr
    assert list(tmp_path.iterdir()) == []
