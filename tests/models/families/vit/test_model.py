"""The Vision Transformer: exact invariances, the trimmed last block, recording, resizing, initialisation."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.bundles.pretrained import create
from vitrail.core.errors import UsageError
from vitrail.lab.exact import redraw
from vitrail.lab.permute import move, patch_order, permutation, permute_input_weights
from vitrail.models.activations import look
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.model import ViT
from vitrail.models.layers import patchify, unpatchify
from vitrail.models.positions import POSITIONS

DIFFERENT = 1e-2  # least difference of logits, relative to the spread of the logits of different images


def small(**changes):
    """Return a model with 4 x 6 patches of 4 pixels and random weights, in double precision for exact comparisons."""
    config = ViTConfig(resolution=(16, 24), patch=(4, 4), width=16, heads=2, mlp=32, depth=3, classes=5, channels=2)
    return redraw(ViT(config.replace(**changes)).double(), std=0.4)


def random_images(model, count=3):
    return torch.randn(count, model.config.channels, *model.config.resolution, dtype=torch.float64)


def shuffle_patches(images, order, patch=(4, 4), grid=(4, 6)):
    return unpatchify(patchify(images, patch)[:, order], grid, patch)


def difference(logits, other_logits):
    """Return the largest difference, relative to the spread of the logits of different images."""
    return ((logits - other_logits).abs().max() / (logits - logits.mean(0)).abs().max()).item()


# Exact invariances, each with a counterexample


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_without_positions_logits_are_invariant_to_patch_order_and_patch_shifts(pool):
    model = small(position="none", pool=pool)
    images = random_images(model)
    logits = model(images)
    assert difference(logits, model(shuffle_patches(images, torch.randperm(24)))) < 1e-9
    assert difference(logits, model(images.roll((4, 8), (2, 3)))) < 1e-9
    assert difference(logits, model(images.roll(1, 3))) > DIFFERENT
    positioned = small(pool=pool)
    assert difference(positioned(images), positioned(shuffle_patches(images, torch.randperm(24)))) > DIFFERENT


def test_learned_positions_can_be_permuted_for_shuffled_patches():
    model = small()
    images, order = random_images(model), torch.randperm(24)
    logits = model(images)
    shuffled = shuffle_patches(images, order)
    assert difference(logits, model(shuffled)) > DIFFERENT
    assert permute_input_weights(model, patch_order(order, (16, 24), (4, 4)))
    assert difference(logits, model(shuffled)) < 1e-9


@pytest.mark.parametrize("position", ["learned-1d", "sincos-2d", "relative", "rope-2d"])
def test_shared_shuffle_within_patches_equals_a_permuted_projection(position):
    model = small(position=position)
    images, order = random_images(model), permutation("within", (16, 24), (4, 4), 0)
    logits, shuffled = model(images), move(images, order)
    assert difference(logits, model(shuffled)) > DIFFERENT
    assert permute_input_weights(model, order)
    assert difference(logits, model(shuffled)) < 1e-9


@pytest.mark.parametrize("position", ["sincos-1d", "sincos-2d", "relative", "rope-2d", "learned-2d"])
def test_geometric_positions_depend_on_the_order_of_patches(position):
    model = small(position=position)
    images = random_images(model)
    assert difference(model(images), model(shuffle_patches(images, torch.randperm(24)))) > DIFFERENT


@pytest.mark.parametrize(
    ("position", "pool"),
    [("relative", "cls"), ("relative", "gap"), ("relative", "map"), ("rope-2d", "gap"), ("rope-2d", "map")],
)
def test_wrapped_relative_positions_are_exactly_shift_invariant(position, pool):
    images = random_images(small())
    shifted = images.roll((8, 4), (2, 3))
    wrapped = small(position=position, wrap=True, pool=pool)
    assert difference(wrapped(images), wrapped(shifted)) < 1e-9
    assert difference(wrapped(images), wrapped(images.roll(2, 3))) > DIFFERENT
    clipped = small(position=position, pool=pool)
    assert difference(clipped(images), clipped(shifted)) > DIFFERENT


@pytest.mark.parametrize("position", ["relative", "rope-2d"])
def test_wrapped_positions_with_local_attention_are_shift_invariant(position):
    model = small(position=position, wrap=True, pool="gap", attention="local")
    images = random_images(model)
    assert difference(model(images), model(images.roll((8, 4), (2, 3)))) < 1e-9


def test_wrapped_rope_with_a_class_token_is_not_shift_invariant():
    """Rotary angles are relative between patches. [CLS] has no angle, so it depends on absolute angles."""
    model = small(position="rope-2d", wrap=True)
    images = random_images(model)
    assert difference(model(images), model(images.roll((8, 4), (2, 3)))) > DIFFERENT


def test_vit_is_not_causal():
    """A change of the last patch changes the first patch token in every layer."""
    model = small()
    images = random_images(model, 1)
    changed = images.clone()
    changed[..., -4:, -4:] += 1
    before, after = look(model, images), look(model, changed)
    for layer in range(3):
        assert (before.steps[f"blocks.{layer}"] - after.steps[f"blocks.{layer}"])[:, 1].abs().max() > 1e-3


def test_local_attention_reaches_one_ring_per_layer():
    model = small(attention="local", pool="gap", position="none")
    images = random_images(model, 1)
    changed = images.clone()
    changed[..., :4, :4] += 1  # the first patch
    before, after = look(model, images), look(model, changed)
    columns, rows = torch.arange(24) % 6, torch.arange(24) // 6
    rings = torch.maximum(rows, columns)
    for layer in range(3):
        moved = (before.steps[f"blocks.{layer}"] - after.steps[f"blocks.{layer}"])[0].abs().amax(-1)
        assert torch.equal(moved > 0, rings <= layer + 1)


# Combinations of options

COMBINATIONS = [
    {"position": position, "pool": pool, "registers": registers, **options}
    for position, pool, registers in itertools.product(
        ["none", "learned-1d", "learned-2d", "sincos-1d", "sincos-2d", "relative", "rope-2d"],
        ["cls", "gap", "map"],
        [0, 2],
    )
    for options in (
        {},
        {"norm": "batch", "norm_order": "post", "activation": "relu", "attention": "strided", "representation": "tanh"},
        {"attention": "local", "layer_scale": 0.3, "representation": "gelu", "activation": "gelu-tanh"},
        {"residual": False, "attention_scale": 0.7},
        {"norm": "none", "activation": "none", "layer_scale": 0.1},
    )
] + [
    {"position": position, "position_at": placement, "registers": registers, "class_position": class_position}
    for position in ("learned-1d", "learned-2d", "sincos-2d")
    for placement in ("every", "shared")
    for registers in (0, 1)
    for class_position in (True, False)
]


@pytest.mark.parametrize("changes", COMBINATIONS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_all_paths_agree_for_every_combination_of_options(changes):
    model = small(**changes)
    images = random_images(model)
    logits = model(images)
    untrimmed = model.read(model.encode(model.embed(images), all_tokens=True))
    assert difference(logits, untrimmed) < 1e-10
    activations = look(model, images)
    assert torch.equal(activations.logits, logits)
    for layer in range(3):
        attention = activations.attention[layer]
        assert attention.shape == (3, 2, model.config.tokens, model.config.tokens)
        torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention[..., 0]), rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.cat([model(image[None]) for image in images]), logits, rtol=0, atol=1e-9)
    wider = model.resize((24, 16))
    assert wider(random_images(wider)).shape == (3, 5)
    model.train()(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0 or name.endswith("qkv.bias"), name


def test_without_norm_and_activation_the_model_has_neither():
    model = small(norm="none", activation="none", pool="map")
    assert not [name for name in model.state_dict() if "norm" in name]
    x_BND = torch.randn(2, 5, 16, dtype=torch.float64)
    mlp = model.blocks[0].mlp
    doubled = mlp(2 * x_BND) - mlp(x_BND)
    assert (doubled - (mlp(x_BND) - mlp(torch.zeros_like(x_BND)))).abs().max() < 1e-12  # an affine function
    activations = look(model, random_images(model), inside=[0])
    inside = [name.removeprefix("blocks.0.") for name in activations.steps if name.startswith("blocks.0.")]
    assert inside == [step for step in STEPS if not step.startswith("norm")]
    assert torch.equal(activations.steps["blocks.0.z1"], activations.steps["blocks.0.activated"])


@pytest.mark.parametrize("changes", [{"norm_order": "post"}, {"embedding_norm": True}])
def test_settings_of_norms_are_rejected_without_a_norm(changes):
    with pytest.raises(UsageError, match="Norm must be layer or batch with norm_order post or embedding_norm"):
        small(norm="none", **changes)


def test_dropout_and_stochastic_depth_are_random_in_training_only():
    model = small(dropout=0.2, drop_path=0.3)
    images = random_images(model)
    assert difference(model(images), model(images)) == 0
    model.train()
    torch.manual_seed(5)
    first, second = model(images), model(images)
    torch.manual_seed(5)
    repeated = model(images)
    assert difference(first, second) > DIFFERENT
    assert torch.equal(first, repeated)
    rates = [block.drop_path for block in model.blocks]
    assert rates == [0.0, pytest.approx(0.15), pytest.approx(0.3)]


# Recording


def test_look_records_only_the_requested_layers_and_keeps_the_logits():
    model = redraw(create("ViT-Ti/16", classes=7), std=0.05)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        logits = model(images)
    for layers in (None, (), [3], [-1]):
        assert torch.equal(look(model, images, layers).logits, logits)
    activations = look(model, images, [2, -1])
    assert list(activations.attention) == [2, 11]
    assert [name for name in activations.steps if name.startswith("blocks")] == ["blocks.2", "blocks.11"]
    assert list(activations.steps)[:3] == ["patches", "projected", "tokens"]
    assert activations.steps["patches"].shape == (2, 196, 768)
    assert activations.steps["blocks.11"].shape == (2, 197, 192)
    # The pooled features are the [CLS] output of the complete last block.
    pooled = model.norm(activations.steps["blocks.11"][:, 0])
    torch.testing.assert_close(pooled, activations.steps["pooled"], rtol=0, atol=1e-4)


STEPS = ["norm1", "q", "k", "v", "scores", "weights", "heads", "msa", "middle", "norm2", "z1", "activated", "z2"]


@pytest.mark.parametrize("position", ["learned-1d", "rope-2d", "relative"])
@pytest.mark.parametrize("changes", [{}, {"layer_scale": 0.3, "attention_scale": 0.2, "activation": "gelu-tanh"}])
def test_recorded_steps_inside_a_layer_equal_its_computation(position, changes):
    model = small(position=position, **changes)
    images = random_images(model)
    activations = look(model, images, inside=[1, -1])
    assert torch.equal(activations.logits, model(images))
    steps, scale = activations.steps, changes.get("layer_scale", 1.0)
    assert [name for name in steps if name.count(".") == 2] == [f"blocks.{n}.{step}" for n in (1, 2) for step in STEPS]
    for layer, layer_input in ((1, steps["blocks.0"]), (2, steps["blocks.1"])):
        block, inner = model.blocks[layer], {name: steps[f"blocks.{layer}.{name}"] for name in STEPS}
        assert torch.equal(inner["norm1"], block.norm1(layer_input))
        torch.testing.assert_close(inner["weights"], activations.attention[layer])
        torch.testing.assert_close(inner["scores"].softmax(-1), activations.attention[layer])
        mixed = torch.einsum("bhqn,bhnk->bqhk", inner["weights"], inner["v"]).flatten(2)
        torch.testing.assert_close(inner["msa"], mixed @ block.attn.proj.weight.T + block.attn.proj.bias)
        gammas = [1.0, 1.0] if scale == 1 else [block.ls1.gamma, block.ls2.gamma]
        torch.testing.assert_close(inner["middle"], layer_input + gammas[0] * inner["msa"])
        torch.testing.assert_close(steps[f"blocks.{layer}"], inner["middle"] + gammas[1] * inner["z2"])
        assert inner["z1"].shape == inner["activated"].shape == (3, 25, 32)


def test_recorded_steps_of_the_original_encoder_and_of_igpt():
    model = small(norm_order="post", activation="relu")
    activations = look(model, random_images(model), inside=[0])
    inner = {name.removeprefix("blocks.0."): step for name, step in activations.steps.items()}
    assert torch.equal(inner["norm1"], model.blocks[0].norm1(activations.steps["tokens"] + inner["msa"]))
    torch.testing.assert_close(inner["norm2"], activations.steps["blocks.0"])
    pixels = redraw(create("iGPT-Micro", classes=3), std=0.1)
    activations = look(pixels, torch.rand(2, 1, 14, 14) * 2 - 1, inside=None)
    for layer in range(pixels.config.depth):
        middle, output = activations.steps[f"blocks.{layer}.middle"], activations.steps[f"blocks.{layer}.z2"]
        torch.testing.assert_close(middle + output, activations.steps[f"blocks.{layer}"])
    with pytest.raises(UsageError, match="got family mixer"):
        look(create("Mixer-Nano/7"), torch.zeros(1, 1, 28, 28), inside=[0])
    with pytest.raises(UsageError, match="evaluation mode"):
        small().train().record(random_images(model), inside=[0])
    assert list(look(create("Mixer-Nano/7"), torch.zeros(1, 1, 28, 28)).attention) == []


def test_look_restores_the_mode_of_every_module():
    model = small().train()
    model.blocks[0].eval()
    look(model, random_images(model))
    assert model.training
    assert not model.blocks[0].training
    assert model.blocks[1].training


def test_hooks_and_adapters_receive_complete_outputs():
    model = small()
    images = random_images(model)
    logits = model(images)
    outputs = {}
    for name in ("blocks.0.mlp", "blocks.0.mlp.fc1", "blocks.2.attn.qkv", "blocks.1.attn"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: outputs.update({name: (output, output.clone())})
        )
    with torch.no_grad():
        assert difference(logits, model(images)) < 1e-9
    assert len(outputs) == 4
    assert all(torch.equal(output, copy) for output, copy in outputs.values())
    assert outputs["blocks.2.attn.qkv"][0].shape == (3, 25, 48)

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    adapted = small()
    adapter = Adapter(16, 48).double()
    adapter.load_state_dict(adapted.blocks[-1].attn.qkv.state_dict())
    adapted.blocks[-1].attn.qkv = adapter
    untrimmed = adapted.read(adapted.encode(adapted.embed(images), all_tokens=True))
    assert difference(adapted(images), untrimmed) < 1e-9
    assert difference(adapted(images), logits) > DIFFERENT


def test_under_autocast_the_residual_stream_stays_in_full_precision():
    model = redraw(create("ViT-Nano/7"))
    with torch.autocast("cpu", torch.bfloat16):
        activations = look(model, torch.randn(2, 1, 28, 28))
    assert {activations.steps[name].dtype for name in ("tokens", "blocks.0", "blocks.3")} == {torch.float32}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "local"},
        {"attention": "strided", "pool": "gap"},
        {"position": "relative"},
        {"position": "rope-2d"},
    ],
    ids=str,
)
def test_export_keeps_the_logits_for_every_mask_and_position(changes):
    model = redraw(create("ViT-Nano/7", **changes))
    images = torch.randn(2, 1, 28, 28)
    exported = torch.export.export(model, (images,))
    torch.testing.assert_close(exported.module()(images), model(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        *({"position": position} for position in POSITIONS if position not in POSITIONS.extension_names),
        *({"position": "learned-1d", "position_at": placement} for placement in ("every", "shared")),
        {"position": "learned-2d", "position_at": "every"},
        {"position": "relative", "position_at": "shared"},
        {"attention": "local"},
        {"attention": "strided"},
        {"pool": "map"},
        {"norm": "batch"},
        {"norm": "none", "activation": "none"},
        {"dropout": 0.1, "drop_path": 0.1, "token_drop": 0.5},
        {"merge": 2},
    ],
    ids=str,
)
def test_compile_makes_one_graph_for_every_setting(changes):
    model = create("ViT-Pico/2", depth=2, **changes).train()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for _ in range(3):
            compiled(torch.randn(2, 1, 8, 8)).sum().backward()


def test_tables_follow_the_dtype_without_double_rounding():
    model = small(position="rope-2d")
    double_model = ViT(model.config).double()
    assert torch.equal(model.rope, double_model.rope)
    assert model.rope.dtype == torch.float64
    assert torch.equal(model.float().double().rope, double_model.rope)


def test_look_rejects_layers_that_do_not_exist():
    model = small()
    with pytest.raises(UsageError, match=r"Layer must be from 0 to 2 .* got 3"):
        look(model, random_images(model), [3])


def test_images_of_another_shape_raise_a_one_line_error():
    model = small()
    with pytest.raises(UsageError, match=r"Images must have shape \(batch, 2, 16, 24\), got \(1, 3, 16, 24\)"):
        model(torch.zeros(1, 3, 16, 24))


# Changing the resolution


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), rule=st.sampled_from(["google", "timm"]))
def test_resize_changes_only_patch_positions(rows, columns, rule):
    model = small(registers=1)
    resized = model.resize((4 * rows, 4 * columns), rule)
    assert resized.config.grid == (rows, columns)
    assert resized.config.resize_rule == rule
    assert torch.equal(resized.pos_embed[:, 0], model.pos_embed[:, 0])
    for name, tensor in model.state_dict().items():
        if name != "pos_embed":
            assert torch.equal(resized.state_dict()[name], tensor)
    assert resized(random_images(resized)).isfinite().all()
    assert model.config.grid == (4, 6)


def test_resize_interpolates_between_grids_of_equal_size():
    """14 x 14 and 7 x 28 have 196 patches each. Copying the table between these grids would scramble the positions."""
    model = redraw(create("ViT-Ti/16", depth=1, classes=3), std=0.05)
    resized = model.resize((112, 448))
    assert resized.pos_embed.shape == model.pos_embed.shape
    assert (resized.pos_embed - model.pos_embed).abs().max() > 0.05
    # The number of rows is halved; a ramp over columns stays a ramp over columns.
    smooth = redraw(create("ViT-Ti/16", depth=1, classes=3), std=0.05)
    with torch.no_grad():
        ramp = torch.linspace(0, 1, 14)
        smooth.pos_embed[0, 1:] = ramp.repeat(14)[:, None]
    ramps = smooth.resize((112, 448)).pos_embed[0, 1:, 0].reshape(7, 28)
    torch.testing.assert_close(ramps, torch.linspace(0, 1, 28).repeat(7, 1), rtol=0, atol=1e-6)


def test_resize_back_restores_learned_2d_positions():
    model = small(position="learned-2d", position_at="every")
    resized = model.resize((28, 44), "google")
    assert resized.pos_embed_row.shape == (3, 7, 8)
    assert resized.pos_embed_column.shape == (3, 11, 8)
    restored = resized.resize((16, 24))
    torch.testing.assert_close(restored.pos_embed_row, model.pos_embed_row, rtol=0, atol=1e-6)
    torch.testing.assert_close(restored.pos_embed_column, model.pos_embed_column, rtol=0, atol=1e-6)


def test_resize_keeps_frozen_parameters_and_rejects_wrapped_relative_positions():
    model = small()
    model.head.weight.requires_grad_(False)
    assert not model.resize((32, 24)).head.weight.requires_grad
    assert model.resize((32, 24)).pos_embed.requires_grad
    wrapped = small(position="relative", wrap=True)
    with pytest.raises(UsageError, match="must keep the grid of relative positions with wrap"):
        wrapped.resize((32, 24))
    assert difference(wrapped(images := random_images(wrapped)), wrapped.resize((16, 24))(images)) == 0


# Initialisation


def test_initialisation_equals_the_papers_code():
    model = create("ViT-B/16", representation="tanh").requires_grad_(False)
    width = 768
    limit = math.sqrt(6 / (2 * width))
    qkv = model.blocks[0].attn.qkv
    for part in qkv.weight.chunk(3):  # each third separately: fan-out D, not 3 D
        assert part.abs().max() <= limit
        assert part.std() == pytest.approx(limit / math.sqrt(3), rel=0.01)
    assert qkv.bias.abs().max() == 0
    fc1 = model.blocks[5].mlp.fc1
    assert fc1.weight.std() == pytest.approx(math.sqrt(2 / (width + 3072)), rel=0.01)
    assert 0 < fc1.bias.std() < 2e-6
    assert model.pos_embed.std() == pytest.approx(0.02, rel=0.02)
    assert model.cls_token.abs().max() == 0
    for layer in (model.patch_embed.proj, model.pre_logits.fc):
        assert layer.weight.std() == pytest.approx(1 / math.sqrt(layer.weight[0].numel()), rel=0.01)
    assert model.head.weight.abs().max() == 0
    with torch.no_grad():
        assert model(torch.randn(1, 3, 224, 224)).abs().max() == 0


def test_seeded_creation_is_reproducible():
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        weights.append(create("ViT-Pico/2").state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_block_without_residual_connections_composes_its_sub_layers():
    model = small(residual=False)
    block, z_BTD = model.blocks[0], torch.randn(2, model.config.tokens, model.config.width, dtype=torch.float64)
    attention = block.attn(block.norm1(z_BTD))
    torch.testing.assert_close(block(z_BTD), block.mlp(block.norm2(attention)), rtol=0, atol=1e-12)


def test_unscaled_attention_equals_attention_with_scaled_queries():
    model, scaled = small(), small(attention_scale=1)
    width = model.config.width
    scaled.load_state_dict(model.state_dict())
    with torch.no_grad():
        for block in scaled.blocks:
            block.attn.qkv.weight[:width] *= (width // model.config.heads) ** -0.5
            block.attn.qkv.bias[:width] *= (width // model.config.heads) ** -0.5
    images = random_images(model)
    assert difference(model(images), scaled(images)) < 1e-10
    attention, scaled_attention = (look(vit, images).attention[1] for vit in (model, scaled))
    torch.testing.assert_close(attention, scaled_attention, rtol=0, atol=1e-10)


def test_recording_pools_once():
    model = small(pool="map").eval()
    calls = []
    model.attn_pool.register_forward_hook(lambda *_: calls.append("pool"))
    features = model.features(random_images(model))
    assert (calls, features.shape) == (["pool"], (3, 16))
