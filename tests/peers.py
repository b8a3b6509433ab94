"""Other implementations (timm, transformers, torchvision) and their names of our parameters."""

import importlib
import warnings

import pytest
import torch

_declared = []


def import_peer(name):
    """Return the module of another library, or skip the test with the reason why it cannot be imported."""
    try:
        return load_peer(name)
    except ImportError as error:
        return pytest.skip(str(error))


def load_peer(name):
    """Import timm, transformers, torchvision or another library. Raise ImportError with the reason for any failure."""
    if not _declared:
        # torchvision's wheel carries no operators for a CPU build of torch, and timm imports torchvision.
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:
        raise ImportError(f"peer {name} is not usable here: {error}") from error


def timm_vit(config):
    """Return timm's model for a configuration, the function that renames our tensors, and its forward function."""
    peer = load_peer("timm").models.VisionTransformer(
        img_size=config.resolution,
        patch_size=config.patch,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp / config.width,
        num_classes=config.classes,
    )
    return peer, dict, peer


def huggingface_vit(config):
    """Return transformers' model (with fused attention), the renaming function and its forward function."""
    transformers = load_peer("transformers")
    peer = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.heads,
            intermediate_size=config.mlp,
            image_size=config.resolution[0],
            patch_size=config.patch[0],
            num_labels=config.classes,
            layer_norm_eps=config.norm_epsilon,
            attn_implementation="sdpa",
        )
    )
    return peer, to_huggingface, lambda images: peer(images).logits


def torchvision_vit(config):
    """Return torchvision's model, the renaming function and its forward function."""
    peer = load_peer("torchvision").models.VisionTransformer(
        config.resolution[0],
        config.patch[0],
        config.depth,
        config.heads,
        config.width,
        config.mlp,
        num_classes=config.classes,
    )
    return peer, to_torchvision, peer


TIMM_NAMES = {
    "R+ViT-Ti/16": "vit_tiny_r_s16_p8_224",
    "R26+ViT-S/32": "vit_small_r26_s32_224",
    "R50+ViT-B/16": "vit_base_r50_s16_224",
    "Mixer-S/16": "mixer_s16_224",
    "Mixer-S/32": "mixer_s32_224",
    "Mixer-B/16": "mixer_b16_224",
    "BiT-R50x1": "resnetv2_50x1_bit",
}


def timm_with_weights(name, model):
    """Return timm's model of a name, with the weights of our model."""
    peer = load_peer("timm").create_model(TIMM_NAMES[name], num_classes=model.config.classes).eval()
    tensors = model.state_dict()
    if name == "R+ViT-Ti/16":  # a trunk without stages has no name for its root there
        tensors = {key.replace("backbone.stem.", "backbone."): tensor for key, tensor in tensors.items()}
    if name.startswith("BiT"):  # there the head is a 1x1 convolution
        tensors = {key.replace("head.", "head.fc."): tensor for key, tensor in tensors.items()}
        tensors["head.fc.weight"] = tensors["head.fc.weight"][:, :, None, None]
    peer.load_state_dict(tensors, strict=True)
    return peer


def to_huggingface(tensors):
    """Return our parameter names mapped to those of transformers' ViTForImageClassification (version 5)."""
    renamed = {}
    for name, tensor in tensors.items():
        if ".attn.qkv." in name:
            layer, leaf = name.split(".")[1], name.rpartition(".")[2]
            for part, chunk in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"vit.layers.{layer}.attention.{part}_proj.{leaf}"] = chunk
            continue
        for ours, theirs in (
            ("blocks.", "vit.layers."),
            ("attn.proj", "attention.o_proj"),
            ("norm1", "layernorm_before"),
            ("norm2", "layernorm_after"),
            ("cls_token", "vit.embeddings.cls_token"),
            ("pos_embed", "vit.embeddings.position_embeddings"),
            ("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
            ("head.", "classifier."),
        ):
            name = name.replace(ours, theirs)
        renamed["vit.layernorm" + name[4:] if name.startswith("norm.") else name] = tensor
    return renamed


def to_torchvision(tensors):
    """Return our parameter names mapped to those of torchvision's VisionTransformer."""
    renamed = {}
    for name, tensor in tensors.items():
        for ours, theirs in (
            ("blocks.", "encoder.layers.encoder_layer_"),
            ("attn.qkv.", "self_attention.in_proj_"),
            ("attn.proj", "self_attention.out_proj"),
            ("norm1", "ln_1"),
            ("norm2", "ln_2"),
            ("mlp.fc1", "mlp.0"),
            ("mlp.fc2", "mlp.3"),
            ("cls_token", "class_token"),
            ("pos_embed", "encoder.pos_embedding"),
            ("patch_embed.proj", "conv_proj"),
            ("head.", "heads.head."),
        ):
            name = name.replace(ours, theirs)
        renamed["encoder.ln" + name[4:] if name.startswith("norm.") else name] = tensor
    return renamed
