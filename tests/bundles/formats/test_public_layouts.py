"""CLIP's image tower, distilled DeiT and MAE in the layouts that are published, with random weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

import vitrail
from tests.bundles.test_convert import CLOTHES
from tests.peers import import_peer
from vitrail.bundles.convert import convert
from vitrail.bundles.formats.clip import Clip
from vitrail.core.errors import UsageError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "image_size": 32,
    "patch_size": 8,
}
TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1, "mlp_ratio": 2}


def redrawn(peer):
    """A peer in evaluation mode whose weights are random, also where they start at zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return peer.eval()


def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def write(folder, tensors, **documents):
    """Write tensors and JSON documents as a published folder."""
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))


def assert_converts(folder, expected):
    """Convert a folder with its proof, and compare outputs with those of the peer. Returns the report and the model."""
    report = convert(str(folder), folder.parent / f"{folder.name}-bundle", "vitrail", images=CLOTHES)
    assert report["proofs"][0]["largest_difference"] < 1e-4
    model = vitrail.load(folder.parent / f"{folder.name}-bundle").model
    with torch.inference_mode():
        outputs = model(images())
    assert outputs.std() > 0.05
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-4)
    return report, model


def openai_names(tensors):
    """OpenAI's names for the tensors of transformers' image tower."""
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, openai in (
            ("encoder.layers.", "transformer.resblocks."),
            ("embeddings.class_embedding", "class_embedding"),
            ("embeddings.position_embedding.weight", "positional_embedding"),
            ("embeddings.patch_embedding.", "conv1."),
            ("pre_layrnorm.", "ln_pre."),
            ("post_layernorm.", "ln_post."),
            ("layer_norm1.", "ln_1."),
            ("layer_norm2.", "ln_2."),
            ("self_attn.out_proj.", "attn.out_proj."),
            ("mlp.fc1.", "mlp.c_fc."),
            ("mlp.fc2.", "mlp.c_proj."),
        ):
            name = name.replace(theirs, openai)
        renamed[name] = tensor
    for layer in range(SIZES["num_hidden_layers"]):
        for leaf in ("weight", "bias"):
            at = f"transformer.resblocks.{layer}."
            parts = [renamed.pop(f"{at}self_attn.{part}_proj.{leaf}") for part in "qkv"]
            renamed[f"{at}attn.in_proj_{leaf}"] = torch.cat(parts)
    return renamed


@pytest.fixture
def tower():
    """transformers' image tower of CLIP, its tensors without prefix, and its features."""
    transformers = import_peer("transformers")
    peer = redrawn(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES)))
    tensors = {name.removeprefix("vision_model."): tensor for name, tensor in peer.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}
    with torch.inference_mode():
        return peer, tensors, peer(images()).pooler_output


def test_clip_of_hugging_face_without_its_text_tower_gives_equal_features(tmp_path, tower):
    peer, tensors, features = tower
    both = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
    both |= {"text_model.final_layer_norm.weight": torch.ones(3), "logit_scale": torch.tensor(1.0)}
    both |= {"visual_projection.weight": torch.ones(16, 64)}
    write(tmp_path / "both", both, config={"model_type": "clip", "vision_config": peer.config.to_dict()})
    report, model = assert_converts(tmp_path / "both", features)
    assert model.config.activation == "quick-gelu"
    assert any("projection into the space of CLIP's texts is left out" in note for note in report["notes"])
    write(tmp_path / "alone", {f"vision_model.{name}": tensor for name, tensor in tensors.items()})
    report, _ = assert_converts(tmp_path / "alone", features)
    assert any("quick GELU, is used" in note for note in report["notes"])


@pytest.mark.parametrize("is_quick", [True, False])
def test_clip_of_openclip_gives_the_features_of_timm(tmp_path, tower, is_quick):
    timm = import_peer("timm")
    _, tensors, _ = tower
    openai = {f"visual.{name}": tensor for name, tensor in openai_names(tensors).items()}
    openai |= {"visual.proj": torch.ones(64, 16), "token_embedding.weight": torch.ones(3, 2)}
    document = {"model_cfg": {"embed_dim": 16, "quick_gelu": is_quick}}
    write(tmp_path / "open", openai, open_clip_config=document)
    peer = timm.models.VisionTransformer(
        **TIMM,
        num_classes=0,
        pre_norm=True,
        norm_layer=torch.nn.LayerNorm,
        act_layer="quick_gelu" if is_quick else "gelu",
    ).eval()
    filtered = timm.models.vision_transformer.checkpoint_filter_fn(openai, peer)
    peer.load_state_dict({name: filtered[name] for name in peer.state_dict()})
    with torch.inference_mode():
        report, model = assert_converts(tmp_path / "open", peer(images()))
    assert model.config.activation == ("quick-gelu" if is_quick else "gelu")
    assert report["left_out"] == ["proj"]


def test_clip_of_timm_gives_equal_logits_and_is_written_again(tmp_path):
    timm = import_peer("timm")
    peer = redrawn(
        timm.models.VisionTransformer(
            **TIMM, num_classes=7, pre_norm=True, norm_layer=torch.nn.LayerNorm, act_layer="quick_gelu"
        )
    )
    arguments = {**TIMM, "pre_norm": True, "act_layer": "quick_gelu"}
    document = {"architecture": "vit_base_patch16_224", "model_args": arguments, "num_classes": 7}
    write(tmp_path / "timm", peer.state_dict(), config=document)
    with torch.inference_mode():
        expected = peer(images())
    _, model = assert_converts(tmp_path / "timm", expected)
    assert (model.config.embedding_norm, model.config.patch_bias) == (True, False)
    report = convert(str(tmp_path / "timm-bundle"), tmp_path / "again", "timm", images=CLOTHES)
    assert report["proofs"][-1]["largest_difference"] < 1e-4


def test_distilled_deit_of_timm_averages_two_heads_and_is_written_again(tmp_path):
    import_peer("timm")
    from timm.models.deit import VisionTransformerDistilled

    peer = redrawn(VisionTransformerDistilled(**TIMM, num_classes=5))
    document = {"architecture": "deit_base_distilled_patch16_224", "model_args": TIMM, "num_classes": 5}
    write(tmp_path / "timm", peer.state_dict(), config=document)
    with torch.inference_mode():
        expected = peer(images())
    _, model = assert_converts(tmp_path / "timm", expected)
    assert model.config.distilled
    report = convert(str(tmp_path / "timm-bundle"), tmp_path / "again", "timm", images=CLOTHES)
    assert report["proofs"][-1]["largest_difference"] < 1e-4
    assert_converts(tmp_path / "again", expected)


def test_distilled_deit_of_hugging_face_averages_two_heads(tmp_path):
    transformers = import_peer("transformers")
    config = transformers.DeiTConfig(**SIZES, num_labels=5)
    peer = redrawn(transformers.DeiTForImageClassificationWithTeacher(config))
    peer.save_pretrained(tmp_path / "hf")
    with torch.inference_mode():
        expected = peer(images()).logits
    report, model = assert_converts(tmp_path / "hf", expected)
    assert model.config.distilled
    assert not any("became a register" in note for note in report["notes"])


def test_mae_of_facebook_and_of_hugging_face_leave_their_decoder_out(tmp_path):
    timm, transformers = import_peer("timm"), import_peer("transformers")
    peer = redrawn(timm.models.VisionTransformer(**TIMM, num_classes=0))
    with torch.inference_mode():
        features = peer(images())
    decoder = {
        "mask_token": torch.ones(1, 1, 32),
        "decoder_embed.weight": torch.ones(32, 64),
        "decoder_blocks.0.norm1.weight": torch.ones(32),
    }
    write(tmp_path / "encoder", peer.state_dict())
    assert_converts(tmp_path / "encoder", features)
    write(tmp_path / "full", {**peer.state_dict(), **decoder})
    report, _ = assert_converts(tmp_path / "full", features)
    assert set(report["left_out"]) == set(decoder)
    sizes = {name: value // 2 for name, value in SIZES.items() if name in ("hidden_size", "intermediate_size")}
    small = {f"decoder_{name}": value for name, value in sizes.items()}
    small |= {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 1}
    mae = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**SIZES, **small, mask_ratio=0.0))
    mae = redrawn(mae)
    mae.save_pretrained(tmp_path / "hf")
    with torch.inference_mode():
        order = torch.arange(16.0).expand(4, -1)
        expected = mae.vit(images(), noise=order).last_hidden_state[:, 0]
    report, _ = assert_converts(tmp_path / "hf", expected)
    assert "the decoder of MAE is left out" in report["notes"]


EVA_02 = {"swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}
GATED = "got EVA-02, which has SwiGLU and rotary positions"
NO_KEY_BIAS = "got separate ones without keys, as in EVA and BEiT"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param(EVA_02, GATED, id="eva02_tiny_patch14"),
        pytest.param({**EVA_02, "qkv_fused": False, "scale_mlp": True}, GATED, id="eva02_base_patch14"),
        pytest.param(
            {**EVA_02, "qkv_fused": False, "scale_mlp": True, "scale_attn_inner": True, "global_pool": "token"},
            GATED,
            id="eva02_base_patch16_clip",
        ),
        pytest.param({}, "got one that normalises after pooling", id="eva_giant_patch14"),
        pytest.param({"global_pool": "token"}, NO_KEY_BIAS, id="eva_giant_patch14_clip"),
        pytest.param({"global_pool": "token", "use_post_norm": True}, NO_KEY_BIAS, id="eva02_enormous_patch14_clip"),
    ],
)
def test_eva_is_refused_with_the_reason(tmp_path, settings, reason):
    """The models have the settings of timm's models of these names, in a small size."""
    import_peer("timm")
    from timm.models.eva import Eva

    write(tmp_path / "eva", Eva(**TIMM, num_classes=5, **settings).state_dict())
    with pytest.raises(UsageError) as caught:
        convert(str(tmp_path / "eva"), tmp_path / "bundle", "vitrail", images=CLOTHES)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_beit_is_refused_with_the_reason(tmp_path):
    timm = import_peer("timm")
    sizes = {**TIMM, "num_classes": 5, "use_rel_pos_bias": True, "use_abs_pos_emb": False, "init_values": 0.1}
    write(tmp_path / "beit", timm.models.beit.Beit(**sizes).state_dict())
    with pytest.raises(UsageError, match="normalises after pooling"):
        convert(str(tmp_path / "beit"), tmp_path / "bundle", "vitrail", images=CLOTHES)


def test_clip_is_read_only():
    assert Clip("clip").recognises({"visual.ln_pre.weight"})
    assert not Clip("clip").recognises({"visual.trunk.blocks.0.norm1.weight"})
